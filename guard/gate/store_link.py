"""How the store behind an adapter can be reached: a plain connection, tried before an
adapter is built or closed.

Knows no host. The close of a native adapter holds the interpreter lock until its workers
have ended, and a worker that hangs in a TCP connect ends after minutes: the whole server
would stand still. So nothing is built while the store takes no connection, and nothing is
closed while one to the store is being set up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONNECT_SECONDS = 1.0
# Fields of /proc/net/tcp.
_REMOTE, _STATE, _INODE = 2, 3, 9
_SYN_SENT = "02"
_MAX_ANSWER = 120


@dataclass(slots=True)
class StoreLink:
    """Where a RESP server is and what it wants to hear first; no address where the kind of
    store is not known, and then everything below says that nothing is known against it.
    `last_problem` is what the last try met, None when it met none."""

    host: str = ""
    port: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    last_problem: str | None = None

    @staticmethod
    def of(inner_type: str, inner: Mapping[str, Any]) -> StoreLink:
        """Of an adapter's spec, by the same rules as the adapter's own factory."""
        if inner_type != "resp":
            return StoreLink()

        def value(key: str) -> str:
            return str(inner.get(key) or os.environ.get(f"LMCACHE_RESP_{key.upper()}", ""))

        port = value("port")
        return StoreLink(
            value("host"),
            int(port) if port.isdecimal() else 0,
            value("username"),
            value("password"),
        )

    def problem(self) -> str | None:
        """What keeps the store from being used, None for nothing known.

        It must take a connection and answer, each within a second, and accept the password.
        """
        self.last_problem = self._ping() if self.host else None
        return self.last_problem

    def refusal(self) -> str | None:
        """What keeps a connection to the store from being made, None when one was made
        within a second: a store that is frozen still takes connections."""
        self.last_problem = self._connect() if self.host else None
        return self.last_problem

    def _ping(self) -> str | None:
        where = f"{self.host}:{self.port}"
        try:
            with self._connected() as connection:
                greeting = self._greeting()
                connection.sendall(greeting + _command("PING"))
                answers = connection.makefile("rb")
                lines = [answers.readline(_MAX_ANSWER) for _ in range(2 if greeting else 1)]
        except OSError as error:
            return f"{where} did not answer a ping within {CONNECT_SECONDS:g} s ({error})"
        for line in lines:
            words = line.decode("ascii", "replace").strip()
            if line[:1] == b"-" and words[1:].startswith(("NOAUTH", "WRONGPASS", "ERR AUTH")):
                return f"{where} refuses the login: {words[1:]}"
            if line[:1] not in (b"+", b"-"):
                return f"{where} is no RESP server" if line else f"{where} hung up on a ping"
        return None

    def _connect(self) -> str | None:
        try:
            self._connected().close()
        except OSError as error:
            return f"{self.host}:{self.port} takes no connection ({error})"
        return None

    def connecting(self) -> bool:
        """Whether some connection to the store's port is being set up now; yes where that
        cannot be told."""
        try:
            return any(fields[_STATE] == _SYN_SENT for fields in self._connections())
        except OSError:
            return True

    def inodes(self) -> set[str]:
        """Of all sockets on this machine's network that lead to the store's port; empty
        where that cannot be told."""
        try:
            return {fields[_INODE] for fields in self._connections()}
        except OSError:
            return set()

    def _connections(self) -> Iterator[list[str]]:
        if not self.host:
            return
        port = f":{self.port:04X}"
        for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
            try:
                lines = table.read_text().splitlines()[1:]
            except FileNotFoundError:
                continue
            for line in lines:
                fields = line.split()
                if len(fields) > _INODE and fields[_REMOTE].endswith(port):
                    yield fields

    def _connected(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), CONNECT_SECONDS)

    def _greeting(self) -> bytes:
        if not self.password:
            return b""
        login = (self.username, self.password) if self.username else (self.password,)
        return _command("AUTH", *login)


def _command(*words: str) -> bytes:
    parts = [word.encode() for word in words]
    body = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%s" % (len(parts), body)
