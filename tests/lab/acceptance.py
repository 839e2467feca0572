"""The acceptance run: eight phases on the real stack, and whether they showed what they must.

Ratios hold within one run only: P is the median time to first token while L2 is bypassed
by hand, which is what recomputing costs on this machine, under this load, today. A phase
in which other programs used more than a tenth of the machine says nothing: the run is
void and is repeated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import httpx

from .foreign_cpu import ForeignCpu
from .guard_handle import Guard, reading
from .load import Load, Request, summarize
from .processes import LabError
from .proxy import Counters
from .report import Phase, Report
from .stack import MODEL_NAME, Stack
from .watch import Look, Watch, first

SLOW_BYTES_PER_SECOND = 12e6
FOREIGN_LIMIT = 0.10
MAX_RUNS = 3
LENIENT_FACTOR = 1.5
MIN_KNOWN = 0.9  # of the looks at a share, those at which the guard must know it
PATH_READING = "load_bandwidth.path"

RECOMPUTE_SECONDS = 30.0
FAST_SECONDS = 25.0
HELD_IN_SLOW_SECONDS = 40.0
HELD_IN_FAST_SECONDS = 20.0
STAYS_IN_SECONDS = 30.0
ALONE_SLOW_SECONDS = 40.0
SETTLE_SECONDS = 8.0

FAST_RATIO = 0.5
BYPASSED_RATIO = 1.4
BANDWIDTH_TOLERANCE = 0.2
SLOW_SHOWN_SECONDS = 15.0
BYPASSED_AFTER_SECONDS = 15.0
STUCK_SECONDS = 10.0
ADMITTED_AFTER_SECONDS = 60.0
FROZEN_SECONDS = 30.0
FROZEN_SETTLE_SECONDS = 10.0
FROZEN_BYPASSED_SECONDS = 5.0

# What the journal must tell, in this order, with anything between.
STORY = (
    ("override", "bypass"),
    ("override", "auto"),
    ("override", "admit"),
    ("decision", "would_bypass"),
    ("override", "auto"),
    ("decision", "bypass"),
    ("decision", "return"),
    ("decision", "admit"),
    ("decision", "bypass"),
    ("decision", "return"),
    ("decision", "admit"),
)


class AcceptanceFailed(AssertionError):
    """The run did not show what it must; the message is the report."""


class VoidRun(Exception):
    """Other programs used too much of the machine during a phase."""


class AcceptanceRun:
    """One run over a started stack whose L2 is warm."""

    def __init__(self, stack: Stack, guard: Guard, load: Load, *, strict: bool) -> None:
        self._stack = stack
        self._guard = guard
        self._load = load
        self._watch = Watch(guard)
        self._wall_offset = time.time() - time.monotonic()
        self._begin = time.monotonic()
        self._gate_share_bypassed: float | None = None
        self._gate_frozen: dict[str, Any] = {}
        self.report = Report(1.0 if strict else LENIENT_FACTOR)

    def run(self) -> Report:
        """Raises VoidRun as soon as a phase was disturbed; the report has what was seen."""
        try:
            with self._watch:
                self._load.start()
                self._drive()
        finally:
            self._stack.link.thaw()
            self._stack.link.set_rate(None)
            self._load.stop()
            for phase in self.report.phases:
                began = self._load.began(phase.begin + phase.skip_s, phase.end)
                phase.summary = summarize(began)
        self._judge()
        return self.report

    def _drive(self) -> None:
        """The phases one after the other; nothing is judged before all is over, since the
        requests of a phase may end long after it."""
        link, factor = self._stack.link, self.report.factor

        self._guard.override("bypass", ttl_s=600, reason="acceptance (1): recompute only")
        self._phase("1 override bypass, L2 fast", RECOMPUTE_SECONDS)

        self._guard.override("auto", reason="acceptance (2): the guard decides")
        self._phase("2 auto, L2 fast", FAST_SECONDS, ratio=FAST_RATIO)

        self._guard.override("admit", ttl_s=600, reason="acceptance (3): held in")
        slow_from = link.set_rate(SLOW_BYTES_PER_SECOND)
        self._phase("3 override admit, 12 MB/s", HELD_IN_SLOW_SECONDS, link_from=slow_from)

        link.set_rate(None)
        self._phase("4a override admit, L2 fast", HELD_IN_FAST_SECONDS)
        self._guard.override("auto", reason="acceptance (4): from here the guard alone")
        self._phase("4b auto, L2 fast", STAYS_IN_SECONDS)

        slow_from = link.set_rate(SLOW_BYTES_PER_SECOND)
        self._phase(
            "5 guard alone, 12 MB/s",
            ALONE_SLOW_SECONDS,
            ratio=BYPASSED_RATIO,
            skip_s=SETTLE_SECONDS,
            link_from=slow_from,
        )
        self._gate_share_bypassed = self._stack.gate_status()["admission"]["share"]

        link.set_rate(None)
        self._phase("6a guard alone, L2 fast", ADMITTED_AFTER_SECONDS * factor, until=_is_in)
        self._phase("6b admitted again", FAST_SECONDS, ratio=FAST_RATIO)

        link.freeze()
        self._phase(
            "7 guard alone, frozen",
            FROZEN_SECONDS,
            ratio=BYPASSED_RATIO,
            skip_s=FROZEN_SETTLE_SECONDS,
        )
        self._gate_frozen = self._stack.gate_status()

        link.thaw()
        self._phase("8a guard alone, thawed", ADMITTED_AFTER_SECONDS * factor, until=_is_in)
        self._phase("8b admitted again", FAST_SECONDS, ratio=FAST_RATIO)

    def _phase(
        self,
        name: str,
        seconds: float,
        *,
        ratio: float | None = None,
        skip_s: float = 0.0,
        link_from: Counters | None = None,
        until: Callable[[Look], bool] | None = None,
    ) -> None:
        """Waits `seconds`, or at most so long for a look that is as wanted."""
        limit = None if ratio is None else ratio * self.report.factor
        phase = Phase(name, time.monotonic(), skip_s, limit)
        self.report.phases.append(phase)
        with ForeignCpu(self._stack.sessions) as foreign:
            if until is None:
                time.sleep(seconds)
            else:
                self._watch.wait_for(phase.begin, phase.begin + seconds, until)
        phase.end = time.monotonic()
        phase.foreign = foreign.share
        if link_from is not None:
            phase.link_bandwidth = self._stack.link.counters().rate_since(link_from)
        if looks := self._looks(phase):
            phase.shown = str(looks[-1])
            phase.path_bandwidth = reading(looks[-1].status, PATH_READING)
        if phase.foreign > FOREIGN_LIMIT:
            busiest = "; ".join(f"{who.share:.0%} {who.command[:80]}" for who in foreign.busiest())
            raise VoidRun(
                f"in {name!r} other programs used {phase.foreign:.0%} of the machine: {busiest}"
            )

    def _looks(self, phase: Phase) -> list[Look]:
        return self._watch.between(phase.begin, phase.end)

    def _judge(self) -> None:
        report = self.report
        recompute, fast, held_slow, _, stays_in, alone_slow, alone_fast, again = report.phases[:8]
        frozen, thawed, thawed_again = report.phases[8:]
        answered = recompute.summary.answered
        report.check("(1) enough requests for P", f"{answered}", "≥ 10", answered >= 10)
        settled = self._watch.between(recompute.begin + 2, recompute.end)
        self._check_shown("(1) bypassed by hand", settled, lambda look: look.state == "bypassed", 0)
        report.check_ratio("(2) fast", fast)
        report.check_bandwidth(
            "(3) bytes/busy against the link's rate", held_slow, BANDWIDTH_TOLERANCE
        )
        self._check_slow_told(held_slow)
        held = self._looks(held_slow)
        self._check_shown("(3) held in all the while", held, _not_bypassed, 1)
        self._check_shown("(4) not bypassed for 30 s", self._looks(stays_in), _not_bypassed, 1)
        self._check_bypassed(alone_slow)
        self._check_admitted("(6)", alone_fast, again)
        self._check_frozen(frozen)
        self._check_admitted("(8)", thawed, thawed_again)
        self._check_requests()
        self._check_journal()
        if self._watch.unanswered:
            report.notes.append(f"- {self._watch.unanswered} looks at the status had no answer")

    def _check_slow_told(self, phase: Phase) -> None:
        shown = first(self._looks(phase), lambda look: look.cause == "slow")
        phase.switch_seconds = shown.at - phase.begin if shown else None
        self.report.check_time(
            "(3) 'slow' shown though held in", phase.switch_seconds, SLOW_SHOWN_SECONDS
        )
        begin = phase.begin + self._wall_offset
        told = (
            line["at"] - begin
            for line in self._journal()
            if line["at"] >= begin and line.get("cause") == "slow" and says_why(line)
        )
        self.report.check_time(
            "(3) 'slow' journalled, with numbers", next(told, None), SLOW_SHOWN_SECONDS
        )

    def _check_bypassed(self, phase: Phase) -> None:
        report = self.report
        out = first(self._looks(phase), lambda look: look.state == "bypassed" and look.share == 0)
        phase.switch_seconds = out.at - phase.begin if out else None
        report.check_time("(5) bypassed", phase.switch_seconds, BYPASSED_AFTER_SECONDS)
        share = self._gate_share_bypassed
        report.check("(5) the gate itself says so", f"share {share}", "share 0", share == 0)
        report.check_ratio(f"(5) after the first {SETTLE_SECONDS:g} s", phase)
        self._check_stuck("(5)", out)

    def _check_admitted(self, number: str, waited: Phase, again: Phase) -> None:
        back = first(self._looks(waited), _is_in)
        waited.switch_seconds = back.at - waited.begin if back else None
        self.report.check_time(f"{number} admitted", waited.switch_seconds, ADMITTED_AFTER_SECONDS)
        self.report.check_ratio(f"{number} fast again", again)

    def _check_frozen(self, phase: Phase) -> None:
        report, gate = self.report, self._gate_frozen
        out = first(self._looks(phase), lambda look: look.state == "bypassed" and look.share == 0)
        phase.switch_seconds = out.at - phase.begin if out else None
        report.check_time("(7) bypassed", phase.switch_seconds, FROZEN_BYPASSED_SECONDS)
        hung, last = gate["in_flight"]["loads"], gate["rebuild"]["last"] or {}
        ended = last.get("ended_loads", 0) if last.get("operation") == "abort" else 0
        # At the moment of the freeze there may have been lookups only, which a bypass frees.
        measured = f"{ended} ended, {hung} hang"
        report.check("(7) hung loads aborted", measured, "none hang", hung == 0)
        report.check_ratio(f"(7) after the first {FROZEN_SETTLE_SECONDS:g} s", phase)
        self._check_stuck("(7)", out)

    def _check_stuck(self, number: str, out: Look | None) -> None:
        if out is None:
            return
        stuck = self._load.in_flight(out.at)
        ended = [request.end for request in stuck if request.end is not None]
        longest = max(ended, default=out.at) - out.at
        what = f"{number} {len(stuck)} stuck requests done"
        self.report.check_time(what, longest, STUCK_SECONDS)

    def _check_shown(
        self, what: str, looks: list[Look], wanted: Callable[[Look], bool], share: float
    ) -> None:
        """Every look is as wanted, and where the guard knows the share in force it is
        `share`; a scrape that was late may hide it now and then, but not often."""
        wrong = [look for look in looks if not wanted(look) or look.share not in (None, share)]
        hidden = sum(look.share is None for look in looks)
        measured = f"{len(looks) - len(wrong)} of {len(looks)} looks"
        if hidden:
            measured += f", share unknown in {hidden}"
        if wrong:
            measured += f"; {wrong[0]}"
        seen_enough = len(looks) - hidden >= MIN_KNOWN * len(looks) > 0
        self.report.check(what, measured, "all", seen_enough and not wrong)

    def _check_requests(self) -> None:
        requests = self._load.requests
        failed = [request for request in requests if request.error is not None]
        measured = f"{len(failed)} of {len(requests)}"
        if failed:
            measured += f": {failed[0].error}"
        self.report.check("no request failed", measured, "0", bool(requests) and not failed)

    def _check_journal(self) -> None:
        """The order of what was done, and that each action tells its why."""
        told = [
            (line["kind"], line.get("action"))
            for line in self._journal()
            if line["kind"] in ("override", "decision")
        ]
        rest = iter(told)
        complete = all(step in rest for step in STORY)
        self.report.check(
            "the journal's order",
            " → ".join(str(action) for _, action in told),
            " → ".join(action for _, action in STORY),
            complete,
        )
        acted = [
            line
            for line in self._journal()
            if line["kind"] == "decision" and line.get("action") in ("bypass", "return", "admit")
        ]
        why = sum(says_why(line) for line in acted)
        slow = [
            line
            for line in self._journal()
            if line["kind"] == "decision"
            and line.get("action") in ("bypass", "would_bypass")
            and line.get("cause") == "slow"
        ]
        unfounded = [line for line in slow if not shows_slow(line)]
        self.report.check(
            "what is called slow is below break-even in its own evidence",
            f"{len(slow) - len(unfounded)} of {len(slow)}",
            "all",
            bool(slow) and not unfounded,
        )
        self.report.check(
            "the journal says why, in words and numbers",
            f"{why} of {len(acted)} actions",
            "all",
            bool(acted) and why == len(acted),
        )
        self.report.notes += [
            f"- {line['at'] - self._begin - self._wall_offset:.1f} s {line['action']}: "
            f"{line['reason']}"
            for line in self._journal()
            if line["kind"] == "decision"
        ]

    def _journal(self) -> list[dict[str, Any]]:
        begin = self._begin + self._wall_offset
        return [line for line in self._guard.journal() if line["at"] >= begin]


def accept(stack: Stack, *, strict: bool) -> Report:
    """Runs until one run is not void, at most three times; returns its report.

    Raises AcceptanceFailed when a check of it failed, or when every run was void.
    """
    voids: list[str] = []
    for number in range(1, MAX_RUNS + 1):
        load = Load(stack.engine_url, MODEL_NAME, seed=number)
        prepare(stack, load)
        guard = stack.start_guard(mode="enforce", state=f"acceptance-{number}")
        run = AcceptanceRun(stack, guard, load, strict=strict)
        run.report.notes += [f"- void run: {why}" for why in voids]
        try:
            report = run.run()
        except VoidRun as void:
            voids.append(str(void))
            print(f"\nacceptance run {number} is void: {void}\n{run.report.as_markdown()}")
            continue
        except (httpx.HTTPError, LabError) as error:
            tails = "\n".join(stack.log_tails())
            raise AcceptanceFailed(
                f"the run broke off: {error}\n\n{run.report.as_markdown()}\n{tails}"
            ) from error
        finally:
            guard.kill()
        if report.failures:
            raise AcceptanceFailed(
                f"{len(report.failures)} checks failed\n\n{report.as_markdown()}"
            )
        return report
    raise AcceptanceFailed(
        f"all {MAX_RUNS} runs were void, so nothing was shown:\n" + "\n".join(voids)
    )


def prepare(stack: Stack, load: Load) -> None:
    """L2 holds every prefix of the load, L1 holds nothing, and all is admitted.

    Raises AcceptanceFailed when a request fails or the second pass does not hit.
    """
    stack.link.set_rate(None)
    stack.gate_operation(
        "restore", holder="person:lab", reason="before an acceptance run", lease_s=1
    )
    _check_warm(load.warm(), hits=False)
    stack.wait_stores_quiet()
    _check_warm(load.warm(), hits=True)
    stack.clear_l1()


def _check_warm(requests: list[Request], *, hits: bool) -> None:
    for request in requests:
        if request.error is not None:
            raise AcceptanceFailed(f"warming up failed: {request.error}")
        if hits and not request.cached_tokens:
            raise AcceptanceFailed(
                f"a prompt of {request.prompt_tokens} tokens did not hit L2 after it was stored"
            )


def says_why(line: dict[str, Any]) -> bool:
    """Words, a number among them, and figures as evidence."""
    words = str(line.get("reason", ""))
    figures = (line.get("evidence") or {}).values()
    return bool(re.search(r"[a-z]{3,}", words) and re.search(r"\d", words)) and any(
        isinstance(figure, (int, float)) for figure in figures
    )


def shows_slow(line: dict[str, Any]) -> bool:
    """One of the bandwidths a decision rests on is below the break-even it names."""
    evidence = line.get("evidence") or {}
    needed = evidence.get("break_even_bandwidth")
    seen = [
        value
        for name, value in evidence.items()
        if name != "break_even_bandwidth" and "bandwidth" in name and value is not None
    ]
    return needed is not None and any(value < needed for value in seen)


def _not_bypassed(look: Look) -> bool:
    return look.state != "bypassed"


def _is_in(look: Look) -> bool:
    return look.share == 1 and look.state in ("helping", "idle")
