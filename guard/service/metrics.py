"""The guard's own /metrics: a collector over the latest View.

Nothing is stored between scrapes, so a page can never show a figure that the last tick did
not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from guard.policy.types import AILMENTS, CAUSES, STATES
from guard.readings import Reading, Snapshot
from guard.service.figure_metrics import BY_METRIC, unlisted
from guard.service.status import cause_of, state_of
from guard.view import View


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
    for metric, rows in BY_METRIC.items():
        names = [row.label[0] for row in rows[:1] if row.label]
        family = _gauge(metric, rows[0].help, *names)
        for row in rows:
            figure = snapshot.figures.get(row.figure)
            if isinstance(figure, Reading):
                family.add_metric([row.label[1]] if row.label else [], figure.value)
        if family.samples:
            yield family
    bounds = _gauge(
        "kvguard_estimate_bound",
        "Between which values a figure lies with 95 % confidence, over one to two minutes.",
        *("reading", "bound"),
    )
    for name, figure in snapshot.figures.items():
        if isinstance(figure, Reading):
            for bound, value in (("low", figure.low), ("high", figure.high)):
                if value is not None:
                    bounds.add_metric([name, bound], value)
    if bounds.samples:
        yield bounds
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
