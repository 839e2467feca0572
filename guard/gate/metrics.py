"""The ledger as Prometheus metrics: one collector for all gates of the process.

The host serves prometheus_client's default registry on its own `/metrics`, so that is where
the collector registers. It computes at scrape time (busy time must accrue while loads are in
flight), never raises, and emits each family once with the gates told apart by label `l2`,
since an exposition in which a family comes twice is not valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from guard.gate.admission import Admission, AdmissionState
from guard.gate.ledger import VERSION, Ledger
from guard.gate.rebuild_state import CAUSES
from guard.gate.tally import Histogram, Totals

PREFIX = "kvguard_gate_"

_SUMS = (
    ("loads", "loads", "Completed loads"),
    ("load_bytes", "bytes", "Bytes of completed loads"),
    ("load_seconds", "seconds", "Seconds from submitting a load to its result, summed"),
    ("load_bytes_squared", "bytes_squared", "Squared bytes of each load, summed"),
    ("load_seconds_squared", "seconds_squared", "Squared seconds of each load, summed"),
    ("load_bytes_seconds", "bytes_seconds", "Bytes times seconds of each load, summed"),
)
_KINDS = " (all; alone: overlapped by no other load or probe; probe: by the gate itself)"
_COUNTERS = (
    ("load_busy_seconds", "busy_seconds", "Seconds with at least one load in flight, up to now"),
    ("load_chunks", "chunks", "Distinct chunks loaded"),
    ("load_submitted_bytes", "submitted_bytes", "Bytes that loads asked for, declined ones too"),
    ("load_failures", "load_failures", "Loads that did not load all they were asked for"),
    ("lookup_seconds", "lookup_seconds", "Seconds of lookups that L2 answered, summed"),
    ("lookup_keys", "lookup_keys", "Keys asked for by lookups, denied ones too"),
    ("denied_keys", "denied_keys", "Keys of lookups that were denied L2"),
    ("shadow_found_bytes", "shadow_found_bytes", "Bytes found by lookups nobody waited for"),
    ("store_bytes", "store_bytes", "Bytes of completed stores"),
    ("store_seconds", "store_seconds", "Seconds of completed stores, summed"),
    ("store_failures", "store_failures", "Stores that failed, or that writes=false refused"),
    ("stores_skipped", "stores_skipped", "Stores answered as done since L2 has their keys"),
    ("faults", "faults", "Faults of the gate itself, caught and forwarded plainly"),
)
_GAUGES = (
    ("loads_in_flight", "loads_in_flight", "Loads in flight"),
    ("in_flight_bytes", "bytes_in_flight", "Bytes of the loads in flight"),
    ("oldest_load_seconds", "oldest_load_seconds", "Age of the oldest load in flight"),
    ("oldest_lookup_seconds", "oldest_lookup_seconds", "Age of the oldest lookup in flight"),
    (
        "last_completion_age_seconds",
        "last_completion_age_seconds",
        "Seconds since a load last completed",
    ),
)
_ADMISSION: tuple[tuple[str, str, Callable[[AdmissionState], float | None]], ...] = (
    ("admission_share", "Share of lookups let through to L2", lambda s: s.settings.share),
    ("admission_min_chunks", "Fewest chunks to ask for and find", lambda s: s.settings.min_chunks),
    ("lease_expires_seconds", "Seconds until the lease runs out", lambda s: s.expires_in_s),
    ("revision", "Changes of the admission in this epoch", lambda s: s.revision),
)


@dataclass(frozen=True, slots=True)
class AdapterState:
    """How the adapter behind a gate is: which generation, whether it is there at all and
    ever answered, and what of it looks ill. `last_answer_age_seconds` is None before L2
    answered anything; `rebuilds` counts exchanges by cause."""

    generation: int
    attached: bool
    answered: bool
    age_seconds: float
    last_answer_age_seconds: float | None
    lost_lookups: int
    failed_stores: int
    releasing_loads: int
    parked: int
    rebuilds: Mapping[str, int]


_ADAPTER: tuple[tuple[str, str, Callable[[AdapterState], float | None]], ...] = (
    ("adapter_generation", "Adapters built before the one in use", lambda a: a.generation),
    ("adapter_attached", "1 while there is an adapter to ask", lambda a: float(a.attached)),
    (
        "adapter_answered",
        "1 once the adapter in use has answered anything",
        lambda a: float(a.answered),
    ),
    ("adapter_age_seconds", "Seconds since the adapter in use was built", lambda a: a.age_seconds),
    (
        "last_answer_age_seconds",
        "Seconds since L2 last answered a lookup, a load or a store",
        lambda a: a.last_answer_age_seconds,
    ),
    (
        "lost_lookups",
        "Lookups in a row that found nothing though some of their keys were known to be there",
        lambda a: a.lost_lookups,
    ),
    ("failed_stores", "Stores in a row that failed", lambda a: a.failed_stores),
    (
        "releasing_loads",
        "Loads that an abort ended and that are answered in pace",
        lambda a: a.releasing_loads,
    ),
    ("parked_adapters", "Old adapters that cannot be closed safely yet", lambda a: a.parked),
)


@dataclass(frozen=True, slots=True)
class Gate:
    """What the collector shows of one gate. `l2` and `inner` become labels; `adapter` says
    how the adapter behind it is, where that is known."""

    l2: str
    inner: str
    ledger: Ledger
    admission: Admission
    adapter: Callable[[], AdapterState] | None = None


class GateCollector(Collector):
    """All gates of one registry; see the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: list[Gate] = []

    def add(
        self,
        l2: str,
        inner: str,
        ledger: Ledger,
        admission: Admission,
        adapter: Callable[[], AdapterState] | None = None,
    ) -> Gate:
        """Show one more gate, under `l2` or, where another has that name, `l2-2`, `l2-3` …"""
        with self._lock:
            taken = {gate.l2 for gate in self._gates}
            names = (l2 if n == 1 else f"{l2}-{n}" for n in range(1, len(taken) + 2))
            name = next(n for n in names if n not in taken)
            gate = Gate(name, inner, ledger, admission, adapter)
            self._gates.append(gate)
            return gate

    def remove(self, gate: Gate) -> None:
        """Show that gate no longer; one that is not shown is ignored."""
        with self._lock:
            self._gates = [other for other in self._gates if other is not gate]

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not collect to know the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families. A gate that cannot be read is left out and counts a fault; nothing
        is raised, or the host's own metrics would be lost with ours."""
        with self._lock:
            gates = list(self._gates)
        read: list[tuple[Gate, Totals, AdmissionState]] = []
        adapters: list[tuple[Gate, AdapterState]] = []
        for gate in gates:
            try:
                read.append((gate, gate.ledger.totals(published=True), gate.admission.state()))
                if gate.adapter is not None:
                    adapters.append((gate, gate.adapter()))
            except Exception:
                gate.ledger.fault()
        try:
            yield from list(_families(read, adapters))
        except Exception:
            for gate in gates:
                gate.ledger.fault()


