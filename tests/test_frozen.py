"""A store that answers nothing: told from a slow one, out within seconds, hung loads ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from guard.policy.breaker import decide
from guard.policy.stalled import hung_seconds, patience_seconds
from guard.policy.state import BreakerState, PolicySettings, Surroundings
from guard.policy.types import Decision, Operation, Override
from guard.policy.verdict import Limits, judge
from tests.figures import B_STAR, hanging_loads, hanging_lookup, snapshot

ABLE = Surroundings("enforce", can_abort=True)


def kind(**given: Any) -> tuple[str, str | None]:
    verdict = judge(snapshot(**given), Limits())
    return verdict.kind, verdict.cause


def test_patience_is_twice_the_recompute_of_what_is_in_flight() -> None:
    assert patience_seconds(snapshot(**hanging_loads(9, loads=3, size=100e6))) == 4.0
    assert patience_seconds(snapshot(mean_load=75e6)) == 3.0
    assert patience_seconds(snapshot(mean_load=1e6)) == 1.0
    assert patience_seconds(snapshot()) == 2.0
    assert patience_seconds(snapshot(break_even_bandwidth="no_prefill_yet", mean_load=9e9)) == 5.0


def test_lookups_that_hang_are_frozen_as_soon_as_patience_ends() -> None:
    assert kind(**hanging_lookup(1.9)) == ("idle", None)
    assert kind(**hanging_lookup(2.1)) == ("frozen", "frozen")


@pytest.mark.parametrize(
    "given",
    [
        {"last_answer_age": 500.0, "last_completion_age": 500.0},
        hanging_lookup(60.0, last_answer_age=1.0),
        hanging_lookup(60.0, last_answer_age="not_given"),
        hanging_lookup(4.9, break_even_bandwidth="no_prefill_yet"),
    ],
    ids=["idle", "L2 answers others", "an older gate tells no answers", "no break-even yet"],
)
def test_what_is_not_frozen(given: dict[str, Any]) -> None:
    assert kind(**given)[0] != "frozen"


def test_without_a_break_even_nothing_answered_for_5_s_is_enough() -> None:
    for hanging in (hanging_lookup(5.1), hanging_loads(5.1)):
        assert kind(**{**hanging, "break_even_bandwidth": "no_prefill_yet"})[0] == "frozen"


@pytest.mark.parametrize("age", [2.0, 4.0, 8.0])
def test_a_store_that_only_crawls_is_slow(age: float) -> None:
    # 12 MB/s where break-even is 100: two loads of 50 MB complete nothing for 8 s.
    verdict = judge(snapshot(**hanging_loads(age, break_even_bandwidth=100e6)), Limits())
    assert (verdict.kind, verdict.cause, verdict.silent) == ("slow", "slow", True)


def test_loads_that_move_next_to_nothing_are_frozen() -> None:
    assert kind(**hanging_loads(35.0))[0] == "slow"
    assert kind(**hanging_loads(41.0))[0] == "frozen"


@pytest.mark.parametrize("never", [{"adapter_answered": 0.0}, {"adapter_attached": 0.0}])
def test_an_adapter_that_never_answered_is_a_failed_store(never: dict[str, float]) -> None:
    hanging = hanging_lookup(3.0, last_answer_age="nothing_answered_yet", **never)
    assert kind(**hanging) == ("frozen", "store_failed")


def test_a_load_that_hangs_beside_others_is_told_from_a_crowd() -> None:
    given = {
        **hanging_loads(12.0, loads=1, size=6e6),
        "bandwidth_recent": 60e6,
        "last_answer_age": 0.3,
        "last_completion_age": 0.3,
    }
    assert hung_seconds(snapshot(**given), 10.0) == 12.0
    assert hung_seconds(snapshot(**given), 13.0) is None
    assert hung_seconds(snapshot(**{**given, "last_answer_age": 3.1}), 10.0) is None
    assert hung_seconds(snapshot(**{**given, "bandwidth_recent": "idle"}), 10.0) is None
    crowded = {**given, "in_flight": 250e6, "loads_in_flight": 5.0}
    assert hung_seconds(snapshot(**crowded), 10.0) is None


@dataclass
class Run:
    """A breaker on a scripted clock; keeps what it did and when."""

    around: Surroundings = ABLE
    state: BreakerState = field(default_factory=BreakerState)
    now: float = 1000.0
    did: list[tuple[float, str, Decision]] = field(default_factory=list)

    def tick(self, seconds: float = 1.0, **given: Any) -> Decision:
        self.now += seconds
        decision, self.state = decide(
            snapshot(self.now, **given),
            self.state,
            PolicySettings(),
            self.around,
            self.now,
            lambda: 0.5,
        )
        if decision.action:
            self.did.append((self.now, decision.action, decision))
        return decision

    def actions(self) -> list[str]:
        return [action for _, action, _ in self.did]


@pytest.mark.parametrize("interval", [1.0, 0.97])
@pytest.mark.parametrize("phase", [0.05, 0.5, 0.95])
def test_a_freeze_is_bypassed_within_5_s(interval: float, phase: float) -> None:
    for hanging in (hanging_lookup, hanging_loads):
        run = Run(now=phase)
        while not run.did:
            age = run.now + interval
            run.tick(interval, **(hanging(age) if age > 0.1 else {}))
            assert run.now < 5.0
        assert run.actions() == ["bypass"]


def test_frozen_takes_two_ticks() -> None:
    run = Run()
    run.tick(**hanging_lookup(30.0))
    run.tick(bandwidth_alone=250e6)
    assert run.did == []


def test_slow_that_turns_frozen_is_one_episode_and_then_shown_as_frozen() -> None:
    run = Run()
    run.tick(**hanging_loads(3.0))
    decision = run.tick(**hanging_loads(50.0))
    assert (decision.action, decision.cause) == ("bypass", "frozen")
    run = Run()
    for age in (3.0, 4.0, 5.0):
        run.tick(**hanging_loads(age))
    assert run.state.cause == "slow"
    assert run.tick(**hanging_loads(60.0)).cause == "frozen"
    assert run.tick().cause == "frozen"


def bypassed(around: Surroundings = ABLE) -> Run:
    run = Run(around)
    while run.state.phase != "open":
        run.tick(**hanging_lookup(9.0))
    run.did.clear()
    return run


def test_hung_loads_are_aborted_once_then_with_back_off() -> None:
    run = bypassed()
    began, age = run.now, 3.0
    for _ in range(40):
        age += 1.0
        run.tick(**hanging_loads(age, loads=4, prefill_utilization=0.4))
    aborts = [when - began for when, action, _ in run.did if action == "abort"]
    assert aborts == [2, 7, 17, 37]
    decision = run.did[0][2]
    assert decision.operation == Operation("abort", "frozen", 0.6 * B_STAR, 10.0)
    assert decision.admission is not None
    assert decision.admission.share == 0
    assert "4 loads still hang" in decision.reason
    run.tick()
    assert (run.state.aborts, run.state.next_abort_at) == (0, 0.0)


def test_a_slow_bypass_whose_loads_must_be_aborted_was_frozen_and_is_probed_early() -> None:
    run = Run(ABLE)
    slow = hanging_loads(3.0, break_even_bandwidth=100e6)
    assert kind(**slow) == ("slow", "slow")
    while run.state.phase != "open":
        run.tick(**slow)
    assert run.state.cause == "slow"
    began, dwell = run.now, run.state.return_at - run.state.since
    age = 3.0
    while run.did[-1][1] != "abort":
        age += 1.0
        # The bound stays too high to be called frozen, as with half of a load moved.
        run.tick(**hanging_loads(age, break_even_bandwidth=100e6))
    assert run.state.cause == "frozen"
    assert run.state.next_probe_at <= run.now + 3.0
    assert run.state.return_at == run.state.since + dwell / 2
    assert run.now - began < 5.0


def test_the_release_never_falls_under_a_quarter_of_the_gpu() -> None:
    run = bypassed()
    for age in (4.0, 5.0, 6.0):
        run.tick(**hanging_loads(age, prefill_utilization=1.3))
    assert run.did[0][2].operation == Operation("abort", "frozen", 0.25 * B_STAR, 10.0)


def test_without_a_break_even_the_release_is_spread_evenly() -> None:
    run = Run()
    while not run.state.aborts:
        run.tick(**hanging_loads(30.0, break_even_bandwidth="no_prefill_yet"))
    assert run.did[-1][2].operation == Operation("abort", "frozen", 100e6 / 10, 10.0)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"loads_in_flight": "cache_down"},
        hanging_loads(1.5),
        hanging_loads(9.0, last_completion_age=1.5),
        hanging_loads(9.0, releasing_loads=3.0),
        hanging_loads(9.0, oldest_load="not_a_number"),
    ],
    ids=["none in flight", "not seen", "young", "others complete", "being released", "NaN"],
)
def test_what_is_not_aborted(given: dict[str, Any]) -> None:
    run = bypassed()
    for _ in range(10):
        run.tick(**given)
    assert "abort" not in run.actions()


def test_a_gate_that_cannot_abort_is_told_once() -> None:
    run = bypassed(Surroundings("enforce", can_abort=False, why_no_abort="fs keeps writing"))
    for age in range(4, 120):
        decision = run.tick(**hanging_loads(age))
        assert decision.operation is None
    told = [decision for _, action, decision in run.did if action == "abort_refused"]
    assert len(told) == 1
    assert "fs keeps writing" in told[0].reason


def test_observe_only_tells() -> None:
    run = Run(replace(ABLE, mode="observe"))
    for age in range(3, 60):
        assert run.tick(**hanging_loads(age)).operation is None
    assert run.actions() == ["would_bypass", "would_abort"]


def override(run: Run, mode: Any) -> Override:
    return Override(mode, "ana", "store upgrade", run.now, run.now + 900, 1)


def test_a_persons_bypass_ends_hung_loads_too() -> None:
    run = Run()
    run.around = replace(ABLE, override=override(run, "bypass"))
    for age in (3.0, 4.0, 5.0):
        decision = run.tick(**hanging_loads(age))
    assert run.actions() == ["abort"]
    assert run.did[0][0] == 1002
    assert decision.cause == "manual"


@pytest.mark.parametrize(
    "change",
    [{"foreign_holder": "person:ben", "share_in_force": 0.0}, {"mode": "observe"}],
    ids=["another leads", "observe"],
)
def test_nothing_is_aborted_under_a_bypass_unless_we_lead_and_enforce(change: Any) -> None:
    run = Run()
    run.around = replace(ABLE, override=override(run, "bypass"), **change)
    for age in range(3, 30):
        assert run.tick(**hanging_loads(age)).operation is None
    run = Run(replace(ABLE, **change))
    for age in range(3, 30):
        assert run.tick(**hanging_loads(age)).operation is None


def test_a_person_who_keeps_l2_in_keeps_its_loads() -> None:
    run = Run()
    run.around = replace(ABLE, override=override(run, "admit"))
    for age in range(3, 60):
        run.tick(**hanging_loads(age))
    assert run.actions() == ["would_bypass"]


def test_frozen_again_on_the_way_back_is_out_at_once() -> None:
    run = bypassed()
    run.state = replace(run.state, phase="returning", step_since=run.now)
    decision = run.tick(**hanging_lookup(2.5))
    assert (decision.action, decision.cause) == ("bypass", "frozen")


def test_where_nothing_can_be_probed_a_frozen_l2_is_not_let_in_blindly() -> None:
    run = bypassed(replace(ABLE, can_probe=False))
    for age in range(10, 100):
        assert run.tick(**hanging_lookup(age)).state == "bypassed"
    assert run.tick().action == "return"
