"""What the breaker is told and what it remembers: its constants, its state, what is around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from guard.policy.types import Cause, Mode, Override
from guard.policy.verdict import Limits
from guard.sources.gate import ProbeResult

Phase = Literal["closed", "open", "returning"]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The breaker's constants; docs/policy.md gives the reason of each."""

    limits: Limits = field(default_factory=Limits)
    confirm_seconds: float = 2.0
    dwell_seconds: float = 30.0
    dwell_max_seconds: float = 300.0
    probe_interval_seconds: float = 5.0
    probe_interval_max_seconds: float = 15.0
    probes_to_win: int = 3
    return_shares: Sequence[float] = (0.05, 0.25, 0.5, 1.0)
    return_step_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class BreakerState:
    """All the breaker remembers between ticks. `since` is when the phase began; the
    `episode_*` fields follow one run of losing (slow, frozen) or overloaded verdicts;
    `return_at` is when winning probes may let L2 back in; `aborts` counts those of the
    loads that hang now, `next_abort_at` spaces them."""

    phase: Phase = "closed"
    since: float = 0.0
    cause: Cause | None = None
    trips: int = 0
    episode_kind: str | None = None
    episode_since: float = 0.0
    episode_last: float = 0.0
    episode_ticks: int = 0
    episode_told: bool = False
    wins: int = 0
    next_probe_at: float = 0.0
    return_at: float = 0.0
    probe_interval: float = 0.0
    probe_seen: int | None = None
    step: int = 0
    step_since: float = 0.0
    share: float = 1.0
    aborts: int = 0
    next_abort_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else the policy must know: mode, a person's override, who holds the gate
    (None: we do or may), the share in force, the gate's last probe, and whether the gate
    can end loads that hang (`why_no_abort` says why not)."""

    mode: Mode
    override: Override | None = None
    can_control: bool = True
    foreign_holder: str | None = None
    share_in_force: float | None = None
    can_probe: bool = True
    probe: ProbeResult | None = None
    blind: str | None = None
    can_abort: bool = False
    why_no_abort: str = ""
