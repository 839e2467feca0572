"""What keeps the host unharmed: caught faults, event fds that outlive nothing, one thread.

The rule of the gate: a fault of its own is caught where the host called, counted and logged
once for each place, and the call is forwarded as if there were no gate.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guard.gate.ledger import Ledger

logger = logging.getLogger("kvguard.gate")


class Faults:
    """Counts the gate's own faults, and logs the first of each place with its traceback."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen: set[str] = set()

    def caught(self, place: str) -> None:
        """Call in the `except` clause; never raises."""
        try:
            self._ledger.fault()
            if place not in self._seen:
                self._seen.add(place)
                logger.exception("fault while %s; forwarded as without a gate", place)
        except Exception:
            # Whoever catches a fault has a host to answer; there is nobody left to tell.
            pass


class Bell:
    """A second descriptor of an adapter's eventfd, which the host polls and we may ring.

    Raises ValueError for a descriptor that is no eventfd, since an answer of the gate could
    then never reach the host.
    """

    def __init__(self, fd: int) -> None:
        kind = str(Path(f"/proc/self/fd/{fd}").readlink())
        if "eventfd" not in kind:
            raise ValueError(f"the inner adapter signals by {kind}; the gate needs an eventfd")
        self._lock = threading.Lock()
        self._fd = os.dup(fd)

    def fileno(self) -> int:
        """The descriptor for the host; -1 once closed."""
        return self._fd

    def ring(self) -> None:
        """Wake the host, which then asks for the results of all its tasks."""
        # Under the lock: a descriptor that was closed may belong to somebody else by now.
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def move(self, fd: int) -> None:
        """Become a second descriptor of another eventfd, under the same number, and ring.

        Raises OSError for a descriptor that is none.
        """
        # Rung before, so that a host which was woken for the old one finds something to
        # read; and the old one after, or a host that waits on it would wait for ever.
        os.eventfd_write(fd, 1)
        with self._lock:
            if self._fd < 0:
                return
            old = os.dup(self._fd)
            try:
                os.dup2(fd, self._fd, inheritable=False)
                os.eventfd_write(old, 1)
            finally:
                os.close(old)

    def close(self) -> None:
        """Give the descriptor back; ringing does nothing from now on."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def bells(inner: Any) -> tuple[Bell, Bell, Bell]:
    """Of an adapter's store, lookup and load descriptors. Raises ValueError as Bell does."""
    made: list[Bell] = []
    try:
        for fd in (
            inner.get_store_event_fd(),
            inner.get_lookup_and_lock_event_fd(),
            inner.get_load_event_fd(),
        ):
            made.append(Bell(fd))
    except BaseException:
        for bell in made:
            bell.close()
        raise
    return made[0], made[1], made[2]


class Keeper:
    """A thread that calls `tick` whenever it is woken or the time that `tick` last asked
    for has passed. `tick` returns seconds until it is due again, None for when woken."""

    RETRY_SECONDS = 1.0
    JOIN_SECONDS = 2.0

    def __init__(self, tick: Callable[[], float | None], faults: Faults, name: str) -> None:
        self._tick = tick
        self._faults = faults
        self._stop = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; to be called once."""
        self._thread.start()

    def wake(self) -> None:
        """Have `tick` called soon. Cheap enough for any path."""
        if not self._woken.is_set():
            self._woken.set()

    def stop(self) -> None:
        """End the thread; waits for it at most JOIN_SECONDS."""
        self._stop = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(self.JOIN_SECONDS)

    def _run(self) -> None:
        due: float | None = None
        while not self._stop:
            self._woken.wait(due)
            self._woken.clear()
            if self._stop:
                return
            try:
                due = self._tick()
            except Exception:
                self._faults.caught("keeping house")
                due = self.RETRY_SECONDS
