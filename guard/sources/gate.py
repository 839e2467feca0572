"""The gate's two faces: its ledger on the cache's `/metrics`, and its status.

Source of the names: guard/gate/ledger.py. Read here without importing it, since the
gate may be of another version than the guard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guard.errors import SourceUnreadable
from guard.sources.samples import Series, Want, select, wanted_names

_PREFIX = "kvguard_gate_"
INFO = _PREFIX + "info"
LOOKUPS = _PREFIX + "lookups_total"
_SUMS = (
    ("loads", "loads_total"),
    ("bytes", "load_bytes_total"),
    ("seconds", "load_seconds_total"),
    ("bytes_squared", "load_bytes_squared_total"),
    ("seconds_squared", "load_seconds_squared_total"),
    ("bytes_seconds", "load_bytes_seconds_total"),
)

WANTS: tuple[Want, ...] = (
    *(
        Want(f"{kind}.{name}", (_PREFIX + metric,), labels=(("kind", kind),))
        for kind in ("all", "alone")
        for name, metric in _SUMS
    ),
    Want("busy_seconds", (_PREFIX + "load_busy_seconds_total",)),
    Want("load_chunks", (_PREFIX + "load_chunks_total",)),
    Want("submitted_bytes", (_PREFIX + "load_submitted_bytes_total",)),
    Want("load_failures", (_PREFIX + "load_failures_total",)),
    Want("lookups", (LOOKUPS,)),
    *(
        Want(f"lookups.{answer}", (LOOKUPS,), labels=(("answer", answer),))
        for answer in ("hit", "partial", "miss", "declined")
    ),
    Want("lookup_seconds", (_PREFIX + "lookup_seconds_total",)),
    Want("lookup_keys", (_PREFIX + "lookup_keys_total",)),
    Want("denied_keys", (_PREFIX + "denied_keys_total",)),
    Want("loads_in_flight", (_PREFIX + "loads_in_flight",), "gauge"),
    Want("in_flight_bytes", (_PREFIX + "in_flight_bytes",), "gauge"),
    Want("oldest_load_seconds", (_PREFIX + "oldest_load_seconds",), "gauge"),
    Want("oldest_lookup_seconds", (_PREFIX + "oldest_lookup_seconds",), "gauge"),
    Want("last_completion_age_seconds", (_PREFIX + "last_completion_age_seconds",), "gauge"),
    Want("admission_share", (_PREFIX + "admission_share",), "gauge"),
    Want("admission_min_chunks", (_PREFIX + "admission_min_chunks",), "gauge"),
    Want("lease_expires_seconds", (_PREFIX + "lease_expires_seconds",), "gauge"),
    Want("revision", (_PREFIX + "revision",), "gauge"),
    *(
        Want(name, (_PREFIX + name,), "gauge")
        for name in (
            "adapter_attached",
            "adapter_answered",
            "adapter_age_seconds",
            "last_answer_age_seconds",
            "lost_lookups",
            "failed_stores",
            "releasing_loads",
        )
    ),
)
NAMES = wanted_names(WANTS) | {INFO}


def ledger_values(series: Series) -> tuple[dict[str, float], frozenset[str], str | None]:
    """The ledger's numbers (names prefixed `gate.`), what was NaN, and the gate's epoch;
    the epoch is None when the cache runs without a gate."""
    epoch = next((dict(labels).get("epoch") for name, labels in series if name == INFO), None)
    values, not_a_number = select(series, WANTS)
    return (
        {f"gate.{name}": value for name, value in values.items()},
        frozenset(f"gate.{name}" for name in not_a_number),
        epoch,
    )


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """One re-read of known keys by the gate: what it moved and how long each part took."""

    chunks: int
    bytes: float
    lookup_seconds: float
    load_seconds: float
    overlapped: bool


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The gate's last finished probe: `outcome` is done, failed, cancelled, deadline,
    missing or overlapped; `age_seconds` counts since it ended; `of` says which keys it
    read, known or lost, None where the gate does not tell."""

    id: int
    outcome: str
    error: str | None
    age_seconds: float
    samples: tuple[ProbeSample, ...]
    of: str | None = None


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """The gate's last finished abort or rebuild. `outcome` is done (a fresh adapter
    serves), detached (the old one is closed and the store takes no connection) or failed
    (nothing changed); `error` says why in words; `age_seconds` counts since it ended;
    `parked` when the old one cannot be closed yet, so what it left is not answered yet."""

    id: int
    operation: str
    cause: str
    outcome: str
    error: str | None
    age_seconds: float
    ended_loads: int
    ended_lookups: int
    ended_stores: int
    parked: bool = False


