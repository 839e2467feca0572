"""Whose close joins its writers: what decides which adapters may be exchanged.

A load that the gate answers in an adapter's place gives its buffers back to LMCache, which
fills them with other data. An adapter that writes into them after its close would corrupt
the KV of another request.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from guard.gate.lmcache_config import GateConfig, builder
    from guard.gate.lmcache_rebuild import REBUILT_TYPES

    from .gate_fake import Host, buffers, make_keys

from .gate_stores import Redis, Throttled, native_threads, resp
from .processes import Run

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning")

CHUNK = 1_000_000
SETTLED_SECONDS = 1.5


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with Run() as made:
        yield made


def build(inner: dict[str, Any]) -> Any:
    return builder(GateConfig.parse({"inner": inner}), None)()


def written(objects: list[Any]) -> int:
    return sum(len(o.raw_data) - bytes(o.raw_data).count(0) for o in objects)


class TestResp:
    """Loads in every state they can be in when the close comes."""

    @pytest.mark.parametrize("frozen", [False, True], ids=["slow", "frozen in mid-load"])
    def test_after_its_close_nothing_is_written(self, run: Run, frozen: bool) -> None:
        proxy = Throttled(run, Redis(run).start().port).start()
        threads = native_threads()
        adapter = build(resp(proxy.port, num_workers=8))
        host, keys = Host(adapter), make_keys(8)
        assert host.store(keys, buffers(8, size=CHUNK, fill=7)).is_successful()
        assert host.lookup(keys).popcount() == 8
        objects = buffers(8, size=CHUNK)
        proxy.link.set_rate(4e6)
        adapter.submit_load_task(keys, objects)
        deadline = time.monotonic() + 10
        while not 0 < written(objects) < 8 * CHUNK:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if frozen:
            proxy.link.freeze()
        adapter.close()
        at_close = written(objects)
        assert 0 < at_close < 8 * CHUNK  # so it was closed in the midst of writing
        proxy.link.thaw()
        proxy.link.set_rate(None)
        time.sleep(SETTLED_SECONDS)
        assert written(objects) == at_close
        assert native_threads() <= threads

    def test_after_its_close_no_store_is_read(self, run: Run) -> None:
        """A store's buffer is given back too, and what is sent of it goes by its key."""
        redis = Redis(run).start()
        proxy = Throttled(run, redis.port).start()
        adapter = build(resp(proxy.port, num_workers=2))
        proxy.link.set_rate(1e6)
        objects = buffers(6, size=CHUNK, fill=7)
        adapter.submit_store_task(make_keys(6), objects)
        time.sleep(0.5)
        adapter.close()
        for item in objects:
            item.raw_data[:] = bytes([9]) * CHUNK
        proxy.link.set_rate(None)
        time.sleep(SETTLED_SECONDS)
        reader = build(resp(redis.port))
        try:
            host = Host(reader)
            found = host.lookup(make_keys(6))
            keys = found.gather(make_keys(6))
            loaded = buffers(len(keys), size=CHUNK)
            if keys:
                assert host.load(keys, loaded).popcount() == len(keys)
            assert all(bytes(o.raw_data) == bytes([7]) * CHUNK for o in loaded)
        finally:
            reader.close()

    def test_it_is_on_the_list(self) -> None:
        assert "resp" in REBUILT_TYPES


class TestFs:
    def test_it_writes_on_after_its_close_so_it_is_not_on_the_list(self, tmp_path: Path) -> None:
        adapter = build({"type": "fs", "base_path": str(tmp_path)})
        host, keys = Host(adapter), make_keys(1)
        assert host.store(keys, buffers(1, size=4096, fill=7)).is_successful()
        (stored,) = [path for path in tmp_path.rglob("*") if path.is_file()]
        objects = buffers(1, size=4096)
        stored.unlink()
        os.mkfifo(stored)  # a file whose reading hangs, as on a disk that does
        pipe = os.open(stored, os.O_RDWR)
        adapter.submit_load_task(keys, objects)
        time.sleep(0.3)
        adapter.close()
        assert written(objects) == 0
        os.write(pipe, bytes([7]) * 4096)
        os.close(pipe)
        deadline = time.monotonic() + 5
        while not written(objects) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert written(objects) == 4096, "fs joins its writers by now: look at it anew"
        assert "fs" not in REBUILT_TYPES
