"""The breaker on a scripted clock: what it does, when, and that it says why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.policy.breaker import decide
from guard.policy.open_phase import judge_probe
from guard.policy.state import BreakerState, PolicySettings, Surroundings
from guard.policy.types import Decision, Override
from guard.policy.verdict import judge
from guard.readings import Figure, Missing, Reading, Snapshot
from guard.sources.gate import ProbeResult, ProbeSample

B_STAR = 50e6
SETTINGS = PolicySettings()


def reading(value: float) -> Reading:
    return Reading(value, "bytes_per_second", 0.0, "test")


def figures(**given: float) -> dict[str, Figure]:
    named: dict[str, Figure] = {
        "load_bandwidth.alone": Missing("too_few_alone_loads"),
        "load_bandwidth.recent": Missing("idle"),
        "in_flight_bandwidth_bound": Missing("nothing_in_flight"),
        "break_even_bandwidth": reading(B_STAR),
    }
    short = {
        "alone": "load_bandwidth.alone",
        "recent": "load_bandwidth.recent",
        "bound": "in_flight_bandwidth_bound",
        "rho": "load_utilization.max",
        "backlog": "backlog",
        "growth": "backlog_growth",
        "declined": "declined",
        "prompt": "load_bandwidth.prompt",
    }
    named.update({short[name]: reading(value) for name, value in given.items()})
    return named


FAST = figures(alone=250e6, recent=240e6)
SLOW = figures(recent=12e6)
IDLE = figures()
BOUND = figures(alone=540e6, recent=500e6, bound=27e6)
CROWDED = figures(alone=250e6, recent=240e6, rho=1.4, backlog=9, growth=1)


@dataclass
class Run:
    """A breaker with its clock; keeps every decision that acted."""

    around: Surroundings = field(default_factory=lambda: Surroundings("enforce"))
    state: BreakerState = field(default_factory=BreakerState)
    now: float = 1000.0
    acted: list[tuple[float, Decision]] = field(default_factory=list)
    last: Decision | None = None

    def tick(self, what: dict[str, Figure], seconds: float = 1.0) -> Decision:
        self.now += seconds
        snapshot = Snapshot(self.now, self.now, what)
        decision, self.state = decide(
            snapshot, self.state, SETTINGS, self.around, self.now, lambda: 0.5
        )
        if decision.action:
            self.acted.append((self.now, decision))
        self.last = decision
        return decision

    def ticks(self, what: dict[str, Figure], count: int) -> Decision:
        for _ in range(count):
            decision = self.tick(what)
        return decision

    def probed(self, identity: int, seconds: float) -> None:
        sample = ProbeSample(4, 25e6, 0.01, seconds, False)
        result = ProbeResult(identity, "done", None, 0.1, (sample,))
        self.around = replace(self.around, probe=result)

    def actions(self) -> list[str | None]:
        return [decision.action for _, decision in self.acted]


def opened() -> Run:
    run = Run()
    run.ticks(FAST, 5)
    run.ticks(SLOW, 4)
    assert run.state.phase == "open"
    return run


def test_fast_is_helping_and_nothing_is_done() -> None:
    run = Run()
    decision = run.ticks(FAST, 60)
    assert (decision.state, run.acted) == ("helping", [])


def test_idle_is_not_slow() -> None:
    run = Run()
    assert run.ticks(IDLE, 600).state == "idle"
    assert run.acted == []


@pytest.mark.parametrize(
    "evidence",
    [figures(alone=40e6), figures(recent=40e6), figures(alone=250e6, recent=240e6, bound=40e6)],
    ids=["alone", "path when nothing ran alone", "in flight although the window looks fine"],
)
def test_slow_is_bypassed_within_seconds_and_says_the_numbers(evidence: dict) -> None:
    run = Run()
    run.ticks(FAST, 5)
    began = run.now
    run.ticks(evidence, 6)
    when, decision = run.acted[0]
    assert decision.action == "bypass"
    assert decision.admission is not None
    assert decision.admission.share == 0
    assert when - began <= 4
    assert "40.0 MB/s" in decision.reason
    assert "50.0 MB/s" in decision.reason


def test_a_slow_path_while_loads_alone_are_fast_is_not_slow() -> None:
    run = Run()
    assert run.ticks(figures(alone=200e6, recent=30e6), 30).state == "helping"


def test_one_slow_tick_is_not_enough_but_a_flicker_is_one_episode() -> None:
    run = Run()
    for _ in range(20):
        run.tick(SLOW)
        run.ticks(FAST, 5)
    assert run.acted == []
    for _ in range(3):
        run.tick(SLOW)
        run.tick(FAST)
    assert run.actions() == ["bypass"]


@settings(max_examples=300, deadline=None)
@given(
    seen=st.lists(st.sampled_from([FAST, SLOW, IDLE, BOUND, CROWDED]), max_size=60),
    mode=st.sampled_from(["enforce", "observe"]),
    held_in=st.booleans(),
)
def test_no_action_rests_on_figures_that_speak_against_it(seen, mode, held_in) -> None:
    word = Override("admit", "ana", "a test", 0.0, 1e9, 1) if held_in else None
    run = Run(Surroundings(mode, override=word))
    for what in seen:
        decision = run.tick(what)
        judged = judge(Snapshot(run.now, run.now, what), SETTINGS.limits)
        if decision.action in ("bypass", "would_bypass"):
            assert judged.kind in ("slow", "overloaded")
            assert judged.words in decision.reason
        if decision.action in ("shed", "would_shed"):
            assert judged.kind == "overloaded"


def test_observe_tells_once_and_does_not_act() -> None:
    run = Run(Surroundings("observe"))
    decision = run.ticks(SLOW, 60)
    assert run.actions() == ["would_bypass"]
    assert decision.state == "hurting"
    assert decision.admission is None


def test_a_missing_break_even_holds() -> None:
    unknown = {**SLOW, "break_even_bandwidth": Missing("no_prefill_yet")}
    run = Run()
    decision = run.ticks(unknown, 30)
    assert decision.state == "unknown"
    assert "no_prefill_yet" in decision.reason
    assert run.acted == []


def test_a_blind_guard_holds_what_it_did() -> None:
    run = opened()
    before = run.state
    run.around = replace(run.around, blind="cache does not answer")
    decision = run.ticks(IDLE, 100)
    assert (decision.state, decision.admission, run.state) == ("unknown", None, before)


def test_no_probe_before_the_dwell_then_three_wins_then_steps() -> None:
    run = opened()
    tripped = run.acted[-1][0]
    while not (decision := run.tick(IDLE)).probe:
        assert decision.admission is not None
        assert decision.admission.share == 0
    assert run.now - tripped >= SETTINGS.dwell_seconds
    for identity in range(1, 4):
        run.probed(identity, 0.1)
        run.ticks(IDLE, 2)
    assert run.state.phase == "returning"
    shares = []
    while run.state.phase == "returning":
        decision = run.tick(FAST)
        assert decision.admission is not None
        if decision.admission.share not in shares:
            shares.append(decision.admission.share)
    assert shares == [0.05, 0.25, 0.5, 1.0]
    assert run.actions()[-1] == "admit"
    assert run.now - tripped < 30 + 6 + 20 + 5


def test_a_lost_probe_starts_the_count_again_and_backs_off_boundedly() -> None:
    run = opened()
    while not run.tick(IDLE).probe:
        pass
    run.probed(1, 0.1)
    run.tick(IDLE)
    assert run.state.wins == 1
    for identity in range(2, 20):
        run.probed(identity, 2.0)
        run.tick(IDLE)
        assert run.state.wins == 0
        waits = run.state.next_probe_at - run.now
        assert waits <= SETTINGS.probe_interval_max_seconds


def test_a_load_that_loses_on_return_goes_back_at_once_and_dwells_longer() -> None:
    run = opened()
    first_dwell = run.state.next_probe_at - run.state.since
    while not run.tick(IDLE).probe:
        pass
    for identity in range(1, 4):
        run.probed(identity, 0.1)
        run.ticks(IDLE, 2)
    assert run.state.phase == "returning"
    decision = run.tick(figures(bound=10e6))
    assert (decision.action, decision.reason_code) == ("bypass", "return_lost")
    assert run.state.next_probe_at - run.state.since == 1.5 * first_dwell


FROZEN = {
    **figures(bound=0.5e6),
    "oldest_load": reading(30.0),
    "loads_in_flight": reading(2.0),
    "in_flight": reading(50e6),
    "last_answer_age": reading(30.0),
    "last_completion_age": reading(30.0),
}


def frozen() -> Run:
    run = Run()
    run.ticks(FAST, 5)
    run.ticks(FROZEN, 4)
    assert (run.state.phase, run.state.cause) == ("open", "frozen")
    return run


def test_a_frozen_store_is_probed_at_once_but_not_let_in_before_half_a_dwell() -> None:
    run = frozen()
    opened_at = run.state.since
    probed_at = next(n for n in range(20) if run.tick(IDLE).probe) + 1
    assert probed_at <= 4
    for identity in range(1, 30):
        run.probed(identity, 0.01)
        run.ticks(IDLE, 3)
        if run.state.phase == "returning":
            break
        assert run.last is not None
        assert run.last.admission is not None
        assert run.last.admission.share == 0
    waited = run.now - opened_at
    assert SETTINGS.dwell_seconds / 2 <= waited <= SETTINGS.dwell_seconds / 2 + 6


def test_a_probe_that_loses_late_in_the_dwell_begins_the_row_anew() -> None:
    run = frozen()
    for identity in range(1, 4):
        run.probed(identity, 0.01)
        run.ticks(IDLE, 2)
    run.probed(4, 9.0)
    run.ticks(IDLE, 1)
    assert run.state.wins == 0
    run.ticks(IDLE, 30)
    assert run.state.phase == "open"


def test_what_first_looked_slow_is_probed_early_once_it_is_frozen() -> None:
    run = opened()
    slow_probe_at = run.state.next_probe_at
    run.ticks(FROZEN, 2)
    assert run.state.cause == "frozen"
    assert run.state.next_probe_at < slow_probe_at
    assert run.state.return_at - run.state.since == SETTINGS.dwell_seconds / 2


def test_the_dwell_is_bounded_and_never_latches() -> None:
    run = Run()
    run.state = replace(run.state, trips=1000)
    run.ticks(SLOW, 5)
    assert run.state.next_probe_at - run.state.since <= SETTINGS.dwell_max_seconds


def test_a_result_older_than_the_bypass_does_not_count() -> None:
    run = opened()
    old = ProbeResult(7, "done", None, 500.0, (ProbeSample(4, 25e6, 0.01, 0.1, False),))
    run.around = replace(run.around, probe=old)
    run.tick(IDLE)
    assert run.state.wins == 0


def test_a_person_wins_over_the_breaker_and_it_starts_afresh() -> None:
    run = opened()
    word = Override("admit", "ana", "testing the new store", run.now, run.now + 60, 1)
    run.around = replace(run.around, override=word)
    decision = run.ticks(SLOW, 10)
    assert decision.admission is not None
    assert decision.admission.share == 1
    assert decision.state == "hurting"
    assert run.actions() == ["bypass", "would_bypass"]
    assert "ana" in run.acted[-1][1].reason
    run.ticks(FAST, 20)
    run.around = replace(run.around, override=None)
    run.ticks(FAST, 30)
    assert run.actions() == ["bypass", "would_bypass"]
    assert run.state.phase == "closed"


def test_what_another_holds_is_left_alone() -> None:
    run = Run(Surroundings("enforce", foreign_holder="person:ben", share_in_force=0.0))
    decision = run.ticks(FAST, 30)
    assert (decision.state, decision.cause, decision.admission) == ("bypassed", "foreign", None)
    assert "person:ben" in decision.reason


def test_overload_sheds_in_part_and_never_to_nothing() -> None:
    run = Run()
    decision = run.ticks(figures(alone=250e6, recent=240e6, rho=2.0, backlog=20, growth=3), 6)
    assert decision.state == "overloaded"
    assert run.actions() == ["shed"]
    assert decision.admission is not None
    assert decision.admission.share == pytest.approx(0.4)
    run.ticks(figures(alone=250e6, recent=240e6, rho=0.5), 40)
    assert run.actions() == ["shed", "admit"]


def test_a_backlog_that_shrinks_is_no_overload() -> None:
    run = Run()
    run.ticks(figures(alone=250e6, recent=240e6, rho=2.0, backlog=20, growth=-3), 30)
    assert run.acted == []


@pytest.mark.parametrize(
    ("seconds", "won"), [(0.1, True), (0.4, True), (0.42, False), (0.6, False)]
)
def test_a_probe_wins_only_by_the_return_ratio(seconds: float, won: bool) -> None:
    # 25 MB at B* = 50 MB/s recompute in 0.5 s; 1.2 times as fast is 0.417 s, lookup included.
    result = ProbeResult(1, "done", None, 0.0, (ProbeSample(4, 25e6, 0.01, seconds, False),))
    assert judge_probe(result, B_STAR, 1.2)[0] is won


@pytest.mark.parametrize("outcome", ["failed", "deadline", "missing", "overlapped", "cancelled"])
def test_a_probe_without_a_result_is_no_win(outcome: str) -> None:
    result = ProbeResult(1, outcome, "no keys known", 0.0, ())
    won, words = judge_probe(result, B_STAR, 1.2)
    assert not won
    assert outcome in words
