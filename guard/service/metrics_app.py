"""/metrics, /healthz and /readyz: a bare ASGI application, for both listeners.

None of them asks a peer: a dead cache must not take the pod out of service.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from guard.service.metrics import MetricsPage
from guard.view import View

PATHS = ("/metrics", "/healthz", "/readyz")
_TEXT = "text/plain; charset=utf-8"
_STALE_INTERVALS = 10

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, body and content type of one answer."""

    status: int
    body: bytes
    content_type: str = _TEXT


class MetricsApp:
    """What Prometheus and the kubelet ask for, over the latest view.

    `interval` is the loop's, in seconds; `clock` is the monotonic clock of the view.
    """

    def __init__(
        self,
        view: Callable[[], View],
        interval: float,
        version: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._limit = _STALE_INTERVALS * interval
        self._clock = clock
        self._started = clock()
        self._page = MetricsPage(view, version)

    def answer(self, path: str, accept: str | None = None) -> Answer:
        """The answer to a GET of one of PATHS; 404 for any other path."""
        if path == "/metrics":
            body, content_type = self._page.render(accept)
            return Answer(200, body, content_type)
        if path == "/healthz":
            return self._health()
        if path == "/readyz":
            ready = self._view().last_tick_monotonic is not None
            return Answer(200, b"ready\n") if ready else Answer(503, b"no tick yet\n")
        return Answer(404, f"not found; here are {', '.join(PATHS)}\n".encode())

    def _health(self) -> Answer:
        last = self._view().last_tick_monotonic
        age = self._clock() - (self._started if last is None else last)
        if age < self._limit:
            return Answer(200, b"ok\n")
        words = f"no tick for {age:.1f} s, the limit is {self._limit:.1f} s\n"
        return Answer(503, words.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call; GET and HEAD only."""
        if scope["type"] != "http":
            return
        if scope["method"] not in ("GET", "HEAD"):
            answer = Answer(405, b"only GET and HEAD\n")
        else:
            accept = b",".join(v for k, v in scope["headers"] if k == b"accept")
            answer = self.answer(scope["path"], accept.decode("latin-1"))
        headers = [
            (b"content-type", answer.content_type.encode("latin-1")),
            (b"content-length", str(len(answer.body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})
