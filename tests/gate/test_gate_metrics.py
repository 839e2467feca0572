"""The gate's metrics as Prometheus sees them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from guard.gate.admission import Admission
from guard.gate.ledger import VERSION, Ledger
from guard.gate.metrics import AdapterState, GateCollector, collector
from guard.gate.rebuild_state import CAUSES
from guard.gate.tally import ANSWERS

COUNTERS = {
    *("load_busy_seconds", "load_chunks", "load_submitted_bytes", "load_failures"),
    *("lookup_seconds", "lookup_keys", "denied_keys", "shadow_found_bytes"),
    *("store_bytes", "store_seconds", "store_failures", "stores_skipped", "faults"),
}
BY_KIND = {
    *("loads", "load_bytes", "load_seconds"),
    *("load_bytes_squared", "load_seconds_squared", "load_bytes_seconds"),
}
BY_ANSWER = {"lookups", "shadow_lookups"}
WITHOUT_SAMPLES_AT_FIRST = {"rank_load_bytes"}
GAUGES = {
    *("loads_in_flight", "in_flight_bytes", "admission_share", "admission_min_chunks", "revision"),
    *("adapter_generation", "adapter_attached", "adapter_answered", "adapter_age_seconds"),
    *("lost_lookups", "failed_stores", "releasing_loads", "parked_adapters"),
}
GAUGES_WITHOUT_VALUE_AT_FIRST = {
    *("oldest_load_seconds", "oldest_lookup_seconds", "last_completion_age_seconds"),
    *("lease_expires_seconds", "last_answer_age_seconds"),
}
HISTOGRAMS = {"asked_chunks", "lookup_duration_seconds", "load_duration_seconds"}


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def gate(clock: Clock, epoch: str = "00000000000000aa") -> tuple[Ledger, Admission]:
    return Ledger(clock=clock), Admission(clock=clock, epoch=epoch)


def adapter(last_answer_age_seconds: float | None = None, **rebuilds: int) -> AdapterState:
    return AdapterState(
        generation=3,
        attached=True,
        answered=False,
        age_seconds=7.5,
        last_answer_age_seconds=last_answer_age_seconds,
        lost_lookups=4,
        failed_stores=2,
        releasing_loads=1,
        parked=1,
        rebuilds=rebuilds,
    )


def families(registry: CollectorRegistry) -> dict[str, object]:
    text = generate_latest(registry).decode()
    parsed = list(text_string_to_metric_families(text))
    assert len({f.name for f in parsed}) == len(parsed), "a family comes twice"
    return {f.name: f for f in parsed}


def test_every_family_of_the_design_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    collector(registry).add("resp", "resp", *gate(Clock()), adapter)
    found = families(registry)
    prefix = "kvguard_gate_"
    names = (
        COUNTERS
        | BY_KIND
        | BY_ANSWER
        | WITHOUT_SAMPLES_AT_FIRST
        | GAUGES
        | GAUGES_WITHOUT_VALUE_AT_FIRST
        | HISTOGRAMS
        | {"info", "rebuilds"}
    )
    assert set(found) == {prefix + name for name in names}
    for name, family in found.items():
        short = name.removeprefix(prefix)
        samples = family.samples  # type: ignore[attr-defined]
        assert all(sample.labels["l2"] == "resp" for sample in samples)
        if short in GAUGES_WITHOUT_VALUE_AT_FIRST | WITHOUT_SAMPLES_AT_FIRST:
            assert samples == []
        elif short in BY_KIND:
            assert {s.labels["kind"] for s in samples} == {"all", "alone", "probe"}
        elif short == "rebuilds":
            assert {s.labels["cause"] for s in samples} == set(CAUSES)
        elif short == "lookups":
            assert {s.labels["answer"] for s in samples} == set(ANSWERS)
        elif short in COUNTERS | GAUGES:
            assert len(samples) == 1
        if short in COUNTERS | BY_KIND | BY_ANSWER:
            assert family.type == "counter"  # type: ignore[attr-defined]
            assert {s.name for s in samples} == {name + "_total"}


def test_the_info_names_gate_and_life() -> None:
    registry = CollectorRegistry()
    collector(registry).add("valkey", "resp", *gate(Clock(), "0123456789abcdef"))
    labels = {"l2": "valkey", "epoch": "0123456789abcdef", "inner": "resp", "version": VERSION}
    assert registry.get_sample_value("kvguard_gate_info", labels) == 1


def test_the_adapter_is_shown_as_it_is_when_asked() -> None:
    registry = CollectorRegistry()
    collector(registry).add("resp", "resp", *gate(Clock()), lambda: adapter(2.5, abort=2))

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvguard_gate_{name}", {"l2": "resp", **labels})

    assert (shown("adapter_attached"), shown("adapter_answered")) == (1, 0)
    assert (shown("adapter_generation"), shown("adapter_age_seconds")) == (3, 7.5)
    assert shown("last_answer_age_seconds") == 2.5
    assert (shown("lost_lookups"), shown("failed_stores")) == (4, 2)
    assert (shown("releasing_loads"), shown("parked_adapters")) == (1, 1)
    assert shown("rebuilds_total", cause="abort") == 2
    assert shown("rebuilds_total", cause="reattach") == 0


def test_openmetrics_can_be_read_too() -> None:
    registry = CollectorRegistry()
    ledger, admission = gate(Clock())
    collector(registry).add("resp", "resp", ledger, admission)
    ledger.end_lookup(ledger.begin_lookup(8), "hit", 8, by_l2=True)
    text = openmetrics.generate_latest(registry).decode()
    assert len(list(parse_openmetrics(text))) > 30


def test_histograms_are_cumulative_and_agree_with_the_counters() -> None:
    registry = CollectorRegistry()
    ledger, admission = gate(Clock())
    collector(registry).add("resp", "resp", ledger, admission)
    for chunks in (1, 3, 8, 5000):
        ledger.end_lookup(ledger.begin_lookup(chunks), "hit", chunks, by_l2=True)

    def bucket(bound: str) -> float | None:
        labels = {"l2": "resp", "answer": "hit", "le": bound}
        return registry.get_sample_value("kvguard_gate_asked_chunks_bucket", labels)

    assert [bucket(b) for b in ("1.0", "4.0", "1024.0", "+Inf")] == [1, 2, 3, 4]
    labels = {"l2": "resp", "answer": "hit"}
    assert registry.get_sample_value("kvguard_gate_asked_chunks_sum", labels) == 5012
    assert registry.get_sample_value("kvguard_gate_lookups_total", labels) == 4


def test_several_gates_share_each_family_and_are_told_apart() -> None:
    registry = CollectorRegistry()
    shown = [collector(registry).add("resp", "resp", *gate(Clock())) for _ in range(3)]
    assert [g.l2 for g in shown] == ["resp", "resp-2", "resp-3"]
    shares = families(registry)["kvguard_gate_admission_share"].samples  # type: ignore[attr-defined]
    assert {s.labels["l2"] for s in shares} == {"resp", "resp-2", "resp-3"}
    collector(registry).remove(shown[1])
    collector(registry).remove(shown[1])
    assert collector(registry).add("resp", "resp", *gate(Clock())).l2 == "resp-2"


def test_one_collector_for_each_registry() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    assert collector(registry) is collector(registry)
    assert collector(registry) is not collector(other)
    assert isinstance(collector(other), GateCollector)


def test_a_gate_that_cannot_be_read_takes_nothing_else_down() -> None:
    registry = CollectorRegistry()
    broken, admission = gate(Clock())

    def raises(**_: object) -> None:
        raise RuntimeError("broken")

    broken.totals = raises  # type: ignore[assignment, method-assign]
    collector(registry).add("broken", "resp", broken, admission)
    collector(registry).add("sound", "resp", *gate(Clock()))
    assert registry.get_sample_value("kvguard_gate_admission_share", {"l2": "sound"}) == 1
    assert registry.get_sample_value("kvguard_gate_admission_share", {"l2": "broken"}) is None
    del broken.totals
    assert broken.totals().faults == 2  # once for each time it was read


def test_no_family_at_all_rather_than_an_exception(monkeypatch) -> None:
    from guard.gate import metrics

    registry = CollectorRegistry()
    ledger, admission = gate(Clock())
    collector(registry).add("resp", "resp", ledger, admission)
    monkeypatch.setattr(metrics, "_buckets", lambda histogram: 1 / 0)
    assert generate_latest(registry) == b""
    assert ledger.totals().faults == 1
