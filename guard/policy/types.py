"""The words the policy speaks: states, causes, admission, override, decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["idle", "helping", "hurting", "overloaded", "bypassed", "probing", "unknown"]
STATES: tuple[State, ...] = (
    "idle",
    "helping",
    "hurting",
    "overloaded",
    "bypassed",
    "probing",
    "unknown",
)
Cause = Literal["slow", "overloaded", "frozen", "store_failed", "manual", "foreign"]
CAUSES: tuple[Cause, ...] = ("slow", "overloaded", "frozen", "store_failed", "manual", "foreign")
Mode = Literal["observe", "enforce"]
OverrideMode = Literal["bypass", "admit", "auto"]


@dataclass(frozen=True, slots=True)
class Admission:
    """What may be loaded from L2: `share` of lookups (0…1, 0 is the bypass) and the
    shortest prefix worth asking for, in chunks of the cache."""

    share: float = 1.0
    min_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Override:
    """A person's word, which always wins while it lives.

    `expires_at` is Unix time in seconds. `revision` counts the guard's overrides, so that
    two people cannot overwrite each other unknowingly.
    """

    mode: Literal["bypass", "admit"]
    who: str
    reason: str
    set_at: float
    expires_at: float
    revision: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy wants now, and why.

    `state` and `cause` are what is shown; `admission` is what should be in force, None
    when the policy has no opinion (it holds what is there). `action` is a short stable
    word when this tick changed something (`bypass`, `probe`, `return`, `admit`, `shed`,
    `would_bypass`, `hold`, …), else None; `reason` says it in words and numbers,
    `reason_code` in one stable word for labels; `evidence` holds the figures it rests on.
    `probe` asks control to probe L2 through the gate.
    """

    state: State
    cause: Cause | None
    admission: Admission | None
    action: str | None
    reason_code: str
    reason: str
    evidence: Mapping[str, float | str | None] = field(default_factory=dict)
    probe: bool = False
