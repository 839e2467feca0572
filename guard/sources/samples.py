"""From an exposition to a Sample: a peer's numbers under names of our own.

A table of `Want`s says which series are read, under which of their names by version, and
that series which differ in other labels (data-parallel engines, models) are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from guard import exposition
from guard.errors import ExpositionError, SourceTooLarge, SourceUnreadable
from guard.sources.http import SAMPLE_LIMIT

Kind = Literal["counter", "gauge"]
Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True, slots=True)
class Want:
    """One number we want: our `name`, the sample names it had by version (the first
    that is present wins), the labels that must match, and how it behaves."""

    name: str
    metrics: tuple[str, ...]
    kind: Kind = "counter"
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """What one peer said at one moment.

    `values` holds only what was there and was a number; `not_a_number` names what came as
    NaN. `incarnation` changes when the process behind it is another one, so counters
    before and after cannot be compared. `monotonic` is the clock that windows use.
    """

    at: float
    monotonic: float
    incarnation: object
    values: Mapping[str, float]
    not_a_number: frozenset[str] = field(default_factory=frozenset)


def wanted_names(wants: Iterable[Want]) -> frozenset[str]:
    """All sample names that a table of wants may need."""
    return frozenset(metric for want in wants for metric in want.metrics)


def read_series(url: str, body: bytes, names: frozenset[str]) -> Series:
    """The wanted series of a body. Raises SourceUnreadable, SourceTooLarge."""
    lines = body.count(b"\n")
    if lines > SAMPLE_LIMIT:
        raise SourceTooLarge(f"{url} has {lines} lines, more than {SAMPLE_LIMIT}; not read")
    try:
        return exposition.read(body, names)
    except ExpositionError as error:
        raise SourceUnreadable(f"{url}: {error}") from error


def select(series: Series, wants: Sequence[Want]) -> tuple[dict[str, float], frozenset[str]]:
    """The wanted numbers, summed over the labels that are not asked for, and the names
    of those that came as NaN (a NaN among summed series spoils the sum)."""
    by_metric: dict[str, list[tuple[frozenset[tuple[str, str]], float]]] = {}
    for (metric, labels), value in series.items():
        by_metric.setdefault(metric, []).append((labels, value))
    values: dict[str, float] = {}
    not_a_number: set[str] = set()
    for want in wants:
        rows = next((by_metric[m] for m in want.metrics if m in by_metric), None)
        if rows is None:
            continue
        if want.labels:
            required = frozenset(want.labels)
            rows = [row for row in rows if required <= row[0]]
            if not rows:
                continue
        total = math.fsum(v for _, v in rows if not math.isnan(v))
        if any(math.isnan(v) for _, v in rows):
            not_a_number.add(want.name)
        elif math.isfinite(total):
            values[want.name] = total
    return values, frozenset(not_a_number)


def combine(samples: Sequence[Sample]) -> Sample | None:
    """Several engines on one cache as one: values that every engine gave, added up."""
    if not samples:
        return None
    if len(samples) == 1:
        return samples[0]
    common = set(samples[0].values)
    for sample in samples[1:]:
        common &= set(sample.values)
    return Sample(
        at=max(s.at for s in samples),
        monotonic=max(s.monotonic for s in samples),
        incarnation=tuple(s.incarnation for s in samples),
        values={name: math.fsum(s.values[name] for s in samples) for name in common},
        not_a_number=frozenset().union(*(s.not_a_number for s in samples)),
    )
