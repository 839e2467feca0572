"""Runs the faults of the kit over one stack, each with a guard that acts alone."""

from __future__ import annotations

import time

from ..foreign_cpu import ForeignCpu
from ..guard_handle import Guard
from ..load import Load, summarize
from ..processes import LabError
from ..stack import Stack
from ..watch import Watch, first
from .judge import BACK_SECONDS, judge_health, judge_requests, judge_told
from .kit import Fault, end_everything
from .lookout import HEALTH_LIMIT_S, Lookout
from .outcome import Outcome, deeds
from .readiness import KV_SECONDS, load_of, make_ready, witness_of
from .witness import Witness

PREFILL_RATE = 2800  # the order of what this engine does here; the acceptance run learns it
RECOMPUTE_SECONDS = 20.0
BEFORE_SECONDS = 10.0
AGAIN_SECONDS = 3.0
AFTER_SECONDS = 3.0


class FaultRunner:
    """L2 is warmed and P (the median while all is recomputed) measured once, at the start.

    `factor` multiplies the limits. Raises LabError when the stack cannot be made ready.
    """

    def __init__(self, stack: Stack, *, factor: float) -> None:
        self._stack = stack
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
        self._witness = witness_of(self._stack, self._witness)
        begin = time.monotonic()
        before = self._witness.loads_right(KV_SECONDS)
        load = load_of(self._stack)
        guard = self._stack.start_guard(
            state=f"fault-{fault.name}-{number}", args=("--prefill-rate", str(PREFILL_RATE))
        )
        limit_s = HEALTH_LIMIT_S * self._factor
        try:
            with (
                ForeignCpu(self._stack.sessions) as foreign,
                Lookout(self._stack, health_limit_s=limit_s) as lookout,
                Watch(guard) as watch,
            ):
                load.start()
                self._witness.start()
                self._through(fault, outcome, load, lookout, watch, guard)
            outcome.foreign = foreign.share
            self._judge_kv(outcome, self._witness, before, begin)
        finally:
            end_everything(self._stack)
            self._witness.stop()
            load.stop()
            guard.kill()
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
        time.sleep(BEFORE_SECONDS)
        begin = time.monotonic()
        fault.begin(self._stack)
        while (left := begin + fault.hold_s - time.monotonic()) > 0:
            time.sleep(min(AGAIN_SECONDS, left))
            fault.again(self._stack)
        fault.end(self._stack)
        end = time.monotonic()
        back = self._wait_back(load, lookout, end)
        time.sleep(AFTER_SECONDS)
        over = time.monotonic()

        looks = watch.between(begin, over)
        out = first(looks, lambda look: look.share == 0)
        admitting = lookout.first_admitting(end)
        outcome.bypassed_after_s = out.at - begin if out else None
        outcome.back_after_s = back - end if back is not None else None
        outcome.admitted_after_s = admitting - end if admitting is not None else None
        outcome.did = deeds(guard.journal(), begin + wall_offset)
        judge_requests(outcome, load, begin, over, self._factor)
        judge_health(outcome, lookout, begin, over, self._factor)
        judge_told(outcome, looks, self._factor)

    def _wait_back(self, load: Load, lookout: Lookout, end: float) -> float | None:
        """When a request begun after the end was served from L2 while all is admitted."""
        limit = end + BACK_SECONDS * self._factor
        while time.monotonic() < limit:
            if (admitting := lookout.first_admitting(end)) is not None:
                hits = [
                    each.first_token
                    for each in load.began(end, limit)
                    if each.cached_tokens and each.first_token is not None
                ]
                later = [hit for hit in hits if hit >= admitting]
                if later:
                    return min(later)
            time.sleep(0.2)
        return None

    def _judge_kv(self, outcome: Outcome, witness: Witness, before: bool, begin: float) -> None:
        witness.stop()
        words = [f"before {'right' if before else 'NOT right'}"]
        after = None
        if outcome.back_after_s is not None:
            after = self._kv_after(witness)
            words.append(f"after {'right' if after else 'NOT right'}")
        wrong = witness.wrong(begin, time.monotonic())
        if wrong:
            words.append(f"{len(wrong)} loads WRONG")
        if witness.broken:
            words.append(f"the witness broke off: {witness.broken}")
        outcome.kv = ", ".join(words)
        right = before and after is not False and not wrong
        outcome.check("KV is right", outcome.kv, "right", right)

    def _kv_after(self, witness: Witness) -> bool:
        try:
            return witness.loads_right(KV_SECONDS)
        except (LabError, OSError):
            return False

    def _recompute(self) -> float:
        """P."""
        self._stack.gate_operation(
            "bypass", holder="person:lab", reason="recompute phase", lease_s=300
        )
        with load_of(self._stack) as load:
            time.sleep(RECOMPUTE_SECONDS)
        p50 = summarize(load.requests).p50
        self._stack.gate_operation("restore", holder="person:lab", reason="again", lease_s=1)
        if p50 is None:
            raise LabError("no request was served while everything was recomputed")
        return p50
