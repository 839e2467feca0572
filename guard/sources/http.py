"""One small HTTP client for scrapes and control calls.

httpcore, the transport under httpx, is used directly: a tick makes three GETs, and
httpx's request and response objects would cost more CPU than everything else in it
(bench/tick.py measures both).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from guard.errors import SourceRefused, SourceTooLarge, SourceUnreachable

BODY_LIMIT_BYTES = 10 * 1024 * 1024
SAMPLE_LIMIT = 50_000
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 2
_HEADERS = [(b"User-Agent", b"kvguard"), (b"Accept", b"text/plain, application/json")]


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.scheme, parts.hostname or "", parts.port or default


class HttpClient:
    """A connection pool with a body limit and an overall deadline for every call."""

    def __init__(self, body_limit_bytes: int = BODY_LIMIT_BYTES) -> None:
        self._limit = body_limit_bytes
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=16, max_keepalive_connections=8, keepalive_expiry=30.0
        )

    async def get(self, url: str, timeout_seconds: float) -> bytes:
        """The body of a 200 answer.

        Raises SourceUnreachable (no whole answer within `timeout_seconds`), SourceRefused
        (another status, or a redirect to another host), SourceTooLarge.
        """
        target = url
        for _ in range(_MAX_REDIRECTS + 1):
            status, body, location = await self._call("GET", target, None, timeout_seconds)
            if status == 200:
                return body
            if status in _REDIRECTS and location:
                following = urljoin(target, location)
                if _origin(following) != _origin(url):
                    raise SourceRefused(
                        f"{url} redirects to another host ({following}); "
                        "give the address of the peer itself"
                    )
                target = following
                continue
            raise SourceRefused(f"{target} answered HTTP {status}: {_excerpt(body)}")
        raise SourceRefused(f"{url} redirects more than {_MAX_REDIRECTS} times")

    async def post(
        self, url: str, payload: Mapping[str, Any], timeout_seconds: float
    ) -> tuple[int, bytes]:
        """Status and body of a JSON POST; redirects are not followed.

        Raises SourceUnreachable and SourceTooLarge.
        """
        content = json.dumps(payload, allow_nan=False).encode()
        status, body, _ = await self._call("POST", url, content, timeout_seconds)
        return status, body

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    async def _call(
        self, method: str, url: str, content: bytes | None, timeout_seconds: float
    ) -> tuple[int, bytes, str | None]:
        headers = list(_HEADERS)
        if content is not None:
            headers.append((b"Content-Type", b"application/json"))
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._pool.stream(method, url, headers=headers, content=content) as response,
            ):
                location = None
                for name, value in response.headers:
                    lowered = name.lower()
                    if lowered == b"location":
                        location = value.decode("latin-1")
                    elif lowered == b"content-length" and int(value) > self._limit:
                        raise self._too_large(url)
                chunks: list[bytes] = []
                size = 0
                async for chunk in response.aiter_stream():
                    size += len(chunk)
                    if size > self._limit:
                        raise self._too_large(url)
                    chunks.append(chunk)
                return response.status, b"".join(chunks), location
        except TimeoutError:
            raise SourceUnreachable(
                f"{url} gave no whole answer within {timeout_seconds:g} s"
            ) from None
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
            httpcore.UnsupportedProtocol,
            OSError,
            ValueError,
        ) as error:
            raise SourceUnreachable(
                f"{url} does not answer ({str(error) or type(error).__name__})"
            ) from None

    def _too_large(self, url: str) -> SourceTooLarge:
        return SourceTooLarge(f"{url} answered more than {self._limit} bytes; not read")


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace").strip()
    return " ".join(text.split()) or "(empty body)"
