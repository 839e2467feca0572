"""Exchanging the adapter behind the gate: what ends loads that hang, and what cures an
adapter that never reconnects.

A fresh adapter is built, the one in use is closed, and what it left is answered in its
place. That is safe only where the close is proved to join the adapter's writers, or it
would write into a buffer that by then holds other data. And a close must never be entered
while a worker hangs in connecting (see `store_link`): such an adapter is *parked*, with
what it was given, until it can be closed.

Where an abort finds that the store takes no connection, the adapter is closed and there is
none: lookups are misses and stores fail, until a connection succeeds, which is tried again
and again from here, since nobody else might.
"""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from guard.gate.descriptors import closing
from guard.gate.lmcache_generation import Generation, Wrapped, carry_accounts
from guard.gate.lmcache_lookups import Lookups
from guard.gate.lmcache_parts import Parts, Tasks
from guard.gate.lmcache_transfers import Loads, Stores
from guard.gate.rebuild_state import Ended, RebuildRefused, RebuildRequest, RebuildState
from guard.gate.safety import Bell, logger
from guard.gate.store_link import StoreLink

REBUILT_TYPES = frozenset({"resp"})
"""Adapters whose close is proved to join their writers: by tests/lab/test_gate_close.py,
which also shows that `fs` writes on after its close."""

MAX_PARKED = 2
LOCK_SECONDS = 1.0
"""For the host to come out of the adapter; it never stays there in those types."""
TEND_SECONDS = 1.0
YOUNG_SECONDS = 30.0
"""An adapter that never answered may be connecting in a way that no table shows (it may
wait for a name to be resolved), so it is not closed before it is so old."""
REATTACH_SECONDS = 1.0
REATTACH_MOST_SECONDS = 30.0
DEADLINE_GAP_SECONDS = 5.0
STOP_SECONDS = 2.0
START_SECONDS = 0.2
"""What may pass between an exchange's end and the end of its thread."""


ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.05
_ANY_BYTES = 2**62


class _Failed(Exception):
    """The exchange changed nothing; the words say why."""


