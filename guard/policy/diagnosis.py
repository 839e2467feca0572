"""Which ailment the figures show: what is wrong with the gate's way to L2, and what cures it.

Each is told from what only looks like it: a cold cache misses keys that nobody knew, a slow
store still answers, an idle one is asked nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from guard.policy.stalled import hung_seconds
from guard.policy.state import Phase
from guard.policy.types import Ailment
from guard.policy.verdict import Verdict
from guard.readings import Missing, Snapshot
from guard.sources.gate import GateStatus, ProbeResult

Cure = Literal["connection_lost", "store_emptied", "load_hung", "built_while_down"]
Proof = Literal["connection_lost", "store_emptied"]

# One lookup may miss keys that were just evicted; three in a row that find none do not.
_LOST_LOOKUPS = 3
_FAILED_STORES = 3
_HUNG_SECONDS = 10.0
_NEVER_ANSWERED_SECONDS = 3.0
_OLD_ADAPTER_SECONDS = 10.0
# The gate only builds anew on a store that answers, so such an adapter is given longer.
_REBUILT_SECONDS = 30.0
_SILENT_SECONDS = 10.0
_FRESH_PROBE_SECONDS = 30.0
_UNSETTLED_PROBES = 2
_PASSWORD = re.compile(r"NOAUTH|WRONGPASS|NOPERM|\bAUTH\b|password", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Facts:
    """What healing must know of one tick. `acting`: the guard enforces, and nobody else
    holds the gate. `busy`: an abort, a rebuild or a probe is under way. `probe` is the
    breaker's last probe of known keys, `lost_probe` the last one of lost keys."""

    snapshot: Snapshot
    verdict: Verdict
    phase: Phase
    gate: GateStatus | None
    acting: bool
    observing: bool = False
    busy: bool = False
    probe: ProbeResult | None = None
    lost_probe: ProbeResult | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a tick shows. `ailment` is None while a probe of the lost keys (`probe`) has
    yet to tell; `cure` is the cause to rebuild for, None where a rebuild is no cure."""

    ailment: Ailment | None
    words: str
    cure: Cure | None = None
    probe: bool = False


def diagnose(
    facts: Facts, proof: Proof | None, probes: int, failed_before: float
) -> Finding | None:
    """The finding of this tick, None when nothing is wrong or it cannot be told. `proof`
    is what a probe of the lost keys showed, `probes` how many of them showed nothing,
    `failed_before` how many stores in a row had failed when a cure was last tried."""
    snapshot = facts.snapshot
    if snapshot.value("adapter_attached") == 0:
        problem = store_problem(facts)
        return Finding("detached", problem or "the gate has no adapter and builds one again")
    finding = (
        _never_answers(facts)
        or _lost(facts, proof, probes)
        or _silent_beside_probe(facts)
        or _stores(facts, failed_before)
        or _hung(facts)
    )
    problem = store_problem(facts)
    if problem is None:
        return finding
    if finding is not None:
        words = f"{problem}; {finding.words}"
        return Finding("store_unreachable", words, finding.cure, finding.probe)
    if facts.phase == "open":
        return Finding("store_unreachable", problem)
    return None


def store_problem(facts: Facts) -> str | None:
    """What the gate's last plain connection to the store met, None for nothing."""
    return facts.gate.store_problem if facts.gate is not None else None


def refused_password(problem: str | None) -> bool:
    """Whether the store is there and does not let the gate in."""
    return problem is not None and _PASSWORD.search(problem) is not None


def _never_answers(facts: Facts) -> Finding | None:
    snapshot, gate = facts.snapshot, facts.gate
    if snapshot.value("adapter_answered") != 0:
        return None
    lookup, age = snapshot.value("oldest_lookup"), snapshot.value("adapter_age")
    waiting = lookup is not None or bool(gate is not None and gate.abandoned_lookups)
    if not waiting or age is None:
        return None
    rebuilt = gate is not None and bool(gate.generation)
    patience = _REBUILT_SECONDS if rebuilt else _NEVER_ANSWERED_SECONDS
    old = _REBUILT_SECONDS if rebuilt else _OLD_ADAPTER_SECONDS
    if not ((lookup is not None and lookup > patience) or age > old):
        return None
    return Finding(
        "built_while_down",
        f"the adapter has answered nothing in the {age:.0f} s since it was built, and lookups "
        "wait for it",
        "built_while_down",
    )


def _lost(facts: Facts, proof: Proof | None, probes: int) -> Finding | None:
    lost = facts.snapshot.value("lost_lookups")
    if lost is None or lost < _LOST_LOOKUPS:
        return None
    words = f"{lost:.0f} lookups in a row found none of the keys known to be in L2"
    if proof == "store_emptied":
        return Finding(
            "store_emptied",
            f"{words}, nor does a connection of a probe's own: the store was emptied",
            "store_emptied",
        )
    if proof == "connection_lost":
        return Finding(
            "connection_lost",
            f"{words}, while a connection of a probe's own finds them",
            "connection_lost",
        )
    can_probe = facts.acting and facts.gate is not None and facts.gate.can_probe
    if can_probe and probes < _UNSETTLED_PROBES:
        return Finding(None, words, probe=True)
    untold = "no probe could tell more" if can_probe else "no probe was made"
    return Finding("connection_lost", f"{words}; {untold}", "connection_lost")


def _silent_beside_probe(facts: Facts) -> Finding | None:
    """The store serves a probe while the lookups given up on still hang: a connection that
    is open on this side only, or a worker that waits for an answer for ever."""
    probe, gate = facts.probe, facts.gate
    if probe is None or probe.outcome != "done" or probe.age_seconds > _FRESH_PROBE_SECONDS:
        return None
    if gate is None or not gate.abandoned_lookups:
        return None
    answered = facts.snapshot.get("last_answer_age")
    if isinstance(answered, Missing):
        if answered.reason != "nothing_answered_yet":
            return None
    elif answered.value <= max(_SILENT_SECONDS, probe.age_seconds):
        return None
    return Finding(
        "connection_lost",
        f"a probe's own connection is served, but {gate.abandoned_lookups} lookups that were "
        "given up hang on",
        "connection_lost",
    )


def _stores(facts: Facts, failed_before: float) -> Finding | None:
    """The count goes on over a rebuild; only a store that failed after it speaks against
    the fresh adapter."""
    failed = facts.snapshot.value("failed_stores")
    if failed is None or failed < _FAILED_STORES or failed == failed_before:
        return None
    return Finding("stores_failing", f"{failed:.0f} stores in a row failed", "connection_lost")


def _hung(facts: Facts) -> Finding | None:
    if facts.verdict.losing or facts.verdict.kind == "overloaded":
        return None
    hung = hung_seconds(facts.snapshot, _HUNG_SECONDS)
    if hung is None:
        return None
    load = facts.snapshot.value("oldest_load") or 0.0
    what = "a load" if load >= hung else "a lookup"
    return Finding(
        "load_hung", f"{what} hangs for {hung:.0f} s while L2 answers others", "load_hung"
    )
