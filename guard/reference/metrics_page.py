"""`docs/metrics.md`: every metric of the guard and of the gate, from the code itself.

`python -m guard.reference.metrics_page` prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from guard.gate.admission import Admission as GateAdmission
from guard.gate.ledger import Ledger
from guard.gate.metrics import AdapterState, GateCollector
from guard.policy.types import Admission, Override
from guard.readings import Missing, Reading, Snapshot
from guard.reference.figures import ORIGINS
from guard.reference.reasons import REASONS
from guard.service.figure_metrics import BY_METRIC, METRICS
from guard.service.metrics import ViewCollector
from guard.view import SourceView, View

_HEAD = """\
# Metrics

Made from the code by `make reference`; a test fails when the two differ.

A figure that cannot be had has no sample, never 0 and never NaN:
`kvguard_missing{reading,reason}` is 1 for it instead. Alerts should join on that, not on a
value. All units are SI: bytes, seconds, tokens, ratios from 0 to 1.
"""
_GUARD = """\
## Of the guard itself

On `--metrics-listen` (9470) and on `--listen` (9469), beside `process_*` of the guard's own
process.
"""
_FIGURES = """\
## Figures of the cost model

Of the latest tick, on the same page. Windows end when the peer behind them is restarted, and
begin anew when L2 leaves the path or comes back.
"""
_GATE = """\
## Of the gate

On the cache server's own `/metrics`, label `l2` the adapter's name. They are exact counts
since the gate was started (`kvguard_gate_info` has its epoch). The guard reads them; boards
should rather show the guard's figures.
"""
_REASONS = """\
## Why a figure is missing

The values of `reason` in `kvguard_missing`.
"""

# When a family has no sample; the others always have one.
_ABSENT = {
    "kvguard_admission_share": "no gate was seen",
    "kvguard_admission_min_tokens": "no gate was seen, or a minimum other than 0 is in force",
    "kvguard_override_expires_timestamp_seconds": "no override lives",
    "kvguard_prefill_seconds_saved_total": "nothing was loaded since the guard started, or R is "
    "not known",
    "kvguard_decisions_total": "none of that kind yet",
    "kvguard_control_requests_total": "none of that kind yet",
    "kvguard_healing_attempts_total": "none of that kind yet",
    "kvguard_missing": "nothing is missing",
    "kvguard_estimate_bound": "there is no interval: less than a minute of evidence, or fewer "
    "than six blocks of 5 s with loads",
    "kvguard_source_up": "before the first tick",
    "kvguard_source_scrape_seconds": "the peer never answered",
    "kvguard_unlisted_figures": "before the first tick",
    "kvguard_gate_oldest_load_seconds": "nothing is in flight",
    "kvguard_gate_oldest_lookup_seconds": "nothing is in flight",
    "kvguard_gate_last_completion_age_seconds": "no load has completed",
    "kvguard_gate_last_answer_age_seconds": "L2 has answered nothing",
    "kvguard_gate_lease_expires_seconds": "no lease is in force",
    "kvguard_gate_rank_load_bytes_total": "that rank has loaded nothing",
}


def page() -> str:
    """The whole page, Markdown, ending in a newline."""
    figures = {row.metric for row in METRICS}
    own = [f for f in ViewCollector(_full_view, "").collect() if f.name not in figures]
    gate = list(_gate_families())
    parts = [
        _HEAD,
        _GUARD,
        _table(("metric", "labels", "meaning", "no sample when"), map(_family, own)),
        _FIGURES,
        _table(
            ("metric", "unit", "meaning", "from", "reasons when missing"),
            (row for metric in BY_METRIC for row in _figure(metric)),
        ),
        _GATE,
        _table(("metric", "labels", "meaning", "no sample when"), map(_family, gate)),
        _REASONS,
        _table(("reason", "meaning"), ((f"`{name}`", words) for name, words in REASONS.items())),
    ]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _figure(metric: str) -> Iterator[tuple[str, ...]]:
    """The metric's meaning once, and what each view of it is from."""
    for place, row in enumerate(BY_METRIC[metric]):
        origin = ORIGINS[row.figure]
        label = f'{{{row.label[0]}="{row.label[1]}"}}' if row.label else ""
        yield (
            f"`{row.metric}{label}`",
            row.unit.replace("_per_", "/"),
            row.help if place == 0 else "",
            origin.source,
            ", ".join(f"`{reason}`" for reason in origin.missing),
        )


def _family(family: Metric) -> tuple[str, ...]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    if family.type == "info":
        name = f"{family.name}_info"
    return (
        f"`{name}`",
        ", ".join(f"`{label}`" for label in _labels(family)) or "–",
        family.documentation.rstrip(".") + ".",
        _ABSENT.get(name, "never"),
    )


def _labels(family: Metric) -> list[str]:
    seen = {label for sample in family.samples for label in sample.labels}
    declared = getattr(family, "_labelnames", ())
    return sorted((seen | set(declared)) - {"le"})


def _full_view() -> View:
    """A view in which everything shows."""
    figures = {row.figure: Reading(1.0, row.unit, 0.0, "", 0.0, 2.0) for row in METRICS}
    return View(
        started_at=0.0,
        ticks=1,
        last_tick_monotonic=0.0,
        mode="observe",
        control="gate",
        holder=None,
        admission=Admission(),
        lease_expires_at=None,
        override=Override("bypass", "", "", 0.0, 1.0, 1),
        override_revision=1,
        snapshot=Snapshot(0.0, 0.0, figures | {"lacking": Missing("not_measured")}),
        decision=None,
        sources=(SourceView("engine", "", True, None, 0.0, 0.0),),
        decisions_total={("bypass", "slow"): 1},
        control_requests_total={"written": 1},
        healing_attempts_total={("load_hung", "done"): 1},
        prefill_seconds_saved_total=0.0,
    )


def _gate_families() -> Iterator[Metric]:
    ledger, admission = Ledger(), GateAdmission()
    adapter = AdapterState(0, True, True, 0.0, 0.0, 0, 0, 0, 0, {})
    gates = GateCollector()
    gates.add("l2", "resp", ledger, admission, lambda: adapter)
    yield from gates.collect()


if __name__ == "__main__":
    print(page(), end="")
