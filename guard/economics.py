"""When loading KV from L2 beats recomputing it: the cost model as pure functions.

SI units throughout: seconds, bytes, tokens and their quotients. The symbols are those of
the model's published notes (the incident paper arXiv 2610.21500 and LMCache's break-even
notes): s KV bytes per token, R prefill tokens per second of this engine, B bytes per second
that L2 delivers to one prompt, T0 the fixed seconds of a hit, n tokens to load.

    recompute(n) = n / R        load(n) = T0 + n·s / B
    B* = s·R                    n* = T0 / (1/R − s/B) if B > B*, else infinite

The model is per prompt: what a load costs others (queueing, the GPU's own load) is the
policy's business. Every function raises ValueError, naming the argument, for a NaN, a
negative number, an infinity where none makes sense, and zero where it would divide.
"""

from __future__ import annotations

import math


def break_even_bandwidth(kv_bytes_per_token: float, prefill_rate: float) -> float:
    """B* = s·R in bytes per second: at or below it no prompt of any length gains by loading.

    `kv_bytes_per_token` in bytes per token, `prefill_rate` in tokens per second.
    Raises ValueError for an argument that is NaN, negative or infinite.
    """
    _require("kv_bytes_per_token", kv_bytes_per_token)
    _require("prefill_rate", prefill_rate)
    return kv_bytes_per_token * prefill_rate


def break_even_tokens(
    fixed_seconds: float, kv_bytes_per_token: float, prefill_rate: float, bandwidth: float
) -> float:
    """n* in tokens: shorter prompts recompute faster, longer ones load faster.

    Infinite when `bandwidth` (bytes per second) is at or below B* = s·R; R·T0 when it is
    infinite. `fixed_seconds` is T0, `kv_bytes_per_token` s, `prefill_rate` R > 0.
    A bandwidth of zero is a tier that delivers nothing: n* is infinite, not an error.
    Raises ValueError for an argument out of range.
    """
    _require("fixed_seconds", fixed_seconds)
    _require("prefill_rate", prefill_rate, zero=False)
    _require("bandwidth", bandwidth, infinite=True)
    threshold = break_even_bandwidth(kv_bytes_per_token, prefill_rate)
    if bandwidth <= threshold:
        return math.inf
    if math.isinf(bandwidth):
        return fixed_seconds * prefill_rate
    # T0 / (1/R − s/B) with the difference taken between bandwidths: close to B* the
    # reciprocals cancel to nothing, or to a negative length.
    return fixed_seconds * prefill_rate / ((bandwidth - threshold) / bandwidth)


def load_seconds(
    tokens: float, fixed_seconds: float, kv_bytes_per_token: float, bandwidth: float
) -> float:
    """Seconds to load `tokens` tokens' KV from L2: T0 + n·s / B.

    `fixed_seconds` is T0, `kv_bytes_per_token` s, `bandwidth` B > 0 in bytes per second to
    this one prompt; an infinite bandwidth leaves T0.
    Raises ValueError for an argument out of range.
    """
    _require("tokens", tokens, infinite=True)
    _require("fixed_seconds", fixed_seconds)
    _require("kv_bytes_per_token", kv_bytes_per_token)
    _require("bandwidth", bandwidth, zero=False, infinite=True)
    if kv_bytes_per_token == 0 or math.isinf(bandwidth):
        return fixed_seconds
    return fixed_seconds + tokens * kv_bytes_per_token / bandwidth


def recompute_seconds(tokens: float, prefill_rate: float) -> float:
    """Seconds to compute `tokens` tokens' KV on the engine: n / R.

    `prefill_rate` is R > 0 in tokens per second at that length and at the GPU's present load.
    Raises ValueError for an argument out of range.
    """
    _require("tokens", tokens, infinite=True)
    _require("prefill_rate", prefill_rate, zero=False)
    return tokens / prefill_rate


def load_utilization(arrival_bytes_per_second: float, bandwidth: float) -> float:
    """ρ of the L2 path, a ratio: bytes asked for per second over bytes it can deliver.

    `arrival_bytes_per_second` is what *arrives* (λ·n̄·s), never what was served: served bytes
    cannot exceed the capacity, so a ρ from them never shows the overload. Above 1 there is
    no steady state. `bandwidth` is the path's capacity in bytes per second, > 0.
    Raises ValueError for an argument out of range.
    """
    _require("arrival_bytes_per_second", arrival_bytes_per_second)
    _require("bandwidth", bandwidth, zero=False, infinite=True)
    return arrival_bytes_per_second / bandwidth


def break_even_hit_ratio(
    overhead_seconds: float, saving_seconds: float, lookup_seconds: float = 0
) -> float:
    """p*, a ratio: below this share of hits L2 loses even when every hit wins.

    The store's overhead and the lookup are paid by every request, the saving is had by hits
    only: p* = (overhead + lookup) / (overhead + lookup + saving). 1 when a hit saves nothing.
    All in seconds per request. Raises ValueError for an argument out of range, a negative
    `saving_seconds` among them (a hit that loses has no break-even), and when all are zero.
    """
    _require("overhead_seconds", overhead_seconds)
    _require("saving_seconds", saving_seconds)
    _require("lookup_seconds", lookup_seconds)
    cost = overhead_seconds + lookup_seconds
    if cost + saving_seconds == 0:
        raise ValueError(
            "overhead_seconds, saving_seconds and lookup_seconds are all 0: "
            "there is no break-even to speak of"
        )
    return cost / (cost + saving_seconds)


def _require(name: str, value: float, *, zero: bool = True, infinite: bool = False) -> None:
    if math.isnan(value):
        raise ValueError(f"{name} is NaN")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")
    if value == 0 and not zero:
        raise ValueError(f"{name} must be greater than 0")
    if math.isinf(value) and not infinite:
        raise ValueError(f"{name} must be finite")
