"""A cache server in virtual time whose truth is known: its ledger is the gate's own.

Requests wait for one of the cache's prefetch slots; a lookup, then a load: a fixed cost, then
its bytes over a path (one after the other) or over a stream of its own.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from guard.gate.ledger import Ledger
from guard.sources.samples import Sample

CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Store:
    """T0 in seconds, bytes per second of the whole path or, with `streams`, of each load;
    `noise` is the relative standard deviation of a load's transfer (lognormal, mean 1)."""

    fixed_seconds: float
    bandwidth: float
    noise: float = 0.2
    streams: bool = False
    lookup_seconds: float = 0.005


@dataclass(slots=True)
class VirtualCache:
    """Poisson arrivals of loads of 1 to `max_chunks` chunks at `rate` a second."""

    store: Store
    rate: float
    seed: int
    slots: int = 8
    max_chunks: int = 12
    now: float = 0.0
    offered_bytes: int = 0
    offered: int = 0
    _ledger: Ledger = field(init=False)
    _random: Random = field(init=False)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _waiting: deque[int] = field(default_factory=deque)
    _busy_slots: int = 0
    _path_free: float = 0.0
    _order: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._ledger = Ledger(clock=lambda: self.now)
        self._random = Random(self.seed)
        self._after(self._random.expovariate(self.rate), self._arrive)

    @property
    def mean_bytes(self) -> float:
        """Of a load, over all time."""
        return (self.max_chunks + 1) / 2 * CHUNK_BYTES

    def run(self, seconds: float, every: float = 1.0) -> Iterator[Sample]:
        """A sample every so often of the next `seconds`."""
        for _ in range(round(seconds / every)):
            tick = math.floor(self.now) + every
            while self._events[0][0] <= tick:
                self.now, _, event = heapq.heappop(self._events)
                event()
            self.now = tick
            yield self.sample()

    def sample(self) -> Sample:
        """What the guard would scrape now."""
        totals = self._ledger.totals()
        values = {
            f"gate.{kind}.{name}": float(getattr(totals.sums[kind], name))
            for kind in ("all", "alone")
            for name in (
                *("loads", "bytes", "seconds"),
                *("bytes_squared", "seconds_squared", "bytes_seconds"),
            )
        }
        lookups = {a: float(sum(h.counts)) for a, h in totals.asked_chunks.items()}
        values |= {f"gate.lookups.{a}": lookups[a] for a in ("hit", "partial", "miss", "declined")}
        values |= {
            "gate.lookups": sum(lookups.values()),
            "gate.lookup_seconds": totals.lookup_seconds,
            "gate.lookup_keys": float(totals.lookup_keys),
            "gate.denied_keys": float(totals.denied_keys),
            "gate.busy_seconds": totals.busy_seconds,
            "gate.load_chunks": float(totals.chunks),
            "gate.submitted_bytes": float(totals.submitted_bytes),
            "gate.load_failures": float(totals.load_failures),
            "gate.loads_in_flight": float(totals.loads_in_flight),
            "gate.in_flight_bytes": float(totals.bytes_in_flight),
            "queue.submission": 0.0,
            "queue.pending": float(len(self._waiting)),
        }
        for name in ("oldest_load_seconds", "last_completion_age_seconds"):
            value = getattr(totals, name)
            if value is not None:
                values[f"gate.{name}"] = value
        return Sample(self.now, self.now, ("http://c/metrics", 0.0, "epoch"), values)

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def _arrive(self) -> None:
        self._after(self._random.expovariate(self.rate), self._arrive)
        chunks = self._random.randint(1, self.max_chunks)
        self.offered += 1
        self.offered_bytes += chunks * CHUNK_BYTES
        self._waiting.append(chunks)
        self._fill_slots()

    def _fill_slots(self) -> None:
        while self._waiting and self._busy_slots < self.slots:
            self._busy_slots += 1
            chunks = self._waiting.popleft()
            token = self._ledger.begin_lookup(chunks)

            def answered(token: int = token, chunks: int = chunks) -> None:
                self._ledger.end_lookup(token, "hit", chunks, by_l2=True)
                self._load(chunks)

            self._after(self.store.lookup_seconds, answered)

    def _load(self, chunks: int) -> None:
        nbytes = chunks * CHUNK_BYTES
        token = self._ledger.begin_load(nbytes)
        assert token is not None
        transfer = nbytes / self.store.bandwidth * self._noise()
        begin = self.now + self.store.fixed_seconds
        if not self.store.streams:
            begin = max(begin, self._path_free)
            self._path_free = begin + transfer

        def ended() -> None:
            self._ledger.end_load(token, nbytes, chunks)
            self._busy_slots -= 1
            self._fill_slots()

        self._after(begin + transfer - self.now, ended)

    def _noise(self) -> float:
        sigma = math.sqrt(math.log(1 + self.store.noise**2))
        return self._random.lognormvariate(-sigma * sigma / 2, sigma)
