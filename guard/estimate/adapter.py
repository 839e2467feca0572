"""How the way to L2 is: what is in flight, when L2 last answered, and the gate's adapter.

A gate of an older version does not give all of it; what it does not give is Missing.
"""

from __future__ import annotations

from guard.estimate.figures import BYTES, FLAG, REQUESTS, SECONDS, gauge
from guard.readings import Figure, Missing, Reading
from guard.sources import lmcache_mp
from guard.sources.samples import Sample

# Figure, the gate's gauge, its unit, and why it may be absent although the gate gives it.
_GAUGES = (
    ("in_flight", "in_flight_bytes", BYTES, None),
    ("oldest_lookup", "oldest_lookup_seconds", SECONDS, "nothing_in_flight"),
    ("last_completion_age", "last_completion_age_seconds", SECONDS, "nothing_completed_yet"),
    ("last_answer_age", "last_answer_age_seconds", SECONDS, "nothing_answered_yet"),
    ("lost_lookups", "lost_lookups", REQUESTS, None),
    ("failed_stores", "failed_stores", REQUESTS, None),
    ("adapter_attached", "adapter_attached", FLAG, None),
    ("adapter_answered", "adapter_answered", FLAG, None),
    ("adapter_age", "adapter_age_seconds", SECONDS, None),
    ("releasing_loads", "releasing_loads", REQUESTS, None),
)
# What came with the adapter's figures; before, an absence means the gate's version.
_NEW = frozenset({"last_answer_age"})
_MARK = "gate.adapter_attached"


def adapter_figures(
    cache: Sample | None, at: float, bytes_per_load: float | None
) -> dict[str, Figure]:
    """One figure for each gauge, and the mean size of a load as last seen."""
    names = [name for name, *_ in _GAUGES]
    if cache is None or not lmcache_mp.has_gate(cache):
        reason = "cache_down" if cache is None else "no_gate"
        return {name: Missing(reason) for name in (*names, "mean_load")}
    figures: dict[str, Figure] = {}
    for name, metric, unit, absent in _GAUGES:
        figure = gauge(cache, f"gate.{metric}", unit, "gate", "cache_down")
        if figure == Missing("series_absent"):
            given = name not in _NEW or _MARK in cache.values
            figure = Missing(absent if absent is not None and given else "not_given")
        figures[name] = figure
    figures["mean_load"] = (
        Missing("no_load_yet")
        if bytes_per_load is None
        else Reading(bytes_per_load, BYTES, at, "mean of the last window with loads")
    )
    return figures
