"""ρ, the utilisation of the load path, from arrivals.

LMCache starts a lookup only when a prefetch slot is free, so what is served saturates at
1 whatever is asked for; what arrives is what was served plus what the queues gained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from guard.estimate.intervals import Sums
from guard.estimate.windows import Window


@dataclass(frozen=True, slots=True)
class Capacity:
    """C, bytes per second the path can carry. `saturated` when a window that was full
    set it; otherwise the path can carry at least this. `alone` is B_alone of that time."""

    bytes_per_second: float
    saturated: bool
    alone: float | None


@dataclass(frozen=True, slots=True)
class Utilization:
    """ρ by slots and by path; None where it cannot be told. `path_at_most` when C is only
    known from below. `backlog_growth` in requests over the window; `declined_ratio` of
    all loads that the gate answered as not loaded since its slots were full."""

    slots: float | None
    path: float | None
    path_at_most: bool
    demand_bytes_per_second: float | None
    backlog_growth: float | None
    declined_ratio: float | None


def observe_capacity(
    known: Capacity | None,
    window: Window,
    path: float | None,
    alone: float | None,
    max_in_flight: float | None,
    max_loads: float | None,
) -> Capacity | None:
    """C after one more window: a full window sets it, any other can only raise it, and a
    fall of B_alone by a fifth or more scales it down."""
    if known is not None and alone and known.alone and alone < 0.8 * known.alone:
        known = replace(
            known, bytes_per_second=known.bytes_per_second * alone / known.alone, alone=alone
        )
    if path is None:
        return known
    full_at = min(
        (limit for limit in ((max_in_flight or 0) - 1, max_loads or 0) if limit > 0), default=None
    )
    pending = [
        s.values.get("queue.submission", 0.0) + s.values.get("queue.pending", 0.0)
        for s in window.samples
    ]
    in_flight = [s.values.get("gate.loads_in_flight", 0.0) for s in window.samples]
    full = all(p > 0 for p in pending) or (
        full_at is not None and all(n >= full_at for n in in_flight)
    )
    if full:
        return Capacity(path, True, alone)
    if known is None or path > known.bytes_per_second:
        return Capacity(path, False if known is None else known.saturated, alone)
    return known


@dataclass(frozen=True, slots=True)
class Demand:
    """What ρ of the path is made of beside the counters: C, and the mean bytes that one
    asked key led to load, learnt while lookups were admitted."""

    capacity: Capacity | None
    bytes_per_key: float | None

    def bytes_per_second(self, sums: Sums) -> float | None:
        """Bytes asked of L2 a second, from `demand_sums`: what was submitted, denied keys
        as if they had been admitted, and the queue's growth; None where the last two
        count and no key's size is known."""
        seconds, submitted, denied, growth, keys, lookups = sums
        if self.bytes_per_key is None and (denied > 0 or growth > 0):
            return None
        per_key = self.bytes_per_key or 0.0
        keys_per_lookup = keys / lookups if keys and lookups else 0.0
        asked = submitted + denied * per_key + growth * keys_per_lookup * per_key
        return max(0.0, asked) / seconds

    def utilization(self, sums: Sums) -> float | None:
        """ρ of the path, D/C; None where either is not known."""
        demand = self.bytes_per_second(sums)
        if demand is None or self.capacity is None or self.capacity.bytes_per_second <= 0:
            return None
        return demand / self.capacity.bytes_per_second


def slot_sums(window: Window) -> Sums | None:
    """Seconds, arrivals, lookups that L2 served, and seconds slots were held for them."""
    lookups, growth = window.delta("gate.lookups"), _queue_growth(window)
    served = _sum(window, "gate.lookups.hit", "gate.lookups.partial", "gate.lookups.miss")
    held = _sum(window, "gate.lookup_seconds", "gate.all.seconds")
    if lookups is None or growth is None or served is None or held is None:
        return None
    return window.seconds, lookups + growth, served, held


def slot_utilization(sums: Sums, slots: float | None) -> float | None:
    """ρ of the slots, λ·h/c; None where nothing was served or c is not known."""
    seconds, arrivals, served, held = sums
    if not slots or served <= 0:
        return None
    return max(0.0, arrivals) / seconds * (held / served) / slots


def demand_sums(window: Window) -> Sums | None:
    """Seconds, bytes submitted, keys denied, growth of the queue, keys and lookups asked."""
    growth = _queue_growth(window)
    names = ("submitted_bytes", "denied_keys", "lookup_keys", "lookups")
    submitted, denied, keys, lookups = (window.delta(f"gate.{name}") for name in names)
    if submitted is None or denied is None or growth is None:
        return None
    return window.seconds, submitted, denied, growth, keys or 0.0, lookups or 0.0


def utilization(window: Window, slots: float | None, demand: Demand) -> Utilization:
    """ρ over a window; `slots` is how many lookups the cache lets run at once."""
    held, asked = slot_sums(window), demand_sums(window)
    declined = window.delta("gate.lookups.declined")
    served = _sum(window, "gate.lookups.hit", "gate.lookups.partial", "gate.lookups.miss")
    capacity = demand.capacity
    return Utilization(
        slots=None if held is None else slot_utilization(held, slots),
        path=None if asked is None else demand.utilization(asked),
        path_at_most=capacity is not None and not capacity.saturated,
        demand_bytes_per_second=None if asked is None else demand.bytes_per_second(asked),
        backlog_growth=_queue_growth(window),
        declined_ratio=None if declined is None or not served else declined / (declined + served),
    )


def _queue_growth(window: Window) -> float | None:
    submission, pending = window.delta("queue.submission"), window.delta("queue.pending")
    return None if submission is None or pending is None else submission + pending


def _sum(window: Window, *names: str) -> float | None:
    deltas = [window.delta(name) for name in names]
    return None if any(d is None for d in deltas) else sum(d for d in deltas if d is not None)
