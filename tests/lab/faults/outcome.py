"""What a fault did to the engine, what the guard did about it, and the table of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..load import Summary
from ..report import Check, number
from .kit import Fault

ACTIONS = ("bypass", "shed", "return", "admit", "abort")
# What a line of these kinds says, in the order in which it is shown.
_TOLD_BY = {
    "decision": ("action", "cause"),
    "healing": ("ailment", "event", "action", "cause", "outcome"),
    "control_failed": ("reason",),
}


@dataclass(slots=True)
class Outcome:
    """One run of one fault. Times are seconds: of the guard's deeds since the fault began,
    of what comes after it since it ended."""

    fault: Fault
    number: int
    recompute_p50: float | None = None
    settled_p50: float | None = None
    summary: Summary | None = None
    worst_s: float | None = None
    failed: int = 0
    did: list[tuple[float, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    bypassed_after_s: float | None = None
    back_after_s: float | None = None
    admitted_after_s: float | None = None
    health: str = "–"
    kv: str = "–"
    foreign: float = 0.0
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def ratio(self) -> float | None:
        """The median of what began 10 s after the fault or later, over P."""
        p50 = self.settled_p50
        return p50 / self.recompute_p50 if self.recompute_p50 and p50 is not None else None

    def check(self, what: str, measured: str, limit: str, passed: bool) -> None:
        self.checks.append(Check(what, measured, limit, passed))


def deeds(lines: Iterable[dict[str, Any]], begin: float) -> list[tuple[float, str]]:
    """What the journal tells from `begin` (Unix time) on; a run of the same words once,
    with how often."""
    told = [
        (line["at"] - begin, words)
        for line in lines
        if line["at"] >= begin and (words := _words(line))
    ]
    runs = []
    for words, same in groupby(told, key=lambda deed: deed[1]):
        times = [at for at, _ in same]
        runs.append((times[0], words if len(times) == 1 else f"{words} ×{len(times)}"))
    return runs


def reasons(lines: Iterable[dict[str, Any]], begin: float) -> list[str]:
    """Why each bypass and abort."""
    return [
        f"at {line['at'] - begin:.1f} s {line['action']}: {line.get('reason')}"
        for line in lines
        if line["kind"] == "decision" and line.get("action") in ("bypass", "abort")
    ]


def _words(line: dict[str, Any]) -> str:
    kind = line["kind"]
    action = str(line.get("action", ""))
    if kind not in _TOLD_BY or (
        kind == "decision" and action.removeprefix("would_") not in ACTIONS
    ):
        return ""
    said = [str(line[name]) for name in _TOLD_BY[kind] if line.get(name)]
    return " ".join(dict.fromkeys([*([] if kind == "decision" else [kind]), *said]))


_PAGE = """\
# What breaks, and what comes of it

`make soak` writes this page: every fault of the kit (`tests/lab/faults`) three times, limits
as written; `make lab-test` takes most of them once, with limits times 1.5. The real stack of
`tests/lab` on two cores, two requests at a time, a guard in `enforce` that nobody helps. P is
the median time to first token while everything is recomputed. A median below it during a
fault is the cache server's own memory: what L2 does not take stays there. KV is checked by a
second engine on the same server, which knows every byte it stored.

"""


def as_page(outcomes: Sequence[Outcome], factor: float) -> str:
    """The table as a page of its own."""
    return _PAGE + as_markdown(outcomes, factor)


def as_markdown(outcomes: Sequence[Outcome], factor: float) -> str:
    """The table, then every check that failed, then the notes."""
    head = (
        *("fault", "what breaks", "p50 / P after 10 s", "worst s", "failed"),
        *("what the guard did (s after it began)", "bypassed after s"),
        *("L2 back after s", "admitted after s", "healthcheck", "KV", ""),
    )
    rows = [head, ("---",) * len(head), *map(_cells, outcomes)]
    limits = "as written" if factor == 1 else f"times {factor:g}"
    lines = [
        f"Limits {limits}. 'Bypassed' counts from the fault's beginning, 'back' (a hit is loaded"
        " and the gate admits all) and 'admitted' from its end.",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
    for outcome in outcomes:
        who = f"{outcome.fault.name} {outcome.number}"
        lines += [
            f"- **{who}: {check.what}**: {check.measured}, not {check.limit}"
            for check in outcome.failures
        ]
        lines += [f"- {who}: {note}" for note in outcome.notes]
        lines += [f"- {who}, the guard said: {words}" for words in outcome.told]
    return "\n".join(lines) + "\n"


def _cells(outcome: Outcome) -> tuple[str, ...]:
    summary = outcome.summary
    did = "; ".join(f"{at:.1f} {words}" for at, words in outcome.did) or "nothing"
    return (
        f"{outcome.fault.name} {outcome.number}",
        outcome.fault.what,
        number(outcome.ratio),
        number(outcome.worst_s),
        "–" if summary is None else f"{outcome.failed} of {summary.answered + outcome.failed}",
        did.replace("|", "/"),
        _seconds(outcome.bypassed_after_s),
        _seconds(outcome.back_after_s),
        _seconds(outcome.admitted_after_s),
        outcome.health,
        outcome.kv,
        "ok" if not outcome.failures else "**FAILED**",
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
