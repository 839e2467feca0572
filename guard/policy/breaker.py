"""The breaker: when to take L2 out of the path, and how to put it back.

A pure function of what was seen, its own state, settings, the time and a random number,
so that the loop, replays and simulations run the same code. Times are Unix seconds.

    closed ──slow or frozen──> open ──dwell, then 3 winning probes──> returning ──> closed
      │  ^                       ^                                        │
      │  └─ overload: share ─┐   └───────── a load loses: at once ────────┘
      └──────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from guard.policy.abort import abort_hung
from guard.policy.open_phase import found_silent, open_tick, opened_state
from guard.policy.shown import decision, shown_state
from guard.policy.state import BreakerState, PolicySettings, Surroundings
from guard.policy.types import Admission, Decision, State
from guard.policy.verdict import Verdict, judge
from guard.readings import Snapshot

# Shed to 0.8 of what the path carries: 1 − 1/ρ would aim at ρ = 1, which never drains.
_SHED_TARGET = 0.8
_MIN_SHARE = 0.05
# A verdict that flickers (a completion resets the in-flight bound) is one episode.
_EPISODE_GAP_SECONDS = 3.0
_MIN_EPISODE_TICKS = 2
# A verdict that L2 answers nothing has its duration in it; it need not be waited for again.
_SILENT_CONFIRM_SECONDS = 1.0
# Two ticks of a second are a little less than a second apart, as often as not.
_TICK_SLACK_SECONDS = 0.1


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
        return decision("unknown", state.cause, None, None, "blind", around.blind), state
    verdict = judge(snapshot, settings.limits)
    state = _follow_episode(state, verdict, now)
    if around.override is not None:
        return _overridden(snapshot, state, verdict, settings, around, now)
    if around.foreign_holder is not None:
        return _foreign(state, verdict, around)
    if state.phase == "open":
        decided, state = open_tick(snapshot, state, verdict, settings, around, now, random)
        if state.phase != "open":
            return decided, state
        decided, state = abort_hung(decided, state, snapshot, around, state.since, now)
        if decided.action == "abort" and state.cause == "slow":
            # What is only slow ends some load in all that time.
            state = found_silent(state, "frozen", now)
        return decided, state
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
        state=shown_state(verdict),
        cause=verdict.cause,
        reason=f"not in force, {unseen}: {decision.reason}; {verdict.words}",
    )


def _follow_episode(state: BreakerState, verdict: Verdict, now: float) -> BreakerState:
    family = _family(verdict)
    if family is not None:
        if state.episode_kind == family and now - state.episode_last <= _EPISODE_GAP_SECONDS:
            return replace(state, episode_last=now, episode_ticks=state.episode_ticks + 1)
        return replace(
            state,
            episode_kind=family,
            episode_since=now,
            episode_last=now,
            episode_ticks=1,
            episode_told=False,
        )
    if state.episode_kind and now - state.episode_last > _EPISODE_GAP_SECONDS:
        return replace(state, episode_kind=None, episode_ticks=0, episode_told=False)
    return state


def _family(verdict: Verdict) -> str | None:
    """What kind of episode a verdict belongs to: slow that turns frozen is still the same."""
    if verdict.losing:
        return "slow"
    return "overloaded" if verdict.kind == "overloaded" else None


def _confirmed(
    state: BreakerState, verdict: Verdict, kind: str, settings: PolicySettings, now: float
) -> bool:
    """Whether `verdict` is the one that settles it: a tick that itself says `kind`, as the
    episode does, so that an action never rests on figures that speak against it."""
    wait = settings.confirm_seconds
    if verdict.silent:
        wait = min(wait, _SILENT_CONFIRM_SECONDS)
    return (
        _family(verdict) == state.episode_kind == kind
        and state.episode_ticks >= _MIN_EPISODE_TICKS
        and now - state.episode_since >= wait - _TICK_SLACK_SECONDS
    )


def _overridden(
    snapshot: Snapshot,
    state: BreakerState,
    verdict: Verdict,
    settings: PolicySettings,
    around: Surroundings,
    now: float,
) -> tuple[Decision, BreakerState]:
    """A person's word wins; the breaker starts afresh when it ends."""
    override = around.override
    assert override is not None
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
        fresh = replace(fresh, aborts=state.aborts, next_abort_at=state.next_abort_at)
        held = decision("bypassed", "manual", Admission(0.0), None, "override", said)
        return abort_hung(held, fresh, snapshot, around, override.set_at, now)
    action = None
    if _confirmed(state, verdict, "slow", settings, now) and not state.episode_told:
        action, fresh = "would_bypass", replace(fresh, episode_told=True)
    return (
        decision(
            shown_state(verdict),
            verdict.cause,
            Admission(1.0),
            action,
            (verdict.cause or "slow") if action else "override",
            f"{verdict.words}; held in, since {said}",
            verdict,
        ),
        fresh,
    )


def _foreign(
    state: BreakerState, verdict: Verdict, around: Surroundings
) -> tuple[Decision, BreakerState]:
    out = around.share_in_force == 0
    shown: State = "bypassed" if out else shown_state(verdict)
    words = f"held by {around.foreign_holder}; observing"
    return decision(
        shown, "foreign" if out else verdict.cause, None, None, "held_elsewhere", words, verdict
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
        cause = verdict.cause or "slow"
        if acting:
            opened = opened_state(state, settings, cause, now)
            return decision(
                "bypassed", cause, Admission(0.0), "bypass", cause, verdict.words, verdict
            ), opened
        told = None if state.episode_told else "would_bypass"
        shown = decision(shown_state(verdict), cause, None, told, cause, verdict.words, verdict)
        would_be_out_since = state.episode_since + settings.confirm_seconds
        return abort_hung(
            shown,
            replace(state, episode_told=True),
            snapshot,
            around,
            would_be_out_since,
            now,
        )
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
    return decision(
        shown_state(verdict), verdict.cause, Admission(state.share), action, code, words, verdict
    ), state


def _returning(
    state: BreakerState, verdict: Verdict, settings: PolicySettings, now: float
) -> tuple[Decision, BreakerState]:
    if verdict.losing or verdict.kind == "overloaded":
        cause = (verdict.cause or "slow") if verdict.losing else "slow"
        return decision(
            "bypassed",
            cause,
            Admission(0.0),
            "bypass",
            "return_lost",
            f"back out at {settings.return_shares[state.step]:.0%}: {verdict.words}",
            verdict,
        ), opened_state(state, settings, cause, now)
    share = settings.return_shares[state.step]
    if now - state.step_since < settings.return_step_seconds:
        words = f"{share:.0%} of lookups let in; {verdict.words}"
        return decision(
            "probing", state.cause, Admission(share), None, "returning", words, verdict
        ), state
    if state.step + 1 < len(settings.return_shares):
        share = settings.return_shares[state.step + 1]
        return decision(
            "probing",
            state.cause,
            Admission(share),
            "return",
            "step",
            f"letting {share:.0%} of lookups back in; {verdict.words}",
            verdict,
        ), replace(state, step=state.step + 1, step_since=now)
    closed = BreakerState(since=now, trips=state.trips, probe_seen=state.probe_seen)
    return decision(
        shown_state(verdict),
        None,
        Admission(1.0),
        "admit",
        "returned",
        f"L2 is back in the path; {verdict.words}",
        verdict,
    ), closed
