"""The breaker: when to take L2 out of the path, and how to put it back.

A pure function of what was seen, its own state, settings, the time and a random number,
so that the loop, replays and simulations run the same code. Times are Unix seconds.

    closed ──slow, confirmed──> open ──dwell, then 3 winning probes──> returning ──> closed
      │  ^                        ^                                        │
      │  └─ overload: share ─┐    └───────── a load loses: at once ────────┘
      └──────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from guard.policy.types import Admission, Cause, Decision, Mode, Override, State
from guard.policy.verdict import Kind, Limits, Verdict, judge
from guard.readings import Snapshot
from guard.sources.gate import ProbeResult

Phase = Literal["closed", "open", "returning"]
# Shed to 0.8 of what the path carries: 1 − 1/ρ would aim at ρ = 1, which never drains.
_SHED_TARGET = 0.8
_MIN_SHARE = 0.05
# A verdict that flickers (a completion resets the in-flight bound) is one episode.
_EPISODE_GAP_SECONDS = 3.0
_MIN_EPISODE_TICKS = 2
_PROBE_WIN_SPACING_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The breaker's constants; docs/policy.md gives the reason of each."""

    limits: Limits = field(default_factory=Limits)
    confirm_seconds: float = 2.0
    dwell_seconds: float = 30.0
    dwell_max_seconds: float = 300.0
    probe_interval_seconds: float = 5.0
    probe_interval_max_seconds: float = 30.0
    probes_to_win: int = 3
    return_shares: Sequence[float] = (0.05, 0.25, 0.5, 1.0)
    return_step_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class BreakerState:
    """All the breaker remembers between ticks. `since` is when the phase began; the
    `episode_*` fields follow one run of slow (or overloaded) verdicts."""

    phase: Phase = "closed"
    since: float = 0.0
    cause: Cause | None = None
    trips: int = 0
    episode_kind: str | None = None
    episode_since: float = 0.0
    episode_last: float = 0.0
    episode_ticks: int = 0
    episode_told: bool = False
    wins: int = 0
    next_probe_at: float = 0.0
    probe_interval: float = 0.0
    probe_seen: int | None = None
    step: int = 0
    step_since: float = 0.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else the policy must know: mode, a person's override, who holds the gate
    (None: we do or may), the share in force, and the gate's last probe."""

    mode: Mode
    override: Override | None = None
    can_control: bool = True
    foreign_holder: str | None = None
    share_in_force: float | None = None
    can_probe: bool = True
    probe: ProbeResult | None = None
    blind: str | None = None


def decide(
    snapshot: Snapshot,
    state: BreakerState,
    settings: PolicySettings,
    around: Surroundings,
    now: float,
    random: Callable[[], float],
) -> tuple[Decision, BreakerState]:
    """The decision of this tick and the state to remember. `random` gives [0, 1)."""
    if around.blind is not None:
        return _decision("unknown", state.cause, None, None, "blind", around.blind), state
    verdict = judge(snapshot, settings.limits)
    state = _follow_episode(state, verdict, now)
    if around.override is not None:
        return _overridden(state, verdict, settings, around.override, now)
    if around.foreign_holder is not None:
        return _foreign(state, verdict, around)
    if state.phase == "open":
        return _open(snapshot, state, verdict, settings, around, now, random)
    if state.phase == "returning":
        return _returning(state, verdict, settings, now)
    return _closed(snapshot, state, verdict, settings, around, now)


def as_in_force(
    decision: Decision, snapshot: Snapshot, settings: PolicySettings, share: float | None
) -> Decision:
    """The decision as it may be shown: L2 counts as out of the path only when the gate
    says so. `share` is the one in force, None where there is no gate or it was not seen;
    a bypass that did not come about is shown as what L2 does meanwhile."""
    wanted = decision.admission.share if decision.admission else None
    out = decision.state in ("bypassed", "probing")
    if not out or (share is not None and share <= (0.0 if wanted is None else wanted)):
        return decision
    verdict = judge(snapshot, settings.limits)
    unseen = "no gate was seen" if share is None else f"the gate admits {share:.0%}"
    return replace(
        decision,
        state=_shown(verdict),
        cause=_cause(verdict),
        reason=f"not in force, {unseen}: {decision.reason}; {verdict.words}",
    )


def _decision(
    shown: State,
    cause: Cause | None,
    admission: Admission | None,
    action: str | None,
    code: str,
    words: str,
    verdict: Verdict | None = None,
    probe: bool = False,
) -> Decision:
    evidence = verdict.evidence if verdict else {}
    return Decision(shown, cause, admission, action, code, words, evidence, probe)


def _shown(verdict: Verdict) -> State:
    states: dict[str, State] = {
        "fine": "helping",
        "slow": "hurting",
        "overloaded": "overloaded",
        "idle": "idle",
        "unknown": "unknown",
    }
    return states[verdict.kind]


def _cause(verdict: Verdict) -> Cause | None:
    causes: dict[str, Cause] = {"slow": "slow", "overloaded": "overloaded"}
    return causes.get(verdict.kind)


