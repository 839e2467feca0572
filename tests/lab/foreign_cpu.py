"""How much of the machine programs that are not the lab's used during a phase.

Ours are the test process, what called it, all their sessions' lab children and every
descendant; kernel threads, which work for everybody, count as nobody's. A process that
began and ended between two looks is seen in the time its parent inherits from it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .processes import ProcessInfo, all_processes, process_info

KERNEL_THREADS = 2  # kthreadd, the parent of all of them
LOOK_SECONDS = 0.5

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Busiest:
    command: str
    share: float


class ForeignCpu:
    """Looks at all processes every half second, in a thread, from entering to leaving.

    `share` is foreign CPU time as a fraction of the whole machine's; `busiest` names who;
    `ticks` is the time of each foreign process (pid, start time), in clock ticks.
    """

    def __init__(self, sessions: Iterable[Identity] = ()) -> None:
        self._our_sessions = {leader for leader, _ in sessions}
        self._callers = {info.pid for info in ancestry(os.getpid())}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="foreign-cpu", daemon=True)
        self._seen: dict[Identity, ProcessInfo] = {}
        self.ticks: dict[Identity, int] = {}
        self._commands: dict[Identity, str] = {}
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> ForeignCpu:
        self._look(first=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    @property
    def seconds(self) -> float:
        """CPU seconds of foreign processes so far."""
        return sum(self.ticks.values()) / os.sysconf("SC_CLK_TCK")

    @property
    def share(self) -> float:
        elapsed = self._last - self._begin
        return self.seconds / (elapsed * (os.cpu_count() or 1)) if elapsed > 0 else 0.0

    def command(self, who: Identity) -> str:
        return self._commands.get(who, "?")

    def busiest(self, count: int = 3) -> list[Busiest]:
        whole = (self._last - self._begin) * (os.cpu_count() or 1) * os.sysconf("SC_CLK_TCK")
        ranked = sorted(self.ticks.items(), key=lambda item: -item[1])[:count]
        return [Busiest(self.command(who), ticks / whole) for who, ticks in ranked if ticks]

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self, first: bool = False) -> None:
        now = {(info.pid, info.start): info for info in all_processes()}
        ours = self._ours(now.values())
        gone: dict[int, int] = {}  # what we already counted of a parent's dead children
        for who, before in self._seen.items():
            if who not in now:
                spent = before.own_ticks + before.reaped_ticks
                gone[before.parent] = gone.get(before.parent, 0) + spent
        for who, info in now.items():
            if info.pid in ours:
                continue
            before = self._seen.get(who)
            if first:
                spent = 0
            elif before is None:
                spent = info.own_ticks + info.reaped_ticks
            else:
                inherited = info.reaped_ticks - before.reaped_ticks - gone.get(info.pid, 0)
                spent = info.own_ticks - before.own_ticks + max(0, inherited)
            if spent:
                self.ticks[who] = self.ticks.get(who, 0) + spent
                self._commands.setdefault(who, command_line(info.pid))
        self._seen = now
        self._last = time.monotonic()
        if first:
            self._begin = self._last

    def _ours(self, processes: Iterable[ProcessInfo]) -> set[int]:
        ours = set(self._callers) | {KERNEL_THREADS, os.getpid()}
        parents = {}
        for info in processes:
            parents[info.pid] = info.parent
            if info.session in self._our_sessions:
                ours.add(info.pid)
        me = os.getpid()
        for pid in parents:
            line = [pid]
            while line[-1] in parents and parents[line[-1]] not in (0, line[-1]):
                line.append(parents[line[-1]])
            if me in line or KERNEL_THREADS in line:
                ours.add(pid)
        return ours


def ancestry(pid: int) -> list[ProcessInfo]:
    """The process and all it descends from, but not the machine's first process."""
    line = []
    while pid > 1 and (info := process_info(pid)) is not None:
        line.append(info)
        pid = info.parent
    return line


def command_line(pid: int) -> str:
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            return file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"
