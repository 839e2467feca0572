"""The proxy keeps what it promises: the lab's truth rests on it."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .processes import HOST, Run, free_ports
from .proxy import ProxyControl

MEGABYTE = 1_000_000


class Source(socketserver.StreamRequestHandler):
    """Answers a line 'N' with N bytes; a line that begins with '#' with nothing."""

    def handle(self) -> None:
        try:
            for line in self.rfile:
                if not line.startswith(b"#"):
                    self.wfile.write(bytes(int(line)))
        except OSError:
            return  # cut by the proxy, as the tests want


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True


@dataclass(frozen=True)
class Wire:
    """A source behind a proxy."""

    port: int
    control: ProxyControl

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=20)

    def fetch(self, count: int) -> float:
        """Seconds until `count` bytes came over a connection of its own."""
        with self.connect() as connection:
            begin = time.monotonic()
            connection.sendall(b"%d\n" % count)
            receive(connection, count)
            return time.monotonic() - begin


def receive(connection: socket.socket, count: int) -> None:
    left = count
    while left:
        data = connection.recv(min(left, 1 << 20))
        if not data:
            raise ConnectionError(f"ended with {left} of {count} bytes missing")
        left -= len(data)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    listen, target, control_port = free_ports(3)
    server = Server((HOST, target), Source)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    control = ProxyControl(control_port)
    script = str(Path(__file__).with_name("proxy.py"))
    with Run() as run:
        proxy = run.child(
            "proxy",
            [sys.executable, "-I", script, str(listen), str(target), str(control_port)],
            log=tmp_path / "proxy.log",
        )
        proxy.start()
        proxy.wait_ready(lambda: bool(control.counters()), 10)
        yield Wire(listen, control)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("rate", [2e6, 12e6, 50e6])
def test_the_rate_is_what_was_set(wire: Wire, rate: float) -> None:
    before = wire.control.set_rate(rate)
    seconds = wire.fetch(int(rate * 2))
    after = wire.control.counters()
    assert rate * 2 / seconds == pytest.approx(rate, rel=0.05)
    assert after.rate_since(before) == pytest.approx(rate, rel=0.05)
    assert after.down_bytes - before.down_bytes == int(rate * 2)
    assert after.monotonic - before.monotonic >= seconds


def test_both_directions_share_the_rate(wire: Wire) -> None:
    before = wire.control.set_rate(4e6)
    with wire.connect() as up, wire.connect() as down:
        begin = time.monotonic()
        upload = b"#" * (4 * MEGABYTE - 1) + b"\n"
        sender = threading.Thread(target=up.sendall, args=(upload,))
        sender.start()
        down.sendall(b"%d\n" % (4 * MEGABYTE))
        receive(down, 4 * MEGABYTE)
        sender.join()
        while wire.control.counters().up_bytes - before.up_bytes < len(upload):
            assert time.monotonic() - begin < 10
        seconds = time.monotonic() - begin
    assert seconds == pytest.approx(2, rel=0.15)


def test_connections_are_served_fairly(wire: Wire) -> None:
    wire.control.set_rate(8e6)
    seconds: list[float] = []
    threads = [
        threading.Thread(target=lambda: seconds.append(wire.fetch(4 * MEGABYTE))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(seconds) > 0.85 * max(seconds)
    assert max(seconds) == pytest.approx(2, rel=0.1)


def test_an_idle_link_earns_no_credit_and_is_not_busy(wire: Wire) -> None:
    before = wire.control.set_rate(4e6)
    wire.fetch(MEGABYTE)
    time.sleep(1)
    assert wire.fetch(4 * MEGABYTE) == pytest.approx(1, rel=0.1)
    busy = wire.control.counters().busy_seconds - before.busy_seconds
    assert busy == pytest.approx(1.25, rel=0.1)


def test_a_rate_set_later_holds_from_then_on(wire: Wire) -> None:
    wire.control.set_rate(1e6)
    with wire.connect() as connection:
        connection.sendall(b"%d\n" % (20 * MEGABYTE))
        time.sleep(0.5)
        wire.control.set_rate(None)
        begin = time.monotonic()
        receive(connection, 20 * MEGABYTE)
    assert time.monotonic() - begin < 1.5


def test_the_delay_is_late_but_costs_no_bandwidth(wire: Wire) -> None:
    assert wire.fetch(1) < 0.1
    wire.control.set_delay(0.2)
    assert 0.2 <= wire.fetch(1) < 0.35
    wire.control.set_rate(10e6)
    assert wire.fetch(10 * MEGABYTE) == pytest.approx(1.2, rel=0.1)


def test_frozen_keeps_connections_and_passes_nothing(wire: Wire) -> None:
    with wire.connect() as connection:
        connection.sendall(b"10\n")
        receive(connection, 10)
        wire.control.freeze()
        before = wire.control.counters()
        connection.sendall(b"10\n")
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        frozen = wire.control.counters()
        assert frozen.frozen
        assert frozen.total_bytes == before.total_bytes
        assert frozen.busy_seconds - before.busy_seconds > 0.4
        wire.control.thaw()
        connection.settimeout(5)
        receive(connection, 10)


def test_drop_cuts_what_there_is_and_serves_the_next(wire: Wire) -> None:
    with wire.connect() as connection:
        connection.sendall(b"10\n")
        receive(connection, 10)
        wire.control.drop()
        with pytest.raises(ConnectionError):
            receive(connection, 1)
    assert wire.fetch(10) < 1


def test_a_dead_target_closes_the_connection(wire: Wire, tmp_path: Path) -> None:
    listen, nobody, control = free_ports(3)
    script = str(Path(__file__).with_name("proxy.py"))
    with Run() as run:
        proxy = run.child(
            "proxy",
            [sys.executable, "-I", script, str(listen), str(nobody), str(control)],
            log=tmp_path / "dead.log",
        )
        proxy.start()
        proxy.wait_ready(lambda: bool(ProxyControl(control).counters()), 10)
        with (
            socket.create_connection((HOST, listen), timeout=5) as connection,
            pytest.raises(ConnectionError),
        ):
            receive(connection, 1)


def test_what_cannot_be_is_refused(wire: Wire) -> None:
    for rate in (-1.0, float("inf"), float("nan")):
        with pytest.raises(RuntimeError, match="refused"):
            wire.control.set_rate(rate)
    assert wire.control.counters().rate == 0
