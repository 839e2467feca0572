"""Lookups through the gate: denied at once, let through, given up, or asked for nobody.

`submit` and `query` run on LMCache's prefetch thread, `sweep` on the gate's own. A lookup
that is answered in L2's place while L2 is still asked is *abandoned*: the adapter may yet
find keys and lock them, so it is remembered until it answered and its locks are released,
or until the adapter is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.lmcache_native import Bitmap

from guard.gate.lmcache_generation import Generation
from guard.gate.lmcache_keys import Keys, asked_chunks, found_chunks
from guard.gate.lmcache_parts import Parts, Tasks
from guard.gate.safety import Bell

MAX_ABANDONED = 32
LATE_SECONDS = 60.0
"""An answer that the host did not fetch for so long is fetched for it, or what it forgot to
ask for (a request that it gave up after an error of its own) would be in flight for ever."""
MAX_LATE = 256
SWEEP_SECONDS = 0.1
SHADOW_SWEEP_SECONDS = 0.02
_RECENT = 64
_SHADOWED = ("bypassed", "shed")


@dataclass(slots=True)
class _Lookup:
    """`token` is None where deciding on the lookup met a fault: it is only passed on."""

    token: int | None
    started: float
    keys: Keys
    chunks: int
    of: Generation
    task: int = -1


@dataclass(slots=True)
class _Shadow:
    started: float
    keys: Keys
    chunks: int
    layouts: Mapping[int, Any]
    of: Generation | None = None
    task: int = -1


class Lookups(Tasks):
    """All lookups of one gate.

    `may_shadow`: ask L2 one denied lookup at a time for nobody, so that demand stays known;
    only for adapters whose submitting is known never to block.
    """

    def __init__(self, parts: Parts, bell: Bell, *, may_shadow: bool) -> None:
        super().__init__(parts, bell)
        self._may_shadow = may_shadow
        self._own: dict[int, int] = {}
        self._open: dict[int, _Lookup] = {}
        self._abandoned: dict[int, _Lookup] = {}
        self._late: dict[int, Any] = {}
        self._found: deque[tuple[Keys, str, int]] = deque(maxlen=_RECENT)
        self._shadow: _Shadow | None = None

    @property
    def abandoned(self) -> int:
        """Lookups answered in L2's place that the adapter in use has not answered yet."""
        if not self._abandoned:
            return 0
        current = self._inner.current
        return sum(lookup.of is current for lookup in list(self._abandoned.values()))

    def submit(self, keys: Keys, layouts: Mapping[int, Any]) -> int:
        """A task id: of the adapter, or negative for an answer of the gate's own."""
        lookup = _Lookup(None, self._clock(), keys, len(keys), self._inner.current)
        try:
            lookup.chunks = asked_chunks(keys)
            answer = self._admission.deny(lookup.chunks)
            if answer is None and len(self._abandoned) >= MAX_ABANDONED:
                answer = "expired" if self.abandoned >= MAX_ABANDONED else None
            if answer is not None:
                return self._deny(answer, keys, lookup.chunks, layouts)
            lookup.token = self._ledger.begin_lookup(len(keys))
        except Exception:
            self._faults.caught("deciding on a lookup")
        try:
            task = self._ask(lookup, layouts)
        except BaseException:
            if lookup.token is not None:
                self._ledger.cancel_lookup(lookup.token)
            raise
        if task is None:
            return self._answer_for_none(lookup)
        try:
            if lookup.token is not None and self._admission.settings.lookup_deadline_s is not None:
                self._wake()
        except Exception:
            self._faults.caught("timing a lookup")
        return task

    def _ask(self, lookup: _Lookup, layouts: Mapping[int, Any]) -> int | None:
        """The task id; None where there is no adapter to ask."""
        with self.lock:
            of = lookup.of = self._inner.current
            if not of.serves:
                return None
            lookup.task = int(of.adapter.submit_lookup_and_lock_task(lookup.keys, layouts))
            task = of.task(lookup.task)
            self._open[task] = lookup
            return task

    def _answer_for_none(self, lookup: _Lookup) -> int:
        """A miss, since the adapter was closed and there is no other."""
        count = len(lookup.keys)
        task = next(self._own_ids)
        self._own[task] = count
        try:
            if lookup.token is not None:
                self._ledger.end_lookup(
                    lookup.token, "aborted", lookup.chunks, by_l2=False, denied_keys=count
                )
            self._bell.ring()
        except BaseException:
            del self._own[task]
            raise
        return task

    def _deny(self, answer: str, keys: Keys, chunks: int, layouts: Mapping[int, Any]) -> int:
        task = next(self._own_ids)
        self._own[task] = len(keys)
        try:
            self._ledger.deny_lookup(answer, len(keys), chunks)
            if self._may_shadow and answer in _SHADOWED:
                self._want_shadow(keys, chunks, layouts)
            self._bell.ring()
        except BaseException:
            del self._own[task]
            raise
        return task

    def _want_shadow(self, keys: Keys, chunks: int, layouts: Mapping[int, Any]) -> None:
        if self._shadow is None and not self._abandoned:
            self._shadow = _Shadow(self._clock(), keys, chunks, layouts)
            self._wake()

    def query(self, task: int) -> Any:
        """The bitmap of a lookup, once; None while it is not answered."""
        if task < 0:
            keys = self._own.pop(task, None)
            return None if keys is None else Bitmap(keys)
        late = self._late.pop(task, None)
        if late is not None:
            return late
        lookup = self._open.get(task)
        if lookup is None:
            return None
        result = None
        if lookup.of.speaks:
            result = lookup.of.adapter.query_lookup_and_lock_result(lookup.task)
        if result is None:
            return self._give_up(task, lookup)
        return self._settle(task, lookup, result)

    def _settle(self, task: int, lookup: _Lookup, result: Any) -> Any:
        self._open.pop(task, None)
        if lookup.token is None:
            return result
        try:
            self._inner.heard(lookup.of)
            return self._answer(lookup, lookup.token, result)
        except Exception:
            self._faults.caught("settling a lookup")
            self._ledger.cancel_lookup(lookup.token)
            return result

    def _give_up(self, task: int, lookup: _Lookup) -> Any:
        """A miss in place of what L2 does not answer, if it is not to be waited for."""
        try:
            answer = self._overdue(lookup)
            if answer is None:
                return None
            count = len(lookup.keys)
            miss = Bitmap(count)
        except Exception:
            self._faults.caught("timing a lookup")
            return None
        # From here on the host gets its answer whatever fails: the sweep takes L2's.
        self._abandoned[task] = lookup
        self._open.pop(task, None)
        try:
            if lookup.token is not None:
                self._ledger.end_lookup(
                    lookup.token, answer, lookup.chunks, by_l2=False, denied_keys=count
                )
            self._wake()
        except Exception:
            self._faults.caught("giving up a lookup")
        return miss

    def _overdue(self, lookup: _Lookup) -> str | None:
        if not lookup.of.serves:
            return "aborted"
        settings = self._admission.settings
        if settings.share <= 0:
            return "bypassed"
        deadline = settings.lookup_deadline_s
        late = deadline is not None and self._clock() - lookup.started > deadline
        return "expired" if late else None

    def _answer(self, lookup: _Lookup, token: int, result: Any) -> Any:
        keys, chunks = lookup.keys, lookup.chunks
        settings = self._admission.settings
        found = int(result.popcount())
        self._learn(keys, result, found)
        prefix = found_chunks(result, len(keys), chunks)
        refused = None
        if settings.share <= 0:
            refused = "bypassed"
        elif 0 < prefix < settings.min_chunks:
            refused = "short"
        if refused is not None:
            self._ledger.end_lookup(token, refused, chunks, by_l2=True, denied_keys=found)
            if found:
                lookup.of.adapter.submit_unlock(result.gather(keys))
            return Bitmap(len(keys))
        answer = "miss" if not prefix else "hit" if prefix == chunks else "partial"
        self._ledger.end_lookup(token, answer, chunks, by_l2=True)
        if prefix:
            self._found.append((keys, answer, chunks))
        return result

    def _learn(self, keys: Keys, result: Any, found: int) -> None:
        if not found:
            self._known.found_none(keys)
            return
        self._known.found()
        if found < len(keys):
            self._known.forget((~result).gather(keys))

    def load_refused(self, keys: Keys, answer: str) -> None:
        """The load that followed a lookup was not let in: `answer` is what it comes to."""
        # LMCache hands a load the very key objects of its lookup.
        first = keys[0]
        for at in reversed(range(len(self._found))):
            asked, before, chunks = self._found[at]
            if any(key is first for key in asked):
                del self._found[at]
                self._ledger.change_answer(before, answer, chunks)
                return

    def ring_stuck(self, of: Generation) -> int:
        """That generation serves no more: have the host ask again for what it was asked,
        which is then answered in its place; returns how many lookups that is."""
        stuck = sum(lookup.of is of for lookup in list(self._open.values()))
        self._bell.ring()
        self._wake()
        return stuck

    def sweep(self) -> float | None:
        """Look after what nobody waits for; returns seconds until the next time, None for
        when woken."""
        for task, lookup in list(self._abandoned.items()):
            if self._let_go(lookup.of, lookup.task, lookup.keys):
                del self._abandoned[task]
        self._fetch_late()
        self._sweep_shadow()
        due = self._ring_overdue()
        if self._shadow is not None:
            young = self._clock() - self._shadow.started < 1.0
            pause = SHADOW_SWEEP_SECONDS if young else SWEEP_SECONDS
            due = pause if due is None else min(due, pause)
        if self._abandoned:
            due = SWEEP_SECONDS if due is None else min(due, SWEEP_SECONDS)
        return due

    def _fetch_late(self) -> None:
        now = self._clock()
        for task, lookup in list(self._open.items()):
            if now - lookup.started < LATE_SECONDS:
                return  # and all that follow are younger
            if not lookup.of.speaks:
                continue
            result = lookup.of.adapter.query_lookup_and_lock_result(lookup.task)
            if result is not None:
                self._late[task] = self._settle(task, lookup, result)
                drop_oldest(self._late, MAX_LATE)
                self._bell.ring()

    def _let_go(self, of: Generation, task: int, keys: Keys) -> bool:
        """Whether nothing more is to come of a lookup that nobody waits for: its adapter
        has answered, and its locks are released, or is closed."""
        if not of.speaks:
            return of.phase == "closed"
        result = of.adapter.query_lookup_and_lock_result(task)
        if result is None:
            return False
        self._inner.heard(of)
        self._release(of, keys, result)
        return True

    def _release(self, of: Generation, keys: Keys, result: Any) -> None:
        found = int(result.popcount())
        if found:
            of.adapter.submit_unlock(result.gather(keys))
        self._learn(keys, result, found)

    def _sweep_shadow(self) -> None:
        shadow = self._shadow
        if shadow is None:
            return
        if shadow.of is not None and not shadow.of.serves:
            self._abandon_shadow(shadow, shadow.of)
            return
        try:
            if shadow.of is None:
                with self.lock:
                    of = self._inner.current
                    if not of.serves:
                        self._shadow = None
                        return
                    task = of.adapter.submit_lookup_and_lock_task(shadow.keys, shadow.layouts)
                shadow.of, shadow.task = of, task
            of = shadow.of
            result = of.adapter.query_lookup_and_lock_result(shadow.task)
        except Exception:
            self._shadow = None
            raise
        if result is None:
            return
        self._shadow = None
        self._inner.heard(of)
        self._release(of, shadow.keys, result)
        prefix = found_chunks(result, len(shadow.keys), shadow.chunks)
        answer = "miss" if not prefix else "hit" if prefix == shadow.chunks else "partial"
        found = result.gather(shadow.keys)
        sizes = self._known.sizes(found)
        self._ledger.end_shadow(
            answer,
            sum(
                _layout_bytes(shadow.layouts.get(key.object_group_id)) if size is None else size
                for key, size in zip(found, sizes, strict=True)
            ),
        )

    def _abandon_shadow(self, shadow: _Shadow, of: Generation) -> None:
        self._shadow = None
        if of.phase != "closed":
            lookup = _Lookup(None, shadow.started, shadow.keys, shadow.chunks, of, shadow.task)
            self._abandoned[of.task(shadow.task)] = lookup

    def _ring_overdue(self) -> float | None:
        """Have the host ask again when a lookup is past its time, since L2 rings no more."""
        oldest = next(iter(list(self._open.values())), None)
        if oldest is None:
            return None
        if self._overdue(oldest) is not None:
            self._bell.ring()
            return SWEEP_SECONDS
        deadline = self._admission.settings.lookup_deadline_s
        if deadline is None:
            return None
        return max(0.0, oldest.started + deadline - self._clock()) + 0.001


def drop_oldest(answers: dict[int, Any], kept: int) -> None:
    """Forget what was put in first, until `kept` are left: nobody came for it."""
    while len(answers) > kept:
        answers.pop(next(iter(answers)), None)


def _layout_bytes(layout: Any) -> int:
    """What an object of that layout takes before any encoding; 0 when it is not known."""
    if layout is None:
        return 0
    pairs = zip(layout.shapes, layout.dtypes, strict=True)
    return sum(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in pairs)
