"""What a tick knows: figures that are either a Reading or a Missing, in one Snapshot.

A figure that could not be had is never 0 and never NaN: it is a `Missing` that says
why, and whoever wants to decide on it has to look at that first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Reading:
    """A figure that was measured or derived.

    `value` is in SI units named by `unit` (bytes, seconds, tokens, bytes_per_second,
    tokens_per_second, bytes_per_token, ratio, requests, flag: 0 or 1); it is never NaN. +Inf occurs
    only where it means something: a break-even length that no prompt reaches.
    `at` is Unix time in seconds of the evidence (not of its publication), `source`
    says in a few words where the figure comes from and how good it is. `low` and `high`,
    where they are known, bound the truth with 95 % confidence and enclose the value.

    Raises ValueError for a NaN (a figure without a value is a Missing), and for bounds that
    do not enclose the value.
    """

    value: float
    unit: str
    at: float
    source: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.value):
            raise ValueError(f"a Reading cannot be NaN ({self.source}); use Missing")
        if not (
            (self.low is None or self.low <= self.value)
            and (self.high is None or self.high >= self.value)
        ):
            raise ValueError(f"bounds {self.low}, {self.high} do not enclose {self.value}")


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that could not be had. `reason` is one short stable word or phrase in
    snake_case (it becomes a metric label), `detail` may say more to a person."""

    reason: str
    detail: str = ""


Figure = Reading | Missing


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one tick learnt, never changed afterwards.

    `figures` maps a name to a Figure; names are those of the metrics without prefix and
    unit, a label's value after a dot (`load_bandwidth.alone`, `load_utilization.path`).
    `at` is Unix time, `monotonic` the loop's monotonic clock, both in seconds.
    """

    at: float
    monotonic: float
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "figures", MappingProxyType(dict(self.figures)))

    def get(self, name: str) -> Figure:
        """The figure of that name; Missing('not_measured') when nobody produced one."""
        return self.figures.get(name, Missing("not_measured"))

    def value(self, name: str) -> float | None:
        """The value of a Reading, None for a Missing: for code that tests for None."""
        figure = self.figures.get(name)
        return figure.value if isinstance(figure, Reading) else None

    def missing(self) -> Iterator[tuple[str, Missing]]:
        """All that is missing, by name."""
        for name, figure in self.figures.items():
            if isinstance(figure, Missing):
                yield name, figure
