"""The proxy keeps what it promises: the lab's truth rests on it."""

from __future__ import annotations

import errno
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
    """Answers a line 'N' with N bytes; any other line with nothing."""

    def handle(self) -> None:
        try:
            for line in self.rfile:
                if line.strip().isdigit():
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

    def connect_state(self) -> str:
        """What the kernel says of a connect that has had half a second."""
        with socket.socket() as client:
            client.setblocking(False)
            error = client.connect_ex((HOST, self.port))
            assert error == errno.EINPROGRESS, error
            time.sleep(0.5)
            state = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return {1: "ESTABLISHED", 2: "SYN_SENT", 7: "CLOSE"}[state]

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


def test_stalled_connections_stay_and_pass_nothing_while_others_are_served(wire: Wire) -> None:
    with wire.connect() as first, wire.connect() as second:
        for connection in (first, second):
            connection.sendall(b"10\n")
            receive(connection, 10)
        assert wire.control.stall(1).stalled == 1
        first.sendall(b"10\n")
        second.sendall(b"10\n")
        receive(second, 10)
        assert wire.fetch(10) < 1
        first.settimeout(0.5)
        with pytest.raises(TimeoutError):
            first.recv(1)
        assert wire.control.resume().stalled == 0
        first.settimeout(5)
        receive(first, 10)


def test_half_open_is_told_to_no_client_and_new_connections_work(wire: Wire) -> None:
    with wire.connect() as old:
        old.sendall(b"10\n")
        receive(old, 10)
        wire.control.stall()
        old.sendall(b"10\n")
        old.settimeout(0.5)
        with pytest.raises(TimeoutError):
            old.recv(1)
        assert wire.fetch(10) < 1
        assert wire.control.counters().stalled == 1
    wire.control.resume()
    deadline = time.monotonic() + 5
    while wire.control.counters().connections:
        assert time.monotonic() < deadline, "a connection whose client is gone was kept"


def test_a_stalled_connection_can_be_cut(wire: Wire) -> None:
    with wire.connect() as connection:
        connection.sendall(b"10\n")
        receive(connection, 10)
        wire.control.stall()
        connection.sendall(b"10\n")
        wire.control.drop()
        with pytest.raises(ConnectionError):
            receive(connection, 1)
    deadline = time.monotonic() + 5
    while wire.control.counters().connections:
        assert time.monotonic() < deadline, "a connection that was cut is still counted"


def test_a_closed_port_refuses_and_cuts_and_opens_again(wire: Wire) -> None:
    with wire.connect() as connection:
        connection.sendall(b"10\n")
        receive(connection, 10)
        assert wire.control.close_port().port == "closed"
        with pytest.raises(ConnectionError):
            receive(connection, 1)
    with pytest.raises(ConnectionRefusedError):
        wire.connect()
    assert wire.control.open_port().port == "open"
    assert wire.fetch(10) < 1


def test_a_black_hole_answers_no_syn_and_keeps_what_there_is(wire: Wire) -> None:
    with wire.connect() as old:
        old.sendall(b"10\n")
        receive(old, 10)
        assert wire.control.black_hole().port == "black_hole"
        old.sendall(b"10\n")
        receive(old, 10)
        assert wire.connect_state() == "SYN_SENT"
        assert wire.connect_state() == "SYN_SENT"
        with pytest.raises(TimeoutError):
            socket.create_connection((HOST, wire.port), timeout=1.5)
        wire.control.open_port()
        assert wire.connect_state() == "ESTABLISHED"
        assert wire.fetch(10) < 1


def test_a_connect_into_a_black_hole_succeeds_once_the_port_opens(wire: Wire) -> None:
    wire.control.black_hole()
    with socket.socket() as client:
        client.settimeout(10)
        threading.Timer(0.5, wire.control.open_port).start()
        client.connect((HOST, wire.port))  # the kernel sends the SYN again after 1 s
        client.sendall(b"10\n")
        receive(client, 10)


@pytest.mark.parametrize("between", ["black_hole", "close_port"])
def test_a_port_goes_from_any_state_to_any(wire: Wire, between: str) -> None:
    for operation in ("black_hole", "close_port", "open_port"):
        getattr(wire.control, between)()
        getattr(wire.control, operation)()
    assert wire.fetch(10) < 1


def command(name: str, count: int) -> bytes:
    """A Redis command of that name, which the source answers with `count` bytes."""
    return f"*2\r\n${len(name)}\r\n{name}\r\n$1\r\n{count}\n".encode()


def test_answers_of_one_command_are_late_and_no_others(wire: Wire) -> None:
    wire.control.set_command_delays({"exists": 0.4})
    with wire.connect() as connection:
        for name, least in (("EXISTS", 0.4), ("GET", 0.0), ("exists", 0.4), ("SET", 0.0)):
            begin = time.monotonic()
            connection.sendall(command(name, 4))
            receive(connection, 4)
            assert least <= time.monotonic() - begin < least + 0.2, name
        assert wire.control.set_command_delays({}).command_delays == {}
        begin = time.monotonic()
        connection.sendall(command("EXISTS", 4))
        receive(connection, 4)
        assert time.monotonic() - begin < 0.2


def test_the_next_connection_with_a_command_stalls_and_no_other(wire: Wire) -> None:
    with wire.connect() as looks, wire.connect() as loads, wire.connect() as loads_later:
        wire.control.stall_next("get")
        looks.sendall(command("EXISTS", 4))
        receive(looks, 4)
        loads.sendall(command("GET", 4))
        loads.settimeout(0.5)
        with pytest.raises(TimeoutError):
            loads.recv(1)
        assert wire.control.counters().stalled == 1
        loads_later.sendall(command("GET", 4))
        receive(loads_later, 4)
        wire.control.resume()
        loads.settimeout(5)
        receive(loads, 4)


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
    with pytest.raises(RuntimeError, match="refused"):
        wire.control.set_command_delays({"GET": -1})
    assert wire.control.counters().rate == 0
