"""Bandwidth and fixed cost of loads, from sums that a ledger keeps.

Two views that must not be mixed: loads that ran *alone* show the store (`B_alone`, its
T0); all loads show what one prompt gets now, queueing included (`B_prompt`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from guard.estimate.windows import Window
from guard.sources.samples import Sample

# Below this spread of load sizes (standard deviation over mean) a slope is noise.
_MIN_SIZE_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class LoadSums:
    """n, Σb, Σd, Σb², Σb·d of loads: enough for an exact least-squares fit of d on b, and
    with Σd² (None where it is not known) for the spread around it."""

    loads: float
    bytes: float
    seconds: float
    bytes_squared: float
    bytes_seconds: float
    seconds_squared: float | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """d = T0 + b/B. `fixed_seconds` is None when the sizes do not spread enough to tell
    it from the slope; `bandwidth` (bytes per second) is then Σb/Σd, fixed cost included."""

    bandwidth: float
    fixed_seconds: float | None


def load_sums(window: Window, kind: str) -> LoadSums | None:
    """The ledger's sums of `kind` (all, alone) over a window; None when not all there."""
    names = ("loads", "bytes", "seconds", "bytes_squared", "bytes_seconds")
    loads, moved, seconds, squares, products = (
        window.delta(f"gate.{kind}.{name}") for name in names
    )
    if loads is None or moved is None or seconds is None or squares is None or products is None:
        return None
    spread = window.delta(f"gate.{kind}.seconds_squared")
    return LoadSums(loads, moved, seconds, squares, products, spread)


def fit(sums: LoadSums) -> Fit | None:
    """Least squares of d = T0 + b/B with T0 ≥ 0; None without any load or any second.

    A negative intercept is clamped to 0 and the line drawn again through the origin. A
    slope that is not positive cannot be a bandwidth: then only Σb/Σd is given.
    """
    if sums.loads < 1 or sums.seconds <= 0 or sums.bytes <= 0:
        return None
    ratio = sums.bytes / sums.seconds
    mean_bytes = sums.bytes / sums.loads
    variance = sums.bytes_squared / sums.loads - mean_bytes**2
    if sums.loads < 3 or variance < (_MIN_SIZE_SPREAD * mean_bytes) ** 2:
        return Fit(ratio, None)
    mean_seconds = sums.seconds / sums.loads
    slope = (sums.bytes_seconds / sums.loads - mean_bytes * mean_seconds) / variance
    if slope <= 0:
        return Fit(ratio, None)
    fixed = mean_seconds - slope * mean_bytes
    if fixed < 0:
        return Fit(sums.bytes_squared / sums.bytes_seconds, 0.0)
    return Fit(1 / slope, fixed)


def residual_spread(sums: LoadSums, fixed_seconds: float, bandwidth: float) -> float | None:
    """Standard deviation (seconds) of the loads around the line d = T0 + b/B; None where it
    cannot be told."""
    if sums.seconds_squared is None or sums.loads <= 2:
        return None
    squares = (
        sums.seconds_squared
        + sums.loads * fixed_seconds**2
        + sums.bytes_squared / bandwidth**2
        - 2 * fixed_seconds * sums.seconds
        - 2 * sums.bytes_seconds / bandwidth
        + 2 * fixed_seconds * sums.bytes / bandwidth
    )
    return math.sqrt(max(0.0, squares) / (sums.loads - 2))


def path_bandwidth(window: Window, min_loads: float) -> float | None:
    """Bytes moved per second with a load in flight; None when fewer than `min_loads`
    completed in the window, or the path was never busy.

    Loads are lumps: with five of them in a window, counting each where it completes errs
    by a third. So a load's bytes are spread over its lifetime: at both edges the loads in
    flight count with the part they have had by then, their age times what one prompt
    gets (Σb/Σd), and never more than their size.
    """
    loads, moved = window.delta("gate.all.loads"), window.delta("gate.all.bytes")
    seconds, busy = window.delta("gate.all.seconds"), window.delta("gate.busy_seconds")
    if loads is None or moved is None or seconds is None or busy is None:
        return None
    if loads < min_loads or busy <= 0 or moved <= 0 or seconds <= 0:
        return None
    per_load = moved / seconds
    begun = _moved_in_flight(window.samples[0], per_load)
    under_way = _moved_in_flight(window.samples[-1], per_load)
    return max(0.0, moved + under_way - begun) / busy


def _moved_in_flight(sample: Sample, per_load: float) -> float:
    """Bytes that the loads in flight have had, their ages spread evenly up to the oldest."""
    oldest = sample.values.get("gate.oldest_load_seconds", 0.0)
    count = sample.values.get("gate.loads_in_flight", 0.0)
    ages = oldest * (count + 1) / 2
    return min(sample.values.get("gate.in_flight_bytes", 0.0), ages * per_load)


def in_flight_bound(
    in_flight_bytes: float,
    oldest_load_seconds: float,
    last_completion_age_seconds: float | None,
    fixed_seconds: float,
    min_seconds: float,
) -> float | None:
    """An upper bound of the path's bandwidth from what has *not* completed.

    Since the last completion, or since the oldest load began if that is later, at most
    the bytes in flight have moved. The fixed cost of a hit is taken off the time, which
    keeps the bound on the safe side. None while the time is shorter than `min_seconds`.
    """
    elapsed = oldest_load_seconds
    if last_completion_age_seconds is not None:
        elapsed = min(elapsed, last_completion_age_seconds)
    elapsed -= fixed_seconds
    if elapsed < min_seconds or in_flight_bytes <= 0:
        return None
    return in_flight_bytes / elapsed


def window_bound(window: Window, fixed_seconds: float, min_seconds: float) -> float | None:
    """An upper bound of the path's bandwidth over a window: whatever moved in it belongs
    to loads that completed in it or are in flight at its end.

    Unlike the bound since the last completion it does not begin anew with each, so it
    holds while a slow path still completes a load now and then. Each load's fixed cost is
    taken off the busy time, which keeps it on the safe side. None where less than
    `min_seconds` are left, and where loads failed, since what they moved is not known.
    """
    moved, busy = window.delta("gate.all.bytes"), window.delta("gate.busy_seconds")
    loads, failures = window.delta("gate.all.loads"), window.delta("gate.load_failures")
    in_flight = window.samples[-1].values.get("gate.in_flight_bytes")
    if moved is None or busy is None or loads is None or failures or not in_flight:
        return None
    busy -= fixed_seconds * (loads + 1)
    return (moved + in_flight) / busy if busy >= min_seconds else None
