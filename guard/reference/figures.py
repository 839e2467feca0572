"""Where each figure comes from, and which reasons may make it missing."""

from __future__ import annotations

from typing import NamedTuple

GATE = "gate's ledger"
ENGINE = "engine's `/metrics`"
CACHE = "cache's `/metrics`"

_OF_CACHE = ("cache_down", "no_gate")
_OF_WINDOW = (*_OF_CACHE, "too_few_samples")
_OF_ADAPTER = (*_OF_CACHE, "not_given", "not_a_number")
_OF_ENGINE = ("engine_down", "series_absent", "not_a_number")
_ALONE = (*_OF_WINDOW, "idle", "too_few_alone_loads", "series_absent")
_LOOKUP = (*_OF_WINDOW, "idle")
_LOAD = (*_OF_WINDOW, "not_identifiable", "too_few_alone_loads")
_PREFILL = (
    "no_prefill_yet",
    "engine_metrics_absent",
    "prompts_too_short",
    "too_many_running",
    "too_many_external_hits",
)
_COSTS = (*_PREFILL, "no_load_yet")
_RATIO = ("too_few_samples", "series_absent", "idle")


class Origin(NamedTuple):
    """`source` in words; `missing` are keys of guard.reference.reasons.REASONS."""

    source: str
    missing: tuple[str, ...]


def _union(*parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reason for part in parts for reason in part))


ORIGINS: dict[str, Origin] = {
    "load_bandwidth.alone": Origin(
        f"{GATE}: least squares of d = T0 + b/B over loads that ran alone, in the shortest of "
        "10, 20, 60, 120 s with `min_loads`, and in as much of the longer ones as agrees",
        _ALONE,
    ),
    "load_bandwidth.prompt": Origin(
        f"{GATE}: Σb/Σd over all loads; without a gate LMCache's own histogram of rates, marked "
        "approximate",
        ("cache_down", "too_few_samples", "idle", "too_few_loads", "series_absent"),
    ),
    "load_bandwidth.path": Origin(
        f"{GATE}: bytes / busy over at least `window_seconds`, a load's bytes spread over its "
        "lifetime at both edges",
        (*_OF_WINDOW, "idle", "too_few_loads"),
    ),
    "load_bandwidth.recent": Origin(
        f"{GATE}: the same over the shortest window with `min_loads`",
        (*_OF_WINDOW, "idle", "too_few_loads"),
    ),
    "load_bandwidth.capacity": Origin(
        f"{GATE}: bytes / busy of the last full window; 'at least' before there was one",
        (*_OF_WINDOW, "too_few_loads"),
    ),
    "break_even_bandwidth": Origin("s·R", _COSTS),
    "in_flight_bandwidth_bound": Origin(
        f"{GATE}: the least of what is in flight over the time since the last completion, and "
        "of what completed or flies over the busy time of 3, 5 and 10 s",
        (*_OF_CACHE, "nothing_in_flight", "in_flight_too_young"),
    ),
    "hit_fixed.total": Origin(
        "lookup + load; without the engine's own part", _union(_LOOKUP, _LOAD)
    ),
    "hit_fixed.lookup": Origin(f"{GATE}: mean of the lookups that L2 answered", _LOOKUP),
    "hit_fixed.load": Origin(
        f"{GATE}: intercept of the loads alone; the last good one is kept", _LOAD
    ),
    "hit_fixed.engine": Origin("not measured yet", ("not_measured",)),
    "estimate_loads.alone": Origin(f"{GATE}: loads of the window that ran alone", _OF_WINDOW),
    "estimate_loads.prompt": Origin(f"{GATE}: loads of the window", _OF_WINDOW),
    "load_wait": Origin(f"{GATE}: mean load less T0 + b/B of loads alone", (*_OF_WINDOW, "idle")),
    "loads_in_flight": Origin(GATE, (*_OF_CACHE, "series_absent", "not_a_number")),
    "oldest_load": Origin(GATE, (*_OF_CACHE, "nothing_in_flight", "series_absent", "not_a_number")),
    "oldest_lookup": Origin(GATE, (*_OF_ADAPTER, "nothing_in_flight")),
    "in_flight": Origin(GATE, _OF_ADAPTER),
    "mean_load": Origin(f"{GATE}: of the last window with loads", (*_OF_CACHE, "no_load_yet")),
    "last_completion_age": Origin(GATE, (*_OF_ADAPTER, "nothing_completed_yet")),
    "last_answer_age": Origin(GATE, (*_OF_ADAPTER, "nothing_answered_yet")),
    "lost_lookups": Origin(GATE, _OF_ADAPTER),
    "failed_stores": Origin(GATE, _OF_ADAPTER),
    "adapter_attached": Origin(GATE, _OF_ADAPTER),
    "adapter_answered": Origin(GATE, _OF_ADAPTER),
    "adapter_age": Origin(GATE, _OF_ADAPTER),
    "releasing_loads": Origin(GATE, _OF_ADAPTER),
    "break_even_tokens": Origin(
        "T0/(1/R − s/B), B of loads alone", _union(_COSTS, _ALONE, _LOOKUP, _LOAD)
    ),
    "prefill": Origin(
        f"`prefill_rate`, else {ENGINE}: a high quantile over clean windows of the last hour, of "
        "about the loads' length",
        _PREFILL,
    ),
    "kv_bytes_per_token": Origin(
        f"{GATE}: bytes moved over chunks × chunk size; before any load `kv_bytes_per_token`, "
        "else approximated from the cache's L1 or the engine's own cache",
        ("no_load_yet",),
    ),
    "load_utilization.slots": Origin(
        f"{GATE} and the cache's queues: arrivals × seconds a slot is held / slots",
        (*_OF_WINDOW, "slots_unknown", "idle"),
    ),
    "load_utilization.path": Origin(
        f"{GATE} and the cache's queues: bytes asked for / capacity", (*_OF_WINDOW, "idle")
    ),
    "load_utilization.max": Origin(
        "the larger of both that counts; a path figure that is 'at most' counts only while the "
        "path is contended",
        (*_OF_WINDOW, "idle"),
    ),
    "prefill_utilization": Origin(
        f"{ENGINE}: tokens computed in the window / R", _union(_COSTS, ("too_few_samples",))
    ),
    "external_token.all": Origin(f"{ENGINE}: by source", ("engine_down", *_RATIO)),
    **{
        f"external_token.{tier}": Origin(
            f"{CACHE} over the engine's prompt tokens", ("engine_down", "cache_down", *_RATIO)
        )
        for tier in ("l1", "l2")
    },
    **{f"hit.{tier}": Origin(CACHE, ("cache_down", *_RATIO)) for tier in ("l1", "l2")},
    "backlog": Origin(
        "cache's `/status`: submission and pending queue", ("cache_down", "cache_status_absent")
    ),
    "backlog_growth": Origin("the same over the window", (*_OF_WINDOW, "idle")),
    "declined": Origin(f"{GATE}: declined / (declined + served)", (*_OF_WINDOW, "idle")),
    **{
        f"requests_{name}": Origin(ENGINE, _OF_ENGINE)
        for name in ("running", "waiting", "deferred")
    },
    "time_to_first_token": Origin(ENGINE, ("engine_down", "too_few_samples", "idle")),
}
