"""Bandwidth and fixed cost of loads, from sums that a ledger keeps.

Two views that must not be mixed: loads that ran *alone* show the store (`B_alone`, its
T0); all loads show what one prompt gets now, queueing included (`B_prompt`).
"""

from __future__ import annotations

from dataclasses import dataclass

from guard.estimate.windows import Window

# Below this spread of load sizes (standard deviation over mean) a slope is noise.
_MIN_SIZE_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class LoadSums:
    """n, Σb, Σd, Σb², Σb·d of loads: enough for an exact least-squares fit of d on b."""

    loads: float
    bytes: float
    seconds: float
    bytes_squared: float
    bytes_seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """d = T0 + b/B. `fixed_seconds` is None when the sizes do not spread enough to tell
    it from the slope; `bandwidth` (bytes per second) is then Σb/Σd, fixed cost included."""

    bandwidth: float
    fixed_seconds: float | None


def load_sums(window: Window, kind: str) -> LoadSums | None:
    """The ledger's sums of `kind` (all, alone) over a window; None when not all there."""
    names = ("loads", "bytes", "seconds", "bytes_squared", "bytes_seconds")
    deltas = [window.delta(f"gate.{kind}.{name}") for name in names]
    if any(delta is None for delta in deltas):
        return None
    return LoadSums(*(delta for delta in deltas if delta is not None))


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


def path_bandwidth(window: Window, min_loads: float) -> float | None:
    """Bytes completed per second with a load in flight, over whole loads; None when fewer
    than `min_loads` completed or the path was never busy."""
    part = window.between_steps("gate.all.loads")
    if part is None:
        return None
    loads, moved = part.delta("gate.all.loads"), part.delta("gate.all.bytes")
    busy = part.delta("gate.busy_seconds")
    if loads is None or moved is None or busy is None:
        return None
    # The load whose completion opened the part is not counted in it, but in the window.
    if loads + 1 < min_loads or busy <= 0 or moved <= 0:
        return None
    return moved / busy


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