class Rebuilder:
    """Exchanges one gate's adapter, one exchange at a time, each in a thread of its own."""

    def __init__(
        self,
        inner_type: str,
        link: StoreLink,
        parts: Parts,
        bells: Sequence[Bell],
        lookups: Lookups,
        loads: Loads,
        stores: Stores,
    ) -> None:
        self._type = inner_type
        self._link = link
        self._inner: Wrapped = parts.inner
        self._known = parts.known
        self._faults = parts.faults
        self._clock = parts.clock
        self._wake = parts.wake
        self._bells = bells
        self._lookups, self._loads, self._stores = lookups, loads, stores
        self._tasks: tuple[Tasks, ...] = (stores, lookups, loads)
        self._state = RebuildState(clock=parts.clock)
        self._parked: list[tuple[Generation, RebuildRequest]] = []
        self._busy = threading.Lock()
        self._chooser = random.Random()
        self._closing = False
        self._tended_at = self._deadline_at = float("-inf")
        self._reattach_at = 0.0
        self._reattach_pause = REATTACH_SECONDS

    # What the status shows

    @property
    def parked(self) -> int:
        """Old adapters that cannot be closed safely yet."""
        return len(self._parked)

    def counts(self) -> dict[str, int]:
        """Exchanges by cause."""
        return self._state.counts()

    def as_dict(self) -> dict[str, Any]:
        """The gate's status has it as `rebuild`."""
        return self._state.as_dict()

    def why_not(self) -> str | None:
        """Why nothing can be exchanged here, None when it can."""
        if self._type not in REBUILT_TYPES:
            return f"closing an adapter of type {self._type} is not proved to end its writers"
        if len(self._parked) >= MAX_PARKED:
            return f"{len(self._parked)} old adapters cannot be closed yet"
        return None

    # Beginning one

    def start(self, request: RebuildRequest) -> int:
        """Begin an abort or a rebuild; returns its id. Raises RebuildRefused."""
        reason = self.why_not()
        if reason is not None:
            raise RebuildRefused(f"no {request.operation}: {reason}")
        if not self._busy.acquire(timeout=START_SECONDS):
            raise RebuildRefused("the adapter is being exchanged already; see the status")
        try:
            number = self._state.begin()
            self._thread(lambda: self._run(request))
        except BaseException:
            if self._state.running:
                self._state.end(request, Ended("failed", "no thread could be started"))
            self._busy.release()
            raise
        return number

    def tick(self, load_deadline: float | None) -> float | None:
        """What is due without anybody asking; returns seconds until the next time, None
        for when woken. To be called on the gate's own thread."""
        now = self._clock()
        due: list[float] = []
        if self._parked:
            due.append(self._after(self._tended_at + TEND_SECONDS - now, self._tend))
        if not self._inner.current.serves and not self._closing:
            due.append(self._after(self._reattach_at - now, self._reattach))
        if load_deadline is not None and self.why_not() is None:
            left = self._until_deadline(load_deadline, now)
            if left is not None:
                due.append(self._after(left, self._end_overdue))
        return min(due, default=None)

    def stop(self) -> None:
        """Begin nothing more; waits a little for an exchange that runs."""
        self._closing = True
        # Never given back: whatever is asked for from now on is refused.
        self._busy.acquire(timeout=STOP_SECONDS)

    def _after(self, left: float, job: Callable[[], None]) -> float:
        if left > 0:
            return left + 0.001
        if self._busy.acquire(blocking=False):
            try:
                self._thread(job)
            except BaseException:
                self._busy.release()
                raise
        return TEND_SECONDS

    def _until_deadline(self, deadline: float, now: float) -> float | None:
        oldest = self._loads.oldest()
        if oldest is None:
            return None
        return max(oldest + deadline, self._deadline_at + DEADLINE_GAP_SECONDS) - now

    def _thread(self, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except Exception:
                self._faults.caught("exchanging the adapter")
            finally:
                self._busy.release()
                self._wake()

        threading.Thread(target=run, name="kvguard-rebuild", daemon=True).start()

    # Running one

    def _run(self, request: RebuildRequest) -> None:
        ended = Ended("failed", "a fault of the gate")
        try:
            ended = self._exchange(request)
        except _Failed as failed:
            ended = Ended("failed", str(failed))
        except Exception as error:
            self._faults.caught("exchanging the adapter")
            ended = Ended("failed", f"{type(error).__name__}: {error}"[:200])
        finally:
            self._state.end(request, ended)
            logger.warning(
                "%s (%s) by %s (%s): %s; %d loads, %d lookups, %d stores ended%s%s",
                *(request.operation, request.cause, request.holder or "the gate"),
                request.reason or "-",
                *(ended.outcome, ended.ended_loads, ended.ended_lookups, ended.ended_stores),
                "; the old adapter is parked" if ended.parked else "",
                f"; {ended.error}" if ended.error else "",
            )

    def _exchange(self, request: RebuildRequest) -> Ended:
        old = self._inner.current
        serving = old.serves
        # Asked first: soon a fresh adapter's connections are being set up.
        may_close = self._may_close(old)
        fresh, problem = self._build(request)
        if fresh is None and request.operation != "abort":
            raise _Failed(problem or "no adapter could be built")
        if not serving and fresh is None:
            raise _Failed(f"there is no adapter, and none can be built: {problem}")
        answers: bool | None = None
        try:
            if request.operation != "abort":
                answers = self._answers(fresh)
            if answers is False:
                raise _Failed(f"a fresh adapter got no answer within {ANSWER_SECONDS:g} s")
            self._swap(fresh)
        except BaseException:
            if fresh is not None:
                unused = Generation(-1, fresh, self._clock(), "parked", bool(answers))
                self._parked.append((unused, request))
            raise
        if answers:
            self._inner.heard(self._inner.current)
        # From here on nothing new is asked of the old adapter, and its lookups are answered.
        lookups = self._lookups.ring_stuck(old)
        if not serving:
            self._known.doubt()
            return Ended("done", None, 0, lookups)
        ended = self._take_leave(old, fresh, request, may_close)
        outcome = "done" if fresh is not None else "detached"
        if fresh is None:
            self._reattach_pause = REATTACH_SECONDS
            self._reattach_at = self._clock() + REATTACH_SECONDS
        return replace(ended, outcome=outcome, error=problem, ended_lookups=lookups)

    def _build(self, request: RebuildRequest) -> tuple[Any, str | None]:
        """A fresh adapter, or None and why there is none.

        A store that is frozen still takes connections, and an abort is for just that, so
        for an abort a connection is enough; any other exchange wants an answer.
        """
        abort = request.operation == "abort"
        problem = self._link.refusal() if abort else self._link.problem()
        if problem is not None:
            return None, problem
        try:
            return self._inner.build(), None
        except Exception as error:
            return None, f"building the adapter: {type(error).__name__}: {error}"[:200]

    def _answers(self, fresh: Any) -> bool | None:
        """Whether a fresh adapter answers a lookup of a key that is or was known, None when
        none is. One that answered has connected, and can be closed again at any time."""
        picked = self._known.sample(1, _ANY_BYTES, self._chooser)
        if not picked:
            return None
        keys = [key for key, _ in picked]
        task = fresh.submit_lookup_and_lock_task(keys, {})
        poller = select.poll()
        poller.register(fresh.get_lookup_and_lock_event_fd(), select.POLLIN)
        until = self._clock() + ANSWER_SECONDS
        while (left := until - self._clock()) > 0:
            poller.poll(min(left, _POLL_SECONDS) * 1000)
            found = fresh.query_lookup_and_lock_result(task)
            if found is not None:
                if found.popcount():
                    fresh.submit_unlock(keys)
                return True
        return False

    def _swap(self, fresh: Any | None) -> None:
        taken: list[Tasks] = []
        try:
            for tasks in self._tasks:
                if not tasks.lock.acquire(timeout=LOCK_SECONDS):
                    raise _Failed("the cache does not come out of the adapter")
                taken.append(tasks)
            old = self._inner.current
            if fresh is not None:
                self._inner.install(fresh)
                for bell, fd in zip(self._bells, _event_fds(fresh), strict=True):
                    bell.move(fd)
            if old.phase == "serving":
                old.phase = "leaving"
        finally:
            for tasks in taken:
                tasks.lock.release()

    def _take_leave(
        self, old: Generation, fresh: Any | None, request: RebuildRequest, may_close: bool
    ) -> Ended:
        self._known.doubt()
        if not may_close or not self._close(old):
            old.phase = "parked"
            self._stores.keep(old)
            self._parked.append((old, request))
            return Ended("done", parked=True)
        if fresh is not None:
            try:
                carry_accounts(old.adapter, fresh)
            except Exception:
                self._faults.caught("carrying accounts over")
        return self._settle(old, request)

    def _settle(self, old: Generation, request: RebuildRequest) -> Ended:
        loads = self._loads.end(old, request.release_bytes_per_s, request.release_within_s)
        stores = self._stores.end(old)
        return Ended("done", None, loads, 0, stores)

    def _may_close(self, old: Generation) -> bool:
        young = self._clock() - old.built_at < YOUNG_SECONDS
        return not self._link.connecting() and (old.answered or not young)

    def _close(self, old: Generation) -> bool:
        """Close it, unless descriptors are scarce; returns whether it is closed."""
        with closing() as allowed:
            if not allowed:
                return False
            try:
                old.adapter.close()
            except Exception:
                self._faults.caught("closing an adapter")
        old.phase = "closed"
        return True

    # What comes of itself

    def _tend(self) -> None:
        """Close the parked adapters that can be closed by now."""
        self._tended_at = self._clock()
        for entry in list(self._parked):
            old, request = entry
            if not self._may_close(old):
                continue
            old.phase = "leaving"
            if self._close(old):
                self._settle(old, request)
                self._parked.remove(entry)
            else:
                old.phase = "parked"

    def _reattach(self) -> None:
        """There is no adapter: try whether one can be had again."""
        self._reattach_at = self._clock() + self._reattach_pause
        self._reattach_pause = min(2 * self._reattach_pause, REATTACH_MOST_SECONDS)
        problem = self._link.problem()
        if problem is None and not self._inner.current.serves:
            self._state.begin()
            self._run(RebuildRequest("rebuild", "reattach"))

    def _end_overdue(self) -> None:
        self._deadline_at = self._clock()
        self._state.begin()
        self._run(RebuildRequest("abort", "deadline"))


def _event_fds(adapter: Any) -> tuple[int, int, int]:
    return (
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    )


def admit_revision(request: RebuildRequest, revision: int) -> None:
    """Raises RebuildRefused when the request was made for another revision."""
    if request.if_revision is not None and request.if_revision != revision:
        raise RebuildRefused(f"if_revision is {request.if_revision}, the gate is at {revision}")
