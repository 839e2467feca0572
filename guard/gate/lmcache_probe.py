"""Probing: known keys re-read through an adapter of the probe's own, so that no user waits.

What is delicate here is the end of that adapter (see `store_link`). A store must answer a
ping within a second before an adapter is built, an adapter is closed only when it has
answered all it was asked and no connection to its store is being set up, and any other is
parked, with its buffers, which it may yet write into. With a few parked no more probes are
made.
"""

from __future__ import annotations

import os
import random
import select
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.v1.memory_management import BytesBufferMemoryObj

from guard.gate.descriptors import closing
from guard.gate.known import KnownKeys
from guard.gate.ledger import Ledger
from guard.gate.lmcache_keys import distinct_chunks
from guard.gate.probe_state import ProbeRefused, ProbeRequest, ProbeSample, ProbeState
from guard.gate.safety import Faults
from guard.gate.store_link import StoreLink

PROBED_TYPES = frozenset({"resp", "fs"})
"""Adapters that read into any memory and allow a second instance: proved by tests."""

MAX_PARKED = 2
_IDLE_POLL_SECONDS = 0.01
_CANCEL_POLL_MS = 50


class _Stopped(Exception):
    """The probe ends here, with that outcome."""

    def __init__(self, outcome: str, error: str | None = None) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.error = error


@dataclass(slots=True)
class _Adapter:
    """The probe's own adapter with what it was asked and not answered, and its buffers."""

    adapter: Any
    pending: Callable[[], Any] | None = None
    buffers: tuple[Any, ...] = ()


