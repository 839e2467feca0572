"""The gate's adapter at LMCache's interface, around a fake that answers when told to.

Runs with the LMCache of the interpreter that runs it.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

# LMCache's own imports warn of what others deprecated, and here a warning is an error.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.reconfiguration import (
        L2ReconfigurableAdapter,
        L2ReconfigureError,
    )

    from guard.gate import lmcache as host
    from guard.gate import lmcache_lookups, lmcache_transfers
    from guard.gate.lmcache import GatedL2Adapter
    from guard.gate.lmcache_lookups import MAX_ABANDONED

    from . import gate_fake
    from .gate_fake import FakeAdapter, Host, buffers, make_keys

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning")

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[GatedL2Adapter, FakeAdapter, Host]]]:
    gates: list[GatedL2Adapter] = []

    def build(**params: Any) -> tuple[GatedL2Adapter, FakeAdapter, Host]:
        gate = GatedL2Adapter({"inner": {"type": gate_fake.TYPE}, **params})
        gates.append(gate)
        return gate, gate_fake.MADE[-1], Host(gate)

    yield build
    for gate in gates:
        gate.close()


Make = Callable[..., tuple[GatedL2Adapter, FakeAdapter, Host]]


def totals(gate: GatedL2Adapter) -> Any:
    return gate._ledger.totals()


def answers(gate: GatedL2Adapter) -> dict[str, int]:
    counted = {a: sum(h.counts) for a, h in totals(gate).asked_chunks.items()}
    return {answer: n for answer, n in counted.items() if n}


def operate(gate: GatedL2Adapter, operation: str) -> int:
    """The HTTP status that LMCache would answer."""
    try:
        gate.reconfigure(operation, {}, device_owners=None)
    except L2ReconfigureError as error:
        return int(error.status_code)
    return 200


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class TestPassingThrough:
    def test_a_hit_is_loaded_and_counted(self, make: Make) -> None:
        gate, inner, h = make()
        keys = [*make_keys(4), *make_keys(4, rank=0x01010100)]
        inner.store = {key: bytes([7]) * 64 for key in keys}
        assert h.lookup(keys).popcount() == 8
        objects = buffers(8)
        assert h.load(keys, objects).popcount() == 8
        assert all(o.raw_data == bytes([7]) * 64 for o in objects)
        assert inner.names() == ["lookup", "load", "unlock"]
        assert inner.locked == 0
        seen = totals(gate)
        assert answers(gate) == {"hit": 1}
        assert seen.asked_chunks["hit"].total == 4  # chunks, not keys
        assert (seen.lookup_keys, seen.denied_keys, seen.chunks) == (8, 0, 4)
        assert (seen.sums["all"].bytes, seen.sums["alone"].loads) == (512, 1)
        assert seen.rank_bytes == {"01000100": 256, "01010100": 256}

    def test_partial_and_miss_are_told_apart_and_passed_on(self, make: Make) -> None:
        gate, inner, h = make()
        keys = make_keys(4)
        inner.store = dict.fromkeys((keys[0], keys[1], keys[3]), b"x")
        assert h.lookup(keys).get_indices_list() == [0, 1, 3]
        inner.store = {keys[2]: b"x"}
        assert h.lookup(keys).get_indices_list() == [2]
        assert answers(gate) == {"partial": 1, "miss": 1}

    def test_the_rest_of_the_interface_reaches_the_inner_adapter(self, make: Make) -> None:
        gate, inner, _ = make()
        own = set(GatedL2Adapter.__dict__)
        for name in dir(L2AdapterInterface):
            if name.startswith("_") or name in own:
                continue
            member = inspect.getattr_static(L2AdapterInterface, name)
            if isinstance(member, property):
                assert getattr(gate, name) == getattr(inner, name)
                continue
            seen: list[Any] = []
            setattr(inner, name, lambda *a, s=seen, **k: s.append((a, k)) or "answer")
            assert getattr(gate, name)("one", two=2) == "answer"
            assert seen == [(("one",), {"two": 2})]
        assert not inspect.isabstract(GatedL2Adapter)
        assert isinstance(gate, L2ReconfigurableAdapter)

    def test_identity_reaches_the_inner_adapter_and_those_of_probes(self, make: Make) -> None:
        gate, inner, _ = make()
        gate.set_backend_identity("plugin", shared=True)
        probes = gate._wrapped.build()
        for adapter in (inner, probes):
            assert (adapter._backend_name, adapter._shared) == ("plugin", True)
        probes.close()

    def test_the_inner_adapters_own_errors_are_the_hosts_to_see(self, make: Make) -> None:
        gate, inner, _ = make()

        def refuses(*_: Any) -> int:
            raise RuntimeError("inner refuses")

        for name in ("submit_lookup_and_lock_task", "submit_load_task", "submit_store_task"):
            setattr(inner, name, refuses)
        with pytest.raises(RuntimeError, match="inner refuses"):
            gate.submit_lookup_and_lock_task(make_keys(2), {})
        with pytest.raises(RuntimeError, match="inner refuses"):
            gate.submit_load_task(make_keys(2), buffers(2))
        with pytest.raises(RuntimeError, match="inner refuses"):
            gate.submit_store_task(make_keys(2), buffers(2))
        seen = totals(gate)
        assert (seen.loads_in_flight, seen.lookups_in_flight, seen.faults) == (0, 0, 0)
        with pytest.raises(NotImplementedError):
            gate.list_l2_keys()

    def test_descriptors_are_three_of_its_own(self, make: Make) -> None:
        gate, inner, _ = make()
        fds = {
            gate.get_store_event_fd(),
            gate.get_lookup_and_lock_event_fd(),
            gate.get_load_event_fd(),
        }
        assert len(fds) == 3
        assert not fds & set(inner._fds)


class TestBypass:
    def test_it_answers_at_once_and_asks_nobody(self, make: Make) -> None:
        gate, inner, h = make()
        inner.store = dict.fromkeys(make_keys(4), b"x")
        assert h.lookup(make_keys(4)).popcount() == 4
        gate.reconfigure("bypass", {}, device_owners=None)
        answer = h.lookup(make_keys(4))
        assert (len(answer), answer.popcount()) == (4, 0)
        gate.reconfigure("restore", {}, device_owners=None)
        assert h.lookup(make_keys(4)).popcount() == 4
        assert inner.names() == ["lookup", "lookup"]
        assert answers(gate) == {"hit": 2, "bypassed": 1}
        assert totals(gate).denied_keys == 4

    def test_an_answer_is_given_once(self, make: Make) -> None:
        gate, _, _ = make()
        gate.reconfigure("bypass", {}, device_owners=None)
        task = gate.submit_lookup_and_lock_task(make_keys(4), {})
        assert len(gate.query_lookup_and_lock_result(task)) == 4
        assert gate.query_lookup_and_lock_result(task) is None

    def test_stuck_lookups_are_answered_and_their_late_locks_released(self, make: Make) -> None:
        gate, inner, h = make()
        inner.instant = False
        inner.store = dict.fromkeys(make_keys(3), b"x")
        tasks = [gate.submit_lookup_and_lock_task(make_keys(4), {}) for _ in range(3)]
        assert not h.rang(gate.get_lookup_and_lock_event_fd())
        gate.reconfigure("bypass", {}, device_owners=None)
        assert h.rang(gate.get_lookup_and_lock_event_fd(), 1000)
        for task in tasks:
            assert gate.query_lookup_and_lock_result(task).popcount() == 0
        state = gate.reconfigure_status()["status"]
        assert state["in_flight"]["abandoned_lookups"] == 3
        assert state["in_flight"]["lookups"] == 0
        assert answers(gate) == {"bypassed": 3}
        assert totals(gate).lookup_seconds == 0
        inner.answer_lookups()
        eventually(lambda: inner.locked == 0 and gate._lookups.abandoned == 0)
        assert inner.calls[-3:] == [("unlock", make_keys(3))] * 3

    def test_an_answer_that_came_with_the_bypass_is_a_miss_and_unlocked(self, make: Make) -> None:
        gate, inner, _ = make()
        inner.store = dict.fromkeys(make_keys(4), b"x")
        task = gate.submit_lookup_and_lock_task(make_keys(4), {})
        gate.reconfigure("bypass", {}, device_owners=None)
        assert gate.query_lookup_and_lock_result(task).popcount() == 0
        assert inner.locked == 0
        assert answers(gate) == {"bypassed": 1}

    def test_a_load_in_flight_is_left_to_finish(self, make: Make) -> None:
        gate, inner, h = make()
        keys = make_keys(2)
        inner.store = dict.fromkeys(keys, b"y" * 64)
        h.lookup(keys)
        inner.instant = False
        objects = buffers(2)
        task = gate.submit_load_task(keys, objects)
        gate.reconfigure("bypass", {}, device_owners=None)
        assert gate.query_load_result(task) is None
        inner.finish_loads()
        assert h.await_load(task).popcount() == 2
        assert totals(gate).sums["all"].loads == 1

    def test_a_load_that_comes_after_it_is_not_let_in(self, make: Make) -> None:
        gate, inner, h = make()
        keys = make_keys(2)
        inner.store = dict.fromkeys(keys, b"y" * 64)
        h.lookup(keys)
        gate.reconfigure("bypass", {}, device_owners=None)
        assert h.load(keys, buffers(2)).popcount() == 0
        assert inner.locked == 0
        assert answers(gate) == {"bypassed": 1}

    def test_after_32_abandoned_lookups_none_is_asked(self, make: Make) -> None:
        gate, inner, h = make()
        inner.instant = False
        gate.reconfigure("admission", {"lookup_deadline_s": 0.001}, device_owners=None)
        for _ in range(MAX_ABANDONED):
            assert h.lookup(make_keys(2)).popcount() == 0
        asked = inner.names().count("lookup")
        assert asked == MAX_ABANDONED
        assert h.lookup(make_keys(2)).popcount() == 0
        assert inner.names().count("lookup") == asked
        assert answers(gate) == {"expired": MAX_ABANDONED + 1}
        inner.answer_lookups()
        eventually(lambda: gate._lookups.abandoned == 0)
        inner.instant = True
        h.lookup(make_keys(2))
        assert inner.names().count("lookup") == asked + 1


class TestOtherAdmission:
    def test_a_deadline_answers_without_the_store_or_any_call(self, make: Make) -> None:
        gate, inner, h = make()
        inner.instant = False
        inner.store = dict.fromkeys(make_keys(4), b"x")
        gate.reconfigure("admission", {"lookup_deadline_s": 0.1}, device_owners=None)
        began = time.monotonic()
        assert h.lookup(make_keys(4)).popcount() == 0
        assert 0.1 <= time.monotonic() - began < 2
        assert answers(gate) == {"expired": 1}
        inner.answer_lookups()
        eventually(lambda: inner.locked == 0 and gate._lookups.abandoned == 0)

    def test_what_asks_or_finds_too_few_chunks_is_short(self, make: Make) -> None:
        gate, inner, h = make()
        keys = make_keys(8)
        inner.store = dict.fromkeys(keys[:3], b"x")
        gate.reconfigure("admission", {"min_chunks": 4}, device_owners=None)
        assert h.lookup(make_keys(3)).popcount() == 0
        assert inner.names() == []
        assert h.lookup(keys).popcount() == 0
        assert inner.names() == ["lookup", "unlock"]
        assert inner.locked == 0
        inner.store[keys[3]] = b"x"
        assert h.lookup(keys).popcount() == 4
        assert answers(gate) == {"short": 2, "partial": 1}
        assert totals(gate).denied_keys == 3 + 3

    def test_ranks_and_groups_are_no_chunks(self, make: Make) -> None:
        gate, _, h = make()
        gate.reconfigure("admission", {"min_chunks": 4}, device_owners=None)
        keys = [*make_keys(3), *make_keys(3, rank=0x02010100)]
        h.lookup(keys)
        assert answers(gate) == {"short": 1}

    def test_a_share_lets_its_part_through(self, make: Make) -> None:
        gate, inner, h = make()
        gate.reconfigure("admission", {"share": 0.25}, device_owners=None)
        for _ in range(40):
            h.lookup(make_keys(2))
        assert inner.names().count("lookup") == 10
        assert answers(gate) == {"miss": 10, "shed": 30}

    def test_over_max_loads_a_load_is_answered_as_not_loaded(self, make: Make) -> None:
        gate, inner, h = make(max_loads=2)
        keys = [make_keys(2, start=10 * n) for n in range(3)]
        inner.store = {key: b"z" * 64 for group in keys for key in group}
        for group in keys:
            assert h.lookup(group).popcount() == 2
        inner.instant = False
        tasks = [gate.submit_load_task(group, buffers(2)) for group in keys[:2]]
        declined = gate.submit_load_task(keys[2], buffers(2))
        assert h.rang(gate.get_load_event_fd())
        answer = gate.query_load_result(declined)
        assert (len(answer), answer.popcount()) == (2, 0)
        assert gate.query_load_result(declined) is None
        assert [gate.query_load_result(task) for task in tasks] == [None, None]
        assert "unlock" not in inner.names()  # LMCache unlocks what was not loaded itself
        assert answers(gate) == {"hit": 2, "declined": 1}
        seen = totals(gate)
        assert (seen.loads_in_flight, seen.submitted_bytes) == (2, 3 * 128)
        inner.finish_loads()
        for task in tasks:
            assert gate.query_load_result(task).popcount() == 2
        assert gate.submit_load_task(keys[2], buffers(2)) > 0

    def test_a_declined_loads_keys_need_not_be_stored_again(self, make: Make) -> None:
        gate, inner, h = make(max_loads=1)
        keys = make_keys(2)
        inner.store = dict.fromkeys(make_keys(4), b"z" * 64)
        h.lookup(keys)
        inner.instant = False
        gate.submit_load_task(make_keys(2, start=2), buffers(2))
        assert h.load(keys, buffers(2)).popcount() == 0
        assert h.store(make_keys(2), buffers(2)).is_successful()
        assert "store" not in inner.names()


class TestLease:
    def test_at_its_end_the_default_holds_without_any_call(self, make: Make) -> None:
        gate, inner, h = make(default_share=0.0, max_loads=3)
        inner.instant = False
        revision = gate.reconfigure(
            "admission", {"share": 1.0, "max_loads": 9, "lease_s": 0.3}, device_owners=None
        )["revision"]
        task = gate.submit_lookup_and_lock_task(make_keys(4), {})
        # Nobody calls; the lookup is stuck until the lease runs out into a bypass.
        assert h.await_lookup(task).popcount() == 0
        assert answers(gate) == {"bypassed": 1}
        state = gate.reconfigure_status()["status"]
        assert state["revision"] == revision + 1
        assert state["lease"] is None
        assert state["admission"] == state["default"]
        assert state["admission"]["max_loads"] == 3

    def test_a_scrape_sees_its_end(self, make: Make) -> None:
        gate, _, _ = make(name="lease-test")
        gate.reconfigure("bypass", {"lease_s": 0.2}, device_owners=None)
        share = "kvguard_gate_admission_share"
        assert REGISTRY.get_sample_value(share, {"l2": "lease-test"}) == 0
        eventually(lambda: REGISTRY.get_sample_value(share, {"l2": "lease-test"}) == 1)


class TestStores:
    def test_keys_known_to_be_in_l2_are_not_stored_again(self, make: Make) -> None:
        gate, inner, h = make()
        assert h.store(make_keys(3), buffers(3)).is_successful()
        assert h.store(make_keys(3), buffers(3)).is_successful()
        assert h.store(make_keys(2), buffers(2)).is_successful()
        assert inner.names() == ["store"]
        assert h.store(make_keys(4), buffers(4)).is_successful()
        assert inner.names() == ["store", "store"]
        seen = totals(gate)
        assert (seen.stores_skipped, seen.store_bytes) == (2, 7 * 64)
        assert gate.reconfigure_status()["status"]["known_keys"] == 4

    @pytest.mark.parametrize("how", ["lookup", "load", "delete", "abandoned"])
    def test_a_key_found_absent_is_stored_again(self, make: Make, how: str) -> None:
        gate, inner, h = make()
        h.store(make_keys(2), buffers(2))
        inner.store.clear()
        if how == "lookup":
            h.lookup(make_keys(2))
        elif how == "load":
            assert h.load(make_keys(2), buffers(2)).popcount() == 0
            assert totals(gate).load_failures == 1
        elif how == "delete":
            gate.delete(make_keys(2))
            assert inner.names()[-1] == "delete"
        else:
            inner.instant = False
            task = gate.submit_lookup_and_lock_task(make_keys(2), {})
            gate.reconfigure("bypass", {}, device_owners=None)
            h.await_lookup(task)
            inner.answer_lookups()
            eventually(lambda: gate._lookups.abandoned == 0)
        h.store(make_keys(2), buffers(2))
        assert inner.names().count("store") == 2

    def test_a_failed_store_makes_nothing_known(self, make: Make) -> None:
        gate, inner, h = make()
        inner.fail_stores = True
        assert not h.store(make_keys(2), buffers(2)).is_successful()
        assert not h.store(make_keys(2), buffers(2)).is_successful()
        assert inner.names() == ["store", "store"]
        assert totals(gate).store_failures == 2

    def test_writes_off_is_failed_at_once_and_never_raised(self, make: Make) -> None:
        gate, inner, h = make()
        gate.reconfigure("admission", {"writes": False}, device_owners=None)
        result = h.store(make_keys(2), buffers(2))
        assert not result.is_successful()
        assert inner.names() == []

    def test_what_was_loaded_is_known_too(self, make: Make) -> None:
        _, inner, h = make()
        inner.store = dict.fromkeys(make_keys(2), b"x" * 64)
        h.load(make_keys(2), buffers(2))
        h.store(make_keys(2), buffers(2))
        assert "store" not in inner.names()


class TestShadow:
    @pytest.fixture(autouse=True)
    def fake_may_be_shadowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "SHADOWED_TYPES", frozenset({gate_fake.TYPE}))

    def test_one_denied_lookup_at_a_time_is_asked_for_nobody(self, make: Make) -> None:
        gate, inner, h = make()
        inner.instant = False
        h.store(make_keys(3), buffers(3, size=100))
        gate.reconfigure("bypass", {}, device_owners=None)
        for _ in range(5):
            assert h.lookup(make_keys(4)).popcount() == 0
        eventually(lambda: "lookup" in inner.names())
        inner.answer_lookups()
        eventually(lambda: totals(gate).shadow_lookups["partial"] == 1)
        assert inner.names().count("lookup") == 1
        assert inner.locked == 0
        seen = totals(gate)
        assert seen.shadow_found_bytes == 300
        assert answers(gate) == {"bypassed": 5}
        assert seen.lookup_keys == 20
        h.lookup(make_keys(4, start=50))
        eventually(lambda: inner.names().count("lookup") == 2)
        inner.answer_lookups()
        eventually(lambda: totals(gate).shadow_lookups["miss"] == 1)

    def test_none_while_abandoned_lookups_wait(self, make: Make) -> None:
        gate, inner, h = make()
        inner.instant = False
        task = gate.submit_lookup_and_lock_task(make_keys(2), {})
        gate.reconfigure("bypass", {}, device_owners=None)
        h.await_lookup(task)
        h.lookup(make_keys(2))
        time.sleep(0.3)
        assert inner.names() == ["lookup"]

    def test_a_store_that_refuses_it_costs_nobody_anything(self, make: Make) -> None:
        gate, inner, h = make()
        inner.submit_lookup_and_lock_task = lambda *_: 1 / 0  # type: ignore[method-assign]
        gate.reconfigure("bypass", {}, device_owners=None)
        h.lookup(make_keys(2))
        eventually(lambda: totals(gate).faults == 1)
        h.lookup(make_keys(2))
        eventually(lambda: totals(gate).faults == 2)


class TestControl:
    def test_the_status_is_the_contracts(self, make: Make) -> None:
        gate, _, h = make(name="named")
        h.store(make_keys(1), buffers(1))
        h.load(make_keys(1), buffers(1))
        envelope = gate.reconfigure_status()
        assert envelope["backend"] == "plugin"
        assert envelope["supported_operations"] == [
            *("admission", "bypass", "restore", "probe", "abort", "rebuild")
        ]
        status = json.loads(json.dumps(envelope["status"], allow_nan=False))
        assert set(status) == {
            *("schema", "version", "l2", "inner", "epoch", "revision", "admission", "default"),
            *("lease", "in_flight", "can", "known_keys", "probe", "recent_loads"),
            *("adapter", "rebuild"),
        }
        assert (status["schema"], status["l2"], status["inner"]) == (1, "named", gate_fake.TYPE)
        settings = {
            *("share", "min_chunks", "writes", "lookup_deadline_s", "load_deadline_s"),
            "max_loads",
        }
        assert set(status["admission"]) == set(status["default"]) == settings
        assert set(status["in_flight"]) == {
            *("loads", "bytes", "oldest_load_s", "lookups", "oldest_lookup_s"),
            "abandoned_lookups",
        }
        assert status["can"]["probe"] is status["can"]["abort"] is status["can"]["rebuild"] is False
        assert set(status["can"]["why_not"]) == {"probe", "abort", "rebuild"}
        assert status["probe"] == status["rebuild"] == {"running": False, "last": None}
        ages = {"age_s", "last_answer_age_s"}
        assert {k: v for k, v in status["adapter"].items() if k not in ages} == {
            "generation": 0,
            "attached": True,
            "answered": True,
            "lost_lookups": 0,
            "failed_stores": 0,
            "parked": 0,
            "releasing": 0,
            "store_problem": None,
        }
        assert all(0 <= status["adapter"][age] < 60 for age in ages)
        (load,) = status["recent_loads"]
        assert (load["bytes"], load["alone"]) == (64, True)
        assert 0 <= load["end_ago_s"] <= load["start_ago_s"] < 60
        assert gate.report_status() == {
            "is_healthy": True,
            "type": "fake",
            "kvguard": {
                "l2": "named",
                "epoch": status["epoch"],
                "revision": status["revision"],
                "share": 1.0,
            },
        }

    def test_each_write_answers_the_status_after_it(self, make: Make) -> None:
        gate, _, _ = make()
        answer = gate.reconfigure(
            "bypass", {"holder": "person:ana", "reason": "slow"}, device_owners=None
        )
        assert answer["admission"]["share"] == 0
        assert answer["lease"]["holder"] == "person:ana"
        assert answer["lease"]["lease_s"] == 4 * 3600
        answer["adapter_index"] = 0  # as LMCache does
        assert "adapter_index" not in gate.reconfigure_status()["status"]

    def test_a_stale_revision_gets_the_state(self, make: Make) -> None:
        gate, _, _ = make()
        with pytest.raises(L2ReconfigureError) as caught:
            gate.reconfigure("admission", {"share": 0.0, "if_revision": 99}, device_owners=None)
        assert caught.value.status_code == 409
        assert caught.value.payload["state"]["revision"] == 1
        assert caught.value.payload["state"]["admission"]["share"] == 1.0
        json.dumps(caught.value.payload, allow_nan=False)

    @pytest.mark.parametrize(
        ("operation", "payload", "says"),
        [
            ("admission", {"share": 2}, "share must be a number from 0 to 1"),
            ("admission", {"shares": 0}, "unknown key 'shares'"),
            ("bypass", {"share": 0}, "unknown key 'share'"),
            ("abort", {"share": 0}, "unknown key 'share'"),
            ("rebuild", {"cause": "?"}, "cause must be one of"),
            ("status", {}, "unknown operation 'status'"),
            ("probe", {"chunks": 0}, "chunks must be a whole number from 1"),
        ],
    )
    def test_wrong_input_is_400_with_the_reason(
        self, make: Make, operation: str, payload: dict[str, Any], says: str
    ) -> None:
        gate, _, _ = make()

        def lasting() -> dict[str, Any]:
            status: dict[str, Any] = gate.reconfigure_status()["status"]
            del status["adapter"]["age_s"]
            return status

        before = lasting()
        with pytest.raises(L2ReconfigureError) as caught:
            gate.reconfigure(operation, payload, device_owners=None)
        assert caught.value.status_code == 400
        assert says in caught.value.payload["error"]
        assert lasting() == before
        assert totals(gate).faults == 0

    def test_no_probe_through_an_adapter_nobody_has_proved(self, make: Make) -> None:
        gate, _, _ = make()
        with pytest.raises(L2ReconfigureError) as caught:
            gate.reconfigure("probe", {}, device_owners=None)
        assert caught.value.status_code == 409
        assert "second instance" in caught.value.payload["error"]


class TestConfiguration:
    @pytest.mark.parametrize(
        ("params", "says"),
        [
            ({}, "inner must be the spec"),
            ({"inner": {}}, "inner must be the spec"),
            ({"inner": "resp"}, "inner must be the spec"),
            ({"inner": {"type": gate_fake.TYPE}, "max_load": 3}, "unknown key 'max_load'"),
            ({"inner": {"type": gate_fake.TYPE}, "max_loads": 0}, "max_loads must be"),
            ({"inner": {"type": gate_fake.TYPE}, "default_share": True}, "share must be"),
            ({"inner": {"type": gate_fake.TYPE}, "name": ""}, "name must not be empty"),
            ({"inner": {"type": gate_fake.TYPE}, "name": "a\nb"}, "name must be text"),
            ({"inner": {"type": gate_fake.TYPE, "serde": {"type": "fp8"}}}, "serde must stand"),
            ({"inner": {"type": "no_such"}}, "no_such"),
            ({"inner": {"type": gate_fake.TYPE, "refuse": True}}, "refused by its own config"),
            ({"inner": {"type": gate_fake.TYPE + "_pipe"}}, "eventfd"),
        ],
    )
    def test_the_server_does_not_start_with_a_wrong_one(
        self, params: dict[str, Any], says: str
    ) -> None:
        before = threading.active_count()
        with pytest.raises(ValueError, match=says):
            GatedL2Adapter(params)
        assert threading.active_count() == before

    def test_an_inner_adapter_that_cannot_be_gated_is_closed_again(self) -> None:
        with pytest.raises(ValueError, match="eventfd"):
            GatedL2Adapter({"inner": {"type": gate_fake.TYPE + "_pipe"}})
        assert gate_fake.MADE[-1].closed == 1

    def test_defaults_come_from_the_parameters(self, make: Make) -> None:
        gate, _, _ = make(
            max_loads=7,
            default_share=0.5,
            default_min_chunks=3,
            default_writes=False,
            default_lookup_deadline_s=2,
        )
        assert gate.reconfigure_status()["status"]["admission"] == {
            "share": 0.5,
            "min_chunks": 3,
            "writes": False,
            "lookup_deadline_s": 2.0,
            "load_deadline_s": None,
            "max_loads": 7,
        }


class TestNeverRaises:
    """Whatever breaks inside the gate, LMCache gets what it would get without one."""

    BREAKABLE = (
        *[("_admission", name) for name in ("deny", "state", "settings")],
        *[
            ("_ledger", name)
            for name in (
                *("begin_load", "end_load", "cancel_load", "begin_lookup", "end_lookup"),
                *("deny_lookup", "cancel_lookup", "end_store", "skip_store", "totals"),
                *("recent_loads", "change_answer"),
            )
        ],
        *[("_known", name) for name in ("learn", "forget", "knows_all", "settle", "__len__")],
    )

    @pytest.mark.parametrize(("part", "name"), BREAKABLE)
    @pytest.mark.parametrize("found", [True, False])
    def test_one_part_broken(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, part: str, name: str, found: bool
    ) -> None:
        gate, inner, h = make()
        keys = make_keys(4)
        broken = getattr(gate, part)

        def raises(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{part}.{name} is broken")

        cls = type(broken)
        member = property(raises) if name == "settings" else raises
        monkeypatch.setattr(cls, name, member)
        assert h.store(keys, buffers(4, fill=9)).is_successful()
        assert h.store(keys, buffers(4, fill=9)).is_successful()
        if not found:
            inner.store.clear()
        expected = 4 if found else 0
        assert h.lookup(make_keys(4)).popcount() == expected
        objects = buffers(4)
        assert h.load(make_keys(4), objects).popcount() == expected
        assert all(o.raw_data == bytes([9]) * 64 for o in objects) is found
        gate.delete(make_keys(4))
        assert gate.report_status()["is_healthy"] is True
        assert isinstance(gate.reconfigure_status()["status"], dict)
        for operation in ("bypass", "restore"):
            assert operate(gate, operation) in (200, 500)
        monkeypatch.undo()
        seen = totals(gate)
        assert seen.loads_in_flight == seen.lookups_in_flight == 0 or name in (
            *("end_load", "cancel_load", "end_lookup", "cancel_lookup"),
        )

    def test_a_bypass_still_answers_when_the_account_of_it_fails(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, inner, h = make()
        inner.instant = False
        inner.store = dict.fromkeys(make_keys(2), b"x")
        task = gate.submit_lookup_and_lock_task(make_keys(2), {})
        monkeypatch.setattr(type(gate._ledger), "end_lookup", lambda *_, **__: 1 / 0)
        gate.reconfigure("bypass", {}, device_owners=None)
        assert h.await_lookup(task).popcount() == 0
        monkeypatch.undo()
        inner.answer_lookups()
        eventually(lambda: inner.locked == 0 and gate._lookups.abandoned == 0)
        assert totals(gate).faults == 1

    def test_objects_without_a_size_are_still_moved(self, make: Make) -> None:
        gate, inner, h = make()

        class Odd:
            byte_array = b"odd"
            raw_data = bytearray(3)

        assert h.store(make_keys(1), [Odd()]).is_successful()
        assert inner.store == {make_keys(1)[0]: b"odd"}
        assert h.load(make_keys(1), [Odd()]).popcount() == 1
        assert totals(gate).faults == 2


class TestForgotten:
    """What LMCache gave up after an error of its own, and never asks for again."""

    @pytest.fixture(autouse=True)
    def late_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lmcache_lookups, "LATE_SECONDS", 0.05)
        monkeypatch.setattr(lmcache_transfers, "LATE_SECONDS", 0.05)

    def test_loads_take_no_place_for_ever(self, make: Make) -> None:
        gate, inner, h = make(max_loads=2)
        inner.store = dict.fromkeys(make_keys(8), b"z" * 64)
        inner.instant = False
        objects = buffers(8)
        for n in range(2):
            gate.submit_load_task(make_keys(2, start=2 * n), objects[2 * n : 2 * n + 2])
        inner.finish_loads()
        time.sleep(0.1)
        assert h.load(make_keys(2, start=4), objects[4:6]).popcount() == 0  # declined, and so
        eventually(lambda: totals(gate).loads_in_flight == 0)
        assert totals(gate).sums["all"].loads == 2
        task = gate.submit_load_task(make_keys(2, start=6), objects[6:])
        inner.finish_loads()
        assert h.await_load(task).popcount() == 2

    def test_a_host_that_was_only_slow_still_gets_its_answers(self, make: Make) -> None:
        gate, inner, h = make(max_loads=1)
        keys = make_keys(2)
        inner.store = dict.fromkeys(keys, b"z" * 64)
        inner.instant = False
        objects = buffers(2)
        lookup = gate.submit_lookup_and_lock_task(keys, {})
        load = gate.submit_load_task(keys, objects)
        inner.answer_lookups()
        inner.finish_loads()
        time.sleep(0.1)
        gate._keeper.wake()
        eventually(lambda: totals(gate).loads_in_flight == totals(gate).lookups_in_flight == 0)
        assert h.await_lookup(lookup).popcount() == 2
        assert h.await_load(load).popcount() == 2
        assert gate.query_load_result(load) is None
        assert answers(gate) == {"hit": 1}

    def test_what_is_not_done_is_left_alone(self, make: Make) -> None:
        gate, inner, h = make()
        inner.instant = False
        task = gate.submit_load_task(make_keys(1), buffers(1))
        time.sleep(0.1)
        gate._keeper.wake()
        time.sleep(0.1)
        assert totals(gate).loads_in_flight == 1
        inner.finish_loads()
        assert h.await_load(task).popcount() == 0


class TestClosing:
    def test_it_leaves_nothing_behind(self) -> None:
        threads, fds = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
        for turn in range(20):
            gate = GatedL2Adapter({"inner": {"type": gate_fake.TYPE}, "name": "closing"})
            inner, h = gate_fake.MADE.pop(), Host(gate)
            h.store(make_keys(2), buffers(2))
            inner.instant = False
            gate.submit_lookup_and_lock_task(make_keys(2, start=turn), {})
            gate.reconfigure("bypass", {"lease_s": 60}, device_owners=None)
            gate.close()
            gate.close()
            assert inner.closed == 1
        assert threading.active_count() == threads
        assert len(list(Path("/proc/self/fd").iterdir())) == fds
        share = REGISTRY.get_sample_value("kvguard_gate_admission_share", {"l2": "closing"})
        assert share is None

    def test_two_gates_are_told_apart(self, make: Make) -> None:
        first, _, h = make(name="twin")
        second, _, _ = make(name="twin")
        h.store(make_keys(2), buffers(2))
        store_bytes = "kvguard_gate_store_bytes_total"
        assert first.reconfigure_status()["status"]["l2"] == "twin"
        assert second.reconfigure_status()["status"]["l2"] == "twin-2"
        assert REGISTRY.get_sample_value(store_bytes, {"l2": "twin"}) == 128
        assert REGISTRY.get_sample_value(store_bytes, {"l2": "twin-2"}) == 0


def test_importing_it_loads_nothing_of_ours_but_the_gate() -> None:
    code = (
        "import sys, guard.gate.lmcache\n"
        "print(*sorted(m for m in sys.modules if m.partition('.')[0] == 'guard'))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), "."])},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = ran.stdout.split("\n")[-2].split()
    assert "guard.gate.lmcache" in loaded
    assert [m for m in loaded if m not in ("guard", "guard.gate")] == [
        m for m in loaded if m.startswith("guard.gate.")
    ]
