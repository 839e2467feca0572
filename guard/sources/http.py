"""One small HTTP client for scrapes and control calls.

A tick makes three GETs, and a client of general use takes more CPU for them than all the
rest of the tick takes (bench/tick.py measures both). So this is h11, the protocol under
httpx, over asyncio's streams: keep-alive, one overall deadline a call, a limit on the body.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import h11

from guard.errors import SourceRefused, SourceTooLarge, SourceUnreachable

BODY_LIMIT_BYTES = 10 * 1024 * 1024
SAMPLE_LIMIT = 50_000
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 2
_HEADERS = [("User-Agent", "kvguard"), ("Accept", "text/plain, application/json")]
_READ_BYTES = 256 * 1024
_IDLE_SECONDS = 30.0
# A cache is asked for its metrics and its status at once.
_IDLE_PER_ORIGIN = 4

_Origin = tuple[str, str, int]


def _origin(url: str) -> _Origin:
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.scheme, parts.hostname or "", parts.port or default


def _same_origin(url: str, other: str) -> bool:
    try:
        return _origin(url) == _origin(other)
    except ValueError:
        return False


@dataclass(slots=True)
class _Answer:
    status: int
    body: bytes
    location: str | None


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    used: bool = False
    idle_since: float = 0.0

    @property
    def reusable(self) -> bool:
        """Whether the peer may still hold it."""
        fresh = time.monotonic() - self.idle_since < _IDLE_SECONDS
        return fresh and not (self.reader.at_eof() or self.writer.is_closing())

    def abort(self) -> None:
        self.writer.transport.abort()


class _Stale(Exception):
    """The peer had closed the connection before the request came."""


class HttpClient:
    """A connection pool with a body limit and an overall deadline for every call."""

    def __init__(self, body_limit_bytes: int = BODY_LIMIT_BYTES) -> None:
        self._limit = body_limit_bytes
        self._idle: dict[_Origin, list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def get(self, url: str, timeout_seconds: float) -> bytes:
        """The body of a 200 answer.

        Raises SourceUnreachable (no whole answer within `timeout_seconds`), SourceRefused
        (another status, or a redirect to another host), SourceTooLarge.
        """
        target = url
        for _ in range(_MAX_REDIRECTS + 1):
            answer = await self._call("GET", target, None, timeout_seconds)
            if answer.status == 200:
                return answer.body
            if answer.status in _REDIRECTS and answer.location:
                following = urljoin(target, answer.location)
                if not _same_origin(following, url):
                    raise SourceRefused(
                        f"{url} redirects to another host ({following}); "
                        "give the address of the peer itself"
                    )
                target = following
                continue
            raise SourceRefused(f"{target} answered HTTP {answer.status}: {_excerpt(answer.body)}")
        raise SourceRefused(f"{url} redirects more than {_MAX_REDIRECTS} times")

    async def post(
        self, url: str, payload: Mapping[str, Any], timeout_seconds: float
    ) -> tuple[int, bytes]:
        """Status and body of a JSON POST; redirects are not followed.

        Raises SourceUnreachable and SourceTooLarge.
        """
        content = json.dumps(payload, allow_nan=False).encode()
        answer = await self._call("POST", url, content, timeout_seconds)
        return answer.status, answer.body

    async def close(self) -> None:
        """Close all connections."""
        for connection in (one for idle in self._idle.values() for one in idle):
            connection.abort()
        self._idle.clear()

    async def _call(
        self, method: str, url: str, content: bytes | None, timeout_seconds: float
    ) -> _Answer:
        try:
            async with asyncio.timeout(timeout_seconds):
                try:
                    return await self._attempt(method, url, content)
                except _Stale:
                    if method != "GET":
                        raise
                    self._forget(_origin(url))
                    return await self._attempt(method, url, content)
        except TimeoutError:
            raise SourceUnreachable(
                f"{url} gave no whole answer within {timeout_seconds:g} s"
            ) from None
        except (_Stale, h11.ProtocolError, OSError, ValueError) as error:
            raise SourceUnreachable(
                f"{url} does not answer ({str(error) or type(error).__name__})"
            ) from None

    async def _attempt(self, method: str, url: str, content: bytes | None) -> _Answer:
        origin = _origin(url)
        connection = self._take(origin) or await self._connect(origin)
        kept = False
        try:
            answer = await self._exchange(connection, method, url, content)
            protocol = connection.protocol
            done = protocol.our_state is h11.DONE and protocol.their_state is h11.DONE
            # Bytes beyond the answer would be taken for the next one.
            kept = done and not protocol.trailing_data[0]
            if kept:
                self._keep(origin, connection)
            return answer
        finally:
            if not kept:
                connection.abort()

    async def _exchange(
        self, connection: _Connection, method: str, url: str, content: bytes | None
    ) -> _Answer:
        protocol = connection.protocol
        connection.writer.write(_request(protocol, method, url, content))
        status, location, chunks, size = 0, None, list[bytes](), 0
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                protocol.receive_data(await self._read(connection, answered=status != 0))
            elif isinstance(event, h11.Response):
                status = event.status_code
                for name, value in event.headers:
                    if name == b"location":
                        location = value.decode("latin-1")
                    elif name == b"content-length" and int(value) > self._limit:
                        raise self._too_large(url)
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > self._limit:
                    raise self._too_large(url)
                chunks.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return _Answer(status, b"".join(chunks), location)
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionError("the peer speaks another protocol")

    async def _read(self, connection: _Connection, *, answered: bool) -> bytes:
        try:
            data = await connection.reader.read(_READ_BYTES)
        except ConnectionError:
            if answered or not connection.used:
                raise
            data = b""
        if not data and connection.used and not answered:
            raise _Stale("the peer closed the connection")
        return data

    async def _connect(self, origin: _Origin) -> _Connection:
        scheme, host, port = origin
        if scheme not in ("http", "https"):
            raise ValueError(f"no http or https address: {scheme}://")
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if scheme == "https" else None
        return _Connection(*await asyncio.open_connection(host, port, ssl=tls))

    def _take(self, origin: _Origin) -> _Connection | None:
        idle = self._idle.get(origin, [])
        while idle:
            connection = idle.pop()
            if connection.reusable:
                connection.protocol.start_next_cycle()
                connection.used = True
                return connection
            connection.abort()
        return None

    def _keep(self, origin: _Origin, connection: _Connection) -> None:
        idle = self._idle.setdefault(origin, [])
        if len(idle) >= _IDLE_PER_ORIGIN:
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        idle.append(connection)

    def _forget(self, origin: _Origin) -> None:
        for connection in self._idle.pop(origin, []):
            connection.abort()

    def _too_large(self, url: str) -> SourceTooLarge:
        return SourceTooLarge(f"{url} answered more than {self._limit} bytes; not read")


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace").strip()
    return " ".join(text.split()) or "(empty body)"


def _request(protocol: h11.Connection, method: str, url: str, content: bytes | None) -> bytes:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = [("Host", parts.netloc.rpartition("@")[2]), *_HEADERS]
    if content is not None:
        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
    out = protocol.send(h11.Request(method=method, target=target, headers=headers)) or b""
    if content:
        out += protocol.send(h11.Data(data=content)) or b""
    return out + (protocol.send(h11.EndOfMessage()) or b"")
