"""Probes of a real store through an adapter of their own, and what they leave behind."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lmcache.v1.distributed.l2_adapters.reconfiguration import L2ReconfigureError

    from guard.gate.lmcache import GatedL2Adapter
    from guard.gate.store_link import StoreLink

    from .gate_fake import Host, buffers, make_keys

from .gate_stores import Redis, Throttled, native_threads, open_descriptors, resp
from .processes import Run

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning")

CHUNK = 1_000_000


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with Run() as made:
        yield made


@pytest.fixture(scope="module")
def redis(run: Run) -> Redis:
    return Redis(run).start()


@pytest.fixture(scope="module")
def proxy(run: Run, redis: Redis) -> Throttled:
    return Throttled(run, redis.port).start()


Gated = Callable[[dict[str, Any]], tuple[GatedL2Adapter, Host]]


@pytest.fixture
def gated() -> Iterator[Gated]:
    gates: list[GatedL2Adapter] = []

    def build(inner: dict[str, Any]) -> tuple[GatedL2Adapter, Host]:
        gates.append(GatedL2Adapter({"inner": inner}))
        return gates[-1], Host(gates[-1])

    yield build
    for gate in gates:
        gate.close()


def fill(h: Host, count: int, *, start: int = 0, size: int = CHUNK) -> None:
    keys = make_keys(count, start=start)
    assert h.store(keys, buffers(count, size=size, fill=3)).is_successful()


def status(gate: GatedL2Adapter) -> dict[str, Any]:
    found: dict[str, Any] = gate.reconfigure_status()["status"]
    return found


def probe(gate: GatedL2Adapter, limit_s: float = 30.0, **payload: Any) -> dict[str, Any]:
    """The result of one probe, once it has ended and its adapter is dealt with."""
    answer = gate.reconfigure("probe", payload, device_owners=None)
    assert answer["started"] is True
    deadline = time.monotonic() + limit_s
    while status(gate)["probe"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    last: dict[str, Any] = status(gate)["probe"]["last"]
    assert last["id"] == answer["id"]
    return last


def await_no_parked(gate: GatedL2Adapter, limit_s: float = 20.0) -> None:
    """Probes until the parked adapters have answered and were closed by one of them."""
    deadline = time.monotonic() + limit_s
    while gate._prober._parked:
        assert time.monotonic() < deadline
        try:
            assert probe(gate, chunks=1)["outcome"] == "done"
        except L2ReconfigureError as error:
            assert error.status_code == 409  # noqa: PT017
            time.sleep(0.05)


@pytest.mark.parametrize("rate", [20e6, 5e6])
def test_it_measures_the_bandwidth_of_the_path(
    gated: Gated, proxy: Throttled, redis: Redis, rate: float
) -> None:
    redis.says(b"FLUSHALL")
    proxy.link.set_rate(None)
    gate, h = gated(resp(proxy.port))
    fill(h, 12)
    before = proxy.link.set_rate(rate)
    try:
        result = probe(gate, chunks=6, count=3)
        given = proxy.link.counters().rate_since(before)
    finally:
        proxy.link.set_rate(None)
    assert result["outcome"] == "done"
    assert len(result["samples"]) == 3
    for sample in result["samples"]:
        assert (sample["chunks"], sample["bytes"]) == (6, 6 * CHUNK)
        assert sample["overlapped"] is False
        assert sample["lookup_s"] > 0
    bandwidth = sum(s["bytes"] for s in result["samples"]) / sum(
        s["load_s"] for s in result["samples"]
    )
    # What the link gave, since a busy machine cannot give every rate it is asked for.
    assert given is not None
    assert given <= rate * 1.05
    assert bandwidth == pytest.approx(given, rel=0.2)
    totals = gate._ledger.totals()
    assert (totals.sums["probe"].loads, totals.sums["probe"].bytes) == (3, 18 * CHUNK)
    assert totals.busy_seconds == totals.sums["all"].loads == 0


def test_fs_can_be_probed(gated: Gated, tmp_path: Path) -> None:
    gate, h = gated({"type": "fs", "base_path": str(tmp_path)})
    fill(h, 4)
    result = probe(gate, chunks=3, count=2)
    assert result["outcome"] == "done"
    assert [s["bytes"] for s in result["samples"]] == [3 * CHUNK] * 2


def test_it_works_while_bypassed_and_no_user_waits(gated: Gated, proxy: Throttled) -> None:
    gate, h = gated(resp(proxy.port))
    fill(h, 4, start=100)
    gate.reconfigure("bypass", {}, device_owners=None)
    proxy.link.set_rate(4e6)
    try:
        gate.reconfigure("probe", {"chunks": 4}, device_owners=None)
        began = time.monotonic()
        for _ in range(20):
            assert h.lookup(make_keys(4)).popcount() == 0
        assert time.monotonic() - began < 0.5
        assert status(gate)["probe"]["running"]
        with pytest.raises(L2ReconfigureError) as caught:
            gate.reconfigure("probe", {}, device_owners=None)
        assert caught.value.status_code == 409
        assert caught.value.payload["state"]["probe"]["running"] is True
        while status(gate)["probe"]["running"]:
            time.sleep(0.02)
    finally:
        proxy.link.set_rate(None)
    last = status(gate)["probe"]["last"]
    assert last["outcome"] == "done"
    assert last["samples"][0]["load_s"] > 0.9


def test_the_budget_holds(gated: Gated, redis: Redis) -> None:
    gate, h = gated(resp(redis.port))
    fill(h, 8, start=200)
    result = probe(gate, chunks=8, count=10, max_bytes=5 * CHUNK + 1)
    assert result["outcome"] == "done"
    assert sum(s["bytes"] for s in result["samples"]) == 5 * CHUNK
    result = probe(gate, chunks=2, max_bytes=CHUNK - 1)
    assert result["outcome"] == "missing"
    assert "fits into 999999 bytes" in result["error"]


def test_nothing_known_and_nothing_left(gated: Gated, redis: Redis) -> None:
    gate, h = gated(resp(redis.port))
    result = probe(gate)
    assert (result["outcome"], result["samples"]) == ("missing", [])
    fill(h, 3, start=300)
    redis.says(b"FLUSHALL")
    result = probe(gate, chunks=3)
    assert (result["outcome"], result["samples"]) == ("missing", [])
    assert "has none of the keys" in result["error"]
    assert status(gate)["known_keys"] == 0
    fill(h, 3, start=300)  # and so they are stored again
    assert probe(gate, chunks=3)["outcome"] == "done"


def test_it_waits_until_nothing_is_in_flight(gated: Gated, proxy: Throttled) -> None:
    gate, h = gated(resp(proxy.port))
    fill(h, 6, start=400)
    keys = make_keys(6, start=400)
    assert h.lookup(keys).popcount() == 6
    proxy.link.set_rate(6e6)
    try:
        objects = buffers(6, size=CHUNK)  # resp writes into them until the load is done
        task = gate.submit_load_task(keys, objects)
        assert probe(gate, deadline_s=0.2)["outcome"] == "overlapped"
        gate.reconfigure("probe", {"chunks": 1, "deadline_s": 20}, device_owners=None)
        assert h.await_load(task).popcount() == 6
        while status(gate)["probe"]["running"]:
            time.sleep(0.02)
    finally:
        proxy.link.set_rate(None)
    assert status(gate)["probe"]["last"]["outcome"] == "done"
    assert gate._ledger.totals().sums["alone"].loads == 1  # the probe came after it


def test_a_load_that_comes_meanwhile_spoils_it(gated: Gated, proxy: Throttled) -> None:
    gate, h = gated(resp(proxy.port))
    fill(h, 4, start=500)
    keys = make_keys(1, start=500)
    proxy.link.set_rate(4e6)
    try:
        gate.reconfigure("probe", {"chunks": 4}, device_owners=None)
        while not gate._ledger._probing:
            time.sleep(0.002)
        assert h.load(keys, buffers(1, size=CHUNK)).popcount() == 1
        while status(gate)["probe"]["running"]:
            time.sleep(0.02)
    finally:
        proxy.link.set_rate(None)
    last = status(gate)["probe"]["last"]
    assert last["outcome"] == "overlapped"
    assert [s["overlapped"] for s in last["samples"]] == [True]
    totals = gate._ledger.totals()
    assert totals.sums["probe"].loads == 0
    assert (totals.sums["all"].loads, totals.sums["alone"].loads) == (1, 0)


def test_it_leaves_nothing_behind(gated: Gated, redis: Redis) -> None:
    gate, h = gated(resp(redis.port))
    fill(h, 4, start=600, size=10_000)
    assert probe(gate)["outcome"] == "done"
    threads, fds, clients = native_threads(), open_descriptors(), redis.connections()
    for _ in range(12):
        assert probe(gate, chunks=4)["outcome"] == "done"
    deadline = time.monotonic() + 5
    while redis.connections() > clients and time.monotonic() < deadline:
        time.sleep(0.05)
    assert redis.connections() == clients
    assert open_descriptors() == fds
    assert native_threads() <= threads + 1
    assert gate._prober._parked == []


class TestAStoreThatHangs:
    def test_no_adapter_is_built_for_one_that_does_not_answer(
        self, run: Run, gated: Gated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Redis(run).start()
        gate, h = gated(resp(store.port))
        fill(h, 2)
        built: list[int] = []
        make = gate._prober._build
        monkeypatch.setattr(gate._prober, "_build", lambda: built.append(1) or make())
        with store.frozen():
            result = probe(gate)
            assert result["outcome"] == "failed"
            assert "did not answer a ping within 1 s" in result["error"]
            assert not built
        assert probe(gate)["outcome"] == "done"
        store.kill()
        result = probe(gate)
        assert (result["outcome"], len(built)) == ("failed", 1)
        assert "did not answer a ping" in result["error"]

    def test_adapters_that_hang_are_parked_few_and_closed_when_they_answered(
        self, run: Run, gated: Gated, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        proxy = Throttled(run, redis.port).start()
        gate, h = gated(resp(proxy.port))
        fill(h, 2, start=700)
        # The store freezes after it has answered the ping.
        monkeypatch.setattr(StoreLink, "problem", lambda link: None)
        proxy.link.freeze()
        try:
            for parked in (1, 2):
                began = time.monotonic()
                result = probe(gate, deadline_s=0.3)
                assert time.monotonic() - began < 5
                assert result["outcome"] == "deadline"
                assert "probe's lookup" in result["error"]
                assert len(gate._prober._parked) == parked
            can = status(gate)["can"]
            assert can["probe"] is False
            assert "still hang" in can["why_not"]["probe"]
            with pytest.raises(L2ReconfigureError) as caught:
                gate.reconfigure("probe", {}, device_owners=None)
            assert caught.value.status_code == 409
            assert len(gate._prober._parked) == 2
        finally:
            proxy.link.thaw()
        monkeypatch.undo()
        await_no_parked(gate)
        assert status(gate)["can"]["probe"] is True

    def test_a_load_cut_by_the_deadline_keeps_its_buffers(
        self, run: Run, gated: Gated, redis: Redis
    ) -> None:
        proxy = Throttled(run, redis.port).start()
        gate, h = gated(resp(proxy.port))
        fill(h, 4, start=800)
        proxy.link.set_rate(2e6)
        result = probe(gate, chunks=4, deadline_s=0.5)
        assert result["outcome"] == "deadline"
        assert "probe's load" in result["error"]
        (own,) = gate._prober._parked
        assert [item.get_size() for item in own.buffers] == [CHUNK] * 4
        proxy.link.set_rate(None)
        await_no_parked(gate)

    def test_closing_the_gate_does_not_wait_for_a_probe(self, run: Run, redis: Redis) -> None:
        proxy = Throttled(run, redis.port).start()
        gate = GatedL2Adapter({"inner": resp(proxy.port)})
        fill(Host(gate), 2, start=900)
        proxy.link.set_rate(1e5)
        gate.reconfigure("probe", {}, device_owners=None)
        while not gate._ledger._probing:
            time.sleep(0.002)
        began = time.monotonic()
        gate.close()
        assert time.monotonic() - began < 3
        deadline = time.monotonic() + 10
        while gate._prober.as_dict()["running"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert gate._prober.as_dict()["last"]["outcome"] == "cancelled"
        proxy.link.set_rate(None)


def test_a_connection_being_set_up_is_seen(gated: Gated, redis: Redis) -> None:
    """The tables of the kernel say so: SYN_SENT to the store's port."""
    gate, _ = gated(resp(redis.port))
    assert gate._link.connecting() is False
    # A listener whose queue is full leaves further connections unanswered.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        gate._link.port = port
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            waiting.append(client)
        assert gate._link.connecting() is True
        assert gate._link.problem() is not None
        for client in waiting:
            client.close()
