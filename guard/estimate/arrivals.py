"""ρ and the backlog as figures: what arrives, against what the path can carry."""

from __future__ import annotations

from collections.abc import Mapping

from guard.estimate.figures import BYTES_PER_SECOND, RATIO, REQUESTS, optional
from guard.estimate.utilization import Capacity, Demand, Utilization, observe_capacity, utilization
from guard.estimate.windows import History, Window
from guard.readings import Figure, Missing, Reading
from guard.sources import lmcache_mp
from guard.sources.samples import Sample

# A path figure that is only 'at most' takes part in ρ when B_prompt shows contention.
_CONTENDED = 0.7


class ArrivalEstimator:
    """Remembers the path's capacity C, and what one asked key leads to load."""

    def __init__(self) -> None:
        self._capacity: Capacity | None = None
        self._bytes_per_key: float | None = None

    @property
    def demand(self) -> Demand:
        """What ρ of the path is made of, as known now."""
        return Demand(self._capacity, self._bytes_per_key)

    def figures(
        self,
        loads: Mapping[str, Figure],
        cache: Sample | None,
        history: History,
        status: lmcache_mp.CacheStatus | None,
        *,
        at: float,
        since: float,
        window_seconds: float,
        max_loads: float | None,
        bytes_per_load: float | None,
    ) -> dict[str, Figure]:
        """Backlog, its growth, loads declined, C, and ρ by slots, by path and the larger
        of both that counts; `loads` are the figures of loads of this tick."""
        new = {"backlog": _backlog(cache, at)}
        window = history.window(window_seconds, since) if cache else None
        if cache is not None and not lmcache_mp.has_gate(cache):
            return new | _all_missing("no_gate")
        if window is None:
            return new | _all_missing("cache_down" if cache is None else "too_few_samples")
        self._learn_bytes_per_key(window)
        slots = status.prefetch_slots(bytes_per_load) if status else None
        path, alone = loads["load_bandwidth.path"], loads["load_bandwidth.alone"]
        self._capacity = observe_capacity(
            self._capacity,
            window,
            path.value if isinstance(path, Reading) else None,
            alone.value if isinstance(alone, Reading) else None,
            slots.count if slots else None,
            max_loads,
        )
        use = utilization(window, slots.count if slots else None, self.demand)
        new["load_bandwidth.capacity"] = _capacity_figure(self._capacity, window.at)
        new["backlog_growth"] = optional(use.backlog_growth, REQUESTS, window.at, "Δ queues")
        new["declined"] = optional(use.declined_ratio, RATIO, window.at, "loads over max_loads")
        new["load_utilization.slots"] = (
            Missing("slots_unknown", "the cache's status does not tell how many")
            if slots is None
            else optional(
                use.slots,
                RATIO,
                window.at,
                "λ·h/c from arrivals" + ("" if slots.exact else f", c about {slots.count:.0f}"),
            )
        )
        new["load_utilization.path"] = optional(
            use.path, RATIO, window.at, "D/C" + (", at most" if use.path_at_most else "")
        )
        contended = _contended(new["backlog"], use, loads)
        new["load_utilization.max"] = _largest(use, contended, window.at)
        return new

    def _learn_bytes_per_key(self, window: Window) -> None:
        submitted, keys = window.delta("gate.submitted_bytes"), window.delta("gate.lookup_keys")
        denied = window.delta("gate.denied_keys") or 0.0
        if submitted and keys and keys - denied > 0:
            self._bytes_per_key = submitted / (keys - denied)


def _all_missing(reason: str) -> dict[str, Figure]:
    names = (
        *("load_utilization.slots", "load_utilization.path", "load_utilization.max"),
        *("load_bandwidth.capacity", "backlog_growth", "declined"),
    )
    return {name: Missing(reason) for name in names}


def _backlog(cache: Sample | None, at: float) -> Figure:
    if cache is None:
        return Missing("cache_down")
    submission = cache.values.get("queue.submission")
    pending = cache.values.get("queue.pending")
    if submission is None or pending is None:
        return Missing("cache_status_absent")
    return Reading(submission + pending, REQUESTS, at, "submission + pending queue of the cache")


def _capacity_figure(capacity: Capacity | None, at: float) -> Figure:
    if capacity is None:
        return Missing("too_few_loads")
    how = "a full window" if capacity.saturated else "at least: no full window yet"
    return Reading(capacity.bytes_per_second, BYTES_PER_SECOND, at, how)


def _contended(backlog: Figure, use: Utilization, loads: Mapping[str, Figure]) -> bool:
    prompt, alone = loads["load_bandwidth.prompt"], loads["load_bandwidth.alone"]
    return (
        (isinstance(backlog, Reading) and backlog.value > 0)
        or bool(use.declined_ratio)
        or (
            isinstance(prompt, Reading)
            and isinstance(alone, Reading)
            and prompt.value < _CONTENDED * alone.value
        )
    )


def _largest(use: Utilization, contended: bool, at: float) -> Figure:
    candidates = [("slots", use.slots)]
    if not use.path_at_most or contended:
        candidates.append(("path", use.path))
    known = [(value, name) for name, value in candidates if value is not None]
    if not known:
        return Missing("idle")
    value, name = max(known)
    return Reading(value, RATIO, at, f"the {name} figure")
