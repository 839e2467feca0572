"""R, the engine's prefill rate in tokens per second, from windows that deserve trust.

Σ computed tokens / Σ prefill seconds is a lower bound that falls 2 to 10 times short in
windows with hits or many requests at once (facts: 11 724 at concurrency 1, 356 at 8 with
92 % hits). So only clean blocks count, and a high quantile of them is taken. R falls with
the prompt's length, so each block keeps its length and R is asked for at one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from guard.estimate.windows import History

BLOCK_SECONDS = 5.0
_BLOCK_MAX_SECONDS = 20.0
_MIN_REQUESTS = 2.0
_MIN_TOKENS_PER_REQUEST = 512.0
_MAX_RUNNING = 2.2
_MAX_EXTERNAL_RATIO = 0.1
_KEEP_BLOCKS = 60
_KEEP_SECONDS = 3600.0
_NEARBY_FACTOR = 1.5
_QUANTILE = 0.8


@dataclass(frozen=True, slots=True)
class PrefillBlock:
    """One accepted block: mean computed tokens per request, and their rate."""

    at: float
    monotonic: float
    tokens_per_request: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """R at a length: `nearby` tells whether blocks of about that length were seen."""

    tokens_per_second: float
    at: float
    blocks: int
    nearby: bool


class PrefillEstimator:
    """Collects clean blocks from an engine's history and answers for R(n)."""

    def __init__(self) -> None:
        self._blocks: deque[PrefillBlock] = deque(maxlen=_KEEP_BLOCKS)
        self._since = -math.inf
        self.last_refusal = "no_prefill_yet"

    def update(self, history: History) -> None:
        """Close a block when enough requests finished in it; call once a tick."""
        window = history.window(_BLOCK_MAX_SECONDS, self._since)
        if window is None or window.seconds < BLOCK_SECONDS:
            return
        requests = window.delta("finished_requests")
        if requests is not None and requests < _MIN_REQUESTS:
            return
        self._since = window.samples[-1].monotonic
        tokens = window.delta("finished_computed_tokens")
        seconds = window.delta("prefill_seconds")
        external, prompt = window.delta("external_tokens"), window.delta("prompt_tokens")
        running = [s.values["running"] for s in window.samples if s.values.get("running")]
        if requests is None or tokens is None or seconds is None or prompt is None:
            self.last_refusal = "engine_metrics_absent"
        elif seconds <= 0 or tokens / requests < _MIN_TOKENS_PER_REQUEST:
            self.last_refusal = "prompts_too_short"
        elif not running or sum(running) / len(running) > _MAX_RUNNING:
            self.last_refusal = "too_many_running"
        elif external is not None and external > _MAX_EXTERNAL_RATIO * max(prompt, 1.0):
            self.last_refusal = "too_many_external_hits"
        else:
            self._blocks.append(
                PrefillBlock(
                    window.at, window.samples[-1].monotonic, tokens / requests, tokens / seconds
                )
            )

    def rate(self, tokens: float | None, monotonic: float) -> PrefillRate | None:
        """R for a recompute of `tokens` (None: at whatever length was seen); None when no
        clean block of the last hour is known. Blocks within a factor 1.5 of the length
        are preferred; else those nearest to it answer, and `nearby` is False."""
        blocks = [b for b in self._blocks if monotonic - b.monotonic <= _KEEP_SECONDS]
        if not blocks:
            return None
        nearby = True
        if tokens is not None and tokens > 0:
            distance = {id(b): abs(math.log(b.tokens_per_request / tokens)) for b in blocks}
            limit = math.log(_NEARBY_FACTOR)
            near = [b for b in blocks if distance[id(b)] <= limit]
            nearby = bool(near)
            blocks = near or [
                b for b in blocks if distance[id(b)] <= min(distance.values()) + math.log(1.1)
            ]
        rates = sorted(b.tokens_per_second for b in blocks)
        index = min(len(rates) - 1, int(_QUANTILE * len(rates)))
        return PrefillRate(rates[index], max(b.at for b in blocks), len(blocks), nearby)
