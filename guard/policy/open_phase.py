"""L2 is out of the path: wait, probe, and begin the way back once probes win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from guard.policy.shown import decision
from guard.policy.state import BreakerState, PolicySettings, Surroundings
from guard.policy.types import Admission, Cause, Decision, State
from guard.policy.verdict import Verdict
from guard.readings import Snapshot
from guard.sources.gate import ProbeResult

_PROBE_WIN_SPACING_SECONDS = 1.5
# Doubling would keep a store that broke twice in five minutes out for more than a minute
# after it is well again, though its probes could tell.
_DWELL_GROWTH = 1.5
_MOST_GROWTHS = 30
_SILENT = ("frozen", "store_failed")
_SILENT_PROBE_SECONDS = 3.0
_SILENT_DWELL_RATIO = 0.5


def opened_state(
    state: BreakerState, settings: PolicySettings, cause: Cause | None, now: float
) -> BreakerState:
    """The state of a bypass that begins now; every further trip dwells longer."""
    trips = state.trips + 1
    growth = _DWELL_GROWTH ** min(trips - 1, _MOST_GROWTHS)
    dwell = min(settings.dwell_seconds * growth, settings.dwell_max_seconds)
    opened = BreakerState(
        phase="open",
        since=now,
        cause=cause or "slow",
        trips=trips,
        next_probe_at=now + dwell,
        return_at=now + dwell,
        probe_interval=settings.probe_interval_seconds,
        probe_seen=state.probe_seen,
    )
    return _probed_early(opened, now) if opened.cause in _SILENT else opened


def found_silent(state: BreakerState, cause: Cause | None, now: float) -> BreakerState:
    """The state of a bypass that began as slow, when L2 turns out to answer nothing."""
    return _probed_early(replace(state, cause=cause), now)


def _probed_early(state: BreakerState, now: float) -> BreakerState:
    """A store that answered nothing either answers a probe or not, which a few of them
    tell sooner than a dwell; and one that serves them while the adapter hangs tells what
    is broken."""
    return replace(
        state,
        next_probe_at=min(state.next_probe_at, now + _SILENT_PROBE_SECONDS),
        return_at=state.since + (state.return_at - state.since) * _SILENT_DWELL_RATIO,
    )


def open_tick(
    snapshot: Snapshot,
    state: BreakerState,
    verdict: Verdict,
    settings: PolicySettings,
    around: Surroundings,
    now: float,
    random: Callable[[], float],
) -> tuple[Decision, BreakerState]:
    """One tick of the bypass."""
    if verdict.kind == "frozen" and state.cause == "slow":
        # What first looked slow has now moved nothing for too long to be only that.
        state = found_silent(state, verdict.cause, now)

    def hold(
        shown: State, code: str, words: str, new: BreakerState, action: str | None = None
    ) -> tuple[Decision, BreakerState]:
        probe = action == "probe"
        return decision(shown, new.cause, Admission(0.0), action, code, words, verdict, probe), new

    probe, needed = around.probe, snapshot.value("break_even_bandwidth")
    if probe is not None and probe.id != state.probe_seen:
        began_after = now - probe.age_seconds >= state.since
        state = replace(state, probe_seen=probe.id)
        if began_after and needed is not None:
            won, words = judge_probe(probe, needed, settings.limits.return_ratio)
            if won:
                wins = min(state.wins + 1, settings.probes_to_win)
                enough = wins >= settings.probes_to_win
                if enough and now >= state.return_at:
                    return _return_begins(state, settings, now, words, verdict)
                # Once enough are won, the last one comes when the dwell is over.
                pause = _PROBE_WIN_SPACING_SECONDS
                if enough:
                    pause = max(pause, min(state.probe_interval, state.return_at - now))
                return hold(
                    "probing",
                    "probe_won",
                    f"probe {wins} of {settings.probes_to_win} won: {words}",
                    replace(state, wins=wins, next_probe_at=now + pause),
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
    if not around.can_probe and verdict.kind == "frozen":
        return hold("bypassed", "frozen", f"still frozen: {verdict.words}", state)
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
    return decision(
        "probing",
        state.cause,
        Admission(share),
        "return",
        "probes_won",
        f"letting {share:.0%} of lookups back in: {words}",
        verdict,
    ), new
