"""Healing on a scripted clock: each ailment recognised, cured, ended, and not mistaken."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.policy.diagnosis import Facts
from guard.policy.healing import HealingState, heal
from guard.policy.types import Healing
from guard.policy.verdict import Limits, judge
from guard.sources.gate import GateStatus, ProbeResult
from tests.figures import hanging_loads, snapshot

GATE = GateStatus(
    adapter_index=0,
    l2="resp",
    epoch="aa",
    revision=1,
    share=1.0,
    min_chunks=0,
    max_loads=5,
    default_share=1.0,
    holder="kvguard:a",
    reason=None,
    lease_expires_in_seconds=20.0,
    can_probe=True,
    probe_running=False,
    probe=None,
    known_keys=40,
    can_abort=True,
    can_rebuild=True,
    generation=0,
    abandoned_lookups=0,
)
LOST = {"lost_lookups": 4.0, "last_answer_age": 0.2}
NEVER: dict[str, Any] = {
    "adapter_answered": 0.0,
    "adapter_age": 6.0,
    "oldest_lookup": 4.0,
    "last_answer_age": "nothing_answered_yet",
}
STORES = {"failed_stores": 3.0, "last_answer_age": 0.2}
HUNG: dict[str, Any] = {
    **hanging_loads(12.0, loads=1, size=6e6),
    "bandwidth_alone": 200e6,
    "bandwidth_recent": 200e6,
    "bound": 90e6,
    "last_answer_age": 0.4,
    "last_completion_age": 0.4,
}
DETACHED = {"adapter_attached": 0.0}


def lost_probe(outcome: str, error: str | None = None) -> ProbeResult:
    return ProbeResult(1, outcome, error, 0.0, (), "lost")


@dataclass
class Run:
    """Healing with its clock; keeps what it asked for and told, with the time."""

    gate: GateStatus = GATE
    state: HealingState = field(default_factory=HealingState)
    now: float = 1000.0
    chance: float = 0.5
    acting: bool = True
    observing: bool = False
    phase: Any = "closed"
    busy: bool = False
    probe: ProbeResult | None = None
    lost: ProbeResult | None = None
    failed: float = 2.0
    cures: list[tuple[float, str]] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    events: list[tuple[float, str, str | None]] = field(default_factory=list)

    def tick(self, seconds: float = 1.0, **figures: Any) -> Healing:
        self.now += seconds
        seen = snapshot(self.now, **figures)
        facts = Facts(
            seen,
            judge(seen, Limits()),
            self.phase,
            self.gate,
            acting=self.acting,
            observing=self.observing,
            busy=self.busy,
            probe=self.probe,
            lost_probe=self.lost,
        )
        healing, self.state = heal(facts, self.state, self.now, lambda: self.chance)
        if healing.operation is not None:
            assert healing.operation.kind == "rebuild"
            self.cures.append((self.now, healing.operation.cause))
        if healing.probe_lost:
            self.probes.append(self.now)
        if healing.event is not None:
            self.events.append((self.now, healing.event, healing.ailment))
        return healing

    def ticks(self, count: int, **figures: Any) -> Healing:
        for _ in range(count):
            healing = self.tick(**figures)
        return healing

    def failing(self, count: int) -> Healing:
        """One more store fails every second."""
        for _ in range(count):
            self.failed += 1.0
            healing = self.tick(failed_stores=self.failed, last_answer_age=0.2)
        return healing

    def told(self) -> list[tuple[str, str | None]]:
        return [(event, ailment) for _, event, ailment in self.events]


@pytest.mark.parametrize(
    ("outcome", "ailment"), [("done", "connection_lost"), ("missing", "store_emptied")]
)
def test_lost_keys_are_looked_for_by_a_probe_that_tells_the_ailment(
    outcome: str, ailment: str
) -> None:
    run = Run()
    healing = run.tick(**LOST)
    assert (healing.ailment, healing.probe_lost) == (None, True)
    run.lost = lost_probe(outcome)
    healing = run.tick(**LOST)
    assert healing.ailment == ailment
    assert run.cures == [(1002.0, ailment)]
    assert run.told() == [("began", ailment)]
    run.ticks(8, bandwidth_alone=250e6)
    assert run.told() == [("began", ailment), ("ended", ailment)]
    assert run.tick().ailment is None
    assert len(run.cures) == 1


def test_a_probe_that_ended_before_it_was_asked_for_proves_nothing() -> None:
    run = Run(lost=replace(lost_probe("done"), age_seconds=30.0))
    run.ticks(3, **LOST)
    assert run.cures == []
    assert len(run.probes) == 1


@pytest.mark.parametrize(
    "figures",
    [
        {"lost_lookups": 2.0},
        {"lost_lookups": "not_given"},
        {"hit_l2": 0.0},
        {"failed_stores": 2.0},
        {"last_answer_age": 5000.0},
        hanging_loads(30.0),
        {**HUNG, "oldest_load": 9.0},
        {**HUNG, "last_answer_age": 6.0},
        {**HUNG, "last_answer_age": "not_given"},
        {**HUNG, "in_flight": 900e6},
        {**HUNG, "bandwidth_alone": 12e6},
        {**NEVER, "oldest_lookup": 2.0},
        {**NEVER, "oldest_lookup": "nothing_in_flight"},
        {**NEVER, "adapter_answered": "not_given"},
        {"adapter_answered": 0.0, "adapter_age": 900.0},
    ],
    ids=[
        "two misses of known keys",
        "an older gate",
        "a cold cache misses unknown keys",
        "two failed stores",
        "idle",
        "frozen is the breaker's matter",
        "a load not old enough",
        "a slow store: others are answered seldom",
        "no answers are told",
        "so much in flight that it takes long",
        "a slow store",
        "a lookup of an adapter just built",
        "nothing is asked of it",
        "an older gate does not tell",
        "never asked since it was built",
    ],
)
def test_what_is_no_ailment(figures: dict[str, Any]) -> None:
    run = Run()
    healing = run.ticks(60, **figures)
    assert (healing.ailment, run.cures, run.probes, run.events) == (None, [], [], [])


@pytest.mark.parametrize(
    ("figures", "ailment", "cause"),
    [
        (NEVER, "built_while_down", "built_while_down"),
        (STORES, "stores_failing", "connection_lost"),
        (HUNG, "load_hung", "load_hung"),
        ({**HUNG, "oldest_load": 4.0, "oldest_lookup": 14.0}, "load_hung", "load_hung"),
    ],
)
def test_recognised_cured_and_ended(figures: dict[str, Any], ailment: str, cause: str) -> None:
    run = Run()
    healing = run.tick(**figures)
    assert (healing.ailment, healing.incurable) == (ailment, None)
    assert run.cures == [(1001.0, cause)]
    run.ticks(7, bandwidth_alone=250e6)
    assert run.told() == [("began", ailment), ("ended", ailment)]


def test_lookups_given_up_on_a_new_adapter_are_enough_after_a_while() -> None:
    waiting = {**NEVER, "oldest_lookup": "nothing_in_flight"}
    run = Run(replace(GATE, abandoned_lookups=3))
    assert run.tick(**{**waiting, "adapter_age": 9.0}).ailment is None
    assert run.tick(**{**waiting, "adapter_age": 10.5}).ailment == "built_while_down"
    # One that the gate built on a store that answered is given longer.
    run = Run(replace(GATE, abandoned_lookups=3, generation=2))
    assert run.tick(**{**NEVER, "adapter_age": 25.0}).ailment is None
    assert run.tick(**{**waiting, "adapter_age": 31.0}).ailment == "built_while_down"


def test_a_probe_that_is_served_while_given_up_lookups_hang_is_a_lost_connection() -> None:
    run = Run(replace(GATE, abandoned_lookups=2), phase="open")
    silent = {"last_answer_age": 40.0}
    assert run.tick(**silent).ailment is None
    run.probe = ProbeResult(5, "done", None, 0.5, ())
    assert run.tick(last_answer_age=0.2).ailment is None
    assert run.tick(**silent).ailment == "connection_lost"
    assert run.cures == [(1003.0, "connection_lost")]
    failed = Run(replace(GATE, abandoned_lookups=2), phase="open")
    failed.probe = ProbeResult(5, "deadline", None, 0.5, ())
    assert failed.ticks(9, **silent).ailment is None


def test_back_off_doubles_up_to_a_minute_and_starts_again_after_a_healthy_one() -> None:
    run = Run()
    run.failing(300)
    times = [when for when, _ in run.cures]
    assert [b - a for a, b in pairwise(times)] == [2, 4, 8, 16, 32, 60, 60, 60]
    run.ticks(62)
    assert run.state.courses == {}
    before = len(run.cures)
    run.failing(4)
    assert len(run.cures) == before + 2


def test_a_count_that_stands_still_is_no_new_sign() -> None:
    run = Run()
    run.failing(1)
    run.ticks(120, **STORES)
    assert len(run.cures) == 1
    assert run.told() == [("began", "stores_failing"), ("ended", "stores_failing")]


def test_an_ailment_that_comes_back_soon_goes_on_with_its_back_off() -> None:
    run = Run()
    run.failing(1)
    run.ticks(20)
    assert run.told()[-1] == ("ended", "stores_failing")
    run.failing(1)
    healing = run.failing(1)
    assert healing.attempts == 2
    assert healing.next_at == run.now - 1 + 4


def test_five_cures_in_vain_page_and_it_goes_on_trying() -> None:
    run = Run()
    run.failing(33)
    assert len(run.cures) == 5
    assert run.failing(2).incurable is not None
    healing = run.failing(60)
    assert "the store takes nothing" in str(healing.incurable)
    assert "did not help" in str(healing.incurable)
    assert len(run.cures) >= 6
    assert [event for event, _ in run.told()] == ["began", "incurable"]
    assert run.tick().incurable is not None
    assert run.ticks(6).incurable is None


def test_an_adapter_that_cannot_be_rebuilt_needs_a_person_at_once() -> None:
    run = Run(replace(GATE, can_rebuild=False, why_not={"rebuild": "fs keeps writing"}))
    healing = run.ticks(30, **HUNG)
    assert "fs keeps writing" in str(healing.incurable)
    assert (run.cures, healing.next_at) == ([], None)


def test_a_gate_that_only_waits_for_old_adapters_pages_after_a_minute() -> None:
    why = {"rebuild": "2 old adapters cannot be closed yet"}
    run = Run(replace(GATE, can_rebuild=False, generation=3, why_not=why))
    assert run.failing(50).incurable is None
    assert "cannot be closed yet" in str(run.failing(15).incurable)


def test_observe_tells_once_and_asks_nothing() -> None:
    run = Run(acting=False, observing=True)
    for figures in (LOST, HUNG):
        run.ticks(100, **figures)
        run.ticks(10)
    assert (run.cures, run.probes) == ([], [])
    assert run.told() == [
        ("began", "connection_lost"),
        ("would_rebuild", "connection_lost"),
        ("ended", "connection_lost"),
        ("began", "load_hung"),
        ("would_rebuild", "load_hung"),
        ("ended", "load_hung"),
    ]


def test_where_another_leads_nothing_is_asked_but_it_is_shown() -> None:
    run = Run(acting=False)
    assert run.ticks(30, **LOST).ailment == "connection_lost"
    assert (run.cures, run.probes) == ([], [])
    assert run.told() == [("began", "connection_lost")]


def test_a_store_that_cannot_be_reached_is_told_then_paged_and_healed_when_back() -> None:
    run = Run()
    run.tick(**LOST)
    run.gate = replace(GATE, store_problem="valkey:6379 refused the connection")
    run.lost = lost_probe("failed", "refused")
    healing = run.tick(**LOST)
    assert (healing.ailment, healing.incurable) == ("store_unreachable", None)
    assert "refused the connection" in healing.words
    healing = run.ticks(200, **LOST)
    assert "bring it back" in str(healing.incurable)
    gaps = [b - a for a, b in pairwise(run.probes)]
    assert max(gaps) <= 36
    assert run.cures == []
    run.gate, run.lost = GATE, lost_probe("missing")
    back = run.now
    while not run.cures:
        run.tick(**LOST)
    assert run.now - back <= 38


def test_a_refused_password_needs_a_person_at_once() -> None:
    problem = "NOAUTH Authentication required."
    run = Run(replace(GATE, store_problem=problem))
    healing = run.tick(**DETACHED)
    assert healing.ailment == "detached"
    assert "the store refuses the password" in str(healing.incurable)
    assert run.failing(1).ailment == "store_unreachable"


def test_detached_is_the_gates_to_cure() -> None:
    run = Run(replace(GATE, store_problem="no route"))
    healing = run.ticks(30, **DETACHED)
    assert (healing.ailment, healing.words, healing.incurable) == ("detached", "no route", None)
    assert run.ticks(40, **DETACHED).incurable is not None
    assert run.cures == []


def test_an_old_problem_without_any_sign_is_no_ailment() -> None:
    run = Run(replace(GATE, store_problem="refused an hour ago"))
    assert run.ticks(30, last_answer_age=0.5).ailment is None
    run.phase = "open"
    assert run.tick().ailment == "store_unreachable"


def test_a_probe_that_never_tells_is_not_waited_for_for_ever() -> None:
    run = Run()
    run.ticks(120, **LOST)
    assert len(run.probes) == 2
    assert run.cures[0][1] == "connection_lost"
    assert run.cures[0][0] - run.probes[0] < 30


def test_busy_waits() -> None:
    run = Run(busy=True)
    run.failing(30)
    assert run.cures == []
    run.busy = False
    run.failing(1)
    assert len(run.cures) == 1


def test_the_state_goes_through_json_and_back() -> None:
    run = Run()
    run.failing(10)
    run.ticks(1, **LOST)
    document = json.loads(json.dumps(asdict(run.state)))
    assert HealingState.from_document(document) == run.state


MISSING = dict.fromkeys(
    (
        *("lost_lookups", "failed_stores", "adapter_attached", "adapter_answered", "adapter_age"),
        *("oldest_lookup", "oldest_load", "last_answer_age", "in_flight", "loads_in_flight"),
    ),
    "cache_down",
)
SYMPTOMS: list[dict[str, Any]] = [{}, LOST, NEVER, STORES, HUNG, DETACHED, MISSING]


@settings(max_examples=300, deadline=None)
@given(
    seen=st.lists(
        st.tuples(
            st.sampled_from(SYMPTOMS),
            st.floats(0.3, 40.0),
            st.floats(0.0, 1.0, exclude_max=True),
            st.booleans(),
            st.sampled_from([None, "refused"]),
            st.sampled_from(["done", "missing", "failed", None]),
        ),
        max_size=60,
    ),
    acting=st.booleans(),
)
def test_one_rebuild_a_back_off_none_unless_acting_none_on_a_missing(seen, acting) -> None:
    run = Run(acting=acting, observing=not acting)
    last: dict[str, float] = {}
    for figures, seconds, chance, busy, problem, outcome in seen:
        run.chance, run.busy = chance, busy
        run.gate = replace(GATE, store_problem=problem)
        run.lost = None if outcome is None else lost_probe(outcome)
        healing = run.tick(seconds, **figures)
        if healing.operation is None:
            continue
        cause = healing.operation.cause
        assert acting
        assert not busy
        assert figures not in ({}, MISSING, DETACHED)
        assert run.now - last.get(cause, 0.0) >= 0.8 * 2.0
        last[cause] = run.now
        assert run.state.courses[cause].next_at - run.now <= 60 * 1.2
    if not acting:
        assert (run.cures, run.probes) == ([], [])
