"""What the guard holds the gate at: the decision put into force, or what is there kept, or
let go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from guard.chronicle import Chronicle
from guard.control.reconcile import PERSON, Reconciler, Wanted
from guard.healer import PROBE_CHUNKS, PROBE_DEADLINE_SECONDS, PROBE_MAX_BYTES
from guard.policy.state import Surroundings
from guard.policy.types import Admission, Decision
from guard.sources.gate import GateStatus
from guard.sources.lmcache_mp import PrefetchSlots

_SHORT_LEASE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sight:
    """What of this tick acting depends on: whether the cache that answered has a gate, its
    prefetch slots where they are known, and how long (seconds) the policy has been blind."""

    gated: bool
    slots: PrefetchSlots | None
    blind_seconds: float


class Holding:
    """One gate's admission, through its reconciler. `monotonic` is in seconds.

    `since` is when L2 last left the path or came back: what loads did before says nothing
    about them now.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        chronicle: Chronicle,
        monotonic: Callable[[], float],
        *,
        stop_renewing_after_seconds: float,
    ) -> None:
        self._reconciler = reconciler
        self._chronicle = chronicle
        self._monotonic = monotonic
        self._wanted: Wanted | None = None
        self._was_out: bool | None = None
        self.stop_renewing_after_seconds = stop_renewing_after_seconds
        self.since = float("-inf")

    def follow_share(self, gate: GateStatus | None) -> None:
        """Evidence on loads begins anew when L2 leaves the path and when it comes back,
        whoever did it."""
        if gate is None:
            return
        out = gate.share == 0
        if self._was_out is not None and out != self._was_out:
            self.since = self._monotonic()
        self._was_out = out

    async def act(self, decision: Decision, around: Surroundings, sight: Sight, now: float) -> bool:
        """Have the admission in force that was decided, and ask for its probe; True when
        the gate says it is in force. `now` is Unix time in seconds."""
        if not sight.gated or self._reconciler.status is None:
            return False
        wanted = self._what(decision, around, sight, now)
        if wanted is None:
            return False
        was = self._reconciler.status.share
        done = await self._reconciler.apply(wanted, sight.slots)
        self._wanted = wanted
        self.follow_share(self._reconciler.status)
        self._chronicle.outcome(wanted, was, None if done else self._reconciler.error)
        if decision.probe and done and _enforcing(around):
            await self._reconciler.probe(PROBE_CHUNKS, PROBE_MAX_BYTES, PROBE_DEADLINE_SECONDS)
        return done

    async def release(self) -> bool | None:
        """Give the gate back to its default at once: a short lease that admits all. True
        when the gate did so, None when the guard never held it."""
        if self._wanted is None:
            return None
        return await self._reconciler.apply(self._default("guard stopped: released"), None)

    def _what(
        self, decision: Decision, around: Surroundings, sight: Sight, now: float
    ) -> Wanted | None:
        enforce = _enforcing(around)
        if decision.admission is not None and (enforce or around.override is not None):
            return self._reconciler.wanted(
                decision.admission, decision.reason, around.override, now
            )
        if (
            decision.admission is None
            and enforce
            and around.blind is not None
            and not self._persons_word_ended(around)
            and sight.blind_seconds < self.stop_renewing_after_seconds
        ):
            return self._wanted  # hold what is there, and keep its lease
        if self._must_let_go(around):
            return self._default("no longer held: back to the default")
        return None

    def _default(self, reason: str) -> Wanted:
        return Wanted(Admission(), self._reconciler.holder, reason, _SHORT_LEASE_SECONDS)

    def _must_let_go(self, around: Surroundings) -> bool:
        """A hold that was set through this guard still stands, and nobody wants it: a
        person's word has ended, or the guard only observes."""
        status = self._reconciler.status
        if around.override is not None or around.foreign_holder is not None or status is None:
            return False
        if status.holder is None:
            return False
        observing = around.mode == "observe" and self._wanted is not None
        return observing or self._persons_word_ended(around)

    def _persons_word_ended(self, around: Surroundings) -> bool:
        """The gate still holds what a person said through this guard, and they took it
        back or it ran out."""
        status = self._reconciler.status
        return (
            around.override is None
            and status is not None
            and status.holder is not None
            and status.holder.startswith(PERSON)
        )


def _enforcing(around: Surroundings) -> bool:
    return around.mode == "enforce" and around.foreign_holder is None
