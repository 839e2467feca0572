"""Loads and stores through the gate: counted, or answered at once without L2.

Loads run on LMCache's prefetch thread, stores on its store thread (or, with an outer serde,
both on the serde wrapper's). A load that is let in is never ended by the gate: the adapter
may still write into its buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult

from guard.gate.lmcache_keys import Keys, bytes_by_rank, distinct_chunks
from guard.gate.lmcache_lookups import LATE_SECONDS, MAX_LATE, Lookups, drop_oldest
from guard.gate.lmcache_parts import Parts, Tasks
from guard.gate.safety import Bell


@dataclass(slots=True)
class _Load:
    token: int
    started: float
    keys: Keys
    sizes: Sequence[int]
    bytes: int


@dataclass(slots=True)
class _Store:
    started: float
    keys: Keys
    sizes: Sequence[int]


class Loads(Tasks):
    """All loads of one gate."""

    def __init__(self, parts: Parts, bell: Bell, lookups: Lookups) -> None:
        super().__init__(parts, bell)
        self._lookups = lookups
        self._own: dict[int, int] = {}
        self._open: dict[int, _Load] = {}
        self._late: dict[int, Any] = {}

    def submit(self, keys: Keys, objects: Sequence[Any]) -> int:
        """A task id: of the adapter, or negative for a load answered as not loaded."""
        load: _Load | None = None
        try:
            sizes = [item.get_size() for item in objects]
            total = sum(sizes)
            settings = self._admission.settings
            bypassed = settings.share <= 0
            token = self._ledger.begin_load(total, 0 if bypassed else settings.max_loads)
            if token is None:
                return self._refuse(keys, sizes, "bypassed" if bypassed else "declined")
            load = _Load(token, self._clock(), keys, sizes, total)
        except Exception:
            self._faults.caught("deciding on a load")
        try:
            task = self._inner.submit_load_task(keys, objects)
        except BaseException:
            if load is not None:
                self._ledger.cancel_load(load.token)
            raise
        if load is not None:
            self._open[task] = load
        return int(task)

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
            # Their lookup just found them; what is recomputed now need not be stored again.
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
        result = self._inner.query_load_result(task)
        if result is not None:
            self._settle(task, result)
        return result

    def sweep(self) -> None:
        """Fetch results that the host did not, so that no load stays in flight for ever."""
        now = self._clock()
        for task, load in list(self._open.items()):
            if now - load.started < LATE_SECONDS:
                return  # and all that follow are younger
            result = self._inner.query_load_result(task)
            if result is not None:
                self._late[task] = result
                self._settle(task, result)
                drop_oldest(self._late, MAX_LATE)
                self._bell.ring()

    def _settle(self, task: int, result: Any) -> None:
        load = self._open.pop(task, None)
        if load is not None:
            try:
                self._count(load, result)
            except Exception:
                self._faults.caught("counting a load")
                # A load that stayed in flight here would take a place for ever.
                self._ledger.cancel_load(load.token)

    def _count(self, load: _Load, result: Any) -> None:
        keys, sizes, loaded = load.keys, load.sizes, load.bytes
        if result.popcount() < len(keys):
            keys, sizes = result.gather(keys), result.gather(sizes)
            loaded = sum(sizes)
            self._known.forget((~result).gather(load.keys))
        chunks, ranks = distinct_chunks(keys), bytes_by_rank(keys, sizes)
        self._ledger.end_load(load.token, loaded, chunks, ranks)
        self._known.learn(keys, sizes)


class Stores(Tasks):
    """All stores of one gate."""

    def __init__(self, parts: Parts, bell: Bell) -> None:
        super().__init__(parts, bell)
        self._lock = threading.Lock()
        self._own: dict[int, Any] = {}
        self._open: dict[int, _Store] = {}

    def submit(self, keys: Keys, objects: Sequence[Any]) -> int:
        """A task id: of the adapter, or negative for a store answered without L2."""
        store: _Store | None = None
        try:
            if not self._admission.settings.writes:
                self._ledger.end_store(0, 0.0, ok=False)
                return self._answer(L2StoreResult(False, 0))
            if self._known.knows_all(keys):
                self._ledger.skip_store()
                return self._answer(L2StoreResult(True, 0))
            store = _Store(self._clock(), keys, [item.get_size() for item in objects])
        except Exception:
            self._faults.caught("deciding on a store")
        # Held so that whoever collects completions finds the store that it completes.
        with self._lock:
            task = self._inner.submit_store_task(keys, objects)
            if store is not None:
                self._open[task] = store
        return int(task)

    def _answer(self, result: Any) -> int:
        task = next(self._own_ids)
        with self._lock:
            self._own[task] = result
        try:
            self._bell.ring()
        except BaseException:
            with self._lock:
                self._own.pop(task, None)
            raise
        return task

    def pop_completed(self) -> dict[int, Any]:
        """Results by task id of all stores that completed since the last call."""
        with self._lock:
            done: dict[int, Any] = self._inner.pop_completed_store_tasks()
            ended = [(result, self._open.pop(task, None)) for task, result in done.items()]
            own, self._own = self._own, {}
        for result, store in ended:
            if store is None:
                continue
            try:
                self._count(store, result)
            except Exception:
                self._faults.caught("counting a store")
        return {**done, **own}

    def _count(self, store: _Store, result: Any) -> None:
        ok = bool(result.is_successful())
        self._ledger.end_store(sum(store.sizes), self._clock() - store.started, ok=ok)
        if ok:
            self._known.learn(store.keys, store.sizes)
