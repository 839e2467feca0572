"""When to end loads that hang: L2 is out of the path, and they still hold their requests.

A bypass frees the lookups; a load in flight is only freed by its answer, and a frozen store
gives none.
"""

from __future__ import annotations

from dataclasses import replace

from guard.policy.stalled import patience_seconds, release_rate
from guard.policy.state import BreakerState, Surroundings
from guard.policy.types import Decision, Operation
from guard.readings import Snapshot

# Loads that are only slow end within two seconds of the bypass, or are lost anyway.
_AFTER_BYPASS_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 60.0
_RELEASE_WITHIN_SECONDS = 10.0
_TOO_OLD = "it is of a version that cannot"
_FINAL = frozenset({"would_abort", "abort_refused"})


def abort_hung(
    decision: Decision,
    state: BreakerState,
    snapshot: Snapshot,
    around: Surroundings,
    out_since: float,
    now: float,
) -> tuple[Decision, BreakerState]:
    """The decision with an abort, if loads have hung since L2 left the path at `out_since`
    (Unix seconds): once a batch, and again with back-off while they are still in flight.
    A decision that acts already is left as it is, so that one tick says one thing."""
    loads = snapshot.value("loads_in_flight")
    if not loads:
        if loads is None or not state.aborts:
            return decision, state
        return decision, replace(state, aborts=0, next_abort_at=0.0)
    if decision.action is not None or now < state.next_abort_at:
        return decision, state
    words = _hang(snapshot, loads, now - out_since)
    if words is None:
        return decision, state
    action, code, operation = _what(decision, snapshot, around)
    if action in _FINAL and state.aborts:
        return decision, state
    if action == "abort_refused":
        words = f"{words}, and the gate cannot end them: {around.why_no_abort or _TOO_OLD}"
    pause = min(_FIRST_PAUSE_SECONDS * 2.0**state.aborts, _LONGEST_PAUSE_SECONDS)
    return (
        replace(
            decision,
            action=action,
            reason_code=code,
            reason=f"{words}; {decision.reason}",
            operation=operation,
        ),
        replace(state, aborts=state.aborts + 1, next_abort_at=now + pause),
    )


def _hang(snapshot: Snapshot, loads: float, out_seconds: float) -> str | None:
    oldest, completed = snapshot.value("oldest_load"), snapshot.value("last_completion_age")
    if out_seconds < _AFTER_BYPASS_SECONDS or oldest is None:
        return None
    # What an abort released moments ago must be answered before the next one is judged.
    if snapshot.value("releasing_loads"):
        return None
    if completed is not None and completed < _AFTER_BYPASS_SECONDS:
        return None
    patience = patience_seconds(snapshot)
    if oldest <= patience:
        return None
    return (
        f"{loads:.0f} loads still hang {out_seconds:.1f} s after the bypass, the oldest for "
        f"{oldest:.1f} s where {patience:.1f} s would be patient"
    )


def _what(
    decision: Decision, snapshot: Snapshot, around: Surroundings
) -> tuple[str, str, Operation | None]:
    if around.mode != "enforce" or not around.can_control or around.foreign_holder is not None:
        return "would_abort", "hung", None
    if not around.can_abort:
        return "abort_refused", "hung", None
    operation = Operation(
        "abort",
        decision.cause or "frozen",
        release_rate(snapshot, _RELEASE_WITHIN_SECONDS),
        _RELEASE_WITHIN_SECONDS,
    )
    return "abort", "hung", operation
