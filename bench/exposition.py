"""The selective reader against prometheus_client's parser, on 5 000 lines, in one run."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from guard import exposition
from guard.sources import lmcache_mp, vllm
from guard.sources.samples import wanted_names

LINES = 5_000
LEAST_RATIO = 25.0
CAPTURES = Path(__file__).parent.parent / "tests" / "captures" / "vllm-lmcache-l2"


def median_seconds(work: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def main() -> int:
    capture = next(CAPTURES.glob("v032-lmcmp-vllm-l2warm-end*.prom")).read_text()
    lines = capture.rstrip("\n").split("\n")
    text = "\n".join((lines * (LINES // len(lines) + 1))[:LINES]) + "\n"
    body = text.encode()
    wanted = wanted_names(vllm.WANTS) | wanted_names(lmcache_mp.WANTS)
    found = exposition.read(body, wanted)
    full = median_seconds(lambda: list(text_string_to_metric_families(text)), 7)
    selective = median_seconds(lambda: exposition.read(body, wanted), 101)
    ratio = full / selective
    print(f"{LINES} lines, {len(body) / 1e3:.0f} kB, {len(wanted)} names, {len(found)} series")
    print(f"prometheus_client.parser  {full * 1e3:8.2f} ms")
    print(f"guard.exposition.read     {selective * 1e3:8.2f} ms")
    print(f"ratio                     {ratio:8.1f}   (at least {LEAST_RATIO:g})")
    return 0 if ratio >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
