"""What loads from L2 show of it: bandwidth alone, of the path and per prompt, T0, and
what is still in flight.

A figure rests on the shortest window that holds enough loads: a change shows soon in busy
traffic, and thin traffic is still measured. But when nothing is in flight and the last
load ended long ago, L2 is idle, whatever a long window still remembers of it.
"""

from __future__ import annotations

import math

from guard.estimate.bandwidth import (
    Fit,
    fit,
    in_flight_bound,
    load_sums,
    path_bandwidth,
    window_bound,
)
from guard.estimate.figures import BYTES_PER_SECOND, REQUESTS, SECONDS, gauge
from guard.estimate.steady import steady_window
from guard.estimate.windows import History, Window
from guard.readings import Figure, Missing, Reading
from guard.sources import lmcache_mp
from guard.sources.samples import Sample

_WINDOWS_SECONDS = (10.0, 20.0, 60.0, 120.0)
STALE_SECONDS = 30.0
# A bound from loads younger than this says more about polling than about the store.
_BOUND_MIN_SECONDS = 1.0
_BOUND_WINDOWS_SECONDS = (3.0, 5.0, 10.0)
_GATE_NAMES = (
    "load_bandwidth.alone",
    "load_bandwidth.prompt",
    "load_bandwidth.path",
    "load_bandwidth.recent",
    "in_flight_bandwidth_bound",
    "hit_fixed.lookup",
    "hit_fixed.load",
    "load_wait",
    "estimate_loads.alone",
    "estimate_loads.prompt",
    "oldest_load",
    "loads_in_flight",
)


class LoadEstimator:
    """Remembers the last good T0 and the mean size of a load; all else is of the window."""

    def __init__(self) -> None:
        self._fixed: Reading | None = None
        self.bytes_per_load: float | None = None

    def figures(
        self,
        cache: Sample | None,
        history: History,
        *,
        since: float,
        min_loads: float,
        window_seconds: float,
    ) -> dict[str, Figure]:
        """All figures of loads. `since` (monotonic) is where evidence begins; a bandwidth
        needs `min_loads`, and `load_bandwidth.path` at least `window_seconds`."""
        if cache is None:
            return {name: Missing("cache_down") for name in _GATE_NAMES}
        if not lmcache_mp.has_gate(cache):
            figures: dict[str, Figure] = {name: Missing("no_gate") for name in _GATE_NAMES}
            figures["load_bandwidth.prompt"] = _stock_bandwidth(history, min_loads)
            return figures
        figures = {name: Missing("too_few_samples") for name in _GATE_NAMES}
        figures["loads_in_flight"] = gauge(
            cache, "gate.loads_in_flight", REQUESTS, "gate", "cache_down"
        )
        figures["oldest_load"] = (
            gauge(cache, "gate.oldest_load_seconds", SECONDS, "gate", "cache_down")
            if cache.values.get("gate.loads_in_flight")
            else Missing("nothing_in_flight")
        )
        figures["in_flight_bandwidth_bound"] = self._bound(cache, history, since)
        window = _window(history, "gate.all.loads", since, min_loads)
        if window is None:
            return figures
        figures["hit_fixed.lookup"] = _lookup_seconds(window)
        if self._fixed is not None:
            figures["hit_fixed.load"] = self._fixed
        if (idle := _idle(cache)) is not None:
            for name in ("alone", "prompt", "path", "recent"):
                figures[f"load_bandwidth.{name}"] = idle
            figures["load_wait"] = idle
            return figures
        steady = steady_window(history, window, _WINDOWS_SECONDS, since)
        figures.update(self._fits(window, steady, min_loads))
        figures["load_bandwidth.recent"] = _path(window, min_loads)
        longer = history.window(max(window_seconds, window.seconds), since) or window
        figures["load_bandwidth.path"] = _path(longer, min_loads)
        return figures

    def _fits(self, window: Window, steady: Window, min_loads: float) -> dict[str, Figure]:
        """`steady` is where the evidence on loads alone may reach back to, if `window`
        has enough of them at all: without any, what was before says nothing of now."""
        figures: dict[str, Figure] = {}
        everything, alone = load_sums(window, "all"), load_sums(window, "alone")
        longer = load_sums(steady, "alone")
        if everything is None or alone is None or longer is None:
            reason = Missing("series_absent", "the gate's load sums are not complete")
            return {"load_bandwidth.alone": reason, "load_bandwidth.prompt": reason}
        if alone.loads < min_loads:
            steady = window
        else:
            alone = longer
        seconds = f"over {window.seconds:.0f} s"
        figures["estimate_loads.alone"] = Reading(
            alone.loads, REQUESTS, window.at, f"over {steady.seconds:.0f} s"
        )
        figures["estimate_loads.prompt"] = Reading(everything.loads, REQUESTS, window.at, seconds)
        if everything.loads >= 1:
            self.bytes_per_load = everything.bytes / everything.loads
        alone_fit = fit(alone) if alone.loads >= min_loads else None
        if alone_fit is None:
            idle = everything.loads < 1
            figures["load_bandwidth.alone"] = Missing("idle" if idle else "too_few_alone_loads")
        else:
            self._publish_alone(figures, alone_fit, alone.loads, steady)
        if everything.loads >= min_loads and everything.seconds > 0:
            figures["load_bandwidth.prompt"] = Reading(
                everything.bytes / everything.seconds,
                BYTES_PER_SECOND,
                window.at,
                f"{everything.loads:.0f} loads {seconds}",
            )
            if alone_fit is not None:
                mean_bytes = everything.bytes / everything.loads
                unloaded = (alone_fit.fixed_seconds or 0.0) + mean_bytes / alone_fit.bandwidth
                figures["load_wait"] = Reading(
                    max(0.0, everything.seconds / everything.loads - unloaded),
                    SECONDS,
                    window.at,
                    "mean load less what it would take alone",
                )
        else:
            figures["load_bandwidth.prompt"] = Missing(
                "idle" if everything.loads < 1 else "too_few_loads"
            )
        if self._fixed is not None:
            figures["hit_fixed.load"] = self._fixed
        elif alone_fit is not None:
            figures["hit_fixed.load"] = Missing("not_identifiable", "load sizes do not spread")
        else:
            figures["hit_fixed.load"] = Missing("too_few_alone_loads")
        return figures

    def _publish_alone(
        self, figures: dict[str, Figure], alone: Fit, loads: float, window: Window
    ) -> None:
        how = f"{loads:.0f} loads alone over {window.seconds:.0f} s"
        if alone.fixed_seconds is not None:
            self._fixed = Reading(
                alone.fixed_seconds, SECONDS, window.at, f"intercept of {loads:.0f} loads alone"
            )
        else:
            how += ", fixed cost included"
        figures["load_bandwidth.alone"] = Reading(alone.bandwidth, BYTES_PER_SECOND, window.at, how)

    def _bound(self, cache: Sample, history: History, since: float) -> Figure:
        """The lowest of the upper bounds that what is in flight gives, each with its words."""
        in_flight = cache.values.get("gate.in_flight_bytes")
        oldest = cache.values.get("gate.oldest_load_seconds")
        if not in_flight or oldest is None:
            return Missing("nothing_in_flight")
        fixed = self._fixed.value if self._fixed else 0.0
        flying = f"{in_flight / 1e6:.1f} MB in flight"
        bounds: list[tuple[float, str]] = []
        age = cache.values.get("gate.last_completion_age_seconds")
        bound = in_flight_bound(in_flight, oldest, age, fixed, _BOUND_MIN_SECONDS)
        if bound is not None:
            bounds.append((bound, f"at most: {flying}, none of it completed"))
        for seconds in _BOUND_WINDOWS_SECONDS:
            window = history.window(seconds, since)
            bound = window_bound(window, fixed, _BOUND_MIN_SECONDS) if window else None
            if window is not None and bound is not None:
                completed = (window.delta("gate.all.bytes") or 0.0) / 1e6
                words = f"at most: {flying}, {completed:.1f} MB completed in {window.seconds:.0f} s"
                bounds.append((bound, words))
        if not bounds:
            return Missing("in_flight_too_young")
        value, words = min(bounds)
        return Reading(value, BYTES_PER_SECOND, cache.at, words)


