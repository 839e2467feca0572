"""Low and high bounds of the estimates that decisions rest on, over the last two minutes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from guard.estimate.bandwidth import LoadSums, fit, load_sums, residual_spread
from guard.estimate.intervals import BLOCK_SECONDS, Interval, Sums, blocks, jackknife
from guard.estimate.utilization import Demand, demand_sums, slot_sums, slot_utilization
from guard.estimate.windows import History, Window
from guard.readings import Figure, Reading

_WINDOW_SECONDS = 120.0
_MIN_WINDOW_SECONDS = 60.0


class BoundEstimator:
    """Works the bounds out anew once a block, and remembers them in between."""

    def __init__(self) -> None:
        self._known: dict[str, Interval] = {}
        self._begin = math.inf
        self._end = -math.inf

    def bounded(
        self,
        figures: Mapping[str, Figure],
        history: History,
        since: float,
        slots: float | None,
        demand: Demand,
    ) -> dict[str, Figure]:
        """The figures, those with an interval with `low` and `high`.

        The interval is of the mean over 60 to 120 s and widened to what the figure says
        now: a figure of a shorter window may have moved on. `since`, `slots` (the cache's)
        and `demand` (what ρ of the path is made of) are those of the figures.
        """
        window = history.window(_WINDOW_SECONDS, since)
        if window is None or window.seconds < _MIN_WINDOW_SECONDS:
            self._known, self._end = {}, -math.inf
            return dict(figures)
        end = window.samples[-1].monotonic
        if not self._end <= end < self._end + BLOCK_SECONDS:
            self._known, self._end = _intervals(window, slots, demand), end
        self._begin = window.samples[0].at
        return {name: self._with_bounds(name, figure, figures) for name, figure in figures.items()}

    def _with_bounds(self, name: str, figure: Figure, figures: Mapping[str, Figure]) -> Figure:
        if name == "load_utilization.max":
            name = _largest(figure, figures)
        interval = self._known.get(name)
        # A figure kept from before the window is not one that the window can bound.
        if interval is None or not isinstance(figure, Reading) or figure.at < self._begin:
            return figure
        low, high = min(interval.low, figure.value), max(interval.high, figure.value)
        return replace(figure, low=low, high=high)


def _largest(figure: Figure, figures: Mapping[str, Figure]) -> str:
    """Which of both utilisations the larger one is."""
    names = ("load_utilization.slots", "load_utilization.path")
    same = (
        name
        for name in names
        if isinstance(figure, Reading)
        and isinstance(other := figures.get(name), Reading)
        and other.value == figure.value
    )
    return next(same, "load_utilization.max")


def _intervals(window: Window, slots: float | None, demand: Demand) -> dict[str, Interval]:
    parts = blocks(window)
    found = {
        "load_bandwidth.alone": _with_selection(_of_loads(parts, "alone", _bandwidth), window),
        "load_bandwidth.prompt": _of_loads(parts, "all", _rate),
        "hit_fixed.load": _of_loads(parts, "alone", _fixed_seconds, positive=False),
        "load_utilization.slots": _of(
            [slot_sums(part) for part in parts], lambda sums: slot_utilization(sums, slots)
        ),
        "load_utilization.path": _of([demand_sums(part) for part in parts], demand.utilization),
    }
    return {name: interval for name, interval in found.items() if interval is not None}


def _with_selection(interval: Interval | None, window: Window) -> Interval | None:
    """A load that happens to take longer is less likely to stay alone, so loads alone look
    faster than the store is: at arrivals of λ a second and a variance v of a load's
    seconds, by about λ·v a load, and twice that in the slope. The low bound allows for it."""
    everything, alone = load_sums(window, "all"), load_sums(window, "alone")
    line = fit(alone) if alone is not None else None
    if interval is None or everything is None or alone is None or line is None:
        return interval
    spread = residual_spread(alone, line.fixed_seconds or 0.0, line.bandwidth) or 0.0
    mean_seconds = alone.seconds / alone.loads
    bias = 2 * everything.loads / window.seconds * spread**2 / mean_seconds
    return Interval(interval.low / (1 + bias), interval.high)


def _of_loads(
    parts: list[Window],
    kind: str,
    statistic: Callable[[Sums], float | None],
    *,
    positive: bool = True,
) -> Interval | None:
    """Over the blocks in which loads completed."""
    sums = [load_sums(part, kind) for part in parts]
    vectors = [
        (each.loads, each.bytes, each.seconds, each.bytes_squared, each.bytes_seconds)
        for each in sums
        if each is not None and each.loads > 0
    ]
    interval = jackknife(vectors, statistic, positive=positive)
    if interval is None or positive:
        return interval
    return Interval(max(0.0, interval.low), max(0.0, interval.high))


def _of(sums: list[Sums | None], statistic: Callable[[Sums], float | None]) -> Interval | None:
    known = [each for each in sums if each is not None]
    return jackknife(known, statistic) if len(known) == len(sums) else None


def _bandwidth(sums: Sums) -> float | None:
    found = fit(LoadSums(*sums))
    return found.bandwidth if found else None


def _fixed_seconds(sums: Sums) -> float | None:
    found = fit(LoadSums(*sums))
    return found.fixed_seconds if found else None


def _rate(sums: Sums) -> float | None:
    return sums[1] / sums[2] if sums[2] > 0 else None
