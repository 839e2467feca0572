"""What the gate adds to a lookup, against the same adapter without a gate, in one run.

    .lab/bin/python bench/gate_lookup.py [--rounds 2000]

Needs LMCache; run by an interpreter without it, it starts itself again under .lab's, and
where there is none it says so and ends with 0. The adapter is a fake that answers at once,
so that all the difference is the gate's. Keys are made anew for every lookup, as LMCache's
are, so that no comparison is cut short by finding the very same object. Prints the median
seconds of submit plus query for both, what the gate added and the limit; ends with 1 when
a limit is passed.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEY_COUNTS = (8, 128, 400)
BASE_US, PER_KEY_US = 10.0, 0.3
DISTINCT = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000, help="lookups of each kind")
    rounds = parser.parse_args().rounds
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    logging.getLogger("kvguard.gate").setLevel(logging.ERROR)
    sys.path.insert(0, str(ROOT))
    try:
        import lmcache.v1.distributed.l2_adapters  # noqa: F401
    except ImportError:
        return elsewhere()
    print(f"{'lookup':<10} {'keys':>5} {'bare µs':>9} {'gated µs':>9} {'added':>7} {'limit':>7}")
    passed = True
    for answer in ("hit", "miss", "bypassed"):
        for keys in KEY_COUNTS:
            passed &= row(answer, keys, rounds)
    return 0 if passed else 1


def elsewhere() -> int:
    lab = ROOT / ".lab" / "bin" / "python"
    if lab.exists() and Path(sys.executable) != lab:
        os.execv(lab, [str(lab), *sys.argv])
    print("bench/gate_lookup.py needs LMCache, which this Python does not have: not measured")
    return 0


def row(answer: str, count: int, rounds: int) -> bool:
    from lmcache.v1.memory_management import BytesBufferMemoryObj

    from guard.gate.known import CAPACITY
    from guard.gate.lmcache import GatedL2Adapter

    kind = register_fake()
    gate = GatedL2Adapter({"inner": {"type": kind}, "name": f"bench-{answer}-{count}"})
    bare = gate._inner
    bare.found = answer != "miss"
    # As in a server that has run for long: as many keys known as can be.
    objects = [BytesBufferMemoryObj(b"\0" * 16)] * 1024
    for offset in range(0, CAPACITY, 1024):
        gate.submit_store_task(make_keys(1024, 1_000_000 + offset), objects)
        gate.pop_completed_store_tasks()
    if answer == "bypassed":
        gate.reconfigure("bypass", {}, device_owners=None)
    batches = [make_keys(count, 0) for _ in range(DISTINCT)]
    times: dict[str, list[float]] = {"bare": [], "gated": []}
    for turn in range(rounds):
        keys = batches[turn % DISTINCT]
        for name, adapter in (("bare", bare), ("gated", gate)):
            times[name].append(timed(lambda a=adapter, k=keys: lookup(a, k)))
    gate.close()
    without, with_ = (statistics.median(times[name]) * 1e6 for name in ("bare", "gated"))
    added, limit = with_ - without, BASE_US + PER_KEY_US * count
    verdict = "" if added <= limit else "  over the limit"
    figures = f"{without:>9.1f} {with_:>9.1f} {added:>7.1f} {limit:>7.1f}"
    print(f"{answer:<10} {count:>5} {figures}{verdict}")
    return added <= limit


def lookup(adapter: Any, keys: list[Any]) -> None:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    if adapter.query_lookup_and_lock_result(task) is None:
        raise AssertionError("the fake adapter answers at once")


def timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def make_keys(count: int, offset: int) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    return [
        ObjectKey((offset + n).to_bytes(32, "big"), "Qwen/Qwen3-8B", 0x01000100)
        for n in range(count)
    ]


_FAKE = "kvguard_bench_fake"
_registered: list[str] = []


def register_fake() -> str:
    """A type of adapter in LMCache's registry that does nothing and answers at once."""
    if _registered:
        return _FAKE
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import (
        L2AdapterConfigBase,
        register_l2_adapter_type,
    )
    from lmcache.v1.distributed.l2_adapters.factory import register_l2_adapter_factory

    class Config(L2AdapterConfigBase):
        @classmethod
        def from_dict(cls, d: dict[str, Any]) -> Config:
            return cls()

        @classmethod
        def help(cls) -> str:
            return ""

    class Fake(L2AdapterInterface):
        def __init__(self) -> None:
            super().__init__()
            self.found = True
            self._fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3)]
            self._next = 0
            self._asked: dict[int, int] = {}
            self._stored: dict[int, Any] = {}

        def get_store_event_fd(self) -> int:
            return self._fds[0]

        def get_lookup_and_lock_event_fd(self) -> int:
            return self._fds[1]

        def get_load_event_fd(self) -> int:
            return self._fds[2]

        def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
            self._next += 1
            self._stored[self._next] = L2StoreResult(True, 0)
            return self._next

        def pop_completed_store_tasks(self) -> dict[int, Any]:
            done, self._stored = self._stored, {}
            return done

        def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
            self._next += 1
            self._asked[self._next] = len(keys)
            return self._next

        def query_lookup_and_lock_result(self, task_id: int) -> Any:
            count = self._asked.pop(task_id, None)
            if count is None:
                return None
            return Bitmap(count, count) if self.found else Bitmap(count)

        def submit_unlock(self, keys: list[Any]) -> None:
            pass

        def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
            raise NotImplementedError

        def query_load_result(self, task_id: int) -> Any:
            return None

        def get_memory_tags(self) -> Any:
            return None

        def close(self) -> None:
            for fd in self._fds:
                os.close(fd)

    register_l2_adapter_type(_FAKE, Config)
    register_l2_adapter_factory(_FAKE, lambda config, l1_memory_desc=None: Fake())
    _registered.append(_FAKE)
    return _FAKE


if __name__ == "__main__":
    sys.exit(main())
