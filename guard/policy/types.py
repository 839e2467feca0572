"""The words the policy speaks: states, causes, ailments, admission, decision, healing."""

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
Ailment = Literal[
    "connection_lost",
    "store_emptied",
    "stores_failing",
    "load_hung",
    "built_while_down",
    "detached",
    "store_unreachable",
]
AILMENTS: tuple[Ailment, ...] = (
    "connection_lost",
    "store_emptied",
    "stores_failing",
    "load_hung",
    "built_while_down",
    "detached",
    "store_unreachable",
)


@dataclass(frozen=True, slots=True)
class Admission:
    """What may be loaded from L2: `share` of lookups (0…1, 0 is the bypass) and the
    shortest prefix worth asking for, in chunks of the cache."""

    share: float = 1.0
    min_chunks: int = 0


DEFAULT_TTL_SECONDS = 1800.0
MAX_TTL_SECONDS = 86_400.0


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
class Operation:
    """What the gate is to do with its adapter: `abort` ends what is in flight, `rebuild`
    builds a fresh adapter if the store takes a connection.

    An abort's loads are answered as failed at `release_bytes_per_second` (None: at once),
    all of them within `release_within_seconds`, so that the engine recomputes them in turn.
    """

    kind: Literal["abort", "rebuild"]
    cause: str
    release_bytes_per_second: float | None = None
    release_within_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy wants now, and why.

    `state` and `cause` are what is shown; `admission` is what should be in force, None
    when the policy has no opinion (it holds what is there). `action` is a short stable
    word when this tick changed something (`bypass`, `probe`, `return`, `admit`, `shed`,
    `would_bypass`, `hold`, …), else None; `reason` says it in words and numbers,
    `reason_code` in one stable word for labels; `evidence` holds the figures it rests on.
    `probe` asks control to probe L2 through the gate, `operation` to have the gate end
    what hangs.
    """

    state: State
    cause: Cause | None
    admission: Admission | None
    action: str | None
    reason_code: str
    reason: str
    evidence: Mapping[str, float | str | None] = field(default_factory=dict)
    probe: bool = False
    operation: Operation | None = None


@dataclass(frozen=True, slots=True)
class Healing:
    """What is wrong with the way to L2, and what is done about it.

    `since` is Unix time in seconds; `attempts` counts the cures tried since the way was
    last well, `next_at` is when the next one may come (None: none will). `words` say how
    it shows, `incurable` what a person must do (None: it heals by itself or is being
    healed). `event` is what this tick has to tell: `began`, `ended`, `would_rebuild`,
    `incurable`. `operation` and `probe_lost` ask control for a cure, or for the probe
    that tells which ailment it is.
    """

    ailment: Ailment | None
    since: float | None = None
    attempts: int = 0
    next_at: float | None = None
    words: str = ""
    incurable: str | None = None
    event: str | None = None
    operation: Operation | None = None
    probe_lost: bool = False
