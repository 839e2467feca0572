"""Keeping an adapter's sockets away from numbers that others are given.

LMCache's native adapters close in a race (seen in 0.5.6 and 0.5.7rc2): each worker closes
its own socket when it is told to stop, while the closing thread shuts down all of them by
number. A number that was closed a moment before may by then be another socket of the
process, and that one is shut down: an HTTP connection, or the engine's.

The system gives out the lowest number that is free. So an adapter is built while all low
numbers are taken, and closed only while many of them are free: then nobody is given one of
its own in that moment.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from guard.gate.store_link import StoreLink

HIGHEST_FLOOR = 896
"""Below 1024, the most that callers of select() can wait for."""
LEAST_FREE = 32
"""Numbers that must be free below the floor before an adapter is closed. All of them would
have to be given out within the microseconds that the race lasts."""
CONNECT_SECONDS = 0.5
_POLL_SECONDS = 0.002
_OWN = Path("/proc/self/fd")
_EXCLUSIVE = threading.Lock()


def floor() -> int:
    """The number above which adapters get theirs: half of what the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HIGHEST_FLOOR if soft < 0 else min(soft // 2, HIGHEST_FLOOR)


def free_below_floor() -> int:
    """How many numbers below the floor nobody uses."""
    limit = floor()
    return limit - sum(int(entry.name) < limit for entry in _OWN.iterdir())


@contextmanager
def above_floor(link: StoreLink, sockets: int) -> Iterator[None]:
    """What is opened meanwhile, on any thread, gets numbers above the floor.

    Workers open their sockets in their own time: leaving waits until there are as many
    more `sockets` to the store as given, half a second at most.
    """
    with _EXCLUSIVE, _low_numbers_taken():
        wanted = _sockets_above(link) + sockets
        yield
        until = time.monotonic() + CONNECT_SECONDS
        while _sockets_above(link) < wanted and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


@contextmanager
def closing() -> Iterator[bool]:
    """Whether an adapter may be closed now; to be entered around its close, so that nobody
    takes the low numbers meanwhile."""
    with _EXCLUSIVE:
        yield free_below_floor() >= LEAST_FREE


@contextmanager
def _low_numbers_taken() -> Iterator[None]:
    limit = floor()
    held = [os.eventfd(0, os.EFD_CLOEXEC)]
    try:
        while held[-1] < limit:
            held.append(os.dup(held[0]))
        os.close(held.pop())
        yield
    finally:
        for number in held:
            os.close(number)


def _sockets_above(link: StoreLink) -> int:
    inodes = {f"socket:[{inode}]" for inode in link.inodes()}
    limit, count = floor(), 0
    for entry in _OWN.iterdir():
        if int(entry.name) < limit:
            continue
        try:
            count += str(entry.readlink()) in inodes
        except OSError:
            continue
    return count
