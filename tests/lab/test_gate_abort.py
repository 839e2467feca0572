"""Hung loads in a real LMCache server that keeps L1, and what an abort does for it."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .gate_host import CacheServer
from .gate_stores import Redis, Throttled, resp
from .processes import Run, mapped_shared_memory
from .test_gate_lmcache import VERSIONS, available

ANSWERED_SECONDS = 1.0
ENDED_SECONDS = 2.0
KEPT, UNKNOWN = 900, 950
SLOW = 1e6


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with Run() as made:
        yield made


@pytest.fixture(scope="module")
def proxy(run: Run) -> Throttled:
    return Throttled(run, Redis(run).start().port).start()


@pytest.fixture(scope="module", params=list(VERSIONS))
def server(request: pytest.FixtureRequest, proxy: Throttled) -> Iterator[CacheServer]:
    proxy.link.thaw()
    proxy.link.set_rate(None)
    with CacheServer(
        # A worker for each of the loads, or the last of them would wait for the first.
        resp(proxy.port, num_workers=16),
        lmcache=available(request.param),
        policies=("default", "retain"),
    ) as made:
        yield made


def eventually(condition: Callable[[], Any], limit_s: float = 10.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "it never came true"
        time.sleep(0.02)
    return time.monotonic() - began


class Healthy:
    """Asks /healthcheck all the while, and keeps the longest time it took."""

    def __init__(self, server: CacheServer) -> None:
        self._url = server.url + "/healthcheck"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.worst_seconds = 0.0

    def _ask(self) -> None:
        while not self._stop.wait(0.1):
            began = time.monotonic()
            with urllib.request.urlopen(self._url, timeout=30) as answer:
                answer.read()
            self.worst_seconds = max(self.worst_seconds, time.monotonic() - began)

    def __enter__(self) -> Healthy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(40)


def warm(server: CacheServer, seqs: range, chunks: int) -> None:
    """Those prefixes are in L2 and not in L1."""
    for seq in seqs:
        server.client.request(seq, chunks)
    eventually(lambda: server.status()["known_keys"] >= len(seqs) * chunks)
    server.clear_l1()


def hang(server: CacheServer, proxy: Throttled, seqs: range, chunks: int, loads: int) -> list[int]:
    """Requests whose loads hang in a frozen store, `loads` of them; the requests' handles."""
    proxy.link.set_rate(SLOW)
    handles = [server.client.begin(seq, chunks) for seq in seqs]
    eventually(lambda: server.status()["in_flight"]["loads"] >= loads, 20)
    proxy.link.freeze()
    time.sleep(0.3)
    assert server.status()["in_flight"]["loads"] == loads
    return handles


def answered_within(server: CacheServer, seq: int, chunks: int, limit_s: float) -> int:
    handle = server.client.begin(seq, chunks)
    hit, waited = server.client.poll(handle, 20)
    server.client.drop(handle)
    assert hit is not None
    assert waited < limit_s
    return hit


def restore(server: CacheServer, proxy: Throttled) -> None:
    proxy.link.thaw()
    proxy.link.set_rate(None)
    server.gate("admission", max_loads=5, holder="person:lab")
    server.gate("restore", holder="person:lab")


def test_at_most_five_hang_and_l1_is_served_without_an_abort(
    server: CacheServer, proxy: Throttled
) -> None:
    warm(server, range(1, 9), 3)
    assert server.client.request(KEPT, 2) == 0  # now in L1
    with Healthy(server) as health:
        handles = hang(server, proxy, range(1, 9), 3, loads=5)
        server.gate("bypass", holder="person:lab")
        for _ in range(3):
            assert answered_within(server, KEPT, 2, ANSWERED_SECONDS) == 2
            assert answered_within(server, UNKNOWN, 2, ANSWERED_SECONDS) == 0
        assert server.status()["in_flight"]["loads"] == 5
        assert server.status()["rebuild"]["last"] is None
        restore(server, proxy)
        for handle in handles:
            hit, _ = server.client.poll(handle, 20)
            assert hit is not None
            assert False not in server.client.finish(handle).values()
    assert health.worst_seconds < 1


