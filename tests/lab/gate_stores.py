"""Real stores for the gate's tests: a redis-server, alone or behind the throttling proxy."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .processes import HOST, Child, Run, free_ports
from .proxy import ProxyControl


class Redis:
    """A redis-server of a run. `freeze` stops the process, its connections stay."""

    def __init__(self, run: Run) -> None:
        (self.port,) = free_ports(1)
        self._child = run.child(
            "redis",
            [
                *("redis-server", "--bind", HOST, "--port", str(self.port)),
                *("--dir", str(run.directory), "--save", "", "--appendonly", "no"),
            ],
            log=run.directory / "redis.log",
        )

    def start(self) -> Redis:
        self._child.start()
        self._child.wait_ready(lambda: self.says(b"PING").startswith(b"+PONG"), 20)
        return self

    def says(self, command: bytes) -> bytes:
        with socket.create_connection((HOST, self.port), timeout=5) as connection:
            connection.sendall(command + b"\r\n")
            return connection.recv(64)

    def connections(self) -> int:
        """Clients connected, this one not counted."""
        with socket.create_connection((HOST, self.port), timeout=5) as connection:
            connection.sendall(b"INFO clients\r\n")
            text = connection.recv(4096).decode()
        return int(text.partition("connected_clients:")[2].split()[0]) - 1

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self._child.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._child.signal(signal.SIGCONT)

    def kill(self) -> None:
        self._child.kill()


class Throttled:
    """A proxy before a port; `link` sets its rate, delay and so on."""

    def __init__(self, run: Run, target: int) -> None:
        self.port, control = free_ports(2)
        self.link = ProxyControl(control)
        self._child: Child = run.child(
            "proxy",
            [
                *(sys.executable, "-I", str(Path(__file__).with_name("proxy.py"))),
                *map(str, (self.port, target, control)),
            ],
            log=run.directory / "proxy.log",
        )

    def start(self) -> Throttled:
        self._child.start()
        self._child.wait_ready(lambda: bool(self.link.counters()), 20)
        return self


def resp(port: int, **more: Any) -> dict[str, Any]:
    """The spec of an inner adapter for that port."""
    return {"type": "resp", "host": HOST, "port": port, "num_workers": 4, **more}


def open_descriptors() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def native_threads() -> int:
    """Of this process, those of C++ included."""
    return len(list(Path(f"/proc/{os.getpid()}/task").iterdir()))
