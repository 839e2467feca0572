"""What all parts of the estimate share: units, what a person configured, small makers."""

from __future__ import annotations

from dataclasses import dataclass

from guard.readings import Figure, Missing, Reading
from guard.sources.samples import Sample

BYTES_PER_SECOND = "bytes_per_second"
SECONDS = "seconds"
RATIO = "ratio"
TOKENS = "tokens"
REQUESTS = "requests"
BYTES = "bytes"
FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Configured:
    """What a person told us: used where it cannot be measured (s), or instead (R)."""

    kv_bytes_per_token: float | None = None
    prefill_rate: float | None = None
    min_loads: float = 3.0
    window_seconds: float = 20.0


def gauge(sample: Sample | None, name: str, unit: str, source: str, down: str) -> Figure:
    """The value of a sample as a figure; `down` is the reason when there is no sample."""
    if sample is None:
        return Missing(down)
    if name in sample.not_a_number:
        return Missing("not_a_number")
    value = sample.values.get(name)
    return Missing("series_absent") if value is None else Reading(value, unit, sample.at, source)


def optional(value: float | None, unit: str, at: float, source: str) -> Figure:
    """A reading, or 'idle' where nothing happened that it could be of."""
    return Missing("idle") if value is None else Reading(value, unit, at, source)