def test_eight_hang_and_an_abort_ends_them(server: CacheServer, proxy: Throttled) -> None:
    warm(server, range(11, 21), 4)
    assert server.client.request(KEPT + 1, 2) in (0, 2)
    server.gate("admission", max_loads=8, holder="person:lab")
    with Healthy(server) as health:
        handles = hang(server, proxy, range(11, 19), 1, loads=8)
        server.gate("bypass", holder="person:lab")
        began = time.monotonic()
        assert server.gate("abort", holder="person:lab", reason="frozen")["started"] is True
        eventually(lambda: server.prefetching()["load_phase_count"] == 0, ENDED_SECONDS)
        assert time.monotonic() - began < ENDED_SECONDS
        assert answered_within(server, KEPT + 1, 2, ANSWERED_SECONDS) == 2
        assert answered_within(server, UNKNOWN + 1, 2, ANSWERED_SECONDS) == 0
        last = server.status()["rebuild"]["last"]
        assert (last["outcome"], last["ended_loads"]) == ("done", 8)
        assert server.metrics()["kvguard_gate_rebuilds_total,cause=abort"] >= 1
        restore(server, proxy)
        for handle in handles:
            hit, _ = server.client.poll(handle, 5)
            assert hit == 0
            assert False not in server.client.finish(handle).values()
    assert health.worst_seconds < 1
    # What is loaded through the fresh adapter is what was stored.
    server.clear_l1()
    for seq in range(19, 21):
        assert server.client.request(seq, 4) == 4


def test_two_hundred_rebuilds_under_load_leave_nothing_behind(
    server: CacheServer, proxy: Throttled
) -> None:
    """No lock, descriptor, thread, shared memory or byte of L1 is left."""
    warm(server, range(31, 35), 3)
    for seq in range(31, 35):
        assert server.client.request(seq, 3) == 3
    server.clear_l1()
    server.gate("rebuild")
    eventually(lambda: not server.status()["rebuild"]["running"])
    before = footprint(server)
    hits = 0
    # What one of them leaves shows as well after fewer; two minutes are for one version.
    rebuilds = 200 if server.installed else 40
    for n in range(rebuilds):
        handle = server.client.begin(31 + n % 4, 3)
        code, answer = server.operate("rebuild", cause="manual")
        assert code == 200, answer
        hit, _ = server.client.poll(handle, 10)
        assert hit is not None
        hits += hit
        assert False not in server.client.finish(handle).values()
        eventually(lambda: not server.status()["rebuild"]["running"])
        if n % 10 == 9:
            server.clear_l1()
    assert hits > 0
    server.clear_l1()
    left: dict[str, int] = {}

    def clean() -> bool:
        left.update({k: v for k, v in footprint(server).items() if v > before[k]})
        return all(v <= before[k] for k, v in footprint(server).items())

    deadline = time.monotonic() + 15
    while not clean():
        assert time.monotonic() < deadline, (left, before)
        time.sleep(0.2)
    assert server.metrics()["kvguard_gate_rebuilds_total,cause=manual"] == rebuilds + 1
    assert server.metrics()["kvguard_gate_faults_total"] == 0
    status = server.status()
    assert status["in_flight"]["loads"] == status["in_flight"]["lookups"] == 0
    # Nothing is locked: all of it can be loaded again.
    for seq in range(31, 35):
        assert server.client.request(seq, 3) == 3


def footprint(server: CacheServer) -> dict[str, int]:
    """Descriptors, threads and shared memory of the server, and what L1 holds and locks."""
    root = Path(f"/proc/{server.pid}")
    memory = server.get("/status")[1]["storage_manager"]["l1_managers"]["_default"]
    folders = {"descriptors": root / "fd", "threads": root / "task"}
    return {
        "shared memory": len(mapped_shared_memory(server.pid)),
        **{name: len(list(folder.iterdir())) for name, folder in folders.items()},
        **{
            name: int(value)
            for name, value in memory.items()
            if name in ("memory_used_bytes", "write_locked_count", "read_locked_count")
        },
    }
