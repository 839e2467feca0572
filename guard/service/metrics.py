"""The guard's own /metrics: one table of figures, and a collector over the latest View.

The table is the reference of every figure's metric. Nothing is stored between scrapes,
so a page can never show a figure that the last tick did not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from guard.policy.types import AILMENTS, CAUSES, STATES
from guard.readings import Reading, Snapshot
from guard.service.status import cause_of, state_of
from guard.view import View


@dataclass(frozen=True, slots=True)
class FigureMetric:
    """Where a figure of the Snapshot shows: `label` is None or (name, value)."""

    figure: str
    metric: str
    kind: Literal["gauge"]
    unit: str
    help: str
    label: tuple[str, str] | None = None


def _views(
    base: str, suffix: str, unit: str, help_: str, label: str, values: str
) -> Iterator[FigureMetric]:
    for value in values.split():
        yield FigureMetric(
            f"{base}.{value}", f"kvguard_{base}{suffix}", "gauge", unit, help_, (label, value)
        )


def _one(base: str, suffix: str, unit: str, help_: str) -> FigureMetric:
    return FigureMetric(base, f"kvguard_{base}{suffix}", "gauge", unit, help_)


METRICS: tuple[FigureMetric, ...] = (
    *_views(
        "load_bandwidth",
        "_bytes_per_second",
        "bytes_per_second",
        "Bandwidth of loads from L2: alone (the store's own), prompt (what one prompt gets, "
        "queueing included), path (bytes / busy), recent (path, newest window), capacity.",
        "view",
        "alone prompt path recent capacity",
    ),
    _one(
        "break_even_bandwidth",
        "_bytes_per_second",
        "bytes_per_second",
        "Bandwidth below which loading never beats recompute: KV bytes per token times "
        "prefill rate.",
    ),
    _one(
        "in_flight_bandwidth_bound",
        "_bytes_per_second",
        "bytes_per_second",
        "Upper bound of the bandwidth now, from bytes in flight that have not completed.",
    ),
    *_views(
        "hit_fixed",
        "_seconds",
        "seconds",
        "Fixed cost of a hit, whatever its length: total, lookup, load, engine.",
        "part",
        "total lookup load engine",
    ),
    *_views(
        "estimate_loads",
        "",
        "requests",
        "Loads the bandwidth of this view rests on.",
        "view",
        "alone prompt",
    ),
    _one(
        "load_wait",
        "_seconds",
        "seconds",
        "Mean time a load waits on other loads, beyond what it would take alone.",
    ),
    _one("loads_in_flight", "", "requests", "Loads from L2 in flight."),
    _one("oldest_load", "_seconds", "seconds", "Age of the oldest load in flight."),
    _one("oldest_lookup", "_seconds", "seconds", "Age of the oldest lookup in flight."),
    _one("in_flight", "_bytes", "bytes", "Bytes of the loads in flight."),
    _one("mean_load", "_bytes", "bytes", "Mean size of a load, as last seen."),
    _one("last_completion_age", "_seconds", "seconds", "Time since a load last completed."),
    _one(
        "last_answer_age",
        "_seconds",
        "seconds",
        "Time since L2 last answered a lookup, a load or a store.",
    ),
    _one(
        "lost_lookups",
        "",
        "requests",
        "Lookups in a row that found none of the keys known to be in L2.",
    ),
    _one("failed_stores", "", "requests", "Stores in a row that L2 failed."),
    _one("adapter_attached", "", "flag", "1 while the gate has an adapter to reach L2 by."),
    _one("adapter_answered", "", "flag", "1 when the present adapter has answered anything."),
    _one("adapter_age", "_seconds", "seconds", "Time since the present adapter was built."),
    _one(
        "releasing_loads",
        "",
        "requests",
        "Loads ended by an abort whose answer is held back, so that they are recomputed in turn.",
    ),
    _one(
        "break_even_tokens",
        "",
        "tokens",
        "Prefix length above which loading beats recompute; +Inf when no length does.",
    ),
    _one("prefill", "_tokens_per_second", "tokens_per_second", "Prefill rate of the engine."),
    _one(
        "kv_bytes_per_token", "", "bytes_per_token", "KV bytes that L2 moves per token of prefix."
    ),
    *_views(
        "load_utilization",
        "_ratio",
        "ratio",
        "Load asked of L2 over what it can carry, from arrivals: of the cache's prefetch "
        "slots, of the path, and the larger of both. Above 1 the queue grows without end.",
        "kind",
        "slots path max",
    ),
    _one(
        "prefill_utilization", "_ratio", "ratio", "Tokens computed over what prefill could compute."
    ),
    *_views(
        "external_token",
        "_ratio",
        "ratio",
        "Prompt tokens that came from outside the engine: all, and by tier of the cache.",
        "tier",
        "all l1 l2",
    ),
    *_views(
        "hit",
        "_ratio",
        "ratio",
        "Tokens found over tokens asked of the cache, by the tier that had them.",
        "tier",
        "l1 l2",
    ),
    _one("backlog", "_requests", "requests", "Lookups waiting for a prefetch slot of the cache."),
    _one("backlog_growth", "_requests", "requests", "Growth of the backlog over the window."),
    _one("declined", "_ratio", "ratio", "Loads the gate declined as over its max_loads."),
    _one("requests_running", "", "requests", "Requests the engine is running."),
    _one("requests_waiting", "", "requests", "Requests that wait in the engine."),
    _one("requests_deferred", "", "requests", "Requests the engine deferred, KV loads included."),
    _one("time_to_first_token", "_seconds", "seconds", "Mean time to first token in the engine."),
)

_BY_METRIC: dict[str, list[FigureMetric]] = {}
for _row in METRICS:
    _BY_METRIC.setdefault(_row.metric, []).append(_row)
_FIGURES = frozenset(row.figure for row in METRICS)


def unlisted(snapshot: Snapshot) -> list[str]:
    """Figures of a snapshot that the table does not know; a test keeps this empty."""
    return sorted(set(snapshot.figures) - _FIGURES)


class ViewCollector(Collector):
    """All metrics of the latest view, at the moment of the scrape."""

    def __init__(self, view: Callable[[], View], version: str) -> None:
        self._view = view
        self._version = version

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every family; a figure that is Missing has no sample."""
        view = self._view()
        build = _gauge("kvguard_build_info", "The running kvguard; always 1.", "version")
        build.add_metric([self._version], 1)
        yield build
        if view.snapshot is not None:
            yield from _figures(view.snapshot)
        yield from _verdict(view)
        yield from _control(view)
        yield from _healing(view)
        yield from _sources(view)
        yield from _itself(view)


