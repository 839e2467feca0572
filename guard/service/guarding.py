"""What may reach the switch: this machine's own callers, no web page from elsewhere.

A browser on this machine can be led to call loopback by any page: with a name that
resolves to 127.0.0.1 (the Host header gives it away) or by a cross-site request (the
Origin header does).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from guard.addresses import is_loopback

BODY_LIMIT_BYTES = 16 * 1024

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class LocalOnly:
    """ASGI middleware: 403 for a foreign Host or Origin, 415 for a write that is no JSON,
    413 for a body above the limit."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            return
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value.decode("latin-1"))
        refusal = _refusal(headers, scope["method"])
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            await _refuse(send, 413, f"a body may have at most {BODY_LIMIT_BYTES} bytes")
            return
        rest = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return rest.pop() if rest else await receive()

        await self._app(scope, replay, send)


def _refusal(headers: dict[bytes, list[str]], method: str) -> tuple[int, str] | None:
    hosts = headers.get(b"host", [])
    if len(hosts) != 1 or not _is_local(hosts[0]):
        return 403, (
            f"Host {', '.join(hosts) or '(none)'!r} is not this machine; "
            "call 127.0.0.1, [::1] or localhost"
        )
    for origin in headers.get(b"origin", []):
        if urlsplit(origin).netloc.lower() != hosts[0].lower():
            return 403, f"Origin {origin!r} is another site"
    if method not in ("GET", "HEAD"):
        kinds = headers.get(b"content-type", [])
        if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
            return 415, "Content-Type must be application/json"
    return None


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and "@" not in host and is_loopback(name)


async def _body(receive: Receive) -> bytes | None:
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body  # the client went away; the application will see that too
        body += bytes(message.get("body", b""))
        if len(body) > BODY_LIMIT_BYTES:
            return None
        if not message.get("more_body"):
            return body


async def _refuse(send: Send, status: int, words: str) -> None:
    body = json.dumps({"error": words}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
