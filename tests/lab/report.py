"""What an acceptance run measured, and its table."""

from __future__ import annotations

from dataclasses import dataclass, field

from .load import Summary, summarize


@dataclass(slots=True)
class Phase:
    """One phase. Times in monotonic seconds, bandwidths in bytes per second.

    `summary` is of the requests that began in it, without the first `skip_s` seconds.
    """

    name: str
    begin: float
    skip_s: float = 0.0
    limit_ratio: float | None = None
    end: float = 0.0
    summary: Summary = field(default_factory=lambda: summarize(()))
    path_bandwidth: float | None = None
    link_bandwidth: float | None = None
    shown: str = ""
    switch_seconds: float | None = None
    foreign: float = 0.0


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    measured: str
    limit: str
    passed: bool


@dataclass(slots=True)
class Report:
    """`factor` is what the figures' limits were multiplied with; the first phase gives P."""

    factor: float
    phases: list[Phase] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def recompute_p50(self) -> float | None:
        return self.phases[0].summary.p50 if self.phases else None

    def ratio(self, phase: Phase) -> float | None:
        """The phase's median over P."""
        p50, recompute = phase.summary.p50, self.recompute_p50
        return p50 / recompute if recompute and p50 is not None else None

    def check(self, what: str, measured: str, limit: str, passed: bool) -> None:
        self.checks.append(Check(what, measured, limit, passed))

    def check_ratio(self, what: str, phase: Phase) -> None:
        ratio, limit = self.ratio(phase), phase.limit_ratio
        assert limit is not None
        passed = ratio is not None and ratio <= limit
        self.check(f"{what}: p50", f"{number(ratio)} P", f"≤ {limit:g} P", passed)

    def check_time(self, what: str, seconds: float | None, limit: float) -> None:
        limit *= self.factor
        measured = "never" if seconds is None else f"{seconds:.1f} s"
        self.check(what, measured, f"≤ {limit:g} s", seconds is not None and seconds <= limit)

    def check_bandwidth(self, what: str, phase: Phase, tolerance: float) -> None:
        seen, real, limit = phase.path_bandwidth, phase.link_bandwidth, tolerance * self.factor
        off = None if seen is None or not real else seen / real - 1
        self.check(
            what,
            f"{megabytes(seen)} of {megabytes(real)} MB/s",
            f"within {limit:.0%}",
            off is not None and abs(off) <= limit,
        )

    def as_markdown(self) -> str:
        """The table of the phases, then every check with its figure and limit."""
        limits = "as written" if self.factor == 1 else f"times {self.factor:g}"
        lines = [
            f"Limits {limits}; P = {number(self.recompute_p50)} s.",
            "",
            *_table(
                *("phase", "s", "requests", "p50 s", "p99 s", "p50 / P", "limit"),
                *("bytes/busy MB/s", "link MB/s", "guard shows", "switch after s", "foreign CPU"),
                rows=[self._cells(phase) for phase in self.phases],
            ),
        ]
        if self.checks:
            lines += [
                "",
                *_table(
                    *("check", "measured", "limit", ""),
                    rows=[
                        (c.what, c.measured, c.limit, "ok" if c.passed else "**FAILED**")
                        for c in self.checks
                    ],
                ),
            ]
        return "\n".join([*lines, "", *self.notes]) + "\n"

    def _cells(self, phase: Phase) -> tuple[str, ...]:
        return (
            phase.name,
            f"{phase.end - phase.begin:.0f}",
            str(phase.summary.answered),
            number(phase.summary.p50),
            number(phase.summary.p99),
            number(self.ratio(phase)),
            "" if phase.limit_ratio is None else f"≤ {phase.limit_ratio:g} P",
            megabytes(phase.path_bandwidth),
            megabytes(phase.link_bandwidth),
            phase.shown,
            "" if phase.switch_seconds is None else f"{phase.switch_seconds:.1f}",
            f"{phase.foreign:.1%}",
        )


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:.1f}"


def _table(*head: str, rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
