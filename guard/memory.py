"""What a guard must not forget over a restart: the breaker's state, a person's word, and
what healing has tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

from guard.policy.healing import HealingState
from guard.policy.state import BreakerState
from guard.policy.types import Override

STATE_SCHEMA = 1
# Only what a restart must not lose is worth a write to disk.
_VOLATILE = frozenset(
    {"episode_last", "episode_ticks", "episode_since", "next_probe_at", "next_abort_at"}
)

_HEALING_VOLATILE = frozenset(
    {"seen_at", "probe_asked_at", "next_probe_at", "probe_tries", "incurable"}
)


class StateStore(Protocol):
    """Where the state outlives the guard. Neither call raises for what is on the disk."""

    def load(self) -> Mapping[str, Any] | None:
        """The last saved document, None when there is none that can be used."""

    def save(self, document: Mapping[str, Any]) -> None:
        """Replace the document atomically."""


class Remembered(NamedTuple):
    """What was saved; `words` tell of it, None when there was nothing."""

    state: BreakerState
    override: Override | None
    override_revision: int
    words: str | None
    healing: HealingState = HealingState()


class Memory:
    """Saves only what changed."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._saved: dict[str, Any] | None = None

    def recall(self) -> Remembered:
        """What a guard with the same state directory was doing; a fresh state when there
        is none, or none that can be used."""
        document = self._store.load()
        if document is None or document.get("schema") != STATE_SCHEMA:
            return Remembered(BreakerState(), None, 0, None)
        try:
            state = BreakerState(**document["breaker"])
            word = document.get("override")
            override = Override(**word) if word else None
            revision = int(document.get("override_revision", 0))
            tried = document.get("healing")
            healing = HealingState.from_document(tried) if tried else HealingState()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return Remembered(BreakerState(), None, 0, f"saved state cannot be used: {error!r}")
        words = f"took up the saved state: {state.phase}"
        return Remembered(state, override, revision, words, healing)

    def save(
        self,
        state: BreakerState,
        override: Override | None,
        override_revision: int,
        healing: HealingState,
    ) -> None:
        """Write it if anything that matters is not what was written last."""
        document = {
            "schema": STATE_SCHEMA,
            "breaker": asdict(state),
            "override": asdict(override) if override else None,
            "override_revision": override_revision,
            "healing": asdict(healing),
        }
        lasting = {k: v for k, v in asdict(state).items() if k not in _VOLATILE}
        # Under a person's word the breaker starts afresh at every tick.
        key = {
            **document,
            "breaker": None if override is not None else lasting,
            "healing": {k: v for k, v in asdict(healing).items() if k not in _HEALING_VOLATILE},
        }
        if key != self._saved:
            self._store.save(document)
            self._saved = key