class Prober:
    """Runs one probe at a time in a thread of its own."""

    def __init__(
        self,
        inner_type: str,
        link: StoreLink,
        build: Callable[[], Any],
        known: KnownKeys[Any],
        ledger: Ledger,
        faults: Faults,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._type = inner_type
        self._link = link
        self._build = build
        self._known = known
        self._ledger = ledger
        self._faults = faults
        self._clock = clock
        self._state = ProbeState(clock=clock)
        self._chooser = random.Random()
        self._cancelled = threading.Event()
        self._parked: list[_Adapter] = []

    def why_not(self) -> str | None:
        """Why no probe can be run here, None when one can."""
        if self._type not in PROBED_TYPES:
            return f"no adapter of type {self._type} is known to allow a second instance"
        hanging = sum(own.pending is not None for own in self._parked)
        if hanging >= MAX_PARKED:
            return f"{hanging} adapters of earlier probes still hang"
        return None

    def as_dict(self) -> dict[str, Any]:
        """The gate's status has it as `probe`."""
        return self._state.as_dict()

    def start(self, payload: Mapping[str, Any]) -> int:
        """Begin a probe; returns its id. Raises InvalidWrite and ProbeRefused."""
        request = ProbeRequest.parse(payload)
        self._drop_parked(close=False)
        reason = self.why_not()
        if reason is not None:
            raise ProbeRefused(f"no probe: {reason}")
        probe = self._state.begin(request.of)
        try:
            threading.Thread(
                target=self._run, args=(request,), name="kvguard-probe", daemon=True
            ).start()
        except BaseException:
            self._state.end("failed", "no thread could be started", [])
            raise
        return probe

    def cancel(self) -> None:
        """End a running probe soon, and let no other begin well."""
        self._cancelled.set()

    def _run(self, request: ProbeRequest) -> None:
        samples: list[ProbeSample] = []
        outcome, error = "failed", None
        own: _Adapter | None = None
        try:
            until = self._clock() + request.deadline_s
            self._drop_parked(close=True)
            if len(self._parked) >= MAX_PARKED:
                raise _Stopped("failed", "adapters of earlier probes cannot be closed yet")
            self._wait_idle(until)
            problem = self._link.problem()
            if problem is not None:
                raise _Stopped("failed", problem)
            own = _Adapter(self._build())
            left = request.max_bytes
            for _ in range(request.count):
                sample = self._sample(own, request, left, until)
                samples.append(sample)
                left -= sample.bytes
                if left <= 0 or self._clock() >= until:
                    break
            good = any(not sample.overlapped for sample in samples)
            outcome = "done" if good else "overlapped"
        except _Stopped as stopped:
            outcome, error = stopped.outcome, stopped.error
            if outcome == "missing" and any(not sample.overlapped for sample in samples):
                outcome = "done"
        except Exception as fault:
            self._faults.caught("probing")
            error = f"{type(fault).__name__}: {fault}"[:200]
        finally:
            if own is not None:
                self._dispose(own)
            self._state.end(outcome, error, samples)

    def _wait_idle(self, until: float) -> None:
        """A probe beside real loads slows both, so wait until nothing is in flight."""
        while self._ledger.loads_in_flight or self._ledger.lookups_in_flight:
            if self._cancelled.is_set():
                raise _Stopped("cancelled")
            if self._clock() >= until:
                raise _Stopped("overlapped", "loads or lookups were in flight all the time")
            self._cancelled.wait(_IDLE_POLL_SECONDS)

    def _sample(
        self, own: _Adapter, request: ProbeRequest, max_bytes: int, until: float
    ) -> ProbeSample:
        lost = request.of == "lost"
        picked = self._known.sample(request.chunks, max_bytes, self._chooser, lost=lost)
        if not picked and lost:
            raise _Stopped("missing", "no lookup has missed a key that was known")
        if not picked:
            raise _Stopped("missing", f"no key is known of which one fits into {max_bytes} bytes")
        keys = [key for key, _ in picked]
        adapter = own.adapter
        begun = self._clock()
        task = adapter.submit_lookup_and_lock_task(keys, {})
        own.pending = lambda: adapter.query_lookup_and_lock_result(task)
        found = self._wait(own, adapter.get_lookup_and_lock_event_fd(), until, "lookup")
        lookup_seconds = self._clock() - begun
        if found.popcount() < len(keys):
            # A load of an absent key would hang on resp; what was found is read.
            self._known.forget((~found).gather(keys))
            picked, keys = found.gather(picked), found.gather(keys)
        if not keys:
            raise _Stopped("missing", "the store has none of the keys it was known to have")
        own.buffers = tuple(BytesBufferMemoryObj(bytearray(size)) for _, size in picked)
        mark = self._ledger.begin_probe()
        loaded, seconds, overlapped = 0, 0.0, True
        try:
            begun = self._clock()
            load = adapter.submit_load_task(keys, list(own.buffers))
            own.pending = lambda: adapter.query_load_result(load)
            result = self._wait(own, adapter.get_load_event_fd(), until, "load")
            seconds = self._clock() - begun
            complete = result.popcount() == len(keys)
            if complete:
                loaded = sum(size for _, size in picked)
        finally:
            overlapped = self._ledger.end_probe(mark, loaded, seconds)
        adapter.submit_unlock(keys)
        if not complete:
            self._known.forget((~result).gather(keys))
            raise _Stopped("failed", f"{result.popcount()} of {len(keys)} keys were loaded")
        return ProbeSample(distinct_chunks(keys), loaded, lookup_seconds, seconds, overlapped)

    def _wait(self, own: _Adapter, fd: int, until: float, what: str) -> Any:
        """The result of what the adapter was asked last. Raises _Stopped."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while True:
            result = own.pending() if own.pending is not None else None
            if result is not None:
                own.pending = None
                return result
            if self._cancelled.is_set():
                raise _Stopped("cancelled")
            left = until - self._clock()
            if left <= 0:
                raise _Stopped("deadline", f"the store did not answer the probe's {what} in time")
            if poller.poll(min(_CANCEL_POLL_MS, left * 1000)):
                try:
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass

    # The end of an adapter

    def _dispose(self, own: _Adapter) -> None:
        try:
            if own.pending is None and self._close(own):
                return
        except Exception:
            self._faults.caught("closing a probe's adapter")
        self._parked.append(own)

    def _drop_parked(self, *, close: bool) -> None:
        """Ask the parked adapters again, and close those that have answered by now."""
        for own in list(self._parked):
            try:
                if own.pending is not None and own.pending() is None:
                    continue
                own.pending = None
                if close and self._close(own):
                    self._parked.remove(own)
            except Exception:
                self._faults.caught("closing a parked adapter")

    def _close(self, own: _Adapter) -> bool:
        """Close it where that is safe; returns whether it was."""
        with closing() as allowed:
            if not allowed or self._link.connecting():
                return False
            own.adapter.close()
            return True
