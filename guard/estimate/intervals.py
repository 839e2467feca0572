"""How sure an estimate is: intervals by the delete-one-block jackknife.

Loads come in bursts and wait on each other, so intervals that take them as independent are
far too narrow (plain least squares covered the truth in 17 to 46 % of windows where it
promised 95). Blocks of some seconds are nearly independent: leaving out one block at a time
shows how much the estimate depends on which seconds it saw (Quenouille 1956, Tukey 1958;
blocks: Künsch, Annals of Statistics 17, 1989).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from guard.estimate.windows import Window

Sums = tuple[float, ...]
BLOCK_SECONDS = 5.0
# With fewer blocks the interval says more about the blocks than about the estimate.
_MIN_BLOCKS = 6
# Student's t, two-sided 95 %, by degrees of freedom from 1 on.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179),
    *(2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064),
)
_T_OF_MANY = 2.06
_TINY = 1e-9


class Interval(NamedTuple):
    """Where the truth lies with 95 % confidence, in the estimate's own unit."""

    low: float
    high: float


def blocks(window: Window, seconds: float = BLOCK_SECONDS) -> list[Window]:
    """The window in consecutive parts of at least `seconds`; a shorter rest at its end
    belongs to the last part."""
    samples = window.samples
    edges = [0]
    for place, sample in enumerate(samples):
        # A tick comes a little early as often as late.
        if sample.monotonic - samples[edges[-1]].monotonic >= seconds - 0.5:
            edges.append(place)
    if len(edges) > 1:
        edges[-1] = len(samples) - 1
    return [Window(samples[a : b + 1]) for a, b in pairwise(edges) if b > a]


def jackknife(
    parts: Sequence[Sums],
    statistic: Callable[[Sums], float | None],
    *,
    positive: bool = True,
) -> Interval | None:
    """The interval of `statistic`, a function of sums, over the sum of all `parts`.

    `positive` figures (a bandwidth, a ratio) vary by factors: their interval is symmetric
    on a logarithmic scale. None with fewer than six parts, or where the statistic is not
    defined with one of them left out.
    """
    if len(parts) < _MIN_BLOCKS:
        return None
    whole = tuple(map(math.fsum, zip(*parts, strict=True)))
    values = [statistic(whole)]
    values += [statistic(tuple(map(_less, whole, part))) for part in parts]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values) or (positive and min(known) <= 0):
        return None
    if positive:
        known = list(map(math.log, known))
    centre, left_out = known[0], known[1:]
    count = len(left_out)
    mean = math.fsum(left_out) / count
    variance = (count - 1) / count * math.fsum((value - mean) ** 2 for value in left_out)
    freedom = count - 1
    reach = math.sqrt(variance) * (_T[freedom - 1] if freedom <= len(_T) else _T_OF_MANY)
    low, high = centre - reach, centre + reach
    return Interval(math.exp(low), math.exp(high)) if positive else Interval(low, high)


def _less(whole: float, part: float) -> float:
    """Without what only rounding leaves of a sum whose every part was left out."""
    rest = whole - part
    return 0.0 if abs(rest) < _TINY * abs(whole) else rest
