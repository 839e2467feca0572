"""What hangs: how long is too long, and what the ages of loads and lookups say.

A load older than its own recompute time has already lost; one older than twice that, while
nothing else is answered either, is not slow but stuck.
"""

from __future__ import annotations

from guard.readings import Missing, Reading, Snapshot

_RECOMPUTES = 2.0
# A pause of less than a second is no freeze, however fast the GPU is.
_LEAST_SECONDS = 1.0
_SIZE_UNKNOWN_SECONDS = 2.0
_BREAK_EVEN_UNKNOWN_SECONDS = 5.0
_HUNG_MOVES = 3.0
# A load is the odd one out when L2 answered others within this part of its age.
_ANSWERED_RATIO = 0.25
_LEAST_RELEASE_RATIO = 0.25


def patience_seconds(snapshot: Snapshot) -> float:
    """How old what is in flight may grow before it counts as stuck: twice what recomputing
    a load in flight (or one of the usual size) takes, at least a second."""
    break_even = snapshot.value("break_even_bandwidth")
    if not break_even:
        return _BREAK_EVEN_UNKNOWN_SECONDS
    size = _mean_in_flight(snapshot) or snapshot.value("mean_load")
    if size is None:
        return _SIZE_UNKNOWN_SECONDS
    return max(_LEAST_SECONDS, _RECOMPUTES * size / break_even)


def oldest_seconds(snapshot: Snapshot) -> float | None:
    """Age of the oldest load or lookup in flight; None when nothing is."""
    ages = [snapshot.value("oldest_load"), snapshot.value("oldest_lookup")]
    return max((age for age in ages if age is not None), default=None)


def silent_seconds(snapshot: Snapshot) -> float | None:
    """For how long L2 has answered nothing although it was asked; None when nothing is in
    flight, or when the gate does not tell of answers."""
    oldest = oldest_seconds(snapshot)
    answered = snapshot.get("last_answer_age")
    if oldest is None:
        return None
    if isinstance(answered, Missing):
        return oldest if answered.reason == "nothing_answered_yet" else None
    completed = snapshot.value("last_completion_age")
    return min(oldest, answered.value, oldest if completed is None else completed)


def hung_seconds(snapshot: Snapshot, at_least_seconds: float) -> float | None:
    """The age of a load or lookup that hangs while L2 answers others; None when none does.

    It is the odd one out when it is older than `at_least_seconds`, than moving all that is
    in flight three times at the path's pace would take, and than the patience, and when L2
    answered something else within the last quarter of its age.
    """
    oldest, answered = oldest_seconds(snapshot), snapshot.get("last_answer_age")
    if oldest is None or not isinstance(answered, Reading):
        return None
    in_flight = snapshot.value("in_flight") or 0.0
    moving = 0.0
    if in_flight > 0:
        pace = snapshot.value("load_bandwidth.recent")
        if not pace:
            return None
        moving = _HUNG_MOVES * in_flight / pace
    if oldest <= max(at_least_seconds, moving, patience_seconds(snapshot)):
        return None
    return oldest if answered.value <= _ANSWERED_RATIO * oldest else None


def release_rate(snapshot: Snapshot, within_seconds: float) -> float | None:
    """Bytes per second of KV that the GPU can take back to recompute: all it could, less
    what it does now, never under a quarter. Where that is not known, all that is in flight
    evenly over `within_seconds`; None when nothing is."""
    break_even = snapshot.value("break_even_bandwidth")
    if break_even:
        busy = snapshot.value("prefill_utilization") or 0.0
        return break_even * max(_LEAST_RELEASE_RATIO, 1.0 - busy)
    in_flight = snapshot.value("in_flight")
    return in_flight / within_seconds if in_flight else None


def _mean_in_flight(snapshot: Snapshot) -> float | None:
    loads, moved = snapshot.value("loads_in_flight"), snapshot.value("in_flight")
    return moved / loads if loads and moved else None
