"""s, R and what follows from them: where loading and recomputing break even."""

from __future__ import annotations

from collections.abc import Mapping

from guard import economics
from guard.estimate.figures import BYTES_PER_SECOND, RATIO, SECONDS, TOKENS
from guard.estimate.prefill import PrefillEstimator
from guard.estimate.windows import History, Window
from guard.readings import Figure, Missing, Reading
from guard.sources import lmcache_mp
from guard.sources.samples import Sample

BYTES_PER_TOKEN = "bytes_per_token"
TOKENS_PER_SECOND = "tokens_per_second"


def moved_kv_bytes(window: Window | None, chunk_tokens: int | None) -> Reading | None:
    """s by what the gate moved: Δload_bytes / (Δload_chunks × chunk size); None when
    nothing was moved in the window."""
    if window is None or not chunk_tokens:
        return None
    moved, chunks = window.delta("gate.all.bytes"), window.delta("gate.load_chunks")
    if not moved or not chunks or chunks < 0:
        return None
    return Reading(
        moved / (chunks * chunk_tokens),
        BYTES_PER_TOKEN,
        window.at,
        f"gate: bytes moved of {chunks:.0f} chunks",
    )


def other_kv_bytes(
    configured: float | None,
    engine: Sample | None,
    status: lmcache_mp.CacheStatus | None,
    at: float,
) -> Figure:
    """s before anything was moved: as configured, else approximated from what the cache
    or the engine holds."""
    if configured:
        return Reading(configured, BYTES_PER_TOKEN, at, "configured")
    if status and status.bytes_per_object and status.chunk_size_tokens:
        return Reading(
            status.bytes_per_object / status.chunk_size_tokens,
            BYTES_PER_TOKEN,
            at,
            "approximate: L1 bytes per object (one rank, one object group)",
        )
    per_rank = engine.values.get("kv_bytes_per_token_one_rank") if engine else None
    if per_rank:
        return Reading(per_rank, BYTES_PER_TOKEN, at, "approximate: engine's own cache, one rank")
    return Missing("no_load_yet", "set kv_bytes_per_token, or wait for the first L2 load")


def prefill_rate(
    configured: float | None,
    measured: PrefillEstimator,
    tokens: float | None,
    at: float,
    monotonic: float,
) -> Figure:
    """R at a length of `tokens`, as configured or as measured."""
    if configured:
        return Reading(configured, TOKENS_PER_SECOND, at, "configured")
    rate = measured.rate(tokens, monotonic)
    if rate is None:
        return Missing(measured.last_refusal, "no clean window yet; prefill_rate can be configured")
    where = "of about the loaded length" if rate.nearby else "nearest in length to the loads"
    return Reading(
        rate.tokens_per_second,
        TOKENS_PER_SECOND,
        rate.at,
        f"high quantile of {rate.blocks} clean windows {where}",
    )


def cost_figures(
    figures: Mapping[str, Figure], rate: Figure, engine: History, window_seconds: float
) -> dict[str, Figure]:
    """R, T0 in total, B*, n* and the utilisation of prefill, from the figures of s and
    of loads."""
    new: dict[str, Figure] = {"prefill": rate}
    kv_bytes = figures["kv_bytes_per_token"]
    parts = [figures["hit_fixed.lookup"], figures["hit_fixed.load"]]
    known = [part for part in parts if isinstance(part, Reading)]
    new["hit_fixed.engine"] = Missing("not_measured", "what the engine adds to a hit")
    if len(known) == len(parts):
        new["hit_fixed.total"] = Reading(
            sum(p.value for p in known),
            SECONDS,
            max(p.at for p in known),
            "lookup + load; without the engine's own part",
        )
    else:
        new["hit_fixed.total"] = next(p for p in parts if isinstance(p, Missing))
    if not isinstance(rate, Reading) or not isinstance(kv_bytes, Reading):
        lacking = rate if isinstance(rate, Missing) else kv_bytes
        new["break_even_bandwidth"] = new["break_even_tokens"] = lacking
        new["prefill_utilization"] = lacking
        return new
    new["break_even_bandwidth"] = Reading(
        economics.break_even_bandwidth(kv_bytes.value, rate.value),
        BYTES_PER_SECOND,
        max(rate.at, kv_bytes.at),
        "s·R",
    )
    bandwidth, fixed = figures["load_bandwidth.alone"], new["hit_fixed.total"]
    if isinstance(bandwidth, Reading) and isinstance(fixed, Reading):
        new["break_even_tokens"] = Reading(
            economics.break_even_tokens(fixed.value, kv_bytes.value, rate.value, bandwidth.value),
            TOKENS,
            bandwidth.at,
            "T0/(1/R − s/B), B of loads alone",
        )
    else:
        new["break_even_tokens"] = bandwidth if isinstance(bandwidth, Missing) else fixed
    new["prefill_utilization"] = _prefill_utilization(engine.window(window_seconds), rate)
    return new


def _prefill_utilization(window: Window | None, rate: Reading) -> Figure:
    computed = window.delta("computed_tokens") if window else None
    if window is None or computed is None or window.seconds <= 0:
        return Missing("too_few_samples")
    return Reading(computed / window.seconds / rate.value, RATIO, window.at, "computed tokens / R")
