"""A TCP proxy in a process of its own, whose link gets slow, late, frozen or cut at run time.

    python proxy.py LISTEN_PORT TARGET_PORT CONTROL_PORT

All on 127.0.0.1. The link is shared: one rate in bytes per second for all connections
and both directions together, handed out in turns of 16 KiB, so connections are served
fairly. `busy_seconds` tells a rate only while a rate is set: an unlimited link does not
wait. The delay is added to what the target sends (an answer comes that much later; it
costs no bandwidth). Frozen means that connections stay open and nothing passes.

What breaks, beside the link:
- some connections can stall (the oldest ones, or the next that sends some command): they
  stay open for both ends and nothing of theirs passes, while all others, new ones too,
  are served;
- the port can be closed (new connections are refused, the old ones are cut) or a black
  hole (a SYN is never answered; what happens to old connections is up to the caller);
- the answers to one Redis command can be late while all others are not. Only the first
  bytes of what a client sends are looked at, so this needs a client that waits for each
  answer before it sends the next command, as LMCache's `resp` adapter does.

`ProxyControl` is the Python side of the control port: one JSON object a line each way.
Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

HOST = "127.0.0.1"
TURN_BYTES = 16 * 1024
WIDE_BYTES = 256 * 1024  # pieces of an unlimited link: fewer turns cost less CPU
HELD_PIECES = 512  # what one delayed direction may hold back inside the proxy
SLACK_SECONDS = 0.002  # a link that is ahead by less does not sleep: timers are no finer
MADE_UP_SECONDS = 5 * SLACK_SECONDS
FILLERS = 16  # more connections than a listening queue of length 0 ever takes
FILLED_AFTER_SECONDS = 0.2  # a connect on this machine that takes longer has met a full queue

OPEN, CLOSED, BLACK_HOLE = "open", "closed", "black_hole"

_COMMAND = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Za-z]+)\r\n")


@dataclass(frozen=True, slots=True)
class Counters:
    """What passed since the proxy started.

    `monotonic` is CLOCK_MONOTONIC in seconds, which all processes of a machine share.
    `up_bytes` went to the target, `down_bytes` came from it. `busy_seconds` is the time
    in which at least one byte was waiting for the link or passing it, so that
    Δ(up + down) / Δbusy is the rate the link really gave. `command_delays` are added
    seconds by command name, `port` is open, closed or black_hole.
    """

    monotonic: float
    up_bytes: int
    down_bytes: int
    busy_seconds: float
    rate: float
    delay: float
    frozen: bool
    connections: int
    stalled: int
    port: str
    command_delays: dict[str, float]

    @property
    def total_bytes(self) -> int:
        return self.up_bytes + self.down_bytes

    def rate_since(self, earlier: Counters) -> float | None:
        """Bytes per second of busy time since `earlier`; None when it was never busy."""
        busy = self.busy_seconds - earlier.busy_seconds
        return (self.total_bytes - earlier.total_bytes) / busy if busy > 0 else None


class ProxyControl:
    """Changes a running proxy and reads its counters. Every call is one short connection.

    Raises OSError when no proxy answers, RuntimeError when it refuses the request.
    """

    def __init__(self, control_port: int, timeout_s: float = 5.0) -> None:
        self._address = (HOST, control_port)
        self._timeout = timeout_s

    def set_rate(self, bytes_per_second: float | None) -> Counters:
        """Limits the link; None lifts the limit."""
        return self._call({"rate": 0.0 if bytes_per_second is None else bytes_per_second})

    def set_delay(self, seconds: float) -> Counters:
        return self._call({"delay": seconds})

    def freeze(self) -> Counters:
        return self._call({"frozen": True})

    def thaw(self) -> Counters:
        return self._call({"frozen": False})

    def drop(self) -> Counters:
        """Cuts every connection there is; new ones are served as before."""
        return self._call({"drop": True})

    def stall(self, count: int | None = None) -> Counters:
        """The `count` oldest connections pass nothing any more; None: all there are now.

        Those to come are served. An end that gives up its connection is told so to the
        other only after `resume()`.
        """
        return self._call({"stall": -1 if count is None else count})

    def stall_next(self, command: str) -> Counters:
        """The next connection that sends this Redis command stalls with it."""
        return self._call({"stall_next": command})

    def resume(self) -> Counters:
        """What stalled passes again, beginning with what was held back."""
        return self._call({"stall": 0})

    def close_port(self) -> Counters:
        """Cuts every connection there is and refuses new ones."""
        return self._call({"port": CLOSED})

    def black_hole(self) -> Counters:
        """New connections are never answered; those there are stay as they are."""
        return self._call({"port": BLACK_HOLE})

    def open_port(self) -> Counters:
        """Takes new connections, those that still try included."""
        return self._call({"port": OPEN})

    def set_command_delays(self, seconds: Mapping[str, float]) -> Counters:
        """Answers to these Redis commands come so much later; all others in time."""
        return self._call({"command_delays": dict(seconds)})

    def counters(self) -> Counters:
        return self._call({})

    def _call(self, request: dict[str, Any]) -> Counters:
        with socket.create_connection(self._address, timeout=self._timeout) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        if not line:
            raise RuntimeError("the proxy closed its control connection without an answer")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the proxy refused {request}: {answer['error']}")
        return Counters(**answer)


class Link:
    """The shared wire: takes turns, paces, freezes and counts."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.delay = 0.0
        self.up_bytes = 0
        self.down_bytes = 0
        self._running = asyncio.Event()
        self._running.set()
        self._turn = asyncio.Lock()  # first come, first served: that is the fairness
        self._free_at = 0.0
        self._waiting = 0
        self._busy = 0.0
        self._busy_since = 0.0
        self._busy_until = 0.0

    @property
    def piece_bytes(self) -> int:
        return TURN_BYTES if self.rate > 0 or self.delay > 0 else WIDE_BYTES

    @property
    def frozen(self) -> bool:
        return not self._running.is_set()

    def set_frozen(self, frozen: bool) -> None:
        if frozen:
            self._running.clear()
        else:
            self._running.set()

    @property
    def busy_seconds(self) -> float:
        open_interval = time.monotonic() - self._busy_since if self._waiting else 0.0
        return self._busy + max(0.0, open_interval)

    async def carry(self, count: int, down: bool) -> None:
        """Returns when `count` bytes have passed the link."""
        if self.rate <= 0 and not self.frozen:
            self._count(count, down)
            return
        if self._waiting == 0:
            # A gap that is made up for (see `_pass`) was no idle time of the link.
            self._busy_since = max(time.monotonic() - MADE_UP_SECONDS, self._busy_until)
        self._waiting += 1
        try:
            async with self._turn:
                await self._pass(count)
                self._count(count, down)
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                # What went ahead of its time, by less than the slack, still holds the link.
                self._busy_until = max(time.monotonic(), self._free_at)
                self._busy += max(0.0, self._busy_until - self._busy_since)

    def _count(self, count: int, down: bool) -> None:
        if down:
            self.down_bytes += count
        else:
            self.up_bytes += count

    async def _pass(self, count: int) -> None:
        while True:
            await self._running.wait()
            if self.rate <= 0:
                return
            now = time.monotonic()
            # A late timer is made up for, an idle link is not: its past is no credit.
            self._free_at = max(self._free_at, now - MADE_UP_SECONDS) + count / self.rate
            ahead = self._free_at - now
            if ahead > SLACK_SECONDS:
                await asyncio.sleep(ahead)
            if not self.frozen:
                return


