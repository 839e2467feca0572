"""How much faster the selective reader is than prometheus_client's parser.

    python bench/exposition.py [--lines 5000] [--repeat 15]

Both read the same body in the same process: real vLLM and LMCache expositions from
tests/captures, their engine repeated as a data-parallel deployment would. Prints the best
time of each and the ratio; ends with 1 when the ratio is below 25.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from guard import exposition
from guard.exposition import read

REQUIRED_RATIO = 25
CAPTURES = Path(__file__).parent.parent / "tests" / "captures" / "vllm-lmcache-l2"
ENGINE = CAPTURES / "v032-lmcmp-vllm-l2warm-end__1795972467399.prom"
CACHE = CAPTURES / "v032-lmcmp-lmcache-l2warm-end__1795972468464.prom"

# What a tick asks an engine for, and some of what it asks the cache for: 40 names.
WANTED = frozenset(
    f"vllm:{name}"
    for name in (
        "prompt_tokens_total",
        "prompt_tokens_by_source_total",
        "prompt_tokens_cached_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "external_prefix_cache_queries_total",
        "external_prefix_cache_hits_total",
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "num_preemptions_total",
        "kv_cache_usage_perc",
        "cache_config_info",
        "request_success_total",
        "request_queue_time_seconds_sum",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_sum",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_sum",
        "request_decode_time_seconds_count",
        "request_prefill_kv_computed_tokens_sum",
        "request_prefill_kv_computed_tokens_count",
        "request_prompt_tokens_sum",
        "request_prompt_tokens_count",
        "time_to_first_token_seconds_sum",
        "time_to_first_token_seconds_count",
        "time_to_first_token_seconds_bucket",
        "e2e_request_latency_seconds_sum",
        "e2e_request_latency_seconds_count",
        "iteration_tokens_total_sum",
        "iteration_tokens_total_count",
        "lmcache_mp_lookup_duration_seconds_sum",
        "lmcache_mp_lookup_duration_seconds_count",
    )
) | {
    "lmcache_mp_l2_prefetch_hit_chunks_total",
    "lmcache_mp_l2_prefetch_load_bytes_total",
    "lmcache_mp_lookup_hit_l2_tokens_total",
    "lmcache_mp_lookup_requested_tokens_total",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
}


def body(lines: int) -> str:
    """A body of exactly so many lines: several engines' worth of the captures."""
    engine = ENGINE.read_text().splitlines()
    cache = CACHE.read_text().splitlines()
    replicas = 1
    while True:
        made = list(cache)
        for line in engine:
            if 'engine="0"' in line and not line.startswith("#"):
                made += [line.replace('engine="0"', f'engine="{i}"') for i in range(replicas)]
            else:
                made.append(line)
        if len(made) >= lines:
            return "\n".join(made[:lines]) + "\n"
        replicas += 1


def best_seconds(work: Callable[[], object], repeat: int) -> float:
    """The least of `repeat` times: what the work costs when nothing else interferes."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def measure(lines: int, repeat: int) -> tuple[float, float, float, int]:
    """Seconds of prometheus_client's parser, of ours, of ours at series that it never saw
    before (a first scrape), and the samples that ours returned."""
    text = body(lines)
    raw = text.encode()

    def whole() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in WANTED
        }

    def first() -> None:
        exposition._known_series.clear()
        exposition._known_labels.cache_clear()
        read(raw, WANTED)

    ours = read(raw, WANTED)
    if ours != whole():
        raise SystemExit("the two parsers disagree on the benchmark's body")
    return (
        best_seconds(whole, max(3, repeat // 5)),
        best_seconds(lambda: read(raw, WANTED), repeat),
        best_seconds(first, repeat),
        len(ours),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--repeat", type=int, default=15)
    arguments = parser.parse_args()
    theirs, ours, first, samples = measure(arguments.lines, arguments.repeat)
    ratio = theirs / ours
    print(
        f"{arguments.lines} lines ({len(body(arguments.lines)) / 1e3:.0f} kB), "
        f"{len(WANTED)} names wanted, {samples} samples found"
    )
    print(f"prometheus_client.parser   {theirs * 1e3:8.2f} ms")
    print(f"guard.exposition.read      {ours * 1e3:8.2f} ms")
    print(f"  at a first scrape        {first * 1e3:8.2f} ms")
    print(f"ratio                      {ratio:8.1f}   (at least {REQUIRED_RATIO} required)")
    return 0 if ratio >= REQUIRED_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
