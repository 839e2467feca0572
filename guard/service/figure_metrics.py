"""Which metric shows which figure of a Snapshot: the reference of every figure's name,
unit and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from guard.readings import Snapshot


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

BY_METRIC: dict[str, list[FigureMetric]] = {}
for _row in METRICS:
    BY_METRIC.setdefault(_row.metric, []).append(_row)
_FIGURES = frozenset(row.figure for row in METRICS)


def unlisted(snapshot: Snapshot) -> list[str]:
    """Figures of a snapshot that the table does not know; a test keeps this empty."""
    return sorted(set(snapshot.figures) - _FIGURES)
