"""What the ledger's numbers are made of: sums, histograms, and one reading of them all.

All seconds are of one monotonic clock, all bytes and counts exact integers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

KINDS = ("all", "alone", "probe")
ANSWERS = (
    "hit",
    "partial",
    "miss",
    "bypassed",
    "shed",
    "short",
    "expired",
    "declined",
    "aborted",
)
SHADOW_ANSWERS = ("hit", "partial", "miss")
CHUNK_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SECOND_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
RECENT_LOADS = 64
RANKS = 64
OTHER_RANK = "other"


@dataclass(slots=True)
class Sums:
    """What a least-squares fit of seconds = T0 + bytes / B needs, over completed loads."""

    loads: int = 0
    bytes: int = 0
    seconds: float = 0.0
    bytes_squared: int = 0
    seconds_squared: float = 0.0
    bytes_seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """One more load of `nbytes` that took `seconds`."""
        self.loads += 1
        self.bytes += nbytes
        self.seconds += seconds
        self.bytes_squared += nbytes * nbytes
        self.seconds_squared += seconds * seconds
        self.bytes_seconds += nbytes * seconds


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound, the last one for what is above all bounds, and the sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over; a negative number takes it away again."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        """A histogram of its own with the same content."""
        return Histogram(self.bounds, list(self.counts), self.total)

    def at_least(self, other: Histogram) -> Histogram:
        """The larger of both, bucket by bucket."""
        return Histogram(
            self.bounds,
            [max(a, b) for a, b in zip(self.counts, other.counts, strict=True)],
            max(self.total, other.total),
        )


@dataclass(frozen=True, slots=True)
class RecentLoad:
    """One finished load: seconds of the ledger's clock, bytes loaded, whether alone."""

    start: float
    end: float
    bytes: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """One consistent reading of everything; ages in seconds, None where there is none."""

    sums: Mapping[str, Sums]
    busy_seconds: float
    chunks: int
    submitted_bytes: int
    load_failures: int
    rank_bytes: Mapping[str, int]
    loads_in_flight: int
    bytes_in_flight: int
    lookups_in_flight: int
    oldest_load_seconds: float | None
    oldest_lookup_seconds: float | None
    last_completion_age_seconds: float | None
    lookup_seconds: float
    lookup_keys: int
    denied_keys: int
    asked_chunks: Mapping[str, Histogram]
    lookup_durations: Histogram
    load_durations: Histogram
    shadow_lookups: Mapping[str, int]
    shadow_found_bytes: int
    store_bytes: int
    store_seconds: float
    store_failures: int
    stores_skipped: int
    faults: int
