"""A probe's request, samples and outcome: what is asked of it and what the status shows.

Knows no host. A probe re-reads known keys so that the store's speed can be measured while
nobody uses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from guard.gate.validate import InvalidWrite, integer, no_other_keys, number, shown

MAX_CHUNKS = 1024
MAX_COUNT = 64
MAX_BYTES = 4 * 1024**3
MAX_DEADLINE_S = 600.0

OF = ("known", "lost")
OUTCOMES = ("done", "failed", "cancelled", "deadline", "missing", "overlapped")


class ProbeRefused(Exception):
    """No probe now: one runs already, or none can be run. HTTP status 409."""

    status = 409


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """`count` reads of at most `chunks` keys each, at most `max_bytes` in all, ended after
    `deadline_s`; of keys known to be in L2, or of those that the last lookups missed though
    they were known (`lost`)."""

    chunks: int = 4
    count: int = 1
    max_bytes: int = 256 * 1024**2
    deadline_s: float = 30.0
    of: str = "known"

    @staticmethod
    def parse(payload: Mapping[str, Any]) -> ProbeRequest:
        """Raises InvalidWrite that names the key and its range."""
        usual = ProbeRequest()
        no_other_keys(payload, {"chunks", "count", "max_bytes", "deadline_s", "of"})
        of = payload.get("of", usual.of)
        if of not in OF:
            raise InvalidWrite(f"of must be one of {', '.join(OF)}, not {shown(of)}")
        return ProbeRequest(
            integer("chunks", payload.get("chunks", usual.chunks), 1, MAX_CHUNKS),
            integer("count", payload.get("count", usual.count), 1, MAX_COUNT),
            integer("max_bytes", payload.get("max_bytes", usual.max_bytes), 1, MAX_BYTES),
            number(
                "deadline_s",
                payload.get("deadline_s", usual.deadline_s),
                0,
                MAX_DEADLINE_S,
                over=True,
            ),
            of,
        )


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """One read: distinct chunks and bytes moved, seconds of its lookup and of its load,
    and whether a load of the engine's overlapped it (then it says nothing)."""

    chunks: int
    bytes: int
    lookup_s: float
    load_s: float
    overlapped: bool


@dataclass(slots=True)
class _Last:
    id: int
    of: str
    outcome: str
    error: str | None
    ended_at: float
    samples: list[ProbeSample]


class ProbeState:
    """Which probe runs and how the last one ended. At most one runs. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._id = 0
        self._of = OF[0]
        self._running = False
        self._last: _Last | None = None

    def begin(self, of: str) -> int:
        """The id of a probe that begins, of which keys. Raises ProbeRefused while another runs."""
        with self._lock:
            if self._running:
                raise ProbeRefused("a probe runs already; its result comes with the status")
            self._running = True
            self._of = of
            self._id += 1
            return self._id

    def end(self, outcome: str, error: str | None, samples: list[ProbeSample]) -> None:
        """The probe that ran ended."""
        with self._lock:
            self._running = False
            self._last = _Last(self._id, self._of, outcome, error, self._clock(), samples)

    def as_dict(self) -> dict[str, Any]:
        """The gate's status has it as `probe`."""
        with self._lock:
            last = self._last
            return {
                "running": self._running,
                "last": None
                if last is None
                else {
                    "id": last.id,
                    "of": last.of,
                    "outcome": last.outcome,
                    "error": last.error,
                    "age_s": self._clock() - last.ended_at,
                    "samples": [
                        {
                            "chunks": sample.chunks,
                            "bytes": sample.bytes,
                            "lookup_s": sample.lookup_s,
                            "load_s": sample.load_s,
                            "overlapped": sample.overlapped,
                        }
                        for sample in last.samples
                    ],
                },
            }
