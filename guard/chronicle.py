"""Which turns of events the journal is told of, each once: decisions and what came of
them, peers that come and go, and whether anything can be controlled at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from guard.control.reconcile import Wanted
from guard.policy.types import Decision, Mode
from guard.view import OBSERVE_ONLY, SourceView


class JournalLike(Protocol):
    """What the loop needs of a journal: it never raises, and remembers its last error."""

    error: str | None

    def write(self, kind: str, **fields: Any) -> object:
        """Append one line."""


class Chronicle:
    """Remembers what was told, so that only changes are."""

    def __init__(self, journal: JournalLike) -> None:
        self._journal = journal
        self._up: dict[str, bool] = {}
        self._gated: bool | None = None
        self.control_error: str | None = None

    def sources(self, sources: Sequence[SourceView]) -> None:
        """Peers that began or ceased to answer."""
        for source in sources:
            if self._up.get(source.name) != source.up:
                self._up[source.name] = source.up
                self._journal.write(
                    "source",
                    source=source.name,
                    up=source.up,
                    reason=source.error or f"{source.url} answers",
                )

    def gate(self, gated: bool) -> None:
        """Whether the cache that answers has a gate."""
        if gated != self._gated:
            self._gated = gated
            reason = "the cache has kvguard's gate" if gated else OBSERVE_ONLY
            self._journal.write("control", gated=gated, reason=reason)

    def decision(
        self,
        decision: Decision,
        mode: Mode,
        before: dict[str, Any],
        after: dict[str, Any],
    ) -> None:
        """A decision that acts, or would."""
        self._journal.write(
            "decision",
            action=decision.action,
            state=decision.state,
            cause=decision.cause,
            mode=mode,
            reason_code=decision.reason_code,
            reason=decision.reason,
            evidence=dict(decision.evidence),
            before=before,
            after=after,
        )

    def outcome(self, wanted: Wanted, was: float, error: str | None) -> None:
        """What became of an admission that was to be in force; `error` is None when it
        is, `was` the share before."""
        if error != self.control_error:
            self.control_error = error
            if error is not None:
                self._journal.write("control_failed", reason=error, wanted=asdict(wanted))
            else:
                self._journal.write("control_restored", reason="the gate does as asked again")
        if error is None and was != wanted.admission.share:
            self._journal.write(
                "admission",
                before=was,
                after=wanted.admission.share,
                holder=wanted.holder,
                reason=wanted.reason,
            )
