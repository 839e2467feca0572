"""The adapter behind the gate, which can be exchanged for a fresh one while in use.

Each adapter is one generation. Whatever was asked of it is remembered with its generation,
so that a question is never put to another adapter than the one that was asked, and so that
what an adapter left unanswered can be answered in its place once it is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["serving", "leaving", "parked", "closed"]
_BITS = 40


@dataclass(slots=True, eq=False)
class Generation:
    """One adapter's life.

    `serving`: asked. `leaving`: being closed, not touched by anybody else. `parked`: not
    asked anything new, but it may still answer, and write into the buffers it was given.
    `closed`: its workers have ended, and nothing it was asked will be answered.
    `answered`: whether it ever answered anything, which a worker that hangs in connecting
    does not.
    """

    number: int
    adapter: Any
    built_at: float
    phase: Phase = "serving"
    answered: bool = False

    @property
    def serves(self) -> bool:
        """Whether it may be asked something new."""
        return self.phase == "serving"

    @property
    def speaks(self) -> bool:
        """Whether it may be asked for what it was told to do."""
        return self.phase in ("serving", "parked")

    def task(self, own: int) -> int:
        """The id under which the host knows the task that the adapter calls `own`: no two
        generations share one, and those of the first are the adapter's own."""
        return (self.number << _BITS) + own


class Wrapped:
    """The generation in use, and what a fresh adapter must be told.

    `build` makes an adapter. When an adapter was closed and none could be built, the last
    one stays here, closed; nothing is asked of it.
    """

    def __init__(self, build: Callable[[], Any], clock: Callable[[], float]) -> None:
        self._build = build
        self._clock = clock
        self._listeners: list[Any] = []
        self._identity: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.current = Generation(0, build(), clock())
        self.last_answer_at: float | None = None

    def build(self) -> Any:
        """A fresh adapter that knows who it is, but nobody listens to it yet. Raises what
        building raises."""
        adapter = self._build()
        if self._identity is not None:
            args, kwargs = self._identity
            adapter.set_backend_identity(*args, **kwargs)
        return adapter

    def install(self, adapter: Any) -> Generation:
        """That adapter serves from now on; returns its generation. Whoever listened to the
        old one listens to it too."""
        for listener in self._listeners:
            adapter.register_listener(listener)
        self.current = Generation(self.current.number + 1, adapter, self._clock())
        return self.current

    def set_identity(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As the host tells an adapter who it is."""
        self._identity = (args, kwargs)
        self.current.adapter.set_backend_identity(*args, **kwargs)

    def listen(self, listener: Any) -> None:
        """As the host registers a listener."""
        self._listeners.append(listener)
        self.current.adapter.register_listener(listener)

    def heard(self, generation: Generation) -> None:
        """That generation has answered something."""
        generation.answered = True
        self.last_answer_at = self._clock()


def carry_accounts(old: Any, new: Any) -> None:
    """What LMCache's native adapters know of the bytes in L2 goes over to the new one, or
    eviction would count from nothing: it deletes only what the adapter has in its books.

    An adapter that keeps no such books is left alone.
    """
    books, own = getattr(old, "_key_sizes", None), getattr(new, "_key_sizes", None)
    if not isinstance(books, dict) or not isinstance(own, dict):
        return
    by_salt: dict[str, int] = {}
    with new._lock:
        for key, size in list(books.items()):
            if key not in own:
                own[key] = size
                by_salt[key.cache_salt] = by_salt.get(key.cache_salt, 0) + size
    with new._usage_lock:
        new._total_bytes_used += sum(by_salt.values())
        for salt, size in by_salt.items():
            new._bytes_by_cache_salt[salt] = new._bytes_by_cache_salt.get(salt, 0) + size
