"""Listeners: sockets bound before anything else starts, and uvicorn on top of them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from guard.addresses import is_loopback, split_address
from guard.errors import ListenError

_BACKLOG = 128
_GRACE_SECONDS = 2


def check_exposure(listen: str, token_file: Path | None) -> None:
    """The listener of the switch is for this machine only.

    Raises ListenError for any other bind, and for a token file, which this version does
    not honour: it must not look as if it protected something.
    """
    if token_file is not None:
        raise ListenError(
            f"--token-file {token_file}: this version has no tokens yet; leave it out and "
            "keep --listen on loopback"
        )
    host, _ = split_address(listen)
    if not is_loopback(host):
        raise ListenError(
            f"--listen {listen} would let everyone on the network bypass L2; this version "
            "listens on loopback only (127.0.0.1, [::1], localhost)"
        )


def bind(address: str, flag: str) -> socket.socket:
    """A listening socket on `host:port`. `flag` names the setting in the error.

    Raises ListenError: the port is taken, not ours to use, or the host is not here.
    """
    host, port = split_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ListenError(f"{flag} {address}: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        # At once: two sockets may both bind a port, but only one can listen on it.
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ListenError(f"{flag} {address}: {_why(error)}") from None
    return listener


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is taken; is another kvguard running? Choose another port"
    if error.errno == errno.EACCES:
        return "ports below 1024 need a privilege; choose a higher one"
    if error.errno == errno.EADDRNOTAVAIL:
        return "no interface of this machine has that address"
    return os.strerror(error.errno) if error.errno else str(error)


def url_of(listener: socket.socket) -> str:
    """The URL under which the bound socket is reached from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn in an asyncio loop that belongs to someone else: it takes no signals."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=100,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )

    def install_signal_handlers(self) -> None:
        """Nothing: `kvguard run` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `kvguard run` has its own."""
        yield

    def stop(self) -> None:
        """Finish what is being answered, then end `serve`."""
        self.should_exit = True