class Port:
    """The listening side: open, closed or a black hole, and back again.

    A black hole is a listening socket whose queue is full and that nobody accepts from:
    the kernel then drops every further SYN, and a client stays in SYN_SENT.
    """

    def __init__(self, number: int, serve: Any) -> None:
        self._number = number
        self._serve = serve
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._fillers: list[socket.socket] = []
        self.state = CLOSED

    async def set(self, state: str) -> None:
        if state not in (OPEN, CLOSED, BLACK_HOLE):
            raise ValueError(f"a port cannot be {state!r}")
        if state == self.state:
            return
        if self.state == CLOSED:
            await self._open()
        if state == CLOSED:
            self._close()
        elif state == BLACK_HOLE:
            await self._fill()
        else:
            await self._open()
        self.state = state

    async def _open(self) -> None:
        if self._socket is None:
            self._socket = socket.socket()
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((HOST, self._number))
            self._socket.setblocking(False)
        if self._server is None:
            # asyncio closes the socket it was given; a duplicate keeps the port ours.
            self._server = await asyncio.start_server(
                self._serve, sock=self._socket.dup(), limit=WIDE_BYTES
            )
        self._empty()

    def _close(self) -> None:
        self._stop()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._empty()

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _empty(self) -> None:
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()

    async def _fill(self) -> None:
        self._stop()
        assert self._socket is not None
        self._socket.listen(0)
        loop = asyncio.get_running_loop()
        for _ in range(FILLERS):
            filler = socket.socket()
            filler.setblocking(False)
            try:
                await asyncio.wait_for(
                    loop.sock_connect(filler, (HOST, self._number)), FILLED_AFTER_SECONDS
                )
            except TimeoutError:
                filler.close()
                return
            self._fillers.append(filler)
        raise RuntimeError(f"{FILLERS} connections did not fill the listening queue")


