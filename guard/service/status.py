"""What `GET /api/v1/status` answers: one View as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from guard.journal.decisions import plain
from guard.policy.types import Cause, Healing, Override, State
from guard.readings import Figure, Reading
from guard.view import View

SCHEMA = 1


def status(view: View, version: str) -> dict[str, Any]:
    """The status document of a view; before the first tick its state is `unknown`.

    Times are Unix seconds. JSON has no infinity: an infinite figure is null with
    `"infinite": true`, which is a figure, not a missing one.
    """
    decision, snapshot = view.decision, view.snapshot
    return {
        "schema": SCHEMA,
        "version": version,
        "at": snapshot.at if snapshot else None,
        "started_at": view.started_at,
        "ticks": view.ticks,
        "state": state_of(view),
        "cause": cause_of(view),
        "reason": decision.reason if decision else "no tick yet",
        "mode": view.mode,
        "control": view.control,
        "holder": view.holder,
        "admission": None
        if view.admission is None
        else {
            "share": view.admission.share,
            "min_chunks": view.admission.min_chunks,
            "lease_expires_at": view.lease_expires_at,
        },
        "healing": healing(view.healing),
        "override": override(view.override),
        "override_revision": view.override_revision,
        "decision": None
        if decision is None
        else {
            "action": decision.action,
            "reason_code": decision.reason_code,
            "reason": decision.reason,
            "admission": plain(decision.admission),
            "evidence": plain(decision.evidence),
        },
        "readings": readings(snapshot.figures if snapshot else {}),
        "sources": [plain(source) for source in view.sources],
        "journal_error": view.journal_error,
    }


def state_of(view: View) -> State:
    """The state shown everywhere."""
    return view.decision.state if view.decision else "unknown"


def cause_of(view: View) -> Cause | None:
    """Why L2 is out or should be; None when nothing is wrong, or nothing is known."""
    return view.decision.cause if view.decision else None


def override(value: Override | None) -> dict[str, Any] | None:
    """A person's override as plain data, None when the policy decides."""
    return None if value is None else dict(plain(value))


def healing(value: Healing | None) -> dict[str, Any] | None:
    """What is wrong with the way to L2 and what is done about it, None for nothing."""
    if value is None:
        return None
    return {
        "ailment": value.ailment,
        "since": value.since,
        "attempts": value.attempts,
        "next_at": value.next_at,
        "words": value.words,
        "incurable": value.incurable,
    }


def readings(figures: Mapping[str, Figure]) -> dict[str, dict[str, Any]]:
    """Every figure by name: a value with its unit, time and source, or why it is missing."""
    return {name: _figure(figure) for name, figure in sorted(figures.items())}


def _figure(figure: Figure) -> dict[str, Any]:
    if not isinstance(figure, Reading):
        missing = {"missing": figure.reason}
        return {**missing, "detail": figure.detail} if figure.detail else missing
    document: dict[str, Any] = {
        "value": figure.value,
        "unit": figure.unit,
        "at": figure.at,
        "source": figure.source,
    }
    if figure.low is not None and figure.high is not None:
        document.update(low=figure.low, high=figure.high)
    if math.isinf(figure.value):
        document.update(value=None, infinite=True)
    return document
