"""Child processes that never outlive their test, whatever ends it.

A `Run` owns a directory under the system's temporary folder, the sessions of its
children and the names of their shared memory, all written down in `record.json` there.
Three nets end them: `close()` (also at interpreter exit), a janitor process that wakes
when the owner's end of a pipe closes (a killed owner included), and `sweep()`, which
removes what a killed run whose janitor was killed too has left.

Only what the record names is ever signalled, and a process only if its start time is
the recorded one or its session is.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"
PREFIX = "kvguard-lab-"
RECORD = "record.json"
SHARED_MEMORY = Path("/dev/shm")
TAIL_BYTES = 6000


class LabError(Exception):
    """The lab could not do what a test needs; the message carries the logs' tails."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    pid: int
    parent: int
    group: int
    session: int
    state: str
    start: int  # clock ticks since boot: with the pid, the identity of a process
    own_ticks: int  # user + system time of the process
    reaped_ticks: int  # the same of its children that ended and were waited for


def process_info(pid: int | str) -> ProcessInfo | None:
    """What /proc says of a process; None once it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessInfo(
        pid=int(pid),
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        own_ticks=int(fields[11]) + int(fields[12]),
        reaped_ticks=int(fields[13]) + int(fields[14]),
        start=int(fields[19]),
    )


def all_processes() -> list[ProcessInfo]:
    found = (process_info(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [info for info in found if info is not None]


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, below the range that outgoing connections take theirs from."""
    ports: list[int] = []
    held: list[socket.socket] = []
    choose = random.Random()
    try:
        for _ in range(200 * count):
            port = choose.randrange(15000, 32000)
            candidate = socket.socket()
            try:
                candidate.bind((HOST, port))
            except OSError:
                candidate.close()
                continue
            held.append(candidate)
            ports.append(port)
            if len(ports) == count:
                return ports
    finally:
        for candidate in held:
            candidate.close()
    raise LabError(f"no {count} free ports between 15000 and 32000 on {HOST}")


@dataclass
class Record:
    """What a run must not leave behind."""

    directory: Path
    owner: tuple[int, int]
    sessions: list[tuple[int, int]] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> Record | None:
        try:
            content = json.loads((directory / RECORD).read_text())
            return cls(
                directory,
                tuple(content["owner"]),
                [tuple(entry) for entry in content["sessions"]],
                list(content["shared_memory"]),
            )
        except (OSError, ValueError, KeyError):
            return None

    def write(self) -> None:
        content = {
            "owner": self.owner,
            "sessions": self.sessions,
            "shared_memory": self.shared_memory,
        }
        partial = self.directory / (RECORD + ".new")
        partial.write_text(json.dumps(content))
        partial.replace(self.directory / RECORD)

    @property
    def owner_lives(self) -> bool:
        info = process_info(self.owner[0])
        return info is not None and info.start == self.owner[1] and info.state != "Z"

    def note_shared_memory(self, session: tuple[int, int]) -> bool:
        """Adds what the session's processes have mapped; true when something was new.

        Programs name some of it themselves (Python's `psm_…`), and only their memory
        maps tell which is whose.
        """
        new = {
            name for member in session_members(session) for name in mapped_shared_memory(member.pid)
        }.difference(self.shared_memory)
        self.shared_memory += sorted(new)
        return bool(new)

    def clean(self) -> None:
        for session in self.sessions:
            self.note_shared_memory(session)
            kill_session(session)
        for name in self.shared_memory:
            (SHARED_MEMORY / name).unlink(missing_ok=True)
        # What a program that died early had made under a name we gave it.
        for path in SHARED_MEMORY.glob(f"*{self.directory.name}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def mapped_shared_memory(pid: int) -> set[str]:
    """Names under /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    mark = f" {SHARED_MEMORY}/"
    return {
        line.partition(mark)[2].split("/")[0]
        for line in lines
        if mark in line and not line.endswith(" (deleted)")
    }


def session_members(session: tuple[int, int]) -> list[ProcessInfo]:
    """The living processes of a session, given as its leader's (pid, start time)."""
    leader, start = session
    leader_now = process_info(leader)
    if leader_now is not None and leader_now.start != start:
        return []  # the number belongs to somebody else now
    return [
        info
        for info in all_processes()
        if info.session == leader and info.state not in "ZX" and info.start >= start
    ]


def kill_session(session: tuple[int, int], limit_s: float = 10.0) -> None:
    """Kills every process of the session and returns when none is left.

    Raises LabError when some still live after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while members := session_members(session):
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes survive SIGKILL: {[member.pid for member in members]}")
        time.sleep(0.02)


def sweep() -> list[Path]:
    """Ends and removes what killed runs left; returns their directories."""
    swept = []
    for directory in sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*")):
        record = Record.read(directory)
        if record is not None and not record.owner_lives:
            record.clean()
            swept.append(directory)
    return swept


class Run:
    """One run's directory and janitor. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        sweep()
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.name = self.directory.name
        me = process_info(os.getpid())
        assert me is not None
        self._record = Record(self.directory, (me.pid, me.start))
        self._record.write()
        self._children: list[Child] = []
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.close)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sessions(self) -> list[tuple[int, int]]:
        return list(self._record.sessions)

    def child(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        env_without: Iterable[str] = (),
        log: Path,
    ) -> Child:
        """A program in this process's environment plus `env`, less `env_without`."""
        whole = {**os.environ, "TMPDIR": str(self.directory), **(env or {})}
        for variable in env_without:
            whole.pop(variable, None)
        child = Child(self, name, list(argv), whole, log)
        self._children.append(child)
        return child

    def started(self, process: subprocess.Popen[bytes]) -> tuple[int, int]:
        info = process_info(process.pid)
        session = (process.pid, info.start if info else 0)
        self._record.sessions.append(session)
        self._record.write()
        return session

    def settled(self, session: tuple[int, int]) -> None:
        """To be told when a program is up: only now its shared memory can be known."""
        if self._record.note_shared_memory(session):
            self._record.write()

    def close(self) -> None:
        """Ends everything; safe to call again."""
        atexit.unregister(self.close)
        try:
            for child in self._children:
                child.kill()
            self._record.clean()
        finally:
            if self._janitor.stdin is not None:
                self._janitor.stdin.close()
            self._janitor.wait(timeout=20)