class Connection:
    """A client's connection and its own to the target."""

    def __init__(self, client: asyncio.StreamWriter, target: asyncio.StreamWriter) -> None:
        self.ends = (client, target)
        self.running = asyncio.Event()
        self.running.set()
        self.command = ""

    def sent(self, data: bytes) -> str:
        """Notes and returns the command that a client's bytes begin with; '' when none."""
        found = _COMMAND.match(data)
        if found is None:
            return ""
        self.command = found.group(1).decode().upper()
        return self.command

    def cut(self) -> None:
        self.running.set()  # or what it holds back would keep it for ever
        for end in self.ends:
            end.transport.abort()


class Proxy:
    def __init__(self, listen_port: int, target_port: int) -> None:
        self.port = Port(listen_port, self.serve_client)
        self._target_port = target_port
        self._link = Link()
        self._command_delays: dict[str, float] = {}
        self._stall_next = ""
        self._connections: dict[Connection, None] = {}  # in the order in which they came

    async def serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection(
                HOST, self._target_port, limit=WIDE_BYTES
            )
        except OSError:
            writer.transport.abort()
            return
        connection = Connection(writer, target_writer)
        self._connections[connection] = None
        for end in connection.ends:
            end.transport.set_write_buffer_limits(high=WIDE_BYTES)
        directions = [
            asyncio.create_task(self._direction(connection, reader, target_writer, down=False)),
            asyncio.create_task(self._direction(connection, target_reader, writer, down=True)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            self._connections.pop(connection, None)
            for end in connection.ends:
                end.close()

    async def _direction(
        self,
        connection: Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        down: bool,
    ) -> None:
        """Ends when the sender has ended and all was forwarded, or when either end broke."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD_PIECES)

        async def receive() -> None:
            while data := await reader.read(self._link.piece_bytes):
                delay = 0.0
                if down:
                    late = self._command_delays.get(connection.command, 0.0)
                    delay = self._link.delay + late
                elif (command := connection.sent(data)) and command == self._stall_next:
                    self._stall_next = ""
                    connection.running.clear()
                await held.put((time.monotonic() + delay, data))
            await held.put((0.0, b""))

        async def forward() -> None:
            while True:
                due, data = await held.get()
                if not data:
                    return
                ahead = due - time.monotonic()
                if ahead > 0:
                    await asyncio.sleep(ahead)
                await connection.running.wait()
                await self._link.carry(len(data), down)
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as both:
            both.create_task(receive())
            both.create_task(forward())

    async def serve_control(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while line := await reader.readline():
                try:
                    await self._apply(json.loads(line))
                    answer: dict[str, Any] = asdict(self.counters())
                except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, OSError):
            pass
        finally:
            writer.close()

    async def _apply(self, request: dict[str, Any]) -> None:
        known = {"rate", "delay", "frozen", "drop", "stall", "stall_next", "port"}
        known |= {"command_delays"}
        if unknown := set(request) - known:
            raise ValueError(f"unknown {sorted(unknown)}")
        for name in ("rate", "delay"):
            if name in request:
                setattr(self._link, name, _not_negative(name, request[name]))
        if "command_delays" in request:
            self._command_delays = {
                name.upper(): _not_negative(name, seconds)
                for name, seconds in request["command_delays"].items()
            }
        if "frozen" in request:
            self._link.set_frozen(bool(request["frozen"]))
        if "stall_next" in request:
            self._stall_next = str(request["stall_next"]).upper()
        if "stall" in request:
            self._stall(int(request["stall"]))
        if "port" in request:
            await self.port.set(request["port"])
        if request.get("drop") or request.get("port") == CLOSED:
            for connection in list(self._connections):
                connection.cut()

    def _stall(self, count: int) -> None:
        """The `count` oldest connections, all when negative, and none when 0."""
        if count == 0:
            self._stall_next = ""
        for place, connection in enumerate(self._connections):
            if count == 0:
                connection.running.set()
            elif count < 0 or place < count:
                connection.running.clear()

    def counters(self) -> Counters:
        link = self._link
        return Counters(
            monotonic=time.monotonic(),
            up_bytes=link.up_bytes,
            down_bytes=link.down_bytes,
            busy_seconds=link.busy_seconds,
            rate=link.rate,
            delay=link.delay,
            frozen=link.frozen,
            connections=len(self._connections),
            stalled=sum(not each.running.is_set() for each in self._connections),
            port=self.port.state,
            command_delays=self._command_delays,
        )


def _not_negative(name: str, value: Any) -> float:
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name} must be a finite number, 0 or more")
    return number


async def run(listen_port: int, target_port: int, control_port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    proxy = Proxy(listen_port, target_port)
    await proxy.port.set(OPEN)
    control = await asyncio.start_server(proxy.serve_control, HOST, control_port)
    await ended.wait()
    await proxy.port.set(CLOSED)
    control.close()


if __name__ == "__main__":
    asyncio.run(run(*map(int, sys.argv[1:4])))
