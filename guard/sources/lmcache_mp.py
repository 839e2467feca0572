"""LMCache's multi-process server: `/metrics` (with the gate's ledger, if any) and `/status`.

A series of LMCache is absent until its first increment. It has no counter of L2 load
bytes or seconds in any version; without the gate only a histogram of per-load rates
exists, whose mean is no bandwidth of the path (marked approximate where it is used).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from guard.errors import SourceUnreadable
from guard.sources import gate
from guard.sources.samples import Sample, Want, read_series, select, wanted_names

_START = "process_start_time_seconds"
# The same histogram by version and exporter of LMCache.
_LOAD_RATE = ("lmcache_mp_l2_load_throughput_GB_per_second", "lmcache_mp_l2_load_throughput_gbs")
_LOAD_RATE_OLD = "lmcache_mp_l2_load_throughput_gbs_GB_per_second"

WANTS: tuple[Want, ...] = (
    Want("requested_tokens", ("lmcache_mp_lookup_requested_tokens_total",)),
    Want("hit_tokens", ("lmcache_mp_lookup_hit_tokens_total",)),
    Want("hit_l1_tokens", ("lmcache_mp_lookup_hit_l1_tokens_total",)),
    Want("hit_l2_tokens", ("lmcache_mp_lookup_hit_l2_tokens_total",)),
    Want("l2_loads_completed", ("lmcache_mp_l2_load_completed_requests_total",)),
    Want("l2_chunks_completed", ("lmcache_mp_l2_prefetch_load_completed_chunks_total",)),
    Want(
        "load_rate_sum_gb_per_second",
        tuple(f"{name}_sum" for name in (*_LOAD_RATE, _LOAD_RATE_OLD)),
    ),
    Want(
        "load_rate_count",
        tuple(f"{name}_count" for name in (*_LOAD_RATE, _LOAD_RATE_OLD)),
    ),
    Want("l1_allocation_failures", ("lmcache_mp_l1_allocation_failure_chunks_total",)),
    Want("dropped_events", ("lmcache_mp_event_bus_dropped_events_total",)),
)
_NAMES = wanted_names(WANTS) | gate.NAMES | {_START}


def parse_metrics(url: str, body: bytes, at: float, monotonic: float) -> Sample:
    """A Sample of the cache server; with a gate its ledger is there under `gate.…` and
    the gate's epoch is part of the incarnation. Raises SourceUnreadable, SourceTooLarge."""
    series = read_series(url, body, _NAMES)
    values, not_a_number = select(series, WANTS)
    ledger, ledger_not_a_number, epoch = gate.ledger_values(series)
    values.update(ledger)
    start = next((v for (name, _), v in series.items() if name == _START), None)
    return Sample(at, monotonic, (url, start, epoch), values, not_a_number | ledger_not_a_number)


def has_gate(sample: Sample) -> bool:
    """Whether this cache server runs with kvguard's gate."""
    return isinstance(sample.incarnation, tuple) and sample.incarnation[-1] is not None


@dataclass(frozen=True, slots=True)
class PrefetchSlots:
    """How many lookups and loads LMCache lets run at once. `exact` up to 0.5.6, where it
    is a setting; from 0.5.7 on it is what fits into a part of L1, so it is about so many
    and changes with the size of the loads."""

    count: float
    exact: bool


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The queue side of LMCache's `/status`, counted in lookups (requests), and what the
    L1 holds. A field that the version does not give is None."""

    chunk_size_tokens: int | None
    max_in_flight: int | None
    submission_queue_size: int | None
    pending_queue_size: int | None
    in_flight_request_count: int | None
    load_phase_count: int | None
    is_healthy: bool | None
    bytes_per_object: float | None
    prefetch_budget_bytes: float | None = None

    def prefetch_slots(self, bytes_per_load: float | None) -> PrefetchSlots | None:
        """How many may run at once; None where neither a limit in requests nor one in
        bytes (and the mean size of a load) is known."""
        if self.max_in_flight is not None:
            return PrefetchSlots(float(self.max_in_flight), exact=True)
        if not self.prefetch_budget_bytes or not bytes_per_load:
            return None
        # A lone request runs whatever its size.
        return PrefetchSlots(max(1.0, self.prefetch_budget_bytes / bytes_per_load), exact=False)


def parse_status(url: str, body: bytes) -> CacheStatus:
    """Reads `/status`. Raises SourceUnreadable for anything but LMCache's own answer."""
    try:
        document = json.loads(body)
    except ValueError as error:
        raise SourceUnreadable(f"{url} answered no JSON ({error})") from error
    if not isinstance(document, dict) or "storage_manager" not in document:
        raise SourceUnreadable(f"{url} is no status of an LMCache MP server")
    manager = document["storage_manager"] or {}
    prefetch = manager.get("prefetch_controller") or {}
    level_one = (manager.get("l1_managers") or {}).get("_default") or {}
    objects, used = level_one.get("total_object_count"), level_one.get("memory_used_bytes")
    healthy = document.get("is_healthy")
    # 0.5.7: new requests wait while those in flight stage more than this part of L1.
    watermark = _number(prefetch, "inflight_watermark")
    capacity = _number(level_one, "memory_total_bytes")
    budget = watermark * capacity if watermark is not None and capacity is not None else None
    return CacheStatus(
        chunk_size_tokens=_count(document, "chunk_size"),
        max_in_flight=_count(prefetch, "max_in_flight"),
        submission_queue_size=_count(prefetch, "submission_queue_size"),
        pending_queue_size=_count(prefetch, "pending_queue_size"),
        in_flight_request_count=_count(prefetch, "in_flight_request_count"),
        load_phase_count=_count(prefetch, "load_phase_count"),
        is_healthy=healthy if isinstance(healthy, bool) else None,
        bytes_per_object=used / objects if objects and used else None,
        prefetch_budget_bytes=budget,
    )


def _number(document: dict[str, Any], key: str) -> float | None:
    value = document.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(document: dict[str, Any], key: str) -> int | None:
    value = document.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
