"""The gate's two faces: its ledger on the cache's `/metrics`, and its status.

Source of the names: guard/gate/ledger.py. Read here without importing it, since the
gate may be of another version than the guard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
    missing or overlapped; `age_seconds` counts since it ended."""

    id: int
    outcome: str
    error: str | None
    age_seconds: float
    samples: tuple[ProbeSample, ...]


@dataclass(frozen=True, slots=True)
class GateStatus:
    """What the gate's own status says (schema 1)."""

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
            can_probe=bool((status.get("can") or {}).get("probe", False)),
            probe_running=bool(probe.get("running", False)),
            probe=_probe(probe.get("last")),
            known_keys=int(status.get("known_keys", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SourceUnreadable(f"{url}: unreadable gate status ({error!r})") from error


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
    )
