"""Which keys are in L2, as far as the gate has seen, and the exact bytes of each.

A bounded set. It only ever saves work (a store that need not be done, keys that a probe can
read), so a key that is missing here costs little, while one that is here wrongly costs one
lookup, which takes it out.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

CAPACITY = 65_536

Key = TypeVar("Key")


class KnownKeys(Generic[Key]):
    """At most `capacity` keys with their sizes; the longest unseen go first. Thread-safe.

    `identities` makes of keys what they are found by: equal for equal keys and cheap to
    hash, which a host's own key objects need not be.

    Held in two generations that share no key, which is cheaper than an order among all:
    when the young one has half the capacity, the old one is dropped.
    """

    def __init__(
        self,
        identities: Callable[[Sequence[Key]], Sequence[Hashable]] = lambda keys: keys,
        *,
        capacity: int = CAPACITY,
    ) -> None:
        self._identities = identities
        self._half = max(1, capacity // 2)
        self._lock = threading.Lock()
        self._young: dict[Hashable, tuple[Key, int]] = {}
        self._old: dict[Hashable, tuple[Key, int]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def learn(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        """These keys are in L2 now, each with that many bytes. Of more than half the
        capacity at once only the last are kept."""
        keys, sizes = keys[-self._half :], sizes[-self._half :]
        identities = self._identities(keys)
        with self._lock:
            if len(self._young) + len(keys) > self._half:
                self._old, self._young = self._young, {}
            self._young.update(zip(identities, zip(keys, sizes, strict=True), strict=True))
            if self._old:
                for identity in identities:
                    self._old.pop(identity, None)

    def forget(self, keys: Sequence[Key]) -> None:
        """These keys were found absent, or are being deleted."""
        if not self._young and not self._old:
            return
        absent = self._identities(keys)
        with self._lock:
            for generation in (self._young, self._old):
                if generation:
                    for identity in absent:
                        generation.pop(identity, None)

    def knows_all(self, keys: Sequence[Key]) -> bool:
        """Whether every one of these keys is known to be in L2; false for none."""
        with self._lock:
            young, old = self._young, self._old
            return bool(keys) and all(i in young or i in old for i in self._identities(keys))

    def sizes(self, keys: Sequence[Key]) -> list[int | None]:
        """The bytes of each key, None where it is not known."""
        with self._lock:
            entries = [self._young.get(i) or self._old.get(i) for i in self._identities(keys)]
        return [None if entry is None else entry[1] for entry in entries]

    def sample(self, count: int, max_bytes: int, chooser: random.Random) -> list[tuple[Key, int]]:
        """At most `count` known keys, all of one size, at random, of `max_bytes` in all.

        The size is the one that most known keys have. Empty when nothing is known or one
        key alone is over `max_bytes`.
        """
        with self._lock:
            entries = [*self._old.values(), *self._young.values()]
        if not entries:
            return []
        size, _ = Counter(entry[1] for entry in entries).most_common(1)[0]
        if size <= 0 or size > max_bytes:
            return []
        alike = [entry for entry in entries if entry[1] == size]
        return chooser.sample(alike, min(count, len(alike), max_bytes // size))
