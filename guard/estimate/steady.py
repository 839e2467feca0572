"""How far back the evidence is of one piece: more loads make a better figure, as long as
they tell of the same store."""

from __future__ import annotations

import math
from collections.abc import Sequence

from guard.estimate.bandwidth import LoadSums, fit, load_sums, residual_spread
from guard.estimate.windows import History, Window

# Two and a half standard errors: a change that chance shows once in eighty times.
_ERRORS = 2.5
# Differences of a twentieth are not worth the evidence they would cost.
_LEAST_RATIO = 0.05
# The spread of fewer loads than these says little; loads vary by a fifth as a rule.
_LOADS_FOR_SPREAD = 6.0
_USUAL_SPREAD = 0.2


def steady_window(
    history: History, recent: Window, lengths: Sequence[float], since: float
) -> Window:
    """The longest window whose loads alone agree with those of `recent`.

    Grows step by step through `lengths` (seconds): each step's older loads are held
    against all newer ones, so a smaller change is found the more loads there are, and
    nothing from before a change is mixed in.
    """
    chosen = recent
    for seconds in lengths:
        if seconds <= chosen.seconds:
            continue
        longer = history.window(seconds, since)
        if longer is None or longer.seconds <= chosen.seconds:
            break
        newer, all_sums = load_sums(chosen, "alone"), load_sums(longer, "alone")
        if newer is None or all_sums is None or not agree(newer, _without(all_sums, newer)):
            break
        chosen = longer
    return chosen


def agree(newer: LoadSums, older: LoadSums) -> bool:
    """Whether both sets of loads may be of one line d = T0 + b/B.

    The larger set gives the line and the spread around it; the mean distance of the other
    set's loads from that line must be within what chance would do. True where one is empty.
    """
    model, other = (older, newer) if older.loads >= newer.loads else (newer, older)
    if other.loads <= 0:
        return True
    line = fit(model)
    if line is None:
        return False
    fixed = line.fixed_seconds or 0.0
    expected = fixed + other.bytes / other.loads / line.bandwidth
    distance = abs(other.seconds / other.loads - expected)
    spread = residual_spread(model, fixed, line.bandwidth)
    if spread is None or model.loads < _LOADS_FOR_SPREAD:
        spread = max(spread or 0.0, _USUAL_SPREAD * expected)
    chance = _ERRORS * spread * math.sqrt(1 / model.loads + 1 / other.loads)
    return distance <= max(chance, _LEAST_RATIO * expected)


def _without(whole: LoadSums, part: LoadSums) -> LoadSums:
    squares = (
        None
        if whole.seconds_squared is None or part.seconds_squared is None
        else whole.seconds_squared - part.seconds_squared
    )
    return LoadSums(
        whole.loads - part.loads,
        whole.bytes - part.bytes,
        whole.seconds - part.seconds,
        whole.bytes_squared - part.bytes_squared,
        whole.bytes_seconds - part.bytes_seconds,
        squares,
    )
