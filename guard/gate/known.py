"""Which keys are in L2, as far as the gate has seen, and the exact bytes of each.

A bounded set. It only ever saves work (a store that need not be done, keys that a probe can
read), so a key that is missing here costs little, while one that is here wrongly costs one
lookup, which takes it out.

It is also a witness: lookup after lookup that finds none of the keys known to be there says
that the connection is lost, or the store is another one.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

CAPACITY = 65_536
BACKLOG = 16
MAX_BACKLOG = 1024
MAX_LOST = 64

Key = TypeVar("Key")


class KnownKeys(Generic[Key]):
    """At most `capacity` keys with their sizes; the longest unseen go first. Thread-safe.

    `identities` makes of keys what they are found by: equal for equal keys and cheap to
    hash, which a host's own key objects need not be.

    What is learnt is only noted, so that it costs the path it is learnt on next to nothing.
    Whoever asks has all notes settled first, in their order; `on_backlog` is called when
    there are many, so that somebody settles them in time.

    Held in two generations that share no key, which is cheaper than an order among all:
    when the young one has half the capacity, the old one is dropped. Beside them, and as
    bounded, what is *doubted* (known to an adapter that is no longer in use) and what is
    *lost* (known, and missed by the last lookups).
    """

    def __init__(
        self,
        identities: Callable[[Sequence[Key]], Sequence[Hashable]] = lambda keys: keys,
        *,
        capacity: int = CAPACITY,
        on_backlog: Callable[[], None] = lambda: None,
    ) -> None:
        self._identities = identities
        self._half = max(1, capacity // 2)
        self._on_backlog = on_backlog
        self._lock = threading.Lock()
        self._notes: deque[Callable[[], None]] = deque()
        self._young: dict[Hashable, tuple[Key, int]] = {}
        self._old: dict[Hashable, tuple[Key, int]] = {}
        self._doubted: dict[Hashable, tuple[Key, int]] = {}
        self._lost: dict[Hashable, tuple[Key, int]] = {}
        self._lost_lookups = 0

    def __len__(self) -> int:
        self.settle()
        return len(self._young) + len(self._old)

    @property
    def lost_lookups(self) -> int:
        """Lookups in a row that found nothing, though some of their keys were known."""
        self.settle()
        return self._lost_lookups

    def learn(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        """These keys are in L2 now, each with that many bytes. Both sequences must not
        change any more."""

        def add() -> None:
            for at in range(0, len(keys), self._half):
                part = slice(at, at + self._half)
                self._add(keys[part], sizes[part])

        self._note(add)

    def forget(self, keys: Sequence[Key]) -> None:
        """These keys were found absent, or are being deleted. Must not change any more."""
        self._note(lambda: self._forget(keys))

    def found(self) -> None:
        """A lookup found something, so what was missing before was not for want of a store."""
        # Nearly always there is nothing to take back, and that must cost nothing.
        if self._lost_lookups or self._notes:
            self._note(self._clear_lost)

    def found_none(self, keys: Sequence[Key]) -> None:
        """A lookup found none of these keys. Must not change any more."""
        self._note(lambda: self._lose(keys))

    def doubt(self) -> None:
        """Whatever is known may be so no longer: no store is spared for it, but a probe may
        still look for it, and its sizes are remembered."""

        def doubt() -> None:
            self._doubted = {**self._doubted, **self._old, **self._young}
            for identity in list(self._doubted)[: max(0, len(self._doubted) - 2 * self._half)]:
                del self._doubted[identity]
            self._old, self._young = {}, {}
            self._clear_lost()

        self._note(doubt)
        self.settle()

    def _note(self, note: Callable[[], None]) -> None:
        notes = self._notes
        notes.append(note)
        if len(notes) >= BACKLOG:
            if len(notes) >= MAX_BACKLOG:
                self.settle()
            else:
                self._on_backlog()

    def settle(self) -> None:
        """Work off what was noted."""
        if not self._notes:
            return
        with self._lock:
            while self._notes:
                self._notes.popleft()()

    def _clear_lost(self) -> None:
        self._lost_lookups = 0
        self._lost = {}

    def _forget(self, keys: Sequence[Key]) -> None:
        self._remove(keys)

    def _lose(self, keys: Sequence[Key]) -> None:
        missed = self._remove(keys)
        if missed:
            self._lost_lookups += 1
            for identity, entry in missed.items():
                if len(self._lost) >= MAX_LOST:
                    break
                self._lost[identity] = entry

    def _add(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        identities = self._identities(keys)
        if len(self._young) + len(keys) > self._half:
            self._old, self._young = self._young, {}
        self._young.update(zip(identities, zip(keys, sizes, strict=True), strict=True))
        if self._old:
            for identity in identities:
                self._old.pop(identity, None)
        if self._doubted:
            for identity in identities:
                self._doubted.pop(identity, None)

    def _remove(self, keys: Sequence[Key]) -> dict[Hashable, tuple[Key, int]]:
        """Takes the keys out; returns the entries of those that were known."""
        were: dict[Hashable, tuple[Key, int]] = {}
        if self._young or self._old or self._doubted:
            for identity in self._identities(keys):
                known = self._young.pop(identity, None) or self._old.pop(identity, None)
                if known is not None:
                    were[identity] = known
                elif self._doubted:
                    self._doubted.pop(identity, None)
        return were

    def knows_all(self, keys: Sequence[Key]) -> bool:
        """Whether every one of these keys is known to be in L2; false for none."""
        self.settle()
        with self._lock:
            young, old = self._young, self._old
            return bool(keys) and all(i in young or i in old for i in self._identities(keys))

    def sizes(self, keys: Sequence[Key]) -> list[int | None]:
        """The bytes of each key, None where it is not known."""
        self.settle()
        with self._lock:
            entries = [
                self._young.get(i) or self._old.get(i) or self._doubted.get(i)
                for i in self._identities(keys)
            ]
        return [None if entry is None else entry[1] for entry in entries]

    def sample(
        self, count: int, max_bytes: int, chooser: random.Random, *, lost: bool = False
    ) -> list[tuple[Key, int]]:
        """At most `count` known keys, all of one size, at random, of `max_bytes` in all.

        The size is the one that makes up most of the known bytes, of those within
        `max_bytes`: many small objects say little of what loads cost. Empty when nothing is
        known or all keys are over `max_bytes`. When nothing is known, what is doubted is taken, and
        with `lost` only what the last lookups missed.
        """
        self.settle()
        with self._lock:
            if lost:
                entries = list(self._lost.values())
            else:
                entries = [*self._old.values(), *self._young.values()]
                entries = entries or list(self._doubted.values())
        sizes = Counter(entry[1] for entry in entries if 0 < entry[1] <= max_bytes)
        if not sizes:
            return []
        size = max(sizes, key=lambda each: each * sizes[each])
        alike = [entry for entry in entries if entry[1] == size]
        return chooser.sample(alike, min(count, len(alike), max_bytes // size))
