"""A Redis client of one command at a time, for what a fault does to the store itself."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import IO, Any

from ..processes import HOST

Answer = bytes | int | list[Any] | None


class RedisError(Exception):
    """The store's own words, such as `NOAUTH Authentication required.`"""


class RedisClient:
    """One connection. Every call raises RedisError when refused, OSError when broken."""

    def __init__(self, port: int, *, password: str | None = None, timeout_s: float = 20.0) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=timeout_s)
        self._answers: IO[bytes] = self._socket.makefile("rb")
        if password is not None:
            self.do("AUTH", password)

    def __enter__(self) -> RedisClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._answers.close()
        self._socket.close()

    def do(self, *words: str | bytes | int) -> Answer:
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        bulk = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(b"*%d\r\n" % len(parts) + bulk)
        return self._answer()

    def _answer(self) -> Answer:
        line = self._answers.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the store closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RedisError(rest.decode(errors="replace"))
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._answers.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        raise ConnectionError(f"the store answered {line!r}")
