"""Each fault really is what its name says: a Redis, the proxy and a client, nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ..gate_host import CHUNK_BYTES
from ..gate_stores import Redis, Throttled
from ..processes import HOST, Run
from ..stack import Stack
from .kit import FAULTS, LATE_LOAD_SECONDS, LATE_LOOKUP_SECONDS, by_name, end_everything
from .redis_client import RedisClient, RedisError

WORKERS = 8
VALUE = bytes(CHUNK_BYTES)


class StoreOnly:
    """What a fault needs of a stack, without cache server and engine."""

    disk_bytes = None

    def __init__(self, run: Run) -> None:
        self.store = Process(Redis(run))
        self.store.redis.start()
        self.store_port = self.store.redis.port
        self._proxy = Throttled(run, self.store_port).start()
        self.proxy_port = self._proxy.port
        self.link = self._proxy.link

    def start_store(self) -> None:
        self.store.redis.start()
        self.store.running = True

    def clear_store(self) -> None:
        assert self.store.redis.says(b"FLUSHALL").startswith(b"+OK")

    def cache_status(self) -> dict[str, Any]:
        return {"storage_manager": {"prefetch_controller": {"load_phase_count": 1}}}

    def connect(self) -> RedisClient:
        return RedisClient(self.proxy_port, timeout_s=0.5)

    def connect_error(self) -> int:
        """What a fresh connect has come to after half a second; EINPROGRESS: nothing."""
        with socket.socket() as client:
            client.setblocking(False)
            if (error := client.connect_ex((HOST, self.proxy_port))) != errno.EINPROGRESS:
                return error
            time.sleep(0.5)
            if client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == SYN_SENT:
                return errno.EINPROGRESS
            return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


class Process:
    """A Redis that can be killed, and says whether it runs."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.running = True

    def kill(self) -> None:
        self.redis.kill()
        self.running = False


SYN_SENT = b"\x02"
Begin = Callable[[str], None]


@pytest.fixture(scope="module")
def made() -> Iterator[StoreOnly]:
    with Run() as run:
        yield StoreOnly(run)


@pytest.fixture
def store(made: StoreOnly) -> Iterator[StoreOnly]:
    """A healthy store with one value."""
    with RedisClient(made.store_port) as client:
        client.do("SET", "key", VALUE)
    yield made
    end_everything(cast(Stack, made))


def begin(store: StoreOnly, name: str) -> None:
    by_name(name).begin(cast(Stack, store))


def end(store: StoreOnly, name: str) -> None:
    by_name(name).end(cast(Stack, store))


def seconds(client: RedisClient, *words: str) -> float:
    started = time.monotonic()
    client.do(*words)
    return time.monotonic() - started


def assert_works(store: StoreOnly) -> None:
    with store.connect() as client:
        assert client.do("GET", "key") == VALUE


def test_freeze(store: StoreOnly) -> None:
    with store.connect() as client:
        client.do("PING")
        begin(store, "freeze")
        with pytest.raises(TimeoutError):
            client.do("PING")
    assert store.connect_error() == 0  # a frozen store still takes connections
    end(store, "freeze")
    assert_works(store)


def test_drop(store: StoreOnly) -> None:
    with store.connect() as client:
        client.do("PING")
        begin(store, "drop")
        with pytest.raises(ConnectionError):
            client.do("PING")
    assert_works(store)


def test_half_open(store: StoreOnly) -> None:
    with store.connect() as client:
        client.do("PING")
        begin(store, "half_open")
        with pytest.raises(TimeoutError):
            client.do("PING")
        assert_works(store)


def test_black_hole(store: StoreOnly) -> None:
    with store.connect() as client:
        client.do("PING")
        begin(store, "black_hole")
        with pytest.raises(TimeoutError):
            client.do("PING")
        assert store.connect_error() == errno.EINPROGRESS
        assert store.connect_error() == errno.EINPROGRESS
    end(store, "black_hole")
    assert_works(store)


def test_cut_and_black_hole(store: StoreOnly) -> None:
    with store.connect() as client:
        client.do("PING")
        begin(store, "cut_and_black_hole")
        with pytest.raises(ConnectionError):
            client.do("PING")
        assert store.connect_error() == errno.EINPROGRESS
    end(store, "cut_and_black_hole")
    assert_works(store)


