"""CPU of one whole tick on real expositions: three GETs, read, estimate, decide, show.

The peers run in a process of their own, so that only the guard's CPU is counted. Their
bodies are captures of vLLM and LMCache, with the gate's ledger appended. The cost of the
same three GETs through httpx is shown beside it: it is why the tick has a client of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
CAPTURES = ROOT / "tests" / "captures"
TICKS = 200
MOST_MILLISECONDS = 5.0


def serve(pipe: Connection) -> None:
    from tests.peers import Clock, Peers

    engine = next((CAPTURES / "vllm-lmcache-l2").glob("*vllm-l2warm-end*")).read_bytes()
    cache = next((CAPTURES / "vllm-lmcache-l2").glob("*lmcache-l2warm-end*")).read_bytes()
    status = (CAPTURES / "lmcache-0.5.6" / "status_fs.json").read_bytes()

    class Captured(Peers):
        def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
            if path == "/engine/metrics":
                return 200, engine
            if path == "/metrics":
                self.clock.now += 1
                self.traffic()
                return 200, cache + self._cache().encode()
            if path == "/status":
                return 200, status
            return super()._answer(method, path, body)

    async def main() -> None:
        async with Captured(Clock()) as peers:
            pipe.send(peers.url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


class Silent:
    """Journal and store that keep nothing: their disk is not what is measured."""

    error: str | None = None

    def write(self, kind: str, **fields: Any) -> None:
        pass

    def load(self) -> Mapping[str, Any] | None:
        return None

    def save(self, document: Mapping[str, Any]) -> None:
        pass


async def median_milliseconds(work: Callable[[], Awaitable[object]]) -> float:
    times = []
    for _ in range(TICKS):
        begin = time.process_time()
        await work()
        times.append(time.process_time() - begin)
    return statistics.median(times[10:]) * 1e3


async def measure(url: str) -> tuple[float, float, float]:
    from guard.loop import Loop, LoopSettings

    settings = LoopSettings(engines=(url + "/engine",), cache=url, interval_seconds=10.0)
    loop = Loop(settings, Silent(), Silent())
    tick = await median_milliseconds(loop.tick)
    missing = [name for name, _ in loop.view().snapshot.missing()]  # type: ignore[union-attr]
    assert all(source.up for source in loop.view().sources), loop.view().sources
    assert "load_bandwidth.path" not in missing, missing
    await loop.close()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    import httpx

    async with httpx.AsyncClient() as client:
        paths = ("/engine/metrics", "/metrics", "/status")
        through_httpx = await median_milliseconds(
            lambda: asyncio.gather(*(client.get(url + path) for path in paths))
        )
    return tick, through_httpx, resident


def main() -> int:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        tick, through_httpx, resident = asyncio.run(measure(ours.recv()))
    finally:
        ours.send("stop")
        process.join(5)
    print(f"one whole tick             {tick:6.2f} ms CPU, median of {TICKS} (at most 5)")
    print(f"three GETs through httpx   {through_httpx:6.2f} ms CPU alone")
    print(f"largest resident size      {resident:6.1f} MB (loop without listeners)")
    return 0 if tick < MOST_MILLISECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
