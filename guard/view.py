"""What the loop shows to the service: one immutable view a tick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from guard.policy.types import Admission, Decision, Healing, Mode, Override, OverrideMode
from guard.readings import Snapshot

OBSERVE_ONLY = "observe only: no control available"


@dataclass(frozen=True, slots=True)
class SourceView:
    """One peer as last seen: `name` is a stable label (`engine`, `cache_metrics`,
    `cache_status`, `gate_status`, with `-2`, `-3` … for further engines), `error` what
    went wrong in words, `scrape_seconds` how long the last scrape took."""

    name: str
    url: str
    up: bool
    error: str | None
    scrape_seconds: float | None
    at: float | None


@dataclass(frozen=True, slots=True)
class View:
    """All that a person or Prometheus may see of the guard after a tick.

    `control` says in words whether the guard can act: 'gate', or
    'observe only: no control available', or 'held by X', …. `admission` is what the gate
    says is in force (None when there is no gate or it was not seen). `healing` is what is
    wrong with the way to L2, None while nothing is; `healing_attempts_total` counts by
    cause and outcome.
    """

    started_at: float
    ticks: int
    last_tick_monotonic: float | None
    mode: Mode
    control: str
    holder: str | None
    admission: Admission | None
    lease_expires_at: float | None
    override: Override | None
    override_revision: int
    snapshot: Snapshot | None
    decision: Decision | None
    sources: tuple[SourceView, ...] = ()
    decisions_total: Mapping[tuple[str, str], int] = field(default_factory=dict)
    control_requests_total: Mapping[str, int] = field(default_factory=dict)
    prefill_seconds_saved_total: float | None = None
    tick_cpu_seconds_total: float = 0.0
    journal_error: str | None = None
    healing: Healing | None = None
    healing_attempts_total: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Guard(Protocol):
    """What the service needs of the loop."""

    def view(self) -> View:
        """The latest view; never blocks."""
        ...

    async def set_override(
        self,
        mode: OverrideMode,
        *,
        who: str,
        reason: str,
        ttl_seconds: float | None,
        if_revision: int | None,
    ) -> View:
        """Set or clear (`auto`) the override, act on it at once, journal it.

        Raises guard.errors.ControlConflict when `if_revision` is given and stale.
        """
        ...
