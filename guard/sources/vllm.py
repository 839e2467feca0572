"""vLLM's `/metrics`, versions 0.17 to 0.33 (names checked against each release).

Series of several data-parallel engines (label `engine`) are added up. Latency histograms
of requests start at 0.3 s, so sums and counts are read, never quantiles.
"""

from __future__ import annotations

from collections.abc import Iterable

from guard.sources.samples import Sample, Want, read_series, select, wanted_names

_SOURCE = "vllm:prompt_tokens_by_source_total"
_CACHE_CONFIG = "vllm:cache_config_info"
_START = "process_start_time_seconds"

WANTS: tuple[Want, ...] = (
    Want("prompt_tokens", ("vllm:prompt_tokens_total",)),
    Want("computed_tokens", (_SOURCE,), labels=(("source", "local_compute"),)),
    Want("external_tokens", (_SOURCE,), labels=(("source", "external_kv_transfer"),)),
    Want("prefill_seconds", ("vllm:request_prefill_time_seconds_sum",)),
    Want("prefill_requests", ("vllm:request_prefill_time_seconds_count",)),
    Want("finished_computed_tokens", ("vllm:request_prefill_kv_computed_tokens_sum",)),
    Want("finished_requests", ("vllm:request_prefill_kv_computed_tokens_count",)),
    Want("ttft_seconds", ("vllm:time_to_first_token_seconds_sum",)),
    Want("ttft_requests", ("vllm:time_to_first_token_seconds_count",)),
    Want("running", ("vllm:num_requests_running",), "gauge"),
    Want("waiting", ("vllm:num_requests_waiting",), "gauge"),
    Want(
        "waiting_deferred",
        ("vllm:num_requests_waiting_by_reason",),
        "gauge",
        (("reason", "deferred"),),
    ),
)
_NAMES = wanted_names(WANTS) | {_CACHE_CONFIG, _START}


def parse(url: str, body: bytes, at: float, monotonic: float) -> Sample:
    """A Sample of one vLLM server.

    `kv_bytes_per_token_one_rank` (gauge) is derived from `cache_config_info` where both
    its labels are numbers: what one rank's GPU cache holds per token.
    Raises SourceUnreadable, SourceTooLarge.
    """
    series = read_series(url, body, _NAMES)
    values, not_a_number = select(series, WANTS)
    start: float | None = None
    for (name, labels), value in series.items():
        if name == _START:
            start = value
        elif name == _CACHE_CONFIG:
            per_token = _bytes_per_token(labels)
            if per_token is not None:
                values["kv_bytes_per_token_one_rank"] = per_token
    return Sample(at, monotonic, (url, start), values, not_a_number)


def _bytes_per_token(labels: Iterable[tuple[str, str]]) -> float | None:
    found = dict(labels)
    try:
        total = float(found["kv_cache_memory_bytes"])
        tokens = float(found["kv_cache_size_tokens"])
    except (KeyError, ValueError):
        return None
    return total / tokens if total > 0 and tokens > 0 else None
