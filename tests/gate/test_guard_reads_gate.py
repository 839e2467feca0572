"""What the gate publishes is what the guard's source reads, name by name."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from guard.gate.admission import Admission
from guard.gate.ledger import Ledger
from guard.gate.metrics import GateCollector
from guard.sources import gate as source
from guard.sources import lmcache_mp
from guard.sources.samples import Sample

URL = "http://127.0.0.1:8080/metrics"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    def __init__(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger(clock=self.clock)
        self.admission = Admission(clock=self.clock, epoch="00000000000000aa")
        self.registry = CollectorRegistry()
        collector = GateCollector()
        collector.add("resp", "resp", self.ledger, self.admission)
        self.registry.register(collector)

    def sample(self) -> Sample:
        return lmcache_mp.parse_metrics(URL, generate_latest(self.registry), 0.0, 0.0)

    def load(self, nbytes: int, seconds: float) -> None:
        token = self.ledger.begin_load(nbytes)
        assert token is not None
        self.clock.now += seconds
        self.ledger.end_load(token, nbytes, 4)


def test_every_counter_is_there_from_the_start() -> None:
    sample = Bench().sample()
    assert lmcache_mp.has_gate(sample)
    counters = {f"gate.{want.name}" for want in source.WANTS if want.kind == "counter"}
    assert counters <= set(sample.values)
    assert sample.not_a_number == frozenset()


def test_a_gauge_without_a_value_has_no_sample() -> None:
    values = Bench().sample().values
    assert "gate.oldest_load_seconds" not in values
    assert "gate.last_completion_age_seconds" not in values
    assert "gate.lease_expires_seconds" not in values


def test_sums_of_loads_alone_and_together() -> None:
    bench = Bench()
    bench.load(1000, 2.0)
    first = bench.ledger.begin_load(300)
    second = bench.ledger.begin_load(500)
    assert first is not None
    assert second is not None
    bench.clock.now += 1.0
    bench.ledger.end_load(first, 300, 1)
    bench.clock.now += 1.0
    bench.ledger.end_load(second, 500, 2)
    values = bench.sample().values
    assert values["gate.all.loads"] == 3
    assert values["gate.all.bytes"] == 1800
    assert values["gate.all.seconds"] == 2 + 1 + 2
    assert values["gate.all.bytes_squared"] == 1000**2 + 300**2 + 500**2
    assert values["gate.all.bytes_seconds"] == 2000 + 300 + 1000
    assert values["gate.alone.loads"] == 1
    assert values["gate.alone.bytes"] == 1000
    assert values["gate.busy_seconds"] == 4
    assert values["gate.load_chunks"] == 7
    assert values["gate.submitted_bytes"] == 1800


def test_busy_time_and_ages_run_while_nothing_completes() -> None:
    bench = Bench()
    bench.load(1000, 1.0)
    bench.clock.now += 5.0
    assert bench.ledger.begin_load(4000) is not None
    bench.clock.now += 3.0
    values = bench.sample().values
    assert values["gate.busy_seconds"] == 4
    assert values["gate.in_flight_bytes"] == 4000
    assert values["gate.oldest_load_seconds"] == 3
    assert values["gate.last_completion_age_seconds"] == 8


def test_a_load_over_the_limit_is_not_begun() -> None:
    bench = Bench()
    assert all(bench.ledger.begin_load(10, limit=5) is not None for _ in range(5))
    assert bench.ledger.begin_load(10, limit=5) is None
    values = bench.sample().values
    assert values["gate.loads_in_flight"] == 5
    assert values["gate.submitted_bytes"] == 60


def test_a_load_that_failed_whole_moved_nothing() -> None:
    bench = Bench()
    token = bench.ledger.begin_load(1000)
    assert token is not None
    bench.clock.now += 1.0
    bench.ledger.end_load(token, 0, 0)
    values = bench.sample().values
    assert (values["gate.all.loads"], values["gate.load_failures"]) == (0, 1)


def test_a_lease_shows_and_its_end_is_a_new_revision_without_any_call() -> None:
    bench = Bench()
    bench.admission.write({"share": 0.0, "holder": "kvguard:a", "reason": "slow"})
    held = bench.sample().values
    assert held["gate.admission_share"] == 0
    assert held["gate.lease_expires_seconds"] == 30
    bench.clock.now += 30
    after = bench.sample().values
    assert after["gate.admission_share"] == 1
    assert after["gate.revision"] == held["gate.revision"] + 1


def test_the_guard_reads_the_admissions_state() -> None:
    bench = Bench()
    bench.admission.write({"share": 0.25, "holder": "person:ana", "reason": "x", "lease_s": 60})
    state = {"schema": 1, "l2": "resp", **bench.admission.state().as_dict()}
    status = source.from_state(URL, state, 0)
    assert (status.share, status.holder, status.max_loads) == (0.25, "person:ana", 5)
    assert status.lease_expires_in_seconds == 60
    assert status.epoch == "00000000000000aa"


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.8])
def test_a_share_is_dealt_out_evenly(share: float) -> None:
    admission = Bench().admission
    admission.write({"share": share, "holder": "kvguard:a"})
    let_in = 0
    for count in range(1, 401):
        let_in += admission.deny(8) is None
        assert math.floor(count * share) - 1 <= let_in <= math.ceil(count * share) + 1


@pytest.mark.parametrize(
    "payload",
    [
        {"share": True},
        {"share": float("nan")},
        {"share": -0.1},
        {"share": 1.5},
        {"share": "0"},
        {"shares": 0.5},
        {"max_loads": 0},
        {"max_loads": 2.5},
        {"min_chunks": -1},
        {"writes": 1},
        {"lease_s": 0},
        {"lease_s": 90_000},
        {"holder": "nobody"},
        {"holder": "person:" + "x" * 200},
        {"reason": "line\nbreak"},
        {"if_revision": 1.0},
    ],
)
def test_wrong_input_changes_nothing_and_says_which_key(payload: dict) -> None:
    bench = Bench()
    before = bench.admission.state()
    with pytest.raises(Exception, match=next(iter(payload))) as caught:
        bench.admission.write({"holder": "kvguard:a", **payload})
    assert caught.value.status == 400  # type: ignore[attr-defined]
    assert bench.admission.state() == before


def test_a_stale_revision_is_refused() -> None:
    bench = Bench()
    revision = bench.admission.state().revision
    bench.admission.write({"share": 0.0, "holder": "kvguard:a", "if_revision": revision})
    with pytest.raises(Exception, match="if_revision") as caught:
        bench.admission.write({"share": 1.0, "holder": "kvguard:b", "if_revision": revision})
    assert caught.value.status == 409  # type: ignore[attr-defined]
    assert bench.admission.state().settings.share == 0