def _follow_episode(state: BreakerState, verdict: Verdict, now: float) -> BreakerState:
    if verdict.kind in ("slow", "overloaded"):
        if state.episode_kind == verdict.kind and now - state.episode_last <= _EPISODE_GAP_SECONDS:
            return replace(state, episode_last=now, episode_ticks=state.episode_ticks + 1)
        return replace(
            state,
            episode_kind=verdict.kind,
            episode_since=now,
            episode_last=now,
            episode_ticks=1,
            episode_told=False,
        )
    if state.episode_kind and now - state.episode_last > _EPISODE_GAP_SECONDS:
        return replace(state, episode_kind=None, episode_ticks=0, episode_told=False)
    return state


def _confirmed(
    state: BreakerState, verdict: Verdict, kind: Kind, settings: PolicySettings, now: float
) -> bool:
    """Whether `verdict` is the one that settles it: a tick that itself says `kind`, as the
    episode does, so that an action never rests on figures that speak against it."""
    return (
        verdict.kind == state.episode_kind == kind
        and state.episode_ticks >= _MIN_EPISODE_TICKS
        and now - state.episode_since >= settings.confirm_seconds
    )


def _overridden(
    state: BreakerState,
    verdict: Verdict,
    settings: PolicySettings,
    override: Override,
    now: float,
) -> tuple[Decision, BreakerState]:
    """A person's word wins; the breaker starts afresh when it ends."""
    fresh = BreakerState(
        since=now,
        trips=state.trips,
        episode_kind=state.episode_kind,
        episode_since=state.episode_since,
        episode_last=state.episode_last,
        episode_ticks=state.episode_ticks,
        episode_told=state.episode_told,
        probe_seen=state.probe_seen,
    )
    said = f"{override.who} said {override.mode}: {override.reason}"
    if override.mode == "bypass":
        return _decision("bypassed", "manual", Admission(0.0), None, "override", said), fresh
    action = None
    if _confirmed(state, verdict, "slow", settings, now) and not state.episode_told:
        action, fresh = "would_bypass", replace(fresh, episode_told=True)
    return (
        _decision(
            _shown(verdict),
            _cause(verdict),
            Admission(1.0),
            action,
            "slow" if action else "override",
            f"{verdict.words}; held in, since {said}",
            verdict,
        ),
        fresh,
    )


def _foreign(
    state: BreakerState, verdict: Verdict, around: Surroundings
) -> tuple[Decision, BreakerState]:
    out = around.share_in_force == 0
    shown: State = "bypassed" if out else _shown(verdict)
    words = f"held by {around.foreign_holder}; observing"
    return _decision(
        shown, "foreign" if out else _cause(verdict), None, None, "held_elsewhere", words, verdict
    ), state


def _closed(
    snapshot: Snapshot,
    state: BreakerState,
    verdict: Verdict,
    settings: PolicySettings,
    around: Surroundings,
    now: float,
) -> tuple[Decision, BreakerState]:
    acting = around.mode == "enforce" and around.can_control
    if state.trips and now - state.since > settings.dwell_max_seconds and not state.episode_kind:
        state = replace(state, trips=state.trips - 1, since=now)
    if _confirmed(state, verdict, "slow", settings, now):
        if acting:
            opened = _open_state(state, settings, now)
            return _decision(
                "bypassed", "slow", Admission(0.0), "bypass", "slow", verdict.words, verdict
            ), opened
        told = None if state.episode_told else "would_bypass"
        return _decision(
            _shown(verdict), _cause(verdict), None, told, "slow", verdict.words, verdict
        ), replace(state, episode_told=True)
    action: str | None = None
    code: str = verdict.kind
    share, words = state.share, verdict.words
    rho = snapshot.value("load_utilization.max")
    if _confirmed(state, verdict, "overloaded", settings, now) and rho and not state.episode_told:
        share = max(_MIN_SHARE, min(1.0, _SHED_TARGET / max(rho, settings.limits.overload_trip)))
        action = "shed" if acting else "would_shed"
        words = f"{verdict.words}; admitting {share:.0%} of lookups"
        state = replace(state, episode_told=True, share=share if acting else 1.0, since=now)
    elif (
        state.share < 1
        and (rho is None or rho < settings.limits.overload_return)
        and verdict.kind in ("fine", "idle")
        and now - state.since >= settings.dwell_seconds
    ):
        share, action, code = 1.0, "admit", "relieved"
        words = f"load utilisation is back below {settings.limits.overload_return:g}; {words}"
        state = replace(state, share=1.0, since=now)
    return _decision(
        _shown(verdict), _cause(verdict), Admission(state.share), action, code, words, verdict
    ), state


def _open_state(state: BreakerState, settings: PolicySettings, now: float) -> BreakerState:
    trips = state.trips + 1
    dwell = min(settings.dwell_seconds * trips, settings.dwell_max_seconds)
    return BreakerState(
        phase="open",
        since=now,
        cause="slow",
        trips=trips,
        next_probe_at=now + dwell,
        probe_interval=settings.probe_interval_seconds,
        probe_seen=state.probe_seen,
    )


