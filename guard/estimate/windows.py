"""Windows over a peer's counters, honest about restarts.

A counter that went down, or a process that is another one, ends the history: a window
never spans it. Absent is not 0: a delta needs the counter at both ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from guard.sources.samples import Sample

# A sample that should have come on time but came a little late still opens its window.
_EDGE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Window:
    """Samples of one incarnation, oldest first; at least two of them."""

    samples: Sequence[Sample]

    @property
    def seconds(self) -> float:
        """Length on the monotonic clock."""
        return self.samples[-1].monotonic - self.samples[0].monotonic

    @property
    def at(self) -> float:
        """Unix time of the newest sample."""
        return self.samples[-1].at

    def delta(self, name: str) -> float | None:
        """Increase of a counter, or change of a gauge, over the window; None when it was
        not there at both ends."""
        first, last = self.samples[0].values.get(name), self.samples[-1].values.get(name)
        return None if first is None or last is None else last - first

    def seconds_since_growth(self, name: str) -> float | None:
        """Since the sample in which the counter last grew; None when it did not grow in
        the window, or is not there at its end."""
        newest = self.samples[-1]
        last = newest.values.get(name)
        for later, sample in zip(self.samples[:0:-1], self.samples[-2::-1], strict=True):
            if sample.values.get(name) != last:
                return newest.monotonic - later.monotonic
        return None

    def mean(self, name: str) -> float | None:
        """Mean of a gauge over the samples that have it; None when none has."""
        values = [s.values[name] for s in self.samples if name in s.values]
        return sum(values) / len(values) if values else None


class History:
    """The last `seconds` of one peer's samples, from its present incarnation only."""

    def __init__(self, counters: frozenset[str], seconds: float = 130.0) -> None:
        self._counters = counters
        self._seconds = seconds
        self._samples: deque[Sample] = deque()

    @property
    def last(self) -> Sample | None:
        """The newest sample."""
        return self._samples[-1] if self._samples else None

    def push(self, sample: Sample) -> bool:
        """Add a sample. True when it ended the history: another process, or a counter
        that went down."""
        last = self.last
        reset = last is not None and (
            last.incarnation != sample.incarnation
            or any(
                sample.values[name] < last.values[name]
                for name in self._counters & last.values.keys() & sample.values.keys()
            )
        )
        if reset:
            self._samples.clear()
        self._samples.append(sample)
        while sample.monotonic - self._samples[0].monotonic > self._seconds:
            self._samples.popleft()
        return reset

    def window(self, seconds: float, since: float = float("-inf")) -> Window | None:
        """The last `seconds`, but nothing before `since` (monotonic); None with fewer
        than two samples, or when no time lies between them."""
        if len(self._samples) < 2:
            return None
        start = max(self._samples[-1].monotonic - seconds, since) - _EDGE_SECONDS
        chosen: list[Sample] = []
        for sample in reversed(self._samples):
            if sample.monotonic < start:
                break
            chosen.append(sample)
        if len(chosen) < 2 or chosen[0].monotonic <= chosen[-1].monotonic:
            return None
        chosen.reverse()
        return Window(chosen)