_Read = Sequence[tuple[Gate, Totals, AdmissionState]]


def _families(gates: _Read, adapters: Sequence[tuple[Gate, AdapterState]]) -> Iterator[Metric]:
    info = InfoMetricFamily(PREFIX.rstrip("_"), "The gate and its epoch", labels=["l2"])
    for gate, _, state in gates:
        info.add_metric([gate.l2], {"epoch": state.epoch, "inner": gate.inner, "version": VERSION})
    yield info
    for name, field, text in _SUMS:
        yield _counter(
            name,
            text + _KINDS,
            "kind",
            (
                (gate.l2, kind, getattr(sums, field))
                for gate, totals, _ in gates
                for kind, sums in totals.sums.items()
            ),
        )
    for name, field, text in _COUNTERS:
        family = CounterMetricFamily(PREFIX + name, text, labels=["l2"])
        for gate, totals, _ in gates:
            family.add_metric([gate.l2], getattr(totals, field))
        yield family
    for name, field, text in _GAUGES:
        yield _gauge(name, text, ((g.l2, getattr(totals, field)) for g, totals, _ in gates))
    yield _counter(
        "rank_load_bytes",
        "Bytes loaded by rank, as the rank is written in LMCache's keys",
        "kv_rank",
        ((g.l2, rank, n) for g, totals, _ in gates for rank, n in totals.rank_bytes.items()),
    )
    yield _counter(
        "lookups",
        "Lookups by what the engine was answered in the end",
        "answer",
        (
            (gate.l2, answer, sum(histogram.counts))
            for gate, totals, _ in gates
            for answer, histogram in totals.asked_chunks.items()
        ),
    )
    yield _counter(
        "shadow_lookups",
        "Lookups asked of L2 whose engine had been answered already",
        "answer",
        ((g.l2, a, n) for g, totals, _ in gates for a, n in totals.shadow_lookups.items()),
    )
    yield _counter(
        "rebuilds",
        "Times the adapter behind the gate was exchanged or, for want of a store, closed",
        "cause",
        (
            (gate.l2, cause, adapter.rebuilds.get(cause, 0))
            for gate, adapter in adapters
            for cause in CAUSES
        ),
    )
    asked = HistogramMetricFamily(
        PREFIX + "asked_chunks", "Chunks asked for by a lookup", labels=["l2", "answer"]
    )
    for gate, totals, _ in gates:
        for answer, histogram in totals.asked_chunks.items():
            asked.add_metric([gate.l2, answer], _buckets(histogram), histogram.total)
    yield asked
    yield _histogram(
        "lookup_duration_seconds", "Seconds of lookups that L2 answered", gates, _lookup_durations
    )
    yield _histogram("load_duration_seconds", "Seconds of completed loads", gates, _load_durations)
    for name, text, of in _ADMISSION:
        yield _gauge(name, text, ((gate.l2, of(state)) for gate, _, state in gates))
    for name, text, of_adapter in _ADAPTER:
        yield _gauge(name, text, ((gate.l2, of_adapter(a)) for gate, a in adapters))


