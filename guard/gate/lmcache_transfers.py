"""Loads and stores through the gate: counted, or answered at once without L2.

Loads run on LMCache's prefetch thread, stores on its store thread (or, with an outer serde,
both on the serde wrapper's). What was let in is answered in the adapter's place only after
the adapter is closed, since until then it may write into a load's buffers, and read from a
store's, which by then may hold other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult

from guard.gate.lmcache_generation import Generation
from guard.gate.lmcache_keys import Keys, bytes_by_rank, distinct_chunks
from guard.gate.lmcache_lookups import LATE_SECONDS, MAX_LATE, Lookups, drop_oldest
from guard.gate.lmcache_parts import Parts, Tasks
from guard.gate.safety import Bell


@dataclass(slots=True)
class _Load:
    """`token` is None where deciding on the load met a fault, or once it has ended; `due`
    is when a load that an exchange of the adapter ended is to be answered."""

    token: int | None
    started: float
    keys: Keys
    sizes: Sequence[int]
    bytes: int
    of: Generation
    task: int = -1
    due: float | None = None


@dataclass(slots=True)
class _Store:
    """`started` is None where deciding on the store met a fault: it is only passed on."""

    started: float | None
    keys: Keys
    sizes: Sequence[int]
    of: Generation


class Loads(Tasks):
    """All loads of one gate."""

    def __init__(self, parts: Parts, bell: Bell, lookups: Lookups) -> None:
        super().__init__(parts, bell)
        self._lookups = lookups
        self._own: dict[int, int] = {}
        self._open: dict[int, _Load] = {}
        self._late: dict[int, Any] = {}
        self._releasing = 0

    @property
    def releasing(self) -> int:
        """Loads that have ended and are not answered yet, so that they come back in pace."""
        return self._releasing

    def oldest(self) -> float | None:
        """When the oldest load in flight was submitted, on the clock."""
        for load in list(self._open.values()):
            if load.due is None and load.of.serves:
                return load.started
        return None

    def submit(self, keys: Keys, objects: Sequence[Any]) -> int:
        """A task id: of the adapter, or negative for a load answered as not loaded."""
        load = _Load(None, self._clock(), keys, (), 0, self._inner.current)
        try:
            sizes = [item.get_size() for item in objects]
            load.sizes, load.bytes = sizes, sum(sizes)
            settings = self._admission.settings
            bypassed = settings.share <= 0
            # Loads that wait to be answered take the host's places like those in flight.
            limit = 0 if bypassed else max(0, settings.max_loads - self._releasing)
            load.token = self._ledger.begin_load(load.bytes, limit)
            if load.token is None:
                return self._refuse(keys, sizes, "bypassed" if bypassed else "declined")
        except Exception:
            self._faults.caught("deciding on a load")
        try:
            task = self._ask(load, objects)
        except BaseException:
            if load.token is not None:
                self._ledger.cancel_load(load.token)
            raise
        if task is None:
            if load.token is not None:
                self._ledger.cancel_load(load.token)
            return self._refuse(keys, load.sizes, "aborted")
        try:
            if self._admission.settings.load_deadline_s is not None:
                self._wake()
        except Exception:
            self._faults.caught("timing a load")
        return task

    def _ask(self, load: _Load, objects: Sequence[Any]) -> int | None:
        """The task id; None where there is no adapter to ask."""
        with self.lock:
            of = load.of = self._inner.current
            if not of.serves:
                return None
            load.task = int(of.adapter.submit_load_task(load.keys, objects))
            task = of.task(load.task)
            self._open[task] = load
            return task

    def _refuse(self, keys: Keys, sizes: Sequence[int], answer: str) -> int:
        """Not loaded: LMCache then frees the buffers and unlocks the keys in L2 itself."""
        task = next(self._own_ids)
        self._own[task] = len(keys)
        try:
            self._bell.ring()
        except BaseException:
            del self._own[task]
            raise
        try:
            self._lookups.load_refused(keys, answer)
            if answer != "aborted":
                # Their lookup just found them; what is recomputed now need not be stored.
                self._known.learn(keys, sizes)
            self._wake()
        except Exception:
            self._faults.caught("noting a refused load")
        return task

    def query(self, task: int) -> Any:
        """The bitmap of a load, once; None while it is not done."""
        if task < 0:
            keys = self._own.pop(task, None)
            return None if keys is None else Bitmap(keys)
        late = self._late.pop(task, None)
        if late is not None:
            return late
        load = self._open.get(task)
        if load is None:
            return None
        if load.due is not None:
            return self._release(task, load)
        if not load.of.speaks:
            return None
        result = load.of.adapter.query_load_result(load.task)
        if result is not None and self._open.pop(task, None) is not None:
            self._settle(load, result)
        return result

    def _release(self, task: int, load: _Load) -> Any:
        if load.due is None or self._clock() < load.due:
            return None
        result = Bitmap(len(load.keys))
        if self._open.pop(task, None) is not None:
            self._releasing -= 1
        return result

    def sweep(self) -> float | None:
        """Fetch results that the host did not, so that no load stays in flight for ever,
        and have it ask again for loads that are due; returns seconds until the next is."""
        now = self._clock()
        due = None
        if self._releasing:
            waiting = [load.due for load in list(self._open.values()) if load.due is not None]
            if any(at <= now for at in waiting):
                self._bell.ring()
            due = min((max(0.0, at - now) + 0.001 for at in waiting if at > now), default=None)
        for task, load in list(self._open.items()):
            if now - load.started < LATE_SECONDS:
                break  # and all that follow are younger
            if load.due is not None:
                if now - load.due > LATE_SECONDS:
                    self._release(task, load)
                continue
            if not load.of.speaks:
                continue
            result = load.of.adapter.query_load_result(load.task)
            if result is not None and self._open.pop(task, None) is not None:
                self._late[task] = result
                self._settle(load, result)
                drop_oldest(self._late, MAX_LATE)
                self._bell.ring()
        return due

    def end(self, of: Generation, rate: float | None, within: float) -> int:
        """The adapter of that generation is closed: answer what it left; returns how many.

        Loads are answered as failed, oldest first, and not more than `rate` of their bytes
        a second, since the engine recomputes each at once, but all `within` seconds.
        """
        ended: list[tuple[int, _Load]] = []
        for task, load in list(self._open.items()):
            # Whoever takes it out answers for it: the host may be asking at this moment.
            if load.of is not of or load.due is not None or self._open.pop(task, None) is None:
                continue
            # What had completed before the adapter was closed is as good as any.
            result = of.adapter.query_load_result(load.task)
            if result is not None:
                self._late[task] = result
                self._settle(load, result)
            else:
                ended.append((task, load))
        now = self._clock()
        seconds = sum(load.bytes for _, load in ended[:-1]) / rate if rate else 0.0
        slowing = min(1.0, within / seconds) if seconds else 0.0
        after = 0.0
        for task, load in ended:
            if load.token is not None:
                self._ledger.end_load(load.token, 0, 0)
                load.token = None
            load.due = now + after * slowing
            after += load.bytes / rate if rate else 0.0
            self._releasing += 1
            self._open[task] = load
        self._bell.ring()
        self._wake()
        return len(ended)

    def _settle(self, load: _Load, result: Any) -> None:
        if load.token is None:
            return
        try:
            self._inner.heard(load.of)
            self._count(load, load.token, result)
        except Exception:
            self._faults.caught("counting a load")
            # A load that stayed in flight here would take a place for ever.
            self._ledger.cancel_load(load.token)

    def _count(self, load: _Load, token: int, result: Any) -> None:
        keys, sizes, loaded = load.keys, load.sizes, load.bytes
        if result.popcount() < len(keys):
            keys, sizes = result.gather(keys), result.gather(sizes)
            loaded = sum(sizes)
            self._known.forget((~result).gather(load.keys))
        chunks, ranks = distinct_chunks(keys), bytes_by_rank(keys, sizes)
        self._ledger.end_load(token, loaded, chunks, ranks)
        self._known.learn(keys, sizes)


class Stores(Tasks):
    """All stores of one gate."""

    def __init__(self, parts: Parts, bell: Bell) -> None:
        super().__init__(parts, bell)
        self._own: dict[int, Any] = {}
        self._open: dict[int, _Store] = {}
        self._older: list[Generation] = []
        self._failed_in_a_row = (0, 0)

    @property
    def failed_in_a_row(self) -> int:
        """The last stores of the adapter in use, as far as they all failed."""
        number, failed = self._failed_in_a_row
        return failed if number == self._inner.current.number else 0

    def submit(self, keys: Keys, objects: Sequence[Any]) -> int:
        """A task id: of the adapter, or negative for a store answered without L2."""
        store = _Store(None, keys, (), self._inner.current)
        try:
            if not self._admission.settings.writes or not store.of.serves:
                self._ledger.end_store(0, 0.0, ok=False)
                return self._answer(L2StoreResult(False, 0))
            if self._known.knows_all(keys):
                self._ledger.skip_store()
                return self._answer(L2StoreResult(True, 0))
            store.sizes = [item.get_size() for item in objects]
            store.started = self._clock()
        except Exception:
            self._faults.caught("deciding on a store")
        # Held so that whoever collects completions finds the store that it completes.
        with self.lock:
            of = store.of = self._inner.current
            if of.serves:
                task = of.task(int(of.adapter.submit_store_task(keys, objects)))
                self._open[task] = store
                return task
        self._ledger.end_store(0, 0.0, ok=False)
        return self._answer(L2StoreResult(False, 0))

    def _answer(self, result: Any) -> int:
        task = next(self._own_ids)
        with self.lock:
            self._own[task] = result
        try:
            self._bell.ring()
        except BaseException:
            with self.lock:
                self._own.pop(task, None)
            raise
        return task

    def pop_completed(self) -> dict[int, Any]:
        """Results by task id of all stores that completed since the last call."""
        done: dict[int, Any] = {}
        ended: list[tuple[Any, _Store | None]] = []
        with self.lock:
            for of in (*self._older, self._inner.current):
                if of.speaks:
                    self._pop(of, done, ended)
            own, self._own = self._own, {}
        self._count_all(ended)
        return {**done, **own}

    def _pop(
        self, of: Generation, done: dict[int, Any], ended: list[tuple[Any, _Store | None]]
    ) -> None:
        for number, result in of.adapter.pop_completed_store_tasks().items():
            task = of.task(int(number))
            done[task] = result
            ended.append((result, self._open.pop(task, None)))

    def keep(self, of: Generation) -> None:
        """That generation serves no more, and may complete stores yet."""
        with self.lock:
            self._older.append(of)

    def end(self, of: Generation) -> int:
        """The adapter of that generation is closed: its stores have failed; returns how
        many."""
        done: dict[int, Any] = {}
        ended: list[tuple[Any, _Store | None]] = []
        failed = 0
        with self.lock:
            if of in self._older:
                self._older.remove(of)
            self._pop(of, done, ended)
            for task, store in list(self._open.items()):
                if store.of is of:
                    del self._open[task]
                    done[task] = L2StoreResult(False, 0)
                    failed += 1
            self._own.update(done)
        self._count_all(ended)
        for _ in range(failed):
            self._ledger.end_store(0, 0.0, ok=False)
        self._bell.ring()
        return failed

    def _count_all(self, ended: Sequence[tuple[Any, _Store | None]]) -> None:
        for result, store in ended:
            if store is None or store.started is None:
                continue
            try:
                self._count(store, self._clock() - store.started, result)
            except Exception:
                self._faults.caught("counting a store")

    def _count(self, store: _Store, seconds: float, result: Any) -> None:
        ok = bool(result.is_successful())
        self._ledger.end_store(sum(store.sizes), seconds, ok=ok)
        self._inner.heard(store.of)
        current = self._inner.current
        if ok:
            self._known.learn(store.keys, store.sizes)
        if store.of is current:
            self._failed_in_a_row = (current.number, 0 if ok else self.failed_in_a_row + 1)