def _figures(snapshot: Snapshot) -> Iterator[Metric]:
    for metric, rows in _BY_METRIC.items():
        names = [row.label[0] for row in rows[:1] if row.label]
        family = _gauge(metric, rows[0].help, *names)
        for row in rows:
            figure = snapshot.figures.get(row.figure)
            if isinstance(figure, Reading):
                family.add_metric([row.label[1]] if row.label else [], figure.value)
        if family.samples:
            yield family
    missing = _gauge(
        "kvguard_missing", "1 for each figure that could not be had, and why.", "reading", "reason"
    )
    for name, lacking in snapshot.missing():
        missing.add_metric([name, lacking.reason], 1)
    yield missing
    yield _gauge(
        "kvguard_unlisted_figures",
        "Figures of the last tick without a metric of their own; above 0 is a defect.",
        value=len(unlisted(snapshot)),
    )


def _verdict(view: View) -> Iterator[Metric]:
    states = _gauge("kvguard_state", "1 for the state the guard is in, 0 for the others.", "state")
    for state in STATES:
        states.add_metric([state], float(state == state_of(view)))
    yield states
    out = (view.admission is not None and view.admission.share <= 0) or state_of(view) in (
        "bypassed",
        "probing",
    )
    bypass = _gauge("kvguard_bypass_active", "1 while L2 is bypassed for this cause.", "cause")
    for cause in CAUSES:
        bypass.add_metric([cause], float(out and cause == cause_of(view)))
    yield bypass
    modes = _gauge("kvguard_mode", "1 for the mode the guard runs in.", "mode")
    for mode in ("observe", "enforce"):
        modes.add_metric([mode], float(mode == view.mode))
    yield modes
    decisions = CounterMetricFamily(
        "kvguard_decisions",
        "Decisions that changed something, or would have.",
        labels=["action", "reason"],
    )
    for (action, reason), count in sorted(view.decisions_total.items()):
        decisions.add_metric([action, reason], count)
    yield decisions


