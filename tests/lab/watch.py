"""What a guard showed over time, as somebody who keeps looking at it would see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from .guard_handle import Guard

LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the guard's status. `at` is monotonic seconds; `share` is what the
    guard says is in force in the gate, None when it does not know."""

    at: float
    state: str
    cause: str | None
    share: float | None
    status: dict[str, Any]

    def __str__(self) -> str:
        cause = f" ({self.cause})" if self.cause else ""
        return f"{self.state}{cause}, admits {'?' if self.share is None else f'{self.share:.0%}'}"


class Watch:
    """Looks twice a second, in a thread, from entering to leaving, and remembers."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._looks: list[Look] = []
        self.unanswered = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> list[Look]:
        return [look for look in list(self._looks) if begin <= look.at < end]

    def wait_for(self, begin: float, end: float, wanted: Callable[[Look], bool]) -> Look | None:
        """The first look from `begin` on that is as wanted; None when none was by `end`."""
        while True:
            late = time.monotonic() > end
            found = first(self.between(begin, end), wanted)
            if found is not None or late:
                return found
            time.sleep(LOOK_SECONDS / 2)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            try:
                status = self._guard.status()
            except httpx.HTTPError:
                self.unanswered += 1
                continue
            share = (status["admission"] or {}).get("share")
            self._looks.append(
                Look(time.monotonic(), status["state"], status["cause"], share, status)
            )


def first(looks: list[Look], wanted: Callable[[Look], bool]) -> Look | None:
    return next((look for look in looks if wanted(look)), None)
