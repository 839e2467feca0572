"""An L2 adapter for tests that answers only when it is told to, and notes every call."""

from __future__ import annotations

import os
import select
import threading
import warnings
from collections.abc import Callable
from typing import Any

# LMCache's own imports warn of what others deprecated, and here a warning is an error.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import (
        L2AdapterConfigBase,
        register_l2_adapter_type,
    )
    from lmcache.v1.distributed.l2_adapters.factory import register_l2_adapter_factory
    from lmcache.v1.memory_management import BytesBufferMemoryObj

TYPE = "kvguard_fake"
MADE: list[FakeAdapter] = []


class FakeConfig(L2AdapterConfigBase):
    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> FakeConfig:
        if d.get("refuse"):
            raise ValueError("refused by its own config")
        return cls()

    @classmethod
    def help(cls) -> str:
        return "a fake"


class FakeAdapter(L2AdapterInterface):
    """`calls` are (name, arguments) in order. `store` maps keys to bytes; lookups answer
    from it when `answer_lookups` is called, or at once with `instant`."""

    def __init__(self) -> None:
        super().__init__()
        self.instant = True
        self.calls: list[tuple[str, Any]] = []
        self.store: dict[ObjectKey, bytes] = {}
        self.locks: dict[ObjectKey, int] = {}
        self.fail_stores = False
        self.closed = 0
        self._lock = threading.Lock()
        self._fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3)]
        self._next = 0
        self._waiting: dict[int, list[ObjectKey]] = {}
        self._lookups: dict[int, Any] = {}
        self._loading: dict[int, tuple[list[ObjectKey], list[Any]]] = {}
        self._loads: dict[int, Any] = {}
        self._stores: dict[int, Any] = {}

    # What a test does

    def answer_lookups(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            for task, keys in waiting.items():
                found = Bitmap(len(keys))
                for at, key in enumerate(keys):
                    if key in self.store:
                        found.set(at)
                        self.locks[key] = self.locks.get(key, 0) + 1
                self._lookups[task] = found
        os.eventfd_write(self._fds[1], 1)

    def finish_loads(self) -> None:
        with self._lock:
            loading, self._loading = self._loading, {}
            for task, (keys, objects) in loading.items():
                loaded = Bitmap(len(keys))
                for at, (key, item) in enumerate(zip(keys, objects, strict=True)):
                    if key in self.store:
                        item.raw_data[:] = self.store[key]
                        loaded.set(at)
                self._loads[task] = loaded
        os.eventfd_write(self._fds[2], 1)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @property
    def locked(self) -> int:
        return sum(self.locks.values())

    # The interface

    def get_store_event_fd(self) -> int:
        return self._fds[0]

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._fds[1]

    def get_load_event_fd(self) -> int:
        return self._fds[2]

    def _task(self, name: str, keys: Any) -> int:
        self.calls.append((name, list(keys)))
        self._next += 1
        return self._next

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        task = self._task("store", keys)
        if not self.fail_stores:
            self.store.update((k, bytes(o.byte_array)) for k, o in zip(keys, objects, strict=True))
        self._stores[task] = L2StoreResult(not self.fail_stores, 0)
        os.eventfd_write(self._fds[0], 1)
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        done, self._stores = self._stores, {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        with self._lock:
            task = self._task("lookup", keys)
            self._waiting[task] = list(keys)
        if self.instant:
            self.answer_lookups()
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        self.calls.append(("unlock", list(keys)))
        for key in keys:
            self.locks[key] = self.locks.get(key, 0) - 1

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        with self._lock:
            task = self._task("load", keys)
            self._loading[task] = (list(keys), list(objects))
        if self.instant:
            self.finish_loads()
        return task

    def query_load_result(self, task_id: int) -> Any:
        with self._lock:
            return self._loads.pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        self.calls.append(("delete", list(keys)))

    def get_memory_tags(self) -> Any:
        return "tags"

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": "fake"}

    def close(self) -> None:
        self.closed += 1
        for fd in self._fds:
            os.close(fd)


class PipeAdapter(FakeAdapter):
    """Signals by a pipe, which the gate cannot ring."""

    def __init__(self) -> None:
        super().__init__()
        for fd in self._fds[:2]:
            os.close(fd)
        self._fds[:2] = os.pipe()


class PipeConfig(FakeConfig):
    pass


def _make(cls: type[FakeAdapter]) -> Callable[..., FakeAdapter]:
    def make(config: Any, l1_memory_desc: Any = None) -> FakeAdapter:
        adapter = cls()
        MADE.append(adapter)
        return adapter

    return make


register_l2_adapter_type(TYPE, FakeConfig)
register_l2_adapter_factory(TYPE, _make(FakeAdapter))
register_l2_adapter_type(TYPE + "_pipe", PipeConfig)
register_l2_adapter_factory(TYPE + "_pipe", _make(PipeAdapter))


def make_keys(count: int, start: int = 0, rank: int = 0x01000100, group: int = 0) -> list[Any]:
    """New key objects, equal for equal arguments."""
    return [ObjectKey((start + n).to_bytes(32, "big"), "model", rank, group) for n in range(count)]


def buffers(count: int, size: int = 64, fill: int = 0) -> list[Any]:
    return [BytesBufferMemoryObj(bytearray([fill]) * size) for _ in range(count)]


class Host:
    """Calls an adapter as LMCache's controllers do: submit, poll the fd, query."""

    def __init__(self, adapter: Any, limit_s: float = 20.0) -> None:
        self.adapter = adapter
        self._limit_ms = limit_s * 1000

    def rang(self, fd: int, limit_ms: float = 0) -> bool:
        """Whether the fd rang, which is reset then."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if not poller.poll(limit_ms):
            return False
        os.eventfd_read(fd)
        return True

    def await_lookup(self, task: int) -> Any:
        adapter = self.adapter
        return self._await(
            adapter.get_lookup_and_lock_event_fd(),
            lambda: adapter.query_lookup_and_lock_result(task),
        )

    def lookup(self, keys: list[Any]) -> Any:
        return self.await_lookup(self.adapter.submit_lookup_and_lock_task(keys, {}))

    def await_load(self, task: int) -> Any:
        adapter = self.adapter
        return self._await(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))

    def load(self, keys: list[Any], objects: list[Any]) -> Any:
        result = self.await_load(self.adapter.submit_load_task(keys, objects))
        self.adapter.submit_unlock(keys)
        return result

    def store(self, keys: list[Any], objects: list[Any]) -> Any:
        adapter = self.adapter
        task = adapter.submit_store_task(keys, objects)
        return self._await(
            adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks().get(task)
        )

    def _await(self, fd: int, query: Callable[[], Any]) -> Any:
        while self.rang(fd, self._limit_ms):
            result = query()
            if result is not None:
                return result
        raise AssertionError(f"no answer rang within {self._limit_ms / 1000:.0f} s")