def _window(history: History, count: str, since: float, enough: float) -> Window | None:
    """The shortest window in which the counter `count` grew by `enough`, else the longest
    there is."""
    chosen = None
    for seconds in _WINDOWS_SECONDS:
        window = history.window(seconds, since)
        if window is None:
            return None
        chosen = window
        if (window.delta(count) or 0.0) >= enough:
            break
    return chosen


def _idle(cache: Sample) -> Missing | None:
    """Nothing is being loaded, and nothing was for `STALE_SECONDS`."""
    age = cache.values.get("gate.last_completion_age_seconds")
    if cache.values.get("gate.loads_in_flight") or age is None or age <= STALE_SECONDS:
        return None
    return Missing("idle", f"the last load ended {age:.0f} s ago")


def _lookup_seconds(window: Window) -> Figure:
    served = [
        window.delta(f"gate.lookups.{answer}") or 0.0 for answer in ("hit", "partial", "miss")
    ]
    seconds, count = window.delta("gate.lookup_seconds"), sum(served)
    if seconds is None or count <= 0:
        return Missing("idle")
    return Reading(seconds / count, SECONDS, window.at, f"mean of {count:.0f} lookups")


def _path(window: Window, min_loads: float) -> Figure:
    value = path_bandwidth(window, min_loads)
    if value is None:
        loads = window.delta("gate.all.loads")
        return Missing("idle" if loads == 0 else "too_few_loads")
    return Reading(value, BYTES_PER_SECOND, window.at, f"bytes / busy over {window.seconds:.0f} s")


def _stock_bandwidth(history: History, min_loads: float) -> Figure:
    """Without a gate: LMCache's own histogram of each load's rate, its mean."""
    window = _window(history, "load_rate_count", -math.inf, min_loads)
    if window is None:
        return Missing("too_few_samples")
    total = window.delta("load_rate_sum_gb_per_second")
    count = window.delta("load_rate_count")
    if total is None or count is None:
        return Missing("series_absent", "no L2 load since the cache started")
    if count < min_loads:
        return Missing("idle" if count <= 0 else "too_few_loads")
    age = window.seconds_since_growth("load_rate_count")
    if age is not None and age > STALE_SECONDS:
        return Missing("idle", f"the last load ended {age:.0f} s ago")
    return Reading(
        total / count * 1e9,
        BYTES_PER_SECOND,
        window.at,
        f"approximate: unweighted mean rate of {count:.0f} loads over {window.seconds:.0f} s, "
        "no gate",
    )
