"""Nothing that the lab starts outlives it, however its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .processes import (
    RECORD,
    SHARED_MEMORY,
    LabError,
    Record,
    Run,
    free_ports,
    process_info,
    sweep,
)

# Starts a grandchild that ignores all it can, maps shared memory, and stays.
PROGRAM = """
import mmap, os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
with open(f"/dev/shm/{sys.argv[1]}", "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.lab.processes import Run
run = Run()
argv = [sys.executable, "-c", sys.argv[2], sys.argv[3]]
child = run.child("stubborn", argv, log=Path(sys.argv[4]))
child.start()
child.wait_ready(lambda: sys.argv[3] in "".join(p.name for p in Path("/dev/shm").iterdir())
                 and child.log.read_text().strip().splitlines()[-1].isdigit(), 10)
print(run.directory, child.pid, run._janitor.pid, flush=True)
if sys.argv[5] == "close":
    run.close()
elif sys.argv[5] == "exit":
    sys.exit(3)
elif sys.argv[5] == "raise":
    raise RuntimeError("as a test may")
time.sleep(600)
"""


def gone(pid: int) -> bool:
    info = process_info(pid)
    return info is None or info.state == "Z"


def eventually(condition: Callable[[], bool], limit_s: float = 10) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def start_owner(tmp_path: Path, end: str) -> tuple[subprocess.Popen[str], Path, list[int], Path]:
    """The owner's process, its run's directory, the pids it left, its shared memory."""
    memory = SHARED_MEMORY / f"labtest_{os.getpid()}_{time.monotonic_ns()}"
    log = tmp_path / "stubborn.log"
    root = str(Path(__file__).resolve().parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, root, PROGRAM, memory.name, str(log), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    with owner.stdout:
        directory, child, janitor = owner.stdout.readline().split()
    grandchild = int(log.read_text().strip().splitlines()[-1])
    return owner, Path(directory), [int(child), grandchild, int(janitor)], memory


@pytest.mark.parametrize(
    ("end", "number"),
    [
        ("close", None),
        ("exit", None),
        ("raise", None),
        ("wait", signal.SIGTERM),
        ("wait", signal.SIGINT),
        ("wait", signal.SIGKILL),
    ],
)
def test_nothing_is_left(tmp_path: Path, end: str, number: int | None) -> None:
    owner, directory, pids, memory = start_owner(tmp_path, end)
    if number is not None:
        owner.send_signal(number)
    assert eventually(lambda: all(gone(pid) for pid in pids))
    assert eventually(lambda: not directory.exists())
    assert not memory.exists()
    if end == "close":
        owner.kill()
    owner.wait(timeout=10)


def test_a_run_whose_janitor_died_too_is_swept(tmp_path: Path) -> None:
    owner, directory, pids, memory = start_owner(tmp_path, "wait")
    child, grandchild, janitor = pids
    os.kill(janitor, signal.SIGKILL)
    owner.kill()
    owner.wait(timeout=10)
    assert eventually(lambda: gone(child))  # by its parent's death
    assert not gone(grandchild)
    assert memory.exists()
    assert directory in sweep()
    assert gone(grandchild)
    assert not directory.exists()
    assert not memory.exists()


def test_a_living_run_is_not_swept() -> None:
    with Run() as run:
        assert run.directory not in sweep()
        assert (run.directory / RECORD).exists()


def test_a_number_that_belongs_to_somebody_else_is_let_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        info = process_info(bystander.pid)
        assert info is not None
        directory = tmp_path / "run"
        directory.mkdir()
        Record(directory, (1, 0), [(bystander.pid, info.start - 1)]).clean()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_part_is_killed_and_started_again(tmp_path: Path) -> None:
    with Run() as run:
        child = run.child(
            "sleeper",
            [sys.executable, "-c", "import time; time.sleep(600)"],
            log=tmp_path / "log",
        )
        child.start()
        first = child.pid
        with pytest.raises(LabError, match="already runs"):
            child.start()
        child.kill()
        assert child.exit_code == -signal.SIGKILL
        child.start()
        assert child.running
        assert child.pid != first
    assert not child.running


def test_a_program_that_ends_early_is_told_with_its_log(tmp_path: Path) -> None:
    with Run() as run:
        child = run.child(
            "hasty",
            [sys.executable, "-c", "print('no room at the inn'); raise SystemExit(7)"],
            log=tmp_path / "log",
        )
        child.start()
        with pytest.raises(LabError, match=r"ended with 7\n[\s\S]*no room at the inn"):
            child.wait_ready(lambda: False, 10)


def test_a_program_that_never_gets_ready_is_told_with_its_log(tmp_path: Path) -> None:
    with Run() as run:
        child = run.child(
            "slow",
            [sys.executable, "-c", "import time; print('busy', flush=True); time.sleep(600)"],
            log=tmp_path / "log",
        )
        child.start()
        with pytest.raises(LabError, match=r"not ready after 1 s\n[\s\S]*busy"):
            child.wait_ready(lambda: False, 1)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with Run() as run:
        child = run.child("ghost", ["no-such-program"], log=tmp_path / "log")
        with pytest.raises(LabError, match="no program 'no-such-program'"):
            child.start()


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50
