"""What the figures of one tick say of L2: fine, slow, frozen, overloaded, idle, unknown.

A pure reading of the snapshot; what to do about it, and when, is the breaker's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from guard.policy.stalled import patience_seconds, silent_seconds
from guard.policy.types import Cause
from guard.readings import Missing, Reading, Snapshot

Kind = Literal["fine", "slow", "frozen", "overloaded", "idle", "unknown"]
# A twentieth of all loads answered as not loaded is demand that no backlog shows.
DECLINED_RATIO = 0.05
# With loads in flight only so low a bound tells a store that moves nothing from a slow one.
FROZEN_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """Ratios to break-even bandwidth at which L2 counts as slow and as good again, and
    the utilisations at which it counts as overloaded and as relieved (facts: hysteresis
    of resilience4j and Envoy outlier detection)."""

    trip_ratio: float = 0.9
    return_ratio: float = 1.2
    overload_trip: float = 1.0
    overload_return: float = 0.7


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kind, the sentence with its numbers, and the figures it rests on. `recovered`
    is True when loads beat recompute by the return ratio, not just by the trip ratio;
    `silent` when L2 answers nothing, for so long that the verdict carries its own
    duration; `cause` is what a bypass for it is called."""

    kind: Kind
    words: str
    evidence: Mapping[str, float | str | None] = field(default_factory=dict)
    recovered: bool = False
    silent: bool = False
    cause: Cause | None = None

    @property
    def losing(self) -> bool:
        """L2 costs more than it gives: it is slow or frozen, which is one episode."""
        return self.kind in ("slow", "frozen")


def judge(snapshot: Snapshot, limits: Limits) -> Verdict:
    """The verdict of one snapshot.

    Slow: loads alone are below 0.9·B*; or, when nothing ran alone, the path's bytes per
    busy second are (they bound B_alone from above); or the bytes in flight over the time
    since the last completion are. Overloaded: ρ > 1 with a backlog that does not shrink,
    or loads declined for want of a slot. Frozen: L2 answers nothing, for twice the time
    that recomputing a load would take, and what is in flight cannot just be slow. A Missing
    that a verdict needs makes it unknown.
    """
    frozen = _frozen(snapshot)
    if frozen is not None:
        return frozen
    break_even = snapshot.get("break_even_bandwidth")
    if isinstance(break_even, Missing):
        return Verdict(
            "unknown", f"break-even bandwidth is not known: {break_even.reason} {break_even.detail}"
        )
    needed = break_even.value
    alone = snapshot.get("load_bandwidth.alone")
    recent = snapshot.get("load_bandwidth.recent")
    bound = snapshot.get("in_flight_bandwidth_bound")
    evidence = _evidence(snapshot, _MOVING)
    least = limits.trip_ratio * needed
    candidates = [("bytes in flight", bound)]
    candidates.append(
        ("loads that ran alone", alone)
        if isinstance(alone, Reading)
        else ("the path's bytes per busy second", recent)
    )
    for what, figure in candidates:
        if isinstance(figure, Reading) and figure.value < least:
            return Verdict(
                "slow",
                f"{what} show {_mb(figure.value)} ({figure.source}); recompute wins below "
                f"{limits.trip_ratio:g} x {_mb(needed)}",
                evidence,
                silent=(silent_seconds(snapshot) or 0.0) > patience_seconds(snapshot),
                cause="slow",
            )
    overload = _overload(snapshot, limits)
    if overload:
        return Verdict("overloaded", overload, evidence, cause="overloaded")
    best = next((f for f in (alone, recent) if isinstance(f, Reading)), None)
    if best is None:
        if isinstance(recent, Missing) and recent.reason == "idle" and isinstance(bound, Missing):
            return Verdict("idle", "no load from L2 in the window: nothing to judge", evidence)
        lacking = recent if isinstance(recent, Missing) else Missing("not_measured")
        return _approximate(snapshot, limits, needed, evidence) or Verdict(
            "unknown", f"bandwidth is not known: {lacking.reason}", evidence
        )
    return Verdict(
        "fine",
        f"loads move {_mb(best.value)} ({best.source}), break-even is {_mb(needed)}",
        evidence,
        recovered=best.value > limits.return_ratio * needed,
    )


_MOVING = (
    "break_even_bandwidth",
    "load_bandwidth.alone",
    "load_bandwidth.recent",
    "in_flight_bandwidth_bound",
    "load_utilization.max",
    "backlog",
)
_STANDING = (
    "break_even_bandwidth",
    "in_flight_bandwidth_bound",
    "loads_in_flight",
    "oldest_load",
    "oldest_lookup",
    "last_answer_age",
    "adapter_attached",
    "adapter_answered",
)


def _evidence(snapshot: Snapshot, names: Iterable[str]) -> dict[str, float | str | None]:
    return {name: snapshot.value(name) for name in names}


def _frozen(snapshot: Snapshot) -> Verdict | None:
    """A store that is merely slow answers nothing for seconds too, but bytes do move: with
    loads in flight their bound must be next to nothing."""
    silent, patience = silent_seconds(snapshot), patience_seconds(snapshot)
    if silent is None or silent <= patience:
        return None
    needed = snapshot.value("break_even_bandwidth")
    if needed is not None and snapshot.value("loads_in_flight"):
        bound = snapshot.value("in_flight_bandwidth_bound")
        if bound is None or bound >= FROZEN_RATIO * needed:
            return None
    never = snapshot.value("adapter_answered") == 0 or snapshot.value("adapter_attached") == 0
    since = "since its adapter was built" if never else f"for {silent:.1f} s"
    loads = snapshot.value("loads_in_flight") or 0
    what = f"{loads:.0f} loads hang" if loads else "lookups hang"
    return Verdict(
        "frozen",
        f"L2 has answered nothing {since} while {what}; {patience:.1f} s would be patient",
        _evidence(snapshot, _STANDING),
        silent=True,
        cause="store_failed" if never else "frozen",
    )


def _overload(snapshot: Snapshot, limits: Limits) -> str | None:
    rho, backlog = snapshot.value("load_utilization.max"), snapshot.value("backlog")
    growth = snapshot.value("backlog_growth")
    declined = snapshot.value("declined")
    if (
        rho is not None
        and backlog
        and growth is not None
        and growth >= 0
        and (rho > limits.overload_trip)
    ):
        return (
            f"load utilisation is {rho:.2f} and the backlog of {backlog:.0f} does not shrink: "
            "loads arrive faster than the path carries them"
        )
    if declined is not None and declined > DECLINED_RATIO:
        return f"{declined:.0%} of loads were declined since all load slots were taken"
    return None


def _approximate(
    snapshot: Snapshot,
    limits: Limits,
    needed: float,
    evidence: Mapping[str, float | str | None],
) -> Verdict | None:
    """Without a gate only what one prompt gets is known, and that includes queueing."""
    alone, prompt = snapshot.get("load_bandwidth.alone"), snapshot.get("load_bandwidth.prompt")
    if not (isinstance(alone, Missing) and alone.reason == "no_gate"):
        return None
    if not isinstance(prompt, Reading):
        return None
    words = f"one prompt gets {_mb(prompt.value)} ({prompt.source}), break-even is {_mb(needed)}"
    if prompt.value < limits.trip_ratio * needed:
        return Verdict("slow", words, evidence, cause="slow")
    if prompt.value > limits.return_ratio * needed:
        return Verdict("fine", words, evidence, recovered=True)
    return None


def _mb(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.1f} MB/s"
