"""Exchanging the adapter behind the gate: a fake that answers when told to, and real stores
that freeze, drop their connections, or were down when the adapter was built.

Runs with the LMCache of the interpreter that runs it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lmcache.v1.distributed.l2_adapters.reconfiguration import L2ReconfigureError

    from guard.gate import lmcache_rebuild
    from guard.gate.lmcache import GatedL2Adapter

    from . import gate_fake
    from .gate_fake import FakeAdapter, Host, buffers, make_keys

from .gate_stores import Redis, Throttled, native_threads, open_descriptors, resp
from .processes import Run

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning")

CHUNK = 1_000_000


def status(gate: GatedL2Adapter) -> dict[str, Any]:
    found: dict[str, Any] = gate.reconfigure_status()["status"]
    return found


def operate(gate: GatedL2Adapter, operation: str, **payload: Any) -> dict[str, Any]:
    """The result of an abort or a rebuild, once it has ended."""
    answer = gate.reconfigure(operation, payload, device_owners=None)
    assert answer["started"] is True
    eventually(lambda: not status(gate)["rebuild"]["running"])
    last: dict[str, Any] = status(gate)["rebuild"]["last"]
    assert last["id"] == answer["id"]
    return last


def refused(gate: GatedL2Adapter, operation: str, **payload: Any) -> L2ReconfigureError:
    with pytest.raises(L2ReconfigureError) as caught:
        gate.reconfigure(operation, payload, device_owners=None)
    return caught.value


def ended(gate: GatedL2Adapter, load: int) -> Any:
    """The result of a load that is due, asked for without waiting for a ring of its own."""
    results: list[Any] = []

    def asked() -> bool:
        results.append(gate.query_load_result(load))
        return results[-1] is not None

    eventually(asked)
    return results[-1]


def eventually(condition: Callable[[], Any], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class TestWithAFake:
    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedL2Adapter]:
        """A gate around a fake that counts as one that may be closed."""
        monkeypatch.setattr(lmcache_rebuild, "REBUILT_TYPES", frozenset({gate_fake.TYPE}))
        monkeypatch.setattr(lmcache_rebuild, "YOUNG_SECONDS", 0.0)
        gate = GatedL2Adapter({"inner": {"type": gate_fake.TYPE}})
        yield gate
        gate.close()

    def test_an_abort_answers_all_that_hangs_and_a_fresh_adapter_serves(
        self, made: GatedL2Adapter
    ) -> None:
        old, host = gate_fake.MADE[-1], Host(made)
        keys, other = make_keys(3), make_keys(2, start=50)
        old.store = dict.fromkeys(keys, bytes([7]) * 64)
        assert host.lookup(keys).popcount() == 3
        old.instant = False
        load = made.submit_load_task(keys, buffers(3))
        lookup = made.submit_lookup_and_lock_task(other, {})
        result = operate(made, "abort", reason="frozen", holder="kvguard:test")
        assert (result["outcome"], result["ended_loads"], result["ended_lookups"]) == ("done", 1, 1)
        assert host.await_load(load).popcount() == 0
        assert host.await_lookup(lookup).popcount() == 0
        assert old.closed == 1
        fresh = gate_fake.MADE[-1]
        assert fresh is not old
        fresh.store = dict.fromkeys(keys, bytes([9]) * 64)
        objects = buffers(3)
        assert host.lookup(keys).popcount() == 3
        assert host.load(keys, objects).popcount() == 3
        assert all(item.raw_data == bytes([9]) * 64 for item in objects)
        totals = made._ledger.totals()
        counted = {a: sum(h.counts) for a, h in totals.asked_chunks.items()}
        assert (counted["aborted"], counted["hit"]) == (1, 2)
        assert (totals.load_failures, totals.loads_in_flight) == (1, 0)
        assert status(made)["adapter"]["generation"] == 1

    def test_what_had_completed_before_the_close_is_not_thrown_away(
        self, made: GatedL2Adapter
    ) -> None:
        old, host = gate_fake.MADE[-1], Host(made)
        keys = make_keys(2)
        old.store = dict.fromkeys(keys, bytes([7]) * 64)
        objects = buffers(2)
        load = made.submit_load_task(keys, objects)  # complete, and not asked for yet
        store = made.submit_store_task(make_keys(1, start=9), buffers(1))
        result = operate(made, "abort")
        assert (result["ended_loads"], result["ended_stores"]) == (0, 0)
        assert host.await_load(load).popcount() == 2
        assert made.pop_completed_store_tasks()[store].is_successful()

    def test_loads_come_back_in_pace(self, made: GatedL2Adapter) -> None:
        old, host = gate_fake.MADE[-1], Host(made)
        keys = [make_keys(1, start=n) for n in range(4)]
        old.instant = False
        loads = [made.submit_load_task(k, buffers(1, size=1000)) for k in keys]
        began = time.monotonic()
        operate(made, "abort", release_bytes_per_s=5000)
        assert status(made)["adapter"]["releasing"] == 4
        times = []
        for load in loads:
            assert host.await_load(load).popcount() == 0
            times.append(time.monotonic() - began)
        assert times[3] >= 0.6
        assert times[3] < 2
        assert status(made)["adapter"]["releasing"] == 0

    def test_the_pace_has_a_last_moment(self, made: GatedL2Adapter) -> None:
        old, host = gate_fake.MADE[-1], Host(made)
        old.instant = False
        loads = [made.submit_load_task(make_keys(1, start=n), buffers(1)) for n in range(4)]
        began = time.monotonic()
        operate(made, "abort", release_bytes_per_s=1e-3, release_within_s=0.5)
        for load in loads:
            assert host.await_load(load).popcount() == 0
        assert 0.4 <= time.monotonic() - began < 2

    def test_loads_that_wait_for_their_turn_still_take_places(self, made: GatedL2Adapter) -> None:
        old = gate_fake.MADE[-1]
        old.instant = False
        for n in range(5):
            made.submit_load_task(make_keys(1, start=n), buffers(1))
        operate(made, "abort", release_bytes_per_s=1, release_within_s=30)
        # All five places are taken by what is answered in turn, or soon would be.
        taken = status(made)["adapter"]["releasing"]
        fresh = gate_fake.MADE[-1]
        for n in range(5):
            made.submit_load_task(make_keys(1, start=20 + n), buffers(1))
        assert fresh.names().count("load") == 5 - taken

    def test_listeners_identity_and_what_is_known_go_over(self, made: GatedL2Adapter) -> None:
        heard: list[Any] = []

        class Listener:
            def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
                heard.append(list(keys))

        made.set_backend_identity("resp", shared=True)
        made.register_listener(Listener())
        host = Host(made)
        keys = make_keys(2)
        assert host.store(keys, buffers(2)).is_successful()
        eventually(lambda: status(made)["known_keys"] == 2)
        operate(made, "rebuild", cause="connection_lost")
        fresh = gate_fake.MADE[-1]
        assert (fresh._backend_name, fresh._shared) == ("resp", True)
        fresh._notify_keys_stored(keys, [64, 64])
        assert heard == [keys]
        # The store may be another one now: what was known is stored again.
        assert status(made)["known_keys"] == 0
        assert host.store(keys, buffers(2)).is_successful()
        assert fresh.names()[-1] == "store"

    def test_the_hosts_descriptors_stay_and_ring_for_the_fresh_adapter(
        self, made: GatedL2Adapter
    ) -> None:
        before = (
            made.get_store_event_fd(),
            made.get_lookup_and_lock_event_fd(),
            made.get_load_event_fd(),
        )
        host = Host(made)
        for _ in range(3):
            operate(made, "rebuild")
        after = (
            made.get_store_event_fd(),
            made.get_lookup_and_lock_event_fd(),
            made.get_load_event_fd(),
        )
        assert before == after
        for fd in after:
            host.rang(fd)
        keys = make_keys(1)
        gate_fake.MADE[-1].store = {keys[0]: b"x" * 64}
        assert host.lookup(keys).popcount() == 1

    def test_an_adapter_that_never_answered_is_parked_and_closed_once_it_did(
        self, monkeypatch: pytest.MonkeyPatch, made: GatedL2Adapter
    ) -> None:
        monkeypatch.setattr(lmcache_rebuild, "YOUNG_SECONDS", 30.0)
        monkeypatch.setattr(lmcache_rebuild, "TEND_SECONDS", 0.05)
        old, host = gate_fake.MADE[-1], Host(made)
        old.instant = False
        keys = make_keys(2)
        load = made.submit_load_task(keys, buffers(2))
        lookup = made.submit_lookup_and_lock_task(keys, {})
        result = operate(made, "rebuild", cause="built_while_down")
        assert (result["outcome"], result["parked"], old.closed) == ("done", True, 0)
        assert host.await_lookup(lookup).popcount() == 0
        # It may write into these buffers yet.
        assert not host.rang(made.get_load_event_fd(), 200) or made.query_load_result(load) is None
        old.answer_lookups()
        eventually(lambda: old.closed == 1)
        assert host.await_load(load).popcount() == 0
        eventually(lambda: status(made)["adapter"]["parked"] == 0)

    def test_with_too_many_parked_there_is_no_other(
        self, monkeypatch: pytest.MonkeyPatch, made: GatedL2Adapter
    ) -> None:
        monkeypatch.setattr(lmcache_rebuild, "YOUNG_SECONDS", 30.0)
        for _ in range(lmcache_rebuild.MAX_PARKED):
            operate(made, "rebuild")
        error = refused(made, "rebuild")
        assert error.status_code == 409
        assert "2 old adapters cannot be closed yet" in str(error)
        assert status(made)["can"]["abort"] is False

    def test_a_load_past_its_deadline_is_ended(self, made: GatedL2Adapter) -> None:
        old, host = gate_fake.MADE[-1], Host(made)
        old.instant = False
        made.reconfigure("admission", {"load_deadline_s": 0.2}, device_owners=None)
        began = time.monotonic()
        load = made.submit_load_task(make_keys(1), buffers(1))
        assert host.await_load(load).popcount() == 0
        assert 0.15 < time.monotonic() - began < 2
        eventually(lambda: not status(made)["rebuild"]["running"])
        assert status(made)["rebuild"]["last"]["cause"] == "deadline"
        assert made._rebuilder.counts() == {"deadline": 1}

    def test_the_host_goes_on_while_adapters_are_exchanged(self, made: GatedL2Adapter) -> None:
        """No answer is lost, doubled or mixed up, whenever the exchange comes."""
        host = Host(made)
        stop = threading.Event()
        wrong: list[str] = []

        def ask() -> None:
            n = 0
            while not stop.is_set():
                n += 1
                keys = make_keys(4, start=4 * (n % 50))
                if host.lookup(keys).popcount() not in (0, 4):
                    wrong.append("a lookup")
                if len(host.load(keys, buffers(4)).get_indices_list()) > 4:
                    wrong.append("a load")

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for _ in range(200):
                operate(made, "rebuild")
        finally:
            stop.set()
            asking.join(20)
        assert not asking.is_alive()
        assert wrong == []
        totals = made._ledger.totals()
        assert (totals.loads_in_flight, totals.lookups_in_flight) == (0, 0)
        assert totals.faults == 0

    @pytest.mark.parametrize(
        ("operation", "payload", "words"),
        [
            ("abort", {"release_bytes_per_s": 0}, "release_bytes_per_s"),
            ("abort", {"release_within_s": 61}, "release_within_s"),
            ("abort", {"cause": "manual"}, "unknown key 'cause'"),
            ("rebuild", {"cause": "boredom"}, "cause must be one of"),
            ("rebuild", {"holder": "x" * 200}, "holder"),
            ("rebuild", {"if_revision": True}, "if_revision"),
        ],
    )
    def test_wrong_input_is_refused(
        self, made: GatedL2Adapter, operation: str, payload: dict[str, Any], words: str
    ) -> None:
        error = refused(made, operation, **payload)
        assert (error.status_code, words in str(error)) == (400, True)
        assert status(made)["adapter"]["generation"] == 0

    def test_a_stale_revision_is_refused_with_the_state(self, made: GatedL2Adapter) -> None:
        error = refused(made, "abort", if_revision=99)
        assert error.status_code == 409
        assert error.payload["state"]["revision"] == 1


def test_types_whose_close_is_not_proved_are_refused() -> None:
    gate = GatedL2Adapter({"inner": {"type": gate_fake.TYPE}})
    try:
        for operation in ("abort", "rebuild"):
            error = refused(gate, operation)
            assert error.status_code == 409
            assert "is not proved to end its writers" in str(error)
        gate.reconfigure("admission", {"load_deadline_s": 0.05}, device_owners=None)
        inner: FakeAdapter = gate_fake.MADE[-1]
        inner.instant = False
        gate.submit_load_task(make_keys(1), buffers(1))
        time.sleep(0.3)
        assert status(gate)["in_flight"]["loads"] == 1
        assert inner.closed == 0
    finally:
        gate.close()


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


class TestWithARealStore:
    @pytest.fixture
    def gated(self) -> Iterator[Callable[..., tuple[GatedL2Adapter, Host]]]:
        gates: list[GatedL2Adapter] = []

        def build(port: int, **more: Any) -> tuple[GatedL2Adapter, Host]:
            gates.append(GatedL2Adapter({"inner": resp(port, **more)}))
            return gates[-1], Host(gates[-1])

        yield build
        for gate in gates:
            gate.close()

    Gated = Callable[..., tuple[GatedL2Adapter, Host]]

    def test_loads_that_hang_in_a_frozen_store_are_ended_at_once(
        self, gated: Gated, redis: Redis
    ) -> None:
        gate, host = gated(redis.port)
        keys = make_keys(4)
        assert host.store(keys, buffers(4, size=CHUNK, fill=3)).is_successful()
        assert host.lookup(keys).popcount() == 4
        with redis.frozen():
            loads = [gate.submit_load_task(keys, buffers(4, size=CHUNK)) for _ in range(3)]
            time.sleep(0.2)
            began = time.monotonic()
            result = operate(gate, "abort", reason="frozen")
            for load in loads:
                assert ended(gate, load).popcount() == 0
            assert time.monotonic() - began < 2
            assert (result["outcome"], result["ended_loads"]) == ("done", 3)
        objects = buffers(4, size=CHUNK)
        assert host.lookup(keys).popcount() == 4
        assert host.load(keys, objects).popcount() == 4
        assert all(item.raw_data == bytes([3]) * CHUNK for item in objects)

    def test_a_dropped_connection_is_told_from_a_cold_cache_and_cured(
        self, gated: Gated, redis: Redis, proxy: Throttled
    ) -> None:
        gate, host = gated(proxy.port)
        prefixes = [make_keys(2, start=100 + 2 * n) for n in range(5)]
        for keys in prefixes:
            assert host.store(keys, buffers(2, size=1000, fill=5)).is_successful()
        assert host.lookup(make_keys(2, start=900)).popcount() == 0
        assert status(gate)["adapter"]["lost_lookups"] == 0  # never known: only cold
        proxy.link.drop()
        time.sleep(0.3)
        for keys in prefixes:
            assert host.lookup(keys).popcount() == 0
        assert status(gate)["adapter"]["lost_lookups"] == 5
        gate.reconfigure("probe", {"of": "lost", "chunks": 2}, device_owners=None)
        eventually(lambda: not status(gate)["probe"]["running"])
        assert status(gate)["probe"]["last"]["outcome"] == "done"  # they are there
        assert operate(gate, "rebuild", cause="connection_lost")["outcome"] == "done"
        objects = buffers(2, size=1000)
        assert host.lookup(prefixes[0]).popcount() == 2
        assert host.load(prefixes[0], objects).popcount() == 2
        assert status(gate)["adapter"]["lost_lookups"] == 0

    def test_lost_keys_that_the_store_has_no_more_are_missing(
        self, gated: Gated, redis: Redis, proxy: Throttled
    ) -> None:
        gate, host = gated(proxy.port)
        prefixes = [make_keys(2, start=200 + 2 * n) for n in range(3)]
        for keys in prefixes:
            assert host.store(keys, buffers(2, size=1000)).is_successful()
        redis.says(b"FLUSHALL")
        for keys in prefixes:
            assert host.lookup(keys).popcount() == 0
        assert status(gate)["adapter"]["lost_lookups"] == 3
        gate.reconfigure("probe", {"of": "lost"}, device_owners=None)
        eventually(lambda: not status(gate)["probe"]["running"])
        assert status(gate)["probe"]["last"]["outcome"] == "missing"

    def test_an_adapter_built_while_the_store_was_down_is_cured(
        self, gated: Gated, run: Run
    ) -> None:
        redis = Redis(run)
        gate, host = gated(redis.port)  # nobody listens there yet
        time.sleep(0.3)
        keys = make_keys(2)
        stuck = gate.submit_lookup_and_lock_task(keys, {})
        time.sleep(0.3)
        assert gate.query_lookup_and_lock_result(stuck) is None
        failed = operate(gate, "rebuild", cause="built_while_down")
        assert failed["outcome"] == "failed"
        assert "Connection refused" in failed["error"]
        assert status(gate)["adapter"]["answered"] is False
        redis.start()
        result = operate(gate, "rebuild", cause="built_while_down")
        assert result["outcome"] == "done"
        assert host.await_lookup(stuck).popcount() == 0
        assert host.store(keys, buffers(2, size=1000, fill=1)).is_successful()
        assert host.lookup(keys).popcount() == 2

    def test_an_abort_without_a_store_leaves_none_and_the_gate_comes_back_by_itself(
        self, gated: Gated, run: Run
    ) -> None:
        redis = Redis(run).start()
        proxy = Throttled(run, redis.port).start()
        gate, host = gated(proxy.port)
        keys = make_keys(2)
        assert host.store(keys, buffers(2, size=CHUNK)).is_successful()
        assert host.lookup(keys).popcount() == 2
        proxy.link.freeze()
        load = gate.submit_load_task(keys, buffers(2, size=CHUNK))
        time.sleep(0.2)
        proxy._child.kill()
        result = operate(gate, "abort")
        assert result["outcome"] == "detached"
        assert "takes no connection" in result["error"]
        assert host.await_load(load).popcount() == 0
        assert host.lookup(keys).popcount() == 0
        assert not host.store(make_keys(1, start=77), buffers(1)).is_successful()
        assert status(gate)["adapter"]["attached"] is False
        proxy._child.start()
        eventually(lambda: status(gate)["adapter"]["attached"], 20)
        eventually(lambda: not status(gate)["rebuild"]["running"])
        assert host.lookup(keys).popcount() == 2
        assert gate._rebuilder.counts() == {"abort": 1, "reattach": 1}

    def test_nothing_is_built_or_closed_while_a_connect_hangs(
        self, gated: Gated, redis: Redis
    ) -> None:
        """A close of the adapter would hold the interpreter lock until the connect ends."""
        with BlackHole() as hole:
            gate, host = gated(hole.port)
            keys = make_keys(1)
            stuck = gate.submit_lookup_and_lock_task(keys, {})
            time.sleep(0.2)
            assert gate._link.connecting()
            began = time.monotonic()
            failed = operate(gate, "rebuild", cause="built_while_down")
            assert failed["outcome"] == "failed"
            assert time.monotonic() - began < 2
            aborted = operate(gate, "abort")
            assert aborted["outcome"] == "detached"
            assert aborted["parked"] is True
            assert host.await_lookup(stuck).popcount() == 0
            # This thread would not get here if the lock were held.
            assert time.monotonic() - began < 4
            assert status(gate)["adapter"]["parked"] == 1
            assert host.lookup(make_keys(1, start=5)).popcount() == 0
            redis.says(b"FLUSHALL")
            hole.open(redis.port)
            # The parked one is still connecting, or refused, and is not waited for.
            eventually(lambda: status(gate)["adapter"]["attached"], 40)
            assert host.store(keys, buffers(1, size=100)).is_successful()
            assert host.lookup(keys).popcount() == 1

    def test_a_refused_password_is_said_and_nothing_is_built(self, gated: Gated, run: Run) -> None:
        redis = Redis(run).start()
        gate, _ = gated(redis.port, password="old")
        redis.says(b"CONFIG SET requirepass new")
        result = operate(gate, "rebuild", cause="connection_lost")
        assert result["outcome"] == "failed"
        assert "refuses the login: WRONGPASS" in result["error"]
        assert "old" not in result["error"].replace("password", "")
        assert status(gate)["adapter"]["store_problem"] == result["error"]

    def test_many_exchanges_leave_nothing_behind(self, gated: Gated, redis: Redis) -> None:
        gate, host = gated(redis.port)
        keys = make_keys(2, start=500)
        assert host.store(keys, buffers(2, size=1000)).is_successful()
        operate(gate, "rebuild")
        before = (open_descriptors(), native_threads(), redis.connections())
        for _ in range(10):
            assert operate(gate, "rebuild")["outcome"] == "done"
            assert host.lookup(keys).popcount() == 2
        eventually(lambda: open_descriptors() <= before[0])
        eventually(lambda: native_threads() <= before[1])
        eventually(lambda: redis.connections() == before[2])

    def test_eviction_accounts_go_over(self, gated: Gated, redis: Redis) -> None:
        gate, host = gated(redis.port, max_capacity_gb=1)
        keys = make_keys(3, start=600)
        assert host.store(keys, buffers(3, size=1000)).is_successful()
        assert gate.get_usage().total_bytes_used == 3000
        operate(gate, "rebuild")
        assert gate.get_usage().total_bytes_used == 3000
        gate.delete(keys[:1])
        assert gate.get_usage().total_bytes_used == 2000


class BlackHole:
    """A port on which a connect hangs: its queue of connections is full. `open` has it
    forward to another port."""

    def __enter__(self) -> BlackHole:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port = int(self._server.getsockname()[1])
        self._ends: list[socket.socket] = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._ends.append(filler)
        time.sleep(0.1)
        return self

    def open(self, target: int) -> None:
        threading.Thread(target=self._serve, args=(target,), daemon=True).start()

    def _serve(self, target: int) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                behind = socket.create_connection(("127.0.0.1", target))
            except OSError:
                return
            self._ends += [client, behind]
            for one, other in ((client, behind), (behind, client)):
                threading.Thread(target=_forward, args=(one, other), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for end in self._ends:
            end.close()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