def _open(
    snapshot: Snapshot,
    state: BreakerState,
    verdict: Verdict,
    settings: PolicySettings,
    around: Surroundings,
    now: float,
    random: Callable[[], float],
) -> tuple[Decision, BreakerState]:
    def hold(
        shown: State, code: str, words: str, new: BreakerState, action: str | None = None
    ) -> tuple[Decision, BreakerState]:
        probe = action == "probe"
        return _decision(shown, new.cause, Admission(0.0), action, code, words, verdict, probe), new

    probe, needed = around.probe, snapshot.value("break_even_bandwidth")
    if probe is not None and probe.id != state.probe_seen:
        began_after = now - probe.age_seconds >= state.since
        state = replace(state, probe_seen=probe.id)
        if began_after and needed is not None:
            won, words = judge_probe(probe, needed, settings.limits.return_ratio)
            if won:
                wins = state.wins + 1
                if wins >= settings.probes_to_win:
                    return _return_begins(state, settings, now, words, verdict)
                return hold(
                    "probing",
                    "probe_won",
                    f"probe {wins} of {settings.probes_to_win} won: {words}",
                    replace(state, wins=wins, next_probe_at=now + _PROBE_WIN_SPACING_SECONDS),
                    "probe_won",
                )
            interval = min(state.probe_interval * 1.5, settings.probe_interval_max_seconds)
            return hold(
                "bypassed",
                "probe_lost",
                f"probe lost: {words}",
                replace(
                    state,
                    wins=0,
                    probe_interval=interval,
                    next_probe_at=now + interval * (0.5 + 0.5 * random()),
                ),
                "probe_lost",
            )
    if now < state.next_probe_at:
        left = state.next_probe_at - now
        return hold(
            "probing" if state.wins else "bypassed",
            "dwell",
            f"out of the path; next probe in {left:.0f} s",
            state,
        )
    if needed is None:
        return hold("unknown", "blind", "break-even bandwidth is not known: holding", state)
    if not around.can_probe:
        return _return_begins(state, settings, now, "this backend allows no probe", verdict)
    return hold(
        "probing",
        "probe",
        "probing L2 with loads that no user waits for",
        replace(state, next_probe_at=now + state.probe_interval),
        "probe",
    )


def judge_probe(probe: ProbeResult, break_even: float, return_ratio: float) -> tuple[bool, str]:
    """Whether re-reading known keys beat recomputing their tokens by `return_ratio`,
    lookup included; and the numbers in words."""
    clean = [s for s in probe.samples if not s.overlapped and s.bytes > 0]
    if probe.outcome != "done" or not clean:
        return False, f"{probe.outcome}{': ' + probe.error if probe.error else ''}"
    moved = sum(s.bytes for s in clean)
    took = sum(s.lookup_seconds + s.load_seconds for s in clean)
    recompute = moved / break_even
    words = (
        f"{moved / 1e6:.1f} MB in {took:.2f} s, recompute takes {recompute:.2f} s "
        f"(return needs {return_ratio:g} times as fast)"
    )
    return took * return_ratio < recompute, words


def _return_begins(
    state: BreakerState, settings: PolicySettings, now: float, words: str, verdict: Verdict
) -> tuple[Decision, BreakerState]:
    share = settings.return_shares[0]
    new = replace(
        state,
        phase="returning",
        since=now,
        step=0,
        step_since=now,
        wins=0,
        episode_kind=None,
        episode_ticks=0,
        episode_told=False,
    )
    return _decision(
        "probing",
        state.cause,
        Admission(share),
        "return",
        "probes_won",
        f"letting {share:.0%} of lookups back in: {words}",
        verdict,
    ), new


def _returning(
    state: BreakerState, verdict: Verdict, settings: PolicySettings, now: float
) -> tuple[Decision, BreakerState]:
    if verdict.kind in ("slow", "overloaded"):
        return _decision(
            "bypassed",
            "slow",
            Admission(0.0),
            "bypass",
            "return_lost",
            f"back out at {settings.return_shares[state.step]:.0%}: {verdict.words}",
            verdict,
        ), _open_state(state, settings, now)
    share = settings.return_shares[state.step]
    if now - state.step_since < settings.return_step_seconds:
        words = f"{share:.0%} of lookups let in; {verdict.words}"
        return _decision(
            "probing", state.cause, Admission(share), None, "returning", words, verdict
        ), state
    if state.step + 1 < len(settings.return_shares):
        share = settings.return_shares[state.step + 1]
        return _decision(
            "probing",
            state.cause,
            Admission(share),
            "return",
            "step",
            f"letting {share:.0%} of lookups back in; {verdict.words}",
            verdict,
        ), replace(state, step=state.step + 1, step_since=now)
    closed = BreakerState(since=now, trips=state.trips, probe_seen=state.probe_seen)
    return _decision(
        _shown(verdict),
        None,
        Admission(1.0),
        "admit",
        "returned",
        f"L2 is back in the path; {verdict.words}",
        verdict,
    ), closed