def test_port_closed(store: StoreOnly) -> None:
    with store.connect() as client:
        client.do("PING")
        begin(store, "port_closed")
        with pytest.raises(ConnectionError):
            client.do("PING")
    assert store.connect_error() == errno.ECONNREFUSED
    end(store, "port_closed")
    assert_works(store)


def test_flushall(store: StoreOnly) -> None:
    with store.connect() as client:
        begin(store, "flushall")
        assert client.do("DBSIZE") == 0  # and the connection is the old one
    assert store.link.counters().rate == 0


def test_restarted_empty(store: StoreOnly) -> None:
    with store.connect() as client:
        client.do("PING")
        begin(store, "restarted_empty")
        with pytest.raises(ConnectionError):
            client.do("PING")
    with pytest.raises(ConnectionError), store.connect() as client:
        client.do("PING")  # connected, but to nobody
    end(store, "restarted_empty")
    with store.connect() as client:
        assert client.do("DBSIZE") == 0


@pytest.mark.parametrize(
    ("name", "late", "fast", "delay"),
    [
        ("slow_lookups", "EXISTS", "GET", LATE_LOOKUP_SECONDS),
        ("slow_loads", "GET", "EXISTS", LATE_LOAD_SECONDS),
    ],
)
def test_one_command_is_slow(
    store: StoreOnly, name: str, late: str, fast: str, delay: float
) -> None:
    begin(store, name)
    with RedisClient(store.proxy_port) as client:
        assert delay <= seconds(client, late, "key") < delay + 0.4
        assert seconds(client, fast, "key") < 0.4
        end(store, name)
        assert seconds(client, late, "key") < 0.4


def test_worker_stuck(store: StoreOnly) -> None:
    clients = [store.connect() for _ in range(WORKERS)]
    for client in clients:
        client.do("PING")
    begin(store, "worker_stuck")
    stuck = 0
    for client in clients:
        try:
            client.do("EXISTS", "key")
            client.do("GET", "key")
        except TimeoutError:
            stuck += 1
    assert stuck == 1
    for client in clients:
        client.__exit__(None, None, None)
    end(store, "worker_stuck")
    assert_works(store)


def test_sizes_changed(store: StoreOnly) -> None:
    begin(store, "sizes_changed")
    with store.connect() as client:
        assert client.do("STRLEN", "key") == CHUNK_BYTES // 2
        client.do("SET", "other", VALUE)
        by_name("sizes_changed").again(cast(Stack, store))
        assert client.do("STRLEN", "key") == CHUNK_BYTES // 2
        assert client.do("STRLEN", "other") == CHUNK_BYTES // 2


def test_wrong_password(store: StoreOnly) -> None:
    with store.connect() as client:
        client.do("PING")
        begin(store, "wrong_password")
        with pytest.raises(ConnectionError):
            client.do("PING")
    with store.connect() as client, pytest.raises(RedisError, match="NOAUTH"):
        client.do("GET", "key")
    end(store, "wrong_password")
    assert_works(store)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk of 8 MiB in a mount namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    with Run() as run:
        mount_point = run.directory / "disk"
        mount_point.mkdir()
        rootless = ["--map-root-user"] if os.geteuid() else []
        script = 'mount -t tmpfs -o size=8m lab "$0" && exec sleep 60'
        child = run.child(
            "disk",
            ["unshare", "--mount", *rootless, "sh", "-c", script, str(mount_point)],
            log=run.directory / "disk.log",
        )
        child.start()
        path = Path(f"/proc/{child.pid}/root{mount_point}")
        deadline = time.monotonic() + 5
        while not os.path.ismount(path):
            if not child.running or time.monotonic() > deadline:
                pytest.skip(f"no disk of one's own here: {child.log_tail()}")
            time.sleep(0.05)
        yield path


def test_disk_full(disk: Path) -> None:
    class OnDisk:
        def __init__(self) -> None:
            self.disk = disk

    stack = cast(Stack, OnDisk())
    fault = by_name("disk_full")
    (disk / "before").write_bytes(VALUE)
    fault.begin(stack)
    with pytest.raises(OSError, match="No space left"):
        (disk / "chunk").write_bytes(2 * VALUE)
    assert (disk / "before").read_bytes() == VALUE
    fault.end(stack)
    (disk / "chunk").write_bytes(2 * VALUE)


def test_there_is_a_test_here_for_every_fault() -> None:
    own = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {fault.name for fault in FAULTS} - own <= {"slow_lookups", "slow_loads"}
