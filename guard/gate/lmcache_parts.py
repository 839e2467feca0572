"""What lookups, loads and stores of one gate have in common."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from guard.gate.admission import Admission
from guard.gate.known import KnownKeys
from guard.gate.ledger import Ledger
from guard.gate.lmcache_generation import Wrapped
from guard.gate.safety import Bell, Faults


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one gate. `inner` is the adapter in use, `clock` monotonic seconds,
    and `wake` has the gate's own thread look after things soon."""

    inner: Wrapped
    admission: Admission
    ledger: Ledger
    known: KnownKeys[Any]
    faults: Faults
    clock: Callable[[], float]
    wake: Callable[[], None]


class Tasks:
    """Tasks of one sort, and the bell that tells LMCache of their results.

    Task ids are made of the adapter's own and its generation; the gate's own answers have
    negative ones. `lock` is held while something is asked of the adapter in use, so that
    whoever exchanges it knows all that was asked.
    """

    def __init__(self, parts: Parts, bell: Bell) -> None:
        self._inner = parts.inner
        self._admission = parts.admission
        self._ledger = parts.ledger
        self._known = parts.known
        self._faults = parts.faults
        self._clock = parts.clock
        self._wake = parts.wake
        self._bell = bell
        self._own_ids = itertools.count(-1, -1)
        self.lock = threading.Lock()
