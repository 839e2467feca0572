"""Every fault of the kit against the real stack, with a guard that acts alone.

Once each with limits times 1.5; FAULT_RUNS=3 STRICT=1 takes them three times and as
written. FAULTS=drop,freeze takes only these. The table goes to `.lab-run/faults.md`
(FAULTS_REPORT names another file).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .acceptance import LENIENT_FACTOR
from .conftest import Bench
from .faults.kit import FAULTS, Fault
from .faults.outcome import Outcome, as_markdown, as_page
from .faults.runner import FOREIGN_LIMIT, FaultRunner
from .stack import LAB_RUN, Stack

STRICT = os.environ.get("STRICT") == "1"
RUNS = int(os.environ.get("FAULT_RUNS") or 1)
ONLY = [name for name in os.environ.get("FAULTS", "").split(",") if name]
MAX_TRIES = 3  # of a run in which other programs used too much of the machine
DISK_BYTES = 600 * 1024 * 1024  # what the load's prefixes need, and as much again
REPORT = Path(os.environ.get("FAULTS_REPORT") or LAB_RUN / "faults.md")

outcomes: list[Outcome] = []


def wanted(fault: Fault) -> bool:
    if ONLY:
        return fault.name in ONLY
    return STRICT or not fault.only_in_full


class Runners:
    """One runner at a time, over the stack that the fault needs."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._store = ""
        self._stack: Stack | None = None
        self._runner: FaultRunner | None = None

    def of(self, fault: Fault) -> FaultRunner:
        if self._runner is None or self._store != fault.store:
            self.close()
            self._bench.close()  # two stacks would not fit beside each other
            disk = DISK_BYTES if fault.store == "fs" else None
            self._stack = Stack(disk_bytes=disk)
            self._stack.start()
            self._store = fault.store
            if STRICT:
                self._runner = FaultRunner(self._stack, factor=1.0)
            else:
                self._runner = FaultRunner(
                    self._stack, factor=LENIENT_FACTOR, hold_s=15.0, before_s=6.0
                )
        return self._runner

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        if self._stack is not None:
            self._stack.close()
            self._stack = None


@pytest.fixture(scope="module")
def runners(bench: Bench) -> Iterator[Runners]:
    made = Runners(bench)
    yield made
    made.close()


@pytest.mark.parametrize("number", range(1, RUNS + 1))
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if wanted(fault)], ids=lambda fault: fault.name
)
def test_the_engine_serves_on_and_l2_comes_back(
    runners: Runners, fault: Fault, number: int
) -> None:
    for _ in range(MAX_TRIES):
        outcome = runners.of(fault).run(fault, number)
        if outcome.foreign <= FOREIGN_LIMIT:
            break
        print(f"\n{fault.name} is void: other programs used {outcome.foreign:.0%}")
        outcome.notes.append(f"other programs used {outcome.foreign:.0%} of the machine")
    outcomes.append(outcome)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    factor = 1.0 if STRICT else LENIENT_FACTOR
    REPORT.write_text(as_page(outcomes, factor))
    alone = as_markdown([outcome], factor)
    print(f"\n{alone}")
    assert not outcome.failures, alone
