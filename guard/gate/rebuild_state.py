"""What is asked of an abort or a rebuild, and how the last one went.

Knows no host. Both exchange the adapter behind the gate for a fresh one and answer what the
old one left; an abort does so even where the store takes no connection just now, since what
hangs is to end in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from guard.gate.validate import InvalidWrite, integer, no_other_keys, number, shown, text

MAX_WITHIN_S = 60.0
ASKED_CAUSES = ("manual", "connection_lost", "load_hung", "built_while_down", "store_emptied")
CAUSES = (*ASKED_CAUSES, "abort", "deadline", "reattach")
"""Of `rebuilds_total`: what is asked for, then what the gate says of its own."""


class RebuildRefused(Exception):
    """No abort or rebuild now: one runs already, or none can be done. HTTP status 409."""

    status = 409


@dataclass(frozen=True, slots=True)
class RebuildRequest:
    """`release_bytes_per_s`: at most so many bytes of ended loads are answered in a second,
    None for all at once, and all of them `release_within_s`."""

    operation: str
    cause: str
    holder: str = ""
    reason: str = ""
    release_bytes_per_s: float | None = None
    release_within_s: float = 10.0
    if_revision: int | None = None

    @staticmethod
    def parse(operation: str, payload: Mapping[str, Any]) -> RebuildRequest:
        """Of an `abort` or a `rebuild`. Raises InvalidWrite that names the key."""
        common = {"holder", "reason", "if_revision"}
        rate: float | None = None
        usual = RebuildRequest(operation, "manual")
        within = usual.release_within_s
        if operation == "abort":
            no_other_keys(payload, {*common, "release_bytes_per_s", "release_within_s"})
            cause = "abort"
            given = payload.get("release_bytes_per_s")
            if given is not None:
                rate = number("release_bytes_per_s", given, 0, 1e15, over=True)
            within = number(
                "release_within_s", payload.get("release_within_s", within), 0, MAX_WITHIN_S
            )
        else:
            no_other_keys(payload, {*common, "cause"})
            cause = payload.get("cause", usual.cause)
            if cause not in ASKED_CAUSES:
                raise InvalidWrite(
                    f"cause must be one of {', '.join(ASKED_CAUSES)}, not {shown(cause)}"
                )
        revision = payload.get("if_revision")
        return RebuildRequest(
            operation,
            cause,
            text("holder", payload.get("holder", "")),
            text("reason", payload.get("reason", "")),
            rate,
            within,
            None if revision is None else integer("if_revision", revision, 0),
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """What an exchange of the adapter ended, and how it came out: `done`, a fresh adapter
    serves; `detached`, the old one is closed and there is none; `failed`, nothing changed.
    `parked`: the old one could not be closed safely, so what it left is not answered yet.
    """

    outcome: str
    error: str | None = None
    ended_loads: int = 0
    ended_lookups: int = 0
    ended_stores: int = 0
    parked: bool = False


class RebuildState:
    """Which exchange runs, how the last one that was asked for went, and how many there
    were. At most one runs. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._id = 0
        self._began: float | None = None
        self._last: dict[str, Any] | None = None
        self._ended_at = 0.0
        self._counts: dict[str, int] = {}

    @property
    def running(self) -> bool:
        """Whether an exchange runs."""
        return self._began is not None

    def begin(self) -> int:
        """The id of an exchange that begins. Raises RebuildRefused while another runs."""
        with self._lock:
            if self._began is not None:
                raise RebuildRefused("the adapter is being exchanged already; see the status")
            self._began = self._clock()
            self._id += 1
            return self._id

    def end(self, request: RebuildRequest, ended: Ended) -> None:
        """The exchange that ran ended."""
        with self._lock:
            now = self._clock()
            began, self._began = self._began, None
            self._ended_at = now
            self._last = {
                "id": self._id,
                "operation": request.operation,
                "cause": request.cause,
                **asdict(ended),
                "seconds": 0.0 if began is None else now - began,
            }
            if ended.outcome != "failed":
                self._counts[request.cause] = self._counts.get(request.cause, 0) + 1

    def counts(self) -> dict[str, int]:
        """Exchanges by cause, those that changed nothing left out."""
        with self._lock:
            return dict(self._counts)

    def as_dict(self) -> dict[str, Any]:
        """The gate's status has it as `rebuild`."""
        with self._lock:
            last = self._last and {**self._last, "age_s": self._clock() - self._ended_at}
            return {"running": self._began is not None, "last": last}
