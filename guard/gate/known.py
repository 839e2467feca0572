"""Which keys are in L2, as far as the gate has seen, and the exact bytes of each.

A bounded set. It only ever saves work (a store that need not be done, keys that a probe can
read), so a key that is missing here costs little, while one that is here wrongly costs one
lookup, which takes it out.
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

Key = TypeVar("Key")


class KnownKeys(Generic[Key]):
    """At most `capacity` keys with their sizes; the longest unseen go first. Thread-safe.

    `identities` makes of keys what they are found by: equal for equal keys and cheap to
    hash, which a host's own key objects need not be.

    What is learnt is only noted, so that it costs the path it is learnt on next to nothing.
    Whoever asks has all notes settled first, in their order; `on_backlog` is called when
    there are many, so that somebody settles them in time.

    Held in two generations that share no key, which is cheaper than an order among all:
    when the young one has half the capacity, the old one is dropped.
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
        self._notes: deque[tuple[Sequence[Key], Sequence[int] | None]] = deque()
        self._young: dict[Hashable, tuple[Key, int]] = {}
        self._old: dict[Hashable, tuple[Key, int]] = {}

    def __len__(self) -> int:
        self.settle()
        return len(self._young) + len(self._old)

    def learn(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        """These keys are in L2 now, each with that many bytes. Both sequences must not
        change any more."""
        self._note(keys, sizes)

    def forget(self, keys: Sequence[Key]) -> None:
        """These keys were found absent, or are being deleted. Must not change any more."""
        self._note(keys, None)

    def _note(self, keys: Sequence[Key], sizes: Sequence[int] | None) -> None:
        notes = self._notes
        notes.append((keys, sizes))
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
                keys, sizes = self._notes.popleft()
                if sizes is None:
                    self._remove(keys)
                else:
                    for at in range(0, len(keys), self._half):
                        part = slice(at, at + self._half)
                        self._add(keys[part], sizes[part])

    def _add(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        identities = self._identities(keys)
        if len(self._young) + len(keys) > self._half:
            self._old, self._young = self._young, {}
        self._young.update(zip(identities, zip(keys, sizes, strict=True), strict=True))
        if self._old:
            for identity in identities:
                self._old.pop(identity, None)

    def _remove(self, keys: Sequence[Key]) -> None:
        if self._young or self._old:
            for identity in self._identities(keys):
                if self._young.pop(identity, None) is None:
                    self._old.pop(identity, None)

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
            entries = [self._young.get(i) or self._old.get(i) for i in self._identities(keys)]
        return [None if entry is None else entry[1] for entry in entries]

    def sample(self, count: int, max_bytes: int, chooser: random.Random) -> list[tuple[Key, int]]:
        """At most `count` known keys, all of one size, at random, of `max_bytes` in all.

        The size is the one that most known keys have. Empty when nothing is known or one
        key alone is over `max_bytes`.
        """
        self.settle()
        with self._lock:
            entries = [*self._old.values(), *self._young.values()]
        if not entries:
            return []
        size, _ = Counter(entry[1] for entry in entries).most_common(1)[0]
        if size <= 0 or size > max_bytes:
            return []
        alike = [entry for entry in entries if entry[1] == size]
        return chooser.sample(alike, min(count, len(alike), max_bytes // size))