@dataclass(frozen=True, slots=True)
class GateStatus:
    """What the gate's own status says (schema 1). A gate of an older version does not give
    all of it: what is not there is None, never 0 or false."""

    adapter_index: int
    l2: str
    epoch: str
    revision: int
    share: float
    min_chunks: int
    max_loads: int
    default_share: float
    holder: str | None
    reason: str | None
    lease_expires_in_seconds: float | None
    can_probe: bool
    probe_running: bool
    probe: ProbeResult | None
    known_keys: int
    can_abort: bool | None = None
    can_rebuild: bool | None = None
    why_not: Mapping[str, str] = field(default_factory=dict)
    generation: int | None = None
    store_problem: str | None = None
    abandoned_lookups: int | None = None
    rebuild_running: bool = False
    rebuild: RebuildResult | None = None


def parse_status(url: str, body: bytes) -> GateStatus | None:
    """The first gated adapter of a `GET /reconfigure/plugin/l2/status` answer, or None
    when no adapter there is a gate. Raises SourceUnreadable."""
    try:
        document = json.loads(body)
    except ValueError as error:
        raise SourceUnreadable(f"{url} answered no JSON ({error})") from error
    if not isinstance(document, dict):
        raise SourceUnreadable(f"{url} answered {type(document).__name__}, not an object")
    for adapter in document.get("adapters") or []:
        status = adapter.get("status") if isinstance(adapter, dict) else None
        if isinstance(status, dict) and "epoch" in status and "admission" in status:
            return from_state(url, status, int(adapter.get("adapter_index", 0)))
    return None


def from_state(url: str, status: Mapping[str, Any], adapter_index: int) -> GateStatus:
    """A GateStatus from one adapter's status. Raises SourceUnreadable."""
    schema = status.get("schema")
    if schema != 1:
        raise SourceUnreadable(
            f"{url}: the gate speaks schema {schema!r}, this guard knows 1; upgrade kvguard"
        )
    try:
        admission = status["admission"]
        lease = status.get("lease")
        probe = status.get("probe") or {}
        can = status.get("can") or {}
        adapter = status.get("adapter") or {}
        rebuild = status.get("rebuild") or {}
        problem = adapter.get("store_problem")
        return GateStatus(
            adapter_index=adapter_index,
            l2=str(status.get("l2", "")),
            epoch=str(status["epoch"]),
            revision=int(status["revision"]),
            share=float(admission["share"]),
            min_chunks=int(admission["min_chunks"]),
            max_loads=int(admission["max_loads"]),
            default_share=float(status["default"]["share"]),
            holder=str(lease["holder"]) if lease else None,
            reason=str(lease.get("reason", "")) if lease else None,
            lease_expires_in_seconds=float(lease["expires_in_s"]) if lease else None,
            can_probe=bool(can.get("probe", False)),
            probe_running=bool(probe.get("running", False)),
            probe=_probe(probe.get("last")),
            known_keys=int(status.get("known_keys", 0)),
            can_abort=_flag(can.get("abort")),
            can_rebuild=_flag(can.get("rebuild")),
            why_not={str(k): _words(v) for k, v in (can.get("why_not") or {}).items()},
            generation=_whole(adapter.get("generation")),
            store_problem=None if problem is None else _words(problem),
            abandoned_lookups=_whole((status.get("in_flight") or {}).get("abandoned_lookups")),
            rebuild_running=bool(rebuild.get("running", False)),
            rebuild=_rebuild(rebuild.get("last")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceUnreadable(f"{url}: unreadable gate status ({error!r})") from error


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _words(value: object) -> str:
    """What a store said, fit for a terminal and a journal."""
    return "".join(c if c.isprintable() else " " for c in str(value))[:300]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _rebuild(last: Mapping[str, Any] | None) -> RebuildResult | None:
    if not last:
        return None
    error = last.get("error")
    return RebuildResult(
        id=int(last["id"]),
        operation=str(last["operation"]),
        cause=str(last.get("cause", "")),
        outcome=str(last["outcome"]),
        error=None if error is None else _words(error),
        age_seconds=float(last["age_s"]),
        ended_loads=int(last.get("ended_loads", 0)),
        ended_lookups=int(last.get("ended_lookups", 0)),
        ended_stores=int(last.get("ended_stores", 0)),
        parked=bool(last.get("parked", False)),
    )


def _probe(last: Mapping[str, Any] | None) -> ProbeResult | None:
    if not last:
        return None
    return ProbeResult(
        id=int(last["id"]),
        outcome=str(last["outcome"]),
        error=last.get("error"),
        age_seconds=float(last["age_s"]),
        samples=tuple(
            ProbeSample(
                chunks=int(s["chunks"]),
                bytes=float(s["bytes"]),
                lookup_seconds=float(s["lookup_s"]),
                load_seconds=float(s["load_s"]),
                overlapped=bool(s["overlapped"]),
            )
            for s in last.get("samples", ())
        ),
        of=str(last["of"]) if last.get("of") else None,
    )
