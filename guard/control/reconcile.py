"""From the admission that is wanted to the admission that is in force.

Reads the gate's status, writes what differs, renews the lease, reads again. What the gate
did not confirm is not in force, and a person's hold that is not ours is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from guard.control.lmcache_mp import GateControl
from guard.errors import ControlError, SourceError
from guard.policy.types import Admission, Operation, Override
from guard.sources.gate import GateStatus
from guard.sources.lmcache_mp import PrefetchSlots
from guard.sources.samples import Sample
from guard.view import OBSERVE_ONLY

# Loads must never take all prefetch slots, or a frozen store stalls L1 hits too.
_FREE_SLOTS = 3
_CLOSE_ENOUGH = 0.25
_MOST_LOADS = 4096  # the gate takes no larger one
PERSON = "person:"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An admission to be in force: by whom, why, and for how long without renewal."""

    admission: Admission
    holder: str
    reason: str
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """Whether the gate began what it was asked for, and under which id its result comes;
    else why not, in words and as the word of the error."""

    began: bool
    id: int | None = None
    error: str | None = None
    kind: str = "refused"


class Reconciler:
    """Keeps one gate as wanted. `monotonic` is in seconds."""

    def __init__(
        self,
        control: GateControl,
        holder: str,
        monotonic: Callable[[], float],
        *,
        lease_seconds: float,
        renew_seconds: float,
        status_seconds: float,
    ) -> None:
        self._control = control
        self.holder = holder
        self._monotonic = monotonic
        self._lease_seconds = lease_seconds
        self._renew_seconds = renew_seconds
        self._status_seconds = status_seconds
        self._status_at = float("-inf")
        self._written_at = float("-inf")
        self._must_read = True
        self._own_persons: set[str] = set()
        self.status: GateStatus | None = None
        self.requests: Counter[str] = Counter()
        self.error: str | None = None

    async def refresh(self, cache: Sample | None) -> None:
        """Read the gate's status when it is due: every ten seconds, after a write, and
        when the ledger shows another revision or epoch than the one known."""
        if cache is None:
            self._must_read = True
            return
        epoch = cache.incarnation[-1] if isinstance(cache.incarnation, tuple) else None
        if epoch is None:
            self.status = None
            return
        known = self.status
        if (
            known is not None
            and not self._must_read
            and not known.probe_running
            and not known.rebuild_running
            and known.epoch == epoch
            and cache.values.get("gate.revision") == known.revision
            and self._monotonic() - self._status_at < self._status_seconds
        ):
            return
        try:
            self.status = await self._control.status()
        except SourceError as error:
            self.error = str(error)
            self.requests["status_failed"] += 1
            return
        self._status_at = self._monotonic()
        self._must_read = False
        self.requests["status"] += 1

    def foreign_holder(self, override: Override | None) -> str | None:
        """Who holds the gate if it is neither this guard, nor a person who spoke through
        it, nor nobody."""
        status = self.status
        if status is None or status.holder is None or status.holder == self.holder:
            return None
        if override is not None and status.holder == f"{PERSON}{override.who}":
            return None
        return None if status.holder in self._own_persons else status.holder

    def own(self, who: str) -> None:
        """Remember a person who spoke through this guard: their hold is ours to change."""
        self._own_persons.add(f"{PERSON}{who}")

    def wanted(
        self, admission: Admission, reason: str, override: Override | None, now: float
    ) -> Wanted:
        """How an admission is to be held: a person's for as long as their word lives, so
        that it outlives the guard; the guard's own on a short lease."""
        if override is not None:
            left = max(1.0, override.expires_at - now)
            return Wanted(admission, f"{PERSON}{override.who}", override.reason, left)
        return Wanted(admission, self.holder, reason, self._lease_seconds)

    async def apply(self, wanted: Wanted, slots: PrefetchSlots | None) -> bool:
        """Write what differs, or renew. `slots` are the cache's own, of which loads must
        not take all. True when `wanted` is in force as far as the gate said; False with
        `error` set otherwise."""
        status = self.status
        if status is None:
            self.error = OBSERVE_ONLY
            return False
        max_loads = _max_loads(slots, status.max_loads)
        same = (
            status.share == wanted.admission.share
            and status.min_chunks == wanted.admission.min_chunks
            and status.holder == wanted.holder
            and (max_loads is None or status.max_loads == max_loads)
        )
        persons = wanted.holder.startswith(PERSON)
        due = self._monotonic() - self._written_at >= self._renew_seconds and not persons
        if same and not due:
            return True
        try:
            self.status = await self._control.write(
                status,
                share=wanted.admission.share,
                min_chunks=wanted.admission.min_chunks,
                max_loads=max_loads,
                holder=wanted.holder,
                reason=wanted.reason,
                lease_seconds=wanted.lease_seconds,
            )
        except ControlError as error:
            self.error = str(error)
            self.requests[error.kind] += 1
            self._must_read = True
            return False
        self._written_at = self._monotonic()
        self._must_read = True
        self.error = None
        self.requests["renewed" if same else "written"] += 1
        return True

    async def probe(
        self, chunks: int, max_bytes: int, deadline_seconds: float, *, lost: bool = False
    ) -> Started:
        """Ask for one probe, of known keys or of those that were lost."""
        if self.status is None:
            return Started(False, error=OBSERVE_ONLY)
        probe = self._control.probe(
            self.status,
            chunks=chunks,
            count=1,
            max_bytes=max_bytes,
            deadline_seconds=deadline_seconds,
            lost=lost,
        )
        return await self._start("probe", probe)

    async def operate(self, operation: Operation, reason: str) -> Started:
        """Ask for one abort or rebuild, in the name of whoever holds the gate."""
        if self.status is None:
            return Started(False, error=OBSERVE_ONLY)
        holder = self.status.holder or self.holder
        return await self._start(
            operation.kind,
            self._control.operate(self.status, operation, holder=holder, reason=reason),
        )

    async def _start(self, name: str, request: Awaitable[int | None]) -> Started:
        self._must_read = True
        try:
            identity = await request
        except ControlError as error:
            self.error = str(error)
            self.requests[f"{name}_{error.kind}"] += 1
            return Started(False, error=str(error), kind=error.kind)
        self.requests[name] += 1
        return Started(True, identity)


def _max_loads(slots: PrefetchSlots | None, now: int) -> int | None:
    """How many loads to allow; None to leave it. A limit that follows the loads' size is
    only moved when it is well off, or it would be written at every tick."""
    if slots is None:
        return None
    wanted = min(max(1, int(slots.count) - _FREE_SLOTS), _MOST_LOADS)
    close = not slots.exact and abs(wanted - now) <= _CLOSE_ENOUGH * now
    return now if close else wanted