def _counter(name: str, text: str, label: str, values: Iterable[tuple[str, str, float]]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=["l2", label])
    for l2, value_of_label, value in values:
        family.add_metric([l2, value_of_label], value)
    return family


def _gauge(name: str, text: str, values: Iterable[tuple[str, float | None]]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=["l2"])
    for l2, value in values:
        if value is not None:
            family.add_metric([l2], value)
    return family


def _histogram(name: str, text: str, gates: _Read, of: Callable[[Totals], Histogram]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=["l2"])
    for gate, totals, _ in gates:
        histogram = of(totals)
        family.add_metric([gate.l2], _buckets(histogram), histogram.total)
    return family


def _lookup_durations(totals: Totals) -> Histogram:
    return totals.lookup_durations


def _load_durations(totals: Totals) -> Histogram:
    return totals.load_durations


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    cumulative, buckets = 0, []
    names = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    for name, count in zip(names, histogram.counts, strict=True):
        cumulative += count
        buckets.append((name, float(cumulative)))
    return buckets


_COLLECTORS: dict[CollectorRegistry, GateCollector] = {}
_COLLECTORS_LOCK = threading.Lock()


def collector(registry: CollectorRegistry = REGISTRY) -> GateCollector:
    """The one collector of that registry, registered there the first time it is asked for."""
    with _COLLECTORS_LOCK:
        if registry not in _COLLECTORS:
            made = GateCollector()
            registry.register(made)
            _COLLECTORS[registry] = made
        return _COLLECTORS[registry]
