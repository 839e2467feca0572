"""The gate's exact account of what went through L2: pure sums over given times.

Knows no host and no metrics library: `guard.gate.metrics` shows what is counted here.
All seconds come from one injected monotonic clock, all bytes and counts are exact integers.
Every method is thread-safe and takes well under a microsecond of its caller's time for the
lock; none calls out while holding it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from guard.gate.tally import (
    ANSWERS,
    CHUNK_BUCKETS,
    KINDS,
    OTHER_RANK,
    RANKS,
    RECENT_LOADS,
    SECOND_BUCKETS,
    SHADOW_ANSWERS,
    Histogram,
    RecentLoad,
    Sums,
    Totals,
)

VERSION = "0.1.0"
"""The gate's own version, kept equal to the distribution's by a test: the gate also runs
where kvguard's metadata is not installed."""


@dataclass(slots=True)
class _Load:
    start: float
    bytes: int
    alone: bool


class Ledger:
    """Counts loads, lookups and stores of one L2 adapter."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sums = {kind: Sums() for kind in KINDS}
        self._loads: dict[int, _Load] = {}
        self._lookups: dict[int, float] = {}
        self._token = 0
        self._loads_begun = 0
        self._bytes_in_flight = 0
        self._busy_seconds = 0.0
        self._busy_since = 0.0
        self._last_completion: float | None = None
        self._probing = 0
        self._chunks = self._submitted_bytes = self._load_failures = 0
        self._rank_bytes: dict[str, int] = {}
        self._recent: deque[RecentLoad] = deque(maxlen=RECENT_LOADS)
        self._lookup_seconds = 0.0
        self._lookup_keys = self._denied_keys = 0
        self._asked = {answer: Histogram(CHUNK_BUCKETS) for answer in ANSWERS}
        self._published = {answer: Histogram(CHUNK_BUCKETS) for answer in ANSWERS}
        self._lookup_durations = Histogram(SECOND_BUCKETS)
        self._load_durations = Histogram(SECOND_BUCKETS)
        self._shadow_lookups = dict.fromkeys(SHADOW_ANSWERS, 0)
        self._shadow_found_bytes = 0
        self._store_bytes = self._store_failures = self._stores_skipped = 0
        self._store_seconds = 0.0
        self._faults = 0

    # Loads

    def begin_load(self, nbytes: int, limit: int | None = None) -> int | None:
        """A load of `nbytes` was submitted; returns its token.

        With `limit` loads in flight already it is not begun and None returned, though its
        bytes were asked for and count as submitted all the same.
        """
        with self._lock:
            now = self._clock()
            self._submitted_bytes += nbytes
            in_flight = len(self._loads)
            if limit is not None and in_flight >= limit:
                return None
            self._loads_begun += 1
            if in_flight:
                for other in self._loads.values():
                    other.alone = False
            else:
                self._busy_since = now
            self._token += 1
            self._loads[self._token] = _Load(now, nbytes, not in_flight and not self._probing)
            self._bytes_in_flight += nbytes
            return self._token

    def end_load(
        self,
        token: int,
        ok_bytes: int,
        chunks: int,
        rank_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """A load ended with `ok_bytes` of its bytes and `chunks` distinct chunks loaded.

        Fewer bytes than submitted count as a failure; none at all, as a failure only. A
        token that is not in flight is ignored.
        """
        with self._lock:
            now = self._clock()
            load = self._take(token, now)
            if load is None:
                return
            seconds = now - load.start
            if ok_bytes < load.bytes:
                self._load_failures += 1
            self._recent.append(RecentLoad(load.start, now, ok_bytes, load.alone))
            if ok_bytes <= 0:
                return
            self._last_completion = now
            self._sums["all"].add(ok_bytes, seconds)
            if load.alone:
                self._sums["alone"].add(ok_bytes, seconds)
            self._load_durations.add(seconds)
            self._chunks += chunks
            for rank, nbytes in (rank_bytes or {}).items():
                known = rank in self._rank_bytes or len(self._rank_bytes) < RANKS - 1
                name = rank if known else OTHER_RANK
                self._rank_bytes[name] = self._rank_bytes.get(name, 0) + nbytes

    def cancel_load(self, token: int) -> None:
        """The load never started after all, since the adapter refused it: a failure."""
        with self._lock:
            if self._take(token, self._clock()) is not None:
                self._load_failures += 1

    def _take(self, token: int, now: float) -> _Load | None:
        load = self._loads.pop(token, None)
        if load is not None:
            self._bytes_in_flight -= load.bytes
            if not self._loads:
                self._busy_seconds += now - self._busy_since
        return load

    # Probes

    def begin_probe(self) -> tuple[int, bool]:
        """A probe's load begins: no load that it overlaps is alone. Returns a mark for
        `end_probe`, and whether loads are in flight, which spoils the probe."""
        with self._lock:
            self._probing += 1
            for load in self._loads.values():
                load.alone = False
            return self._loads_begun, bool(self._loads)

    def end_probe(self, mark: tuple[int, bool], nbytes: int, seconds: float) -> bool:
        """A probe's load ended; returns whether a load overlapped it. One that moved bytes
        and was not overlapped counts as kind `probe`, never in busy time."""
        begun, overlapped = mark
        with self._lock:
            self._probing -= 1
            overlapped = overlapped or self._loads_begun != begun
            if nbytes > 0 and not overlapped:
                self._sums["probe"].add(nbytes, seconds)
            return overlapped

    # Lookups

    def begin_lookup(self, keys: int) -> int:
        """A lookup of `keys` keys was asked of L2; returns its token."""
        with self._lock:
            self._lookup_keys += keys
            self._token += 1
            self._lookups[self._token] = self._clock()
            return self._token

    def end_lookup(
        self, token: int, answer: str, chunks: int, *, by_l2: bool, denied_keys: int = 0
    ) -> None:
        """The engine got `answer` to its lookup of `chunks` chunks, which denied it
        `denied_keys` keys. `by_l2`: L2 answered, so the lookup's seconds count; else the
        gate did in its place. A token that is not in flight is ignored."""
        with self._lock:
            start = self._lookups.pop(token, None)
            if start is None:
                return
            self._asked[answer].add(chunks)
            self._denied_keys += denied_keys
            if by_l2:
                seconds = self._clock() - start
                self._lookup_seconds += seconds
                self._lookup_durations.add(seconds)

    def cancel_lookup(self, token: int) -> None:
        """The lookup was never asked after all: the adapter refused it."""
        with self._lock:
            self._lookups.pop(token, None)

    def deny_lookup(self, answer: str, keys: int, chunks: int) -> None:
        """A lookup was answered as a miss without asking L2; `answer` says why."""
        with self._lock:
            self._lookup_keys += keys
            self._denied_keys += keys
            self._asked[answer].add(chunks)

    def change_answer(self, before: str, after: str, chunks: int) -> None:
        """A lookup answered `before` turned out as `after`: its load was not let in."""
        with self._lock:
            self._asked[before].add(chunks, -1)
            self._asked[after].add(chunks)

    def end_shadow(self, answer: str, found_bytes: int) -> None:
        """A lookup that no engine waited for found `found_bytes` in L2."""
        with self._lock:
            self._shadow_lookups[answer] += 1
            self._shadow_found_bytes += found_bytes

    # Stores and faults

    def end_store(self, nbytes: int, seconds: float, *, ok: bool) -> None:
        """A store of `nbytes` ended after `seconds`; a failed one counts as failure only."""
        with self._lock:
            if not ok:
                self._store_failures += 1
                return
            self._store_bytes += nbytes
            self._store_seconds += seconds

    def skip_store(self) -> None:
        """A store was answered as done since L2 holds its keys already."""
        with self._lock:
            self._stores_skipped += 1

    def fault(self) -> None:
        """The gate caught a fault of its own and forwarded plainly."""
        with self._lock:
            self._faults += 1

    # Reading

    @property
    def loads_in_flight(self) -> int:
        """Loads submitted and not ended."""
        return len(self._loads)

    @property
    def lookups_in_flight(self) -> int:
        """Lookups asked of L2 whose engine still waits."""
        return len(self._lookups)

    def recent_loads(self) -> tuple[RecentLoad, ...]:
        """The last 64 loads that ended, oldest first."""
        with self._lock:
            return tuple(self._recent)

    def totals(self, *, published: bool = False) -> Totals:
        """Everything at this moment; busy time includes the interval that is still open.

        `published` readings become counters, which must not be seen to fall: an answer that
        moves from hit to declined after it was published stays until the next hit makes up
        for it.
        """
        with self._lock:
            now = self._clock()
            if published:
                self._published = {
                    answer: self._published[answer].at_least(histogram)
                    for answer, histogram in self._asked.items()
                }
            asked = self._published if published else self._asked
            open_busy = now - self._busy_since if self._loads else 0.0
            last = self._last_completion
            # Both dicts keep the order in which things began.
            load = next(iter(self._loads.values()), None)
            lookup = next(iter(self._lookups.values()), None)
            return Totals(
                sums={kind: replace(sums) for kind, sums in self._sums.items()},
                busy_seconds=self._busy_seconds + open_busy,
                chunks=self._chunks,
                submitted_bytes=self._submitted_bytes,
                load_failures=self._load_failures,
                rank_bytes=dict(self._rank_bytes),
                loads_in_flight=len(self._loads),
                bytes_in_flight=self._bytes_in_flight,
                lookups_in_flight=len(self._lookups),
                oldest_load_seconds=None if load is None else now - load.start,
                oldest_lookup_seconds=None if lookup is None else now - lookup,
                last_completion_age_seconds=None if last is None else now - last,
                lookup_seconds=self._lookup_seconds,
                lookup_keys=self._lookup_keys,
                denied_keys=self._denied_keys,
                asked_chunks={answer: histogram.copy() for answer, histogram in asked.items()},
                lookup_durations=self._lookup_durations.copy(),
                load_durations=self._load_durations.copy(),
                shadow_lookups=dict(self._shadow_lookups),
                shadow_found_bytes=self._shadow_found_bytes,
                store_bytes=self._store_bytes,
                store_seconds=self._store_seconds,
                store_failures=self._store_failures,
                stores_skipped=self._stores_skipped,
                faults=self._faults,
            )