class Child:
    """One program of a run: started, killed and started again with the same arguments."""

    def __init__(self, run: Run, name: str, argv: list[str], env: dict[str, str], log: Path):
        self.name = name
        self.argv = argv
        self.log = log
        self._run = run
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._session: tuple[int, int] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LabError(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Raises LabError when it already runs or its program is not there."""
        if self.running:
            raise LabError(f"{self.name} already runs")
        if shutil.which(self.argv[0]) is None:
            raise LabError(f"{self.name} cannot be started: no program {self.argv[0]!r}")
        argv = self.argv
        # Dies with the thread that started it; the janitor covers what it has started.
        if setpriv := shutil.which("setpriv"):
            argv = [setpriv, "--pdeathsig", "KILL", *argv]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("ab") as log:
                log.write(f"\n== {' '.join(self.argv)}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    argv,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LabError(f"{self.name} cannot be started: {error}") from error
        self._session = self._run.started(self._process)

    def wait_ready(self, ready: Callable[[], bool], limit_s: float) -> float:
        """Seconds until `ready()`; raises LabError with the log's tail when it ends or hangs.

        `ready` is asked every 0.2 s and may raise OSError for 'not yet'.
        """
        begin = time.monotonic()
        while time.monotonic() - begin < limit_s:
            if not self.running:
                raise LabError(f"{self.name} ended with {self.exit_code}\n{self.log_tail()}")
            if _says_yes(ready):
                self._run.settled(self._session or (0, 0))
                return time.monotonic() - begin
            time.sleep(0.2)
        raise LabError(f"{self.name} was not ready after {limit_s:.0f} s\n{self.log_tail()}")

    def signal(self, number: int) -> None:
        """Signals the program itself, not what it has started."""
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL for the program and all it has started; returns when they are gone."""
        if self._session is not None:
            self._run.settled(self._session)
            kill_session(self._session)
        if self._process is not None:
            self._process.wait(timeout=10)

    def log_tail(self) -> str:
        try:
            text = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        except OSError as error:
            text = str(error)
        return f"--- the end of {self.log}\n{text}\n---"


def _says_yes(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except OSError:
        return False


def _janitor(directory: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    record = Record.read(directory)
    if record is not None:
        record.clean()


if __name__ == "__main__":
    _janitor(Path(sys.argv[1]))
