"""ρ, the utilisation of the load path, from arrivals.

LMCache starts a lookup only when a prefetch slot is free, so what is served saturates at
1 whatever is asked for; what arrives is what was served plus what the queues gained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def utilization(
    window: Window,
    capacity: Capacity | None,
    max_in_flight: float | None,
    bytes_per_key: float | None,
) -> Utilization:
    """ρ over a window. `bytes_per_key` is the mean bytes that one asked key led to load,
    learnt while lookups were admitted; denied keys count with it."""
    seconds = window.seconds
    lookups = window.delta("gate.lookups")
    growth = _queue_growth(window)
    declined = window.delta("gate.lookups.declined")
    slots = path = demand = None
    served = _sum(window, "gate.lookups.hit", "gate.lookups.partial", "gate.lookups.miss")
    held = _sum(window, "gate.lookup_seconds", "gate.all.seconds")
    if lookups is not None and served and held is not None and growth is not None and max_in_flight:
        arrivals = max(0.0, lookups + growth) / seconds
        slots = arrivals * (held / served) / max_in_flight
    submitted = window.delta("gate.submitted_bytes")
    denied, keys = window.delta("gate.denied_keys"), window.delta("gate.lookup_keys")
    if submitted is not None and denied is not None and growth is not None:
        unknown_demand = (denied > 0 or growth > 0) and bytes_per_key is None
        if not unknown_demand:
            per_key = bytes_per_key or 0.0
            keys_per_lookup = keys / lookups if keys and lookups else 0.0
            asked = submitted + denied * per_key + growth * keys_per_lookup * per_key
            demand = max(0.0, asked) / seconds
    if demand is not None and capacity is not None and capacity.bytes_per_second > 0:
        path = demand / capacity.bytes_per_second
    return Utilization(
        slots=slots,
        path=path,
        path_at_most=capacity is not None and not capacity.saturated,
        demand_bytes_per_second=demand,
        backlog_growth=growth,
        declined_ratio=None if declined is None or not served else declined / (declined + served),
    )


def _queue_growth(window: Window) -> float | None:
    submission, pending = window.delta("queue.submission"), window.delta("queue.pending")
    return None if submission is None or pending is None else submission + pending


def _sum(window: Window, *names: str) -> float | None:
    deltas = [window.delta(name) for name in names]
    return None if any(d is None for d in deltas) else sum(d for d in deltas if d is not None)
