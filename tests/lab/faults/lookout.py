"""Who keeps looking at the cache server while something is broken.

Two questions in two threads, since an answer to one that does not come must not hide the
other: does `/healthcheck` answer within a second, and what does the gate admit.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..stack import Stack

LOOK_SECONDS = 0.5
HEALTH_LIMIT_S = 1.0
CLOCK_SLACK_S = 0.2  # ages are counted from when the answer was written, not when it came


@dataclass(frozen=True, slots=True)
class Health:
    """One `/healthcheck`: begun `at` monotonic seconds, answered or given up after `seconds`.
    `error` is None for 200."""

    at: float
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class GateLook:
    at: float
    status: dict[str, Any]

    @property
    def share(self) -> float:
        return float(self.status["admission"]["share"])

    @property
    def loads(self) -> list[tuple[float, int]]:
        """When each of the last loads from L2 ended, and how many bytes it brought."""
        return [
            (self.at - load["end_ago_s"], int(load["bytes"]))
            for load in self.status["recent_loads"]
        ]


class Lookout:
    """Looks twice a second, from entering to leaving, and remembers."""

    def __init__(self, stack: Stack, *, health_limit_s: float = HEALTH_LIMIT_S) -> None:
        self._stack = stack
        self._health_limit_s = health_limit_s
        self._server = urlsplit(stack.cache_url)
        self._http = httpx.Client(timeout=5.0, trust_env=False)
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._every, args=(look,), name=name, daemon=True)
            for name, look in (("health", self._ask_health), ("gate", self._ask_gate))
        ]
        self.health: list[Health] = []
        self.gate: list[GateLook] = []

    def __enter__(self) -> Lookout:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._http.close()

    def worst_health(self, begin: float, end: float) -> Health | None:
        """The slowest answer, or the first that did not come; None when nobody looked."""
        asked = [health for health in list(self.health) if begin <= health.at < end]
        return max(asked, key=lambda each: (each.error is not None, each.seconds), default=None)

    def first_share(
        self, begin: float, end: float, wanted: Callable[[float], bool]
    ) -> float | None:
        """When the gate was first seen to admit such a share."""
        looks = (each.at for each in self._looks(begin, end) if wanted(each.share))
        return next(looks, None)

    def whole_again(self, begin: float, end: float) -> float | None:
        """When the gate was first seen to admit everything for good; None when it always
        did, or did not in the end."""
        looks = self._looks(begin, end)
        parts = [place for place, each in enumerate(looks) if each.share < 1]
        if not parts or parts[-1] + 1 == len(looks):
            return None
        return looks[parts[-1] + 1].at

    def share_at(self, moment: float) -> float | None:
        """The smaller of the shares seen just before and just after; None when nobody has
        looked since."""
        after = [each for each in list(self.gate) if each.at >= moment][:1]
        before = [each for each in list(self.gate) if each.at < moment][-1:]
        return min(each.share for each in [*before, *after]) if after else None

    def loaded(self, begin: float, end: float, least_bytes: float) -> bool:
        """Whether a load of so many bytes ended in that time, as the gate tells."""
        return any(
            begin - CLOCK_SLACK_S <= ended <= end + CLOCK_SLACK_S and count >= least_bytes
            for look in list(self.gate)
            if look.at >= begin
            for ended, count in look.loads
        )

    def _looks(self, begin: float, end: float) -> list[GateLook]:
        return [each for each in list(self.gate) if begin <= each.at < end]

    def _every(self, look: Callable[[], None]) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            look()

    def _ask_health(self) -> None:
        begin = time.monotonic()
        connection = http.client.HTTPConnection(
            self._server.hostname or "", self._server.port, timeout=self._health_limit_s
        )
        error: str | None = None
        try:
            connection.request("GET", "/healthcheck")
            status = connection.getresponse().status
            if status != 200:
                error = f"HTTP {status}"
        except (OSError, http.client.HTTPException) as failed:
            error = f"{type(failed).__name__}: {failed}"
        finally:
            connection.close()
        self.health.append(Health(begin, time.monotonic() - begin, error))

    def _ask_gate(self) -> None:
        try:
            answer = self._http.get(f"{self._stack.cache_url}/reconfigure/plugin/l2/status")
            status = answer.raise_for_status().json()["adapters"][0]["status"]
        except (httpx.HTTPError, LookupError, ValueError):
            return
        self.gate.append(GateLook(time.monotonic(), status))
