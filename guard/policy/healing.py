"""Healing the way to L2: which cure, when, and when only a person can help.

A pure function of what was seen, its own state, the time and a random number, beside the
breaker: a fresh adapter does not change what is admitted. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from guard.policy.diagnosis import (
    Facts,
    Finding,
    Proof,
    diagnose,
    refused_password,
    store_problem,
)
from guard.policy.types import Ailment, Healing, Operation

_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0
# A try that finds no store changes nothing and costs one connect; L2 is to be back within
# a minute of the store.
_UNREACHABLE_PAUSE_SECONDS = 30.0
_JITTER = 0.2
_ENDED_AFTER_SECONDS = 5.0
_WELL_SECONDS = 60.0
_CURES_IN_VAIN = 5
_CURES_WITHIN_SECONDS = 600.0
_CURE_TAKES_SECONDS = 3.0
# The gate ends a probe after ten.
_PROBE_TAKES_SECONDS = 12.0
_WAITS_PAGES_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Course:
    """What was tried for one cause: how often since all was well, when it may be tried
    again, and when it was tried lately."""

    attempts: int = 0
    next_at: float = 0.0
    cures: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class HealingState:
    """All that healing remembers. `seen_at` is when something was last wrong, `incurable`
    what was then to be done by a person; `told` are the events of this ailment that were
    told. `proof` and the `probe*` fields belong to the lost keys that a probe looks for,
    `probes` being those that could not tell. `failed_stores` is the count that the last
    cure was tried on."""

    ailment: Ailment | None = None
    since: float = 0.0
    seen_at: float = 0.0
    courses: Mapping[str, Course] = field(default_factory=dict)
    incurable: str | None = None
    told: tuple[str, ...] = ()
    proof: Proof | None = None
    probes: int = 0
    probe_tries: int = 0
    probe_asked_at: float | None = None
    next_probe_at: float = 0.0
    failed_stores: float = 0.0

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> HealingState:
        """What `dataclasses.asdict` made of a state. Raises KeyError, TypeError and
        ValueError for anything else."""
        fields = dict(document)
        courses = {
            str(cause): Course(int(c["attempts"]), float(c["next_at"]), tuple(c["cures"]))
            for cause, c in fields.pop("courses").items()
        }
        return HealingState(**{**fields, "courses": courses, "told": tuple(fields["told"])})


def heal(
    facts: Facts, state: HealingState, now: float, random: Callable[[], float]
) -> tuple[Healing, HealingState]:
    """What is wrong, what to do now, and the state to remember. `random` gives [0, 1)."""
    state = _read_probe(facts, state, now)
    failed = facts.snapshot.value("failed_stores")
    if failed is not None and failed < state.failed_stores:
        state = replace(state, failed_stores=0.0)
    finding = diagnose(facts, state.proof, state.probes, state.failed_stores)
    if finding is None:
        return _well(state, now)
    state = replace(state, seen_at=now)
    event = None
    if finding.ailment is not None and finding.ailment != state.ailment:
        since = state.since if state.ailment is not None else now
        state = replace(state, ailment=finding.ailment, since=since, told=())
        event = "began"
    operation: Operation | None = None
    probe = False
    if finding.cure is not None:
        operation, state = _cure(facts, finding, state, now, random)
    elif finding.probe:
        probe, state = _probe(facts, state, now, random)
    # While a probe looks for the lost keys again, the ailment is still what it was.
    cause = finding.cure or (state.ailment if finding.probe else None)
    incurable = _incurable(facts, finding, cause, state, now) if state.ailment else None
    would = facts.observing and finding.cure is not None and incurable is None
    if event is None and would and "would_rebuild" not in state.told:
        event = "would_rebuild"
    if event is None and incurable is not None and "incurable" not in state.told:
        event = "incurable"
    told = (event,) if event in ("would_rebuild", "incurable") else ()
    state = replace(state, incurable=incurable, told=(*state.told, *told))
    return replace(
        _shown(cause or "", state, finding.words),
        next_at=_next_at(facts, finding, state),
        incurable=incurable,
        event=event,
        operation=operation,
        probe_lost=probe,
    ), state


def _well(state: HealingState, now: float) -> tuple[Healing, HealingState]:
    quiet = now - state.seen_at
    state = replace(state, proof=None, probes=0, probe_asked_at=None)
    if quiet >= _WELL_SECONDS:
        state = replace(state, courses={}, probe_tries=0, next_probe_at=0.0)
    if state.ailment is None:
        return Healing(None), state
    if quiet < _ENDED_AFTER_SECONDS:
        words = f"nothing wrong for {quiet:.0f} s"
        return replace(_shown("", state, words), incurable=state.incurable), state
    ended = replace(
        _shown("", state, f"{state.ailment} is over after {state.seen_at - state.since:.0f} s"),
        event="ended",
    )
    return ended, replace(state, ailment=None, incurable=None, told=())


def _shown(cause: str, state: HealingState, words: str) -> Healing:
    course = state.courses.get(cause)
    attempts = (
        course.attempts if course else max((c.attempts for c in state.courses.values()), default=0)
    )
    return Healing(
        state.ailment, state.since if state.ailment else None, attempts=attempts, words=words
    )


def _next_at(facts: Facts, finding: Finding, state: HealingState) -> float | None:
    if not facts.acting:
        return None
    if finding.cure is not None:
        course = state.courses.get(finding.cure)
        able = facts.gate is not None and bool(facts.gate.can_rebuild)
        return course.next_at if course and able else None
    return state.next_probe_at if finding.probe else None


def _cure(
    facts: Facts,
    finding: Finding,
    state: HealingState,
    now: float,
    random: Callable[[], float],
) -> tuple[Operation | None, HealingState]:
    assert finding.cure is not None
    course = state.courses.get(finding.cure, Course())
    able = facts.gate is not None and bool(facts.gate.can_rebuild)
    if not facts.acting or facts.busy or not able or now < course.next_at:
        return None, state
    recent = tuple(at for at in course.cures if now - at <= _CURES_WITHIN_SECONDS)
    tried = Course(
        course.attempts + 1,
        now + _pause(course.attempts, store_problem(facts), random),
        (*recent, now),
    )
    # What the lost keys were proved to be is used up: the next ones are others.
    probes = 0 if state.proof is not None else state.probes
    courses = {**state.courses, finding.cure: tried}
    failed = facts.snapshot.value("failed_stores") or 0.0
    state = replace(state, courses=courses, proof=None, probes=probes, failed_stores=failed)
    return Operation("rebuild", finding.cure), state


def _probe(
    facts: Facts, state: HealingState, now: float, random: Callable[[], float]
) -> tuple[bool, HealingState]:
    asked = state.probe_asked_at is not None
    if not facts.acting or facts.busy or asked or now < state.next_probe_at:
        return False, state
    pause = _pause(state.probe_tries, store_problem(facts), random)
    return True, replace(
        state,
        probe_asked_at=now,
        next_probe_at=now + pause,
        probe_tries=state.probe_tries + 1,
    )


def _read_probe(facts: Facts, state: HealingState, now: float) -> HealingState:
    """Take up the result of the probe that was asked for."""
    asked_at, probe = state.probe_asked_at, facts.lost_probe
    if asked_at is None:
        return state
    if probe is None or now - probe.age_seconds < asked_at:
        late = now - asked_at > _PROBE_TAKES_SECONDS
        return replace(state, probe_asked_at=None, probes=state.probes + 1) if late else state
    state = replace(state, probe_asked_at=None)
    if probe.outcome == "done":
        return replace(state, proof="connection_lost")
    if probe.outcome == "missing":
        return replace(state, proof="store_emptied")
    # A store that cannot be reached explains a probe that failed; it is asked again.
    return replace(state, probes=state.probes + (store_problem(facts) is None))


def _pause(attempts: int, problem: str | None, random: Callable[[], float]) -> float:
    longest = _LONGEST_PAUSE_SECONDS if problem is None else _UNREACHABLE_PAUSE_SECONDS
    pause = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(attempts, 10), longest)
    return pause * (1.0 - _JITTER + 2.0 * _JITTER * random())


def _incurable(
    facts: Facts, finding: Finding, cause: str | None, state: HealingState, now: float
) -> str | None:
    """What a person must do, None while it may heal by itself."""
    problem, gate = store_problem(facts), facts.gate
    if finding.ailment in ("store_unreachable", "detached"):
        if refused_password(problem):
            return (
                f"the store refuses the password: {problem}; correct it where the adapter is "
                "configured and restart the LMCache server"
            )
        if now - state.since >= _WAITS_PAGES_SECONDS:
            return (
                f"the store cannot be reached: {finding.words}; bring it back, and L2 "
                "returns by itself"
            )
        return None
    help_ = _STORES_HELP if finding.ailment == "stores_failing" else _HELP.get(cause or "")
    if cause is None or help_ is None:
        return None
    if gate is None or not gate.can_rebuild:
        # One that has exchanged adapters can: those it could not close yet are in the way.
        if gate is not None and gate.generation and now - state.since < _WAITS_PAGES_SECONDS:
            return None
        why = (gate.why_not.get("rebuild") if gate else None) or "the gate is too old"
        return f"{help_}; the adapter cannot be built anew here ({why})"
    course = state.courses.get(cause, Course())
    lately = [at for at in course.cures if now - at <= _CURES_WITHIN_SECONDS]
    if len(lately) < _CURES_IN_VAIN or now - lately[-1] < _CURE_TAKES_SECONDS:
        return None
    return f"{help_}; {len(lately)} fresh adapters did not help"


_HELP: Mapping[str, str] = {
    "connection_lost": "restart the LMCache server",
    "store_emptied": "the store loses its keys again and again: look at its memory limit and "
    "its eviction",
    "load_hung": "loads hang again and again: look at the store's eviction and its log, or "
    "restart the LMCache server",
    "built_while_down": "restart the LMCache server while the store is up",
}
_STORES_HELP = (
    "the store takes nothing: look at its memory limit, its disk and its permissions, or "
    "restart the LMCache server"
)
