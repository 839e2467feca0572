"""Runs the faults of the kit over one stack, each with a guard that acts alone."""

from __future__ import annotations

import time

import httpx

from ..foreign_cpu import ForeignCpu
from ..guard_handle import Guard
from ..load import Load, Request, summarize
from ..model import KV_BYTES_PER_TOKEN
from ..processes import LabError
from ..stack import Stack
from ..watch import Watch
from .judge import (
    BACK_SECONDS,
    NOT_ASKED,
    SETTLED_SECONDS,
    judge_failed,
    judge_health,
    judge_kv,
    judge_service,
    judge_told,
    kv_state,
)
from .kit import Fault, end_everything
from .lookout import HEALTH_LIMIT_S, Lookout
from .outcome import Outcome, deeds, reasons
from .readiness import load_of, make_ready, witness_of
from .witness import Witness

PREFILL_RATE = 2800  # the order of what this engine does here; the acceptance run learns it
RECOMPUTE_SECONDS = 20.0
AGAIN_SECONDS = 3.0
AFTER_SECONDS = 3.0
HITS_IN_A_ROW = 3
RECOMPUTE_TRIES = 3
FOREIGN_LIMIT = 0.10  # of the machine, for other programs; above it a phase says little


class FaultRunner:
    """L2 is warmed and P (the median while all is recomputed) measured once, at the start.

    A lasting fault lasts `hold_s`, and what is measured of any is measured for as long.
    `before_s` is how long the guard sees a healthy L2 before it. `factor` multiplies the
    limits. Raises LabError when the stack cannot be made ready.
    """

    def __init__(
        self, stack: Stack, *, factor: float, hold_s: float = 20.0, before_s: float = 10.0
    ) -> None:
        self._stack = stack
        self._hold_s = hold_s
        self._before_s = before_s
        self._factor = factor
        make_ready(stack)
        self._witness: Witness | None = None
        self.recompute_p50 = self._recompute()

    def close(self) -> None:
        if self._witness is not None:
            self._witness.close()
            self._witness = None

    def run(self, fault: Fault, number: int) -> Outcome:
        """One fault from a healthy stack to one that was left alone for a minute."""
        outcome = Outcome(fault, number, self.recompute_p50)
        if left := make_ready(self._stack):
            outcome.notes.append(left)
        self._witness = witness = witness_of(self._stack, self._witness)
        begin = time.monotonic()
        before = kv_state(witness)
        load = load_of(self._stack)
        guard = self._stack.start_guard(
            state=f"fault-{fault.name}-{number}", args=("--prefill-rate", str(PREFILL_RATE))
        )
        try:
            with (
                ForeignCpu(self._stack.sessions) as foreign,
                Lookout(self._stack, health_limit_s=HEALTH_LIMIT_S * self._factor) as lookout,
                Watch(guard) as watch,
            ):
                load.start()
                witness.start()
                self._through(fault, outcome, load, lookout, watch, guard)
            outcome.foreign = foreign.share
        finally:
            end_everything(self._stack)
            witness.stop()
            load.stop()
            guard.kill()
        judge_failed(outcome, load)
        after = NOT_ASKED if outcome.back_after_s is None else self._kv_after(witness)
        judge_kv(outcome, witness, before, after, begin)
        return outcome

    def _through(
        self,
        fault: Fault,
        outcome: Outcome,
        load: Load,
        lookout: Lookout,
        watch: Watch,
        guard: Guard,
    ) -> None:
        wall_offset = time.time() - time.monotonic()
        time.sleep(self._before_s)
        begin = time.monotonic()
        fault.begin(self._stack)
        end = begin
        if fault.lasts:
            while (left := begin + self._hold_s - time.monotonic()) > 0:
                time.sleep(min(AGAIN_SECONDS, left))
                fault.again(self._stack)
            fault.end(self._stack)
            end = time.monotonic()
        back = self._wait_back(load, lookout, end)
        time.sleep(max(AFTER_SECONDS, begin + self._hold_s - time.monotonic()))
        over = time.monotonic()

        bypassed = lookout.first_share(begin, over, lambda share: share == 0)
        admitted = lookout.whole_again(begin, over)
        outcome.bypassed_after_s = None if bypassed is None else bypassed - begin
        outcome.back_after_s = None if back is None else back - end
        outcome.admitted_after_s = None if admitted is None else admitted - end
        journal = [line for line in guard.journal() if line["at"] >= begin + wall_offset]
        outcome.did = deeds(journal, begin + wall_offset)
        outcome.notes += reasons(journal, begin + wall_offset)
        settled = begin + SETTLED_SECONDS, max(back or over, begin + self._hold_s)
        judge_service(outcome, load, begin, settled, over, self._factor)
        judge_health(outcome, lookout, begin, over, self._factor)
        judge_told(outcome, watch.between(begin, over), self._factor)

    def _wait_back(self, load: Load, lookout: Lookout, end: float) -> float | None:
        """When the first of a few requests in a row, all begun after the end, was served
        from L2 while all was admitted; None when none were in time.

        A few, since a prefix can be found and its load then fail. The cache server's own
        memory is emptied again and again: chunks that L2 did not take stay there, and hits
        on them say nothing of L2.
        """
        limit = end + BACK_SECONDS * self._factor
        emptied = 0.0
        while time.monotonic() < limit:
            if time.monotonic() > emptied + AGAIN_SECONDS:
                self._stack.clear_l1()
                emptied = time.monotonic()
            in_row: list[float] = []
            for each in load.began(end, limit):
                if each.first_token is None or each.end is None:
                    break
                in_row = [*in_row, each.first_token] if _from_l2(each, lookout) else []
                if len(in_row) == HITS_IN_A_ROW:
                    return in_row[0]
            time.sleep(0.2)
        return None

    def _kv_after(self, witness: Witness) -> str:
        """What the witness gets back once all is admitted, whatever the guard left."""
        try:
            self._stack.gate_operation(
                "restore", holder="person:lab", reason="looking at the KV", lease_s=1
            )
            return kv_state(witness)
        except (httpx.HTTPError, LabError, OSError) as error:
            return f"not loaded: {error}"

    def _recompute(self) -> float:
        """P, of the least disturbed of a few phases if none was quiet."""
        self._stack.gate_operation(
            "bypass", holder="person:lab", reason="recompute phase", lease_s=600
        )
        phases: list[tuple[float, float]] = []
        while len(phases) < RECOMPUTE_TRIES and not any(
            share <= FOREIGN_LIMIT for share, _ in phases
        ):
            with ForeignCpu(self._stack.sessions) as foreign, load_of(self._stack) as load:
                time.sleep(RECOMPUTE_SECONDS)
            p50 = summarize(load.requests).p50
            if p50 is None:
                raise LabError("no request was served while everything was recomputed")
            phases.append((foreign.share, p50))
        self._stack.gate_operation("restore", holder="person:lab", reason="again", lease_s=1)
        return min(phases)[1]


def _from_l2(request: Request, lookout: Lookout) -> bool:
    """Whether all that was not computed came from L2, while the gate admitted all."""
    first = request.first_token
    if not request.cached_tokens or first is None or lookout.share_at(first) != 1:
        return False
    return lookout.loaded(request.start, first, request.cached_tokens * KV_BYTES_PER_TOKEN)