def _control(view: View) -> Iterator[Metric]:
    if view.admission is not None:
        yield _gauge(
            "kvguard_admission_share",
            "Share of lookups that L2 is asked for, as the gate has it.",
            value=view.admission.share,
        )
        if view.admission.min_chunks == 0:
            yield _gauge(
                "kvguard_admission_min_tokens",
                "Shortest prefix L2 is asked for; absent while the size of a chunk is not known.",
                value=0,
            )
    if view.override is not None:
        yield _gauge(
            "kvguard_override_expires_timestamp_seconds",
            "When a person's override ends.",
            value=view.override.expires_at,
        )
    requests = CounterMetricFamily(
        "kvguard_control_requests", "Control calls by what became of them.", labels=["outcome"]
    )
    for outcome, count in sorted(view.control_requests_total.items()):
        requests.add_metric([outcome], count)
    yield requests


def _healing(view: View) -> Iterator[Metric]:
    healing = view.healing
    ailments = _gauge(
        "kvguard_ailment", "1 for what is wrong with the way to L2, 0 for the others.", "kind"
    )
    incurable = _gauge(
        "kvguard_incurable", "1 for an ailment that only a person can cure: page on it.", "kind"
    )
    for kind in AILMENTS:
        ails = healing is not None and healing.ailment == kind
        ailments.add_metric([kind], float(ails))
        hopeless = ails and healing is not None and healing.incurable is not None
        incurable.add_metric([kind], float(hopeless))
    yield ailments
    yield incurable
    attempts = CounterMetricFamily(
        "kvguard_healing_attempts",
        "Rebuilds of the gate's adapter, and aborts, by cause and by what became of them.",
        labels=["cause", "outcome"],
    )
    for (cause, outcome), count in sorted(view.healing_attempts_total.items()):
        attempts.add_metric([cause, outcome], count)
    yield attempts


def _sources(view: View) -> Iterator[Metric]:
    up = _gauge("kvguard_source_up", "1 when the peer gave its facts at the last try.", "source")
    seconds = _gauge(
        "kvguard_source_scrape_seconds", "How long the last scrape of the peer took.", "source"
    )
    for source in view.sources:
        up.add_metric([source.name], float(source.up))
        if source.scrape_seconds is not None:
            seconds.add_metric([source.name], source.scrape_seconds)
    yield up
    yield seconds


def _itself(view: View) -> Iterator[Metric]:
    yield CounterMetricFamily("kvguard_ticks", "Ticks since the start.", value=view.ticks)
    yield CounterMetricFamily(
        "kvguard_tick_cpu_seconds",
        "CPU seconds that ticks have taken.",
        value=view.tick_cpu_seconds_total,
    )
    yield _gauge(
        "kvguard_journal_failing",
        "1 while the journal cannot be written.",
        value=float(view.journal_error is not None),
    )
    if view.prefill_seconds_saved_total is not None:
        yield CounterMetricFamily(
            "kvguard_prefill_seconds_saved",
            "Prefill seconds that loads from L2 made unnecessary.",
            value=view.prefill_seconds_saved_total,
        )


def _gauge(name: str, help_: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    if labels:
        return GaugeMetricFamily(name, help_, labels=labels)
    return GaugeMetricFamily(name, help_, value=value)


class MetricsPage:
    """Renders the page in the form a scraper asks for; owns its registry."""

    def __init__(self, view: Callable[[], View], version: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ViewCollector(view, version))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """Body and content type, by the request's Accept header."""
        encoder, content_type = choose_encoder(accept or "")
        return encoder(self._registry), content_type
