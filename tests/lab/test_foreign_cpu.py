"""Whose CPU time it was."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from .foreign_cpu import ForeignCpu
from .processes import process_info

SPIN = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
# Leaves a process that is nobody's child here: the middle one ends at once.
ORPHAN = (
    "import subprocess, sys\n"
    "print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True,"
    " stdout=subprocess.DEVNULL).pid)"
)


def spin_apart(seconds: float) -> int:
    """The pid of a busy process that does not descend from this one."""
    program = [sys.executable, "-c", ORPHAN, SPIN.format(seconds)]
    return int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)


def foreign_of(pid: int, foreign: ForeignCpu) -> float:
    """Seconds counted for one process, whatever else this machine does meanwhile."""
    return sum(
        ticks / os.sysconf("SC_CLK_TCK") for (who, _), ticks in foreign.ticks.items() if who == pid
    )


def test_own_descendants_are_not_foreign() -> None:
    with ForeignCpu() as foreign:
        child = subprocess.Popen([sys.executable, "-c", SPIN.format(1.5)])
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
        child.wait()
    assert foreign_of(child.pid, foreign) == 0
    assert foreign_of(os.getpid(), foreign) == 0


def test_a_strange_process_is_foreign_and_is_named() -> None:
    begin = time.monotonic()
    with ForeignCpu() as foreign:
        pid = spin_apart(2)
        time.sleep(2.5)
    elapsed = time.monotonic() - begin
    seconds = foreign_of(pid, foreign)
    assert 0.5 < seconds <= 2.5
    assert foreign.seconds >= seconds
    assert foreign.share >= seconds / (elapsed * (os.cpu_count() or 1))
    assert any("time.monotonic" in who.command for who in foreign.busiest(5))


def test_a_session_of_ours_is_ours_without_being_a_descendant() -> None:
    pid = spin_apart(2)
    info = process_info(pid)
    assert info is not None
    with ForeignCpu([(info.session, info.start)]) as foreign:
        time.sleep(1)
    assert foreign_of(pid, foreign) == 0


def test_short_lived_foreign_children_are_counted_once() -> None:
    spin = repr(SPIN.format(0.2))
    each = f"subprocess.run([sys.executable, '-c', {spin}])"
    many = f"import subprocess, sys\nfor _ in range(8): {each}"
    program = [sys.executable, "-c", ORPHAN, many]
    with ForeignCpu() as foreign:
        pid = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
        while process_info(pid) is not None:
            time.sleep(0.1)
    family = sum(
        ticks
        for who, ticks in foreign.ticks.items()
        if who[0] == pid or "+ 0.2" in foreign.command(who)
    ) / os.sysconf("SC_CLK_TCK")
    assert 0.8 < family < 2.5  # eight fifths of a second, and eight starts of Python
