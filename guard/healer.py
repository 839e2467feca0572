"""The loop's side of healing and of aborts: asks the gate, and tells what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from guard.chronicle import JournalLike
from guard.control.reconcile import Reconciler
from guard.policy.diagnosis import Facts
from guard.policy.healing import HealingState, heal
from guard.policy.state import Phase, Surroundings
from guard.policy.types import Decision, Healing, Operation
from guard.policy.verdict import Verdict
from guard.readings import Snapshot
from guard.sources.gate import ProbeResult, RebuildResult

PROBE_CHUNKS = 4
PROBE_MAX_BYTES = 256 * 1024 * 1024
PROBE_DEADLINE_SECONDS = 10.0
# The gate tries a connection for a second before it builds.
_RESULT_WITHIN_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Pending:
    operation: Operation
    id: int | None
    asked_at: float


class Healer:
    """Keeps the state of healing and what was asked of the gate. `chance` gives [0, 1).

    `shown` is the ailment as every surface shows it, None while all is well; `attempts`
    counts rebuilds and aborts by cause and outcome.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        journal: JournalLike,
        chance: Callable[[], float],
        state: HealingState,
    ) -> None:
        self._reconciler = reconciler
        self._journal = journal
        self._chance = chance
        self._probe_id: int | None = None
        self._pending: _Pending | None = None
        self.state = state
        self.shown: Healing | None = None
        self.attempts: Counter[tuple[str, str]] = Counter()

    def breakers_probe(self) -> ProbeResult | None:
        """The gate's last probe if it was one of known keys: the breaker must not count a
        probe that was not its own."""
        return self._probe(lost=False)

    def judge(
        self,
        snapshot: Snapshot,
        verdict: Verdict,
        phase: Phase,
        around: Surroundings,
        decision: Decision,
        now: float,
    ) -> Healing:
        """This tick's healing; what began and ended is told to the journal."""
        self._read_result(now)
        gate = self._reconciler.status
        asked = decision.operation is not None or decision.probe or self._pending is not None
        running = gate is not None and (gate.rebuild_running or gate.probe_running)
        ours = gate is not None and around.foreign_holder is None
        facts = Facts(
            snapshot,
            verdict,
            phase,
            gate,
            acting=around.mode == "enforce" and ours,
            observing=around.mode == "observe",
            busy=asked or running,
            probe=self._probe(lost=False),
            lost_probe=self._probe(lost=True),
        )
        healing, self.state = heal(facts, self.state, now, self._chance)
        if healing.event is not None:
            self._journal.write(
                "healing",
                action=healing.event,
                ailment=healing.ailment,
                reason=healing.incurable if healing.event == "incurable" else healing.words,
                attempts=healing.attempts,
                incurable=healing.incurable,
            )
        over = healing.ailment is None or healing.event == "ended"
        self.shown = None if over else healing
        return healing

    async def act(self, healing: Healing, now: float) -> None:
        """Ask the gate for the cure, or for the probe that tells which one."""
        if healing.operation is not None:
            await self.operate(healing.operation, healing.words, now)
        elif healing.probe_lost:
            started = await self._reconciler.probe(
                PROBE_CHUNKS, PROBE_MAX_BYTES, PROBE_DEADLINE_SECONDS, lost=True
            )
            self._probe_id = started.id
            if not started.began:
                self.state = replace(self.state, probe_asked_at=None, probes=self.state.probes + 1)

    async def operate(self, operation: Operation, reason: str, now: float) -> None:
        """Ask the gate to abort or rebuild; its result is told when the status has it."""
        started = await self._reconciler.operate(operation, reason)
        if started.began:
            self._pending = _Pending(operation, started.id, now)
            return
        self._tell(operation, started.kind, f"not begun: {started.error}")

    def _probe(self, *, lost: bool) -> ProbeResult | None:
        gate = self._reconciler.status
        probe = gate.probe if gate is not None else None
        if probe is None:
            return None
        of_lost = probe.of == "lost" if probe.of is not None else probe.id == self._probe_id
        return probe if of_lost == lost else None

    def _read_result(self, now: float) -> None:
        pending, status = self._pending, self._reconciler.status
        if pending is None:
            return
        last = None if status is None or status.rebuild_running else status.rebuild
        if last is not None and _is_of(last, pending, now):
            self._pending = None
            self._tell(pending.operation, last.outcome, _words(last))
        elif now - pending.asked_at > _RESULT_WITHIN_SECONDS:
            self._pending = None
            self._tell(pending.operation, "unknown", "the gate told no result")

    def _tell(self, operation: Operation, outcome: str, words: str) -> None:
        cause = operation.cause if operation.kind == "rebuild" else "abort"
        self.attempts[cause, outcome] += 1
        self._journal.write(
            "healing" if operation.kind == "rebuild" else "operation",
            action=operation.kind,
            cause=operation.cause,
            outcome=outcome,
            reason=words,
        )


def _is_of(last: RebuildResult, pending: _Pending, now: float) -> bool:
    if pending.id is not None:
        return last.id == pending.id
    return now - last.age_seconds >= pending.asked_at


def _words(last: RebuildResult) -> str:
    ended = (
        f"ended {last.ended_loads} loads, {last.ended_lookups} lookups, {last.ended_stores} stores"
    )
    if last.parked:
        ended = "the old one cannot be closed yet, what it left waits"
    if last.outcome == "done":
        return f"a fresh adapter serves; {ended}"
    what = f"{last.outcome}: {last.error}" if last.error else last.outcome
    return f"{what}; {ended}" if last.outcome == "detached" else what
