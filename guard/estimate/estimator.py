"""From samples to figures: the estimate stage of a tick.

The estimator owns the histories; each room of figures has a module of its own, and what
is worth remembering is kept there. Everything published is a Reading or a Missing with
its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from guard.estimate.adapter import adapter_figures
from guard.estimate.arrivals import ArrivalEstimator
from guard.estimate.bounds import BoundEstimator
from guard.estimate.costs import cost_figures, moved_kv_bytes, other_kv_bytes, prefill_rate
from guard.estimate.figures import Configured
from guard.estimate.loads import LoadEstimator
from guard.estimate.prefill import PrefillEstimator
from guard.estimate.shares import engine_figures, tier_figures
from guard.estimate.windows import History
from guard.readings import Figure, Reading
from guard.sources import gate, lmcache_mp, vllm
from guard.sources.samples import Sample

_KV_BYTES_WINDOW_SECONDS = 120.0
_ENGINE_COUNTERS = frozenset(w.name for w in vllm.WANTS if w.kind == "counter")
_CACHE_COUNTERS = frozenset(w.name for w in lmcache_mp.WANTS if w.kind == "counter") | frozenset(
    f"gate.{w.name}" for w in gate.WANTS if w.kind == "counter"
)


class Estimator:
    """Feed it one tick's samples, get all figures. Holds no clock and does no I/O."""

    def __init__(self, configured: Configured) -> None:
        self._configured = configured
        self._engine = History(_ENGINE_COUNTERS)
        self._cache = History(_CACHE_COUNTERS)
        self._prefill = PrefillEstimator()
        self._loads = LoadEstimator()
        self._arrivals = ArrivalEstimator()
        self._bounds = BoundEstimator()
        self._kv_bytes: Reading | None = None
        self._saved: float | None = None
        self._saved_tokens: float | None = None

    @property
    def prefill_seconds_saved(self) -> float | None:
        """Prefill seconds that completed L2 loads made unnecessary since the guard
        started, at the R of each moment; None before the first."""
        return self._saved

    @property
    def bytes_per_load(self) -> float | None:
        """Mean size of the last window's loads; None before the first."""
        return self._loads.bytes_per_load

    def configure(self, *, min_loads: float, window_seconds: float) -> None:
        """Change how much evidence a figure needs, while running."""
        self._configured = replace(
            self._configured, min_loads=min_loads, window_seconds=window_seconds
        )

    def update(
        self,
        engine: Sample | None,
        cache: Sample | None,
        status: lmcache_mp.CacheStatus | None,
        at: float,
        monotonic: float,
        since: float = -math.inf,
        max_loads: float | None = None,
    ) -> dict[str, Figure]:
        """All figures of this tick. `since` (monotonic) is where evidence on L2 begins:
        loads from before an admission change say nothing about it. A peer that did not
        answer is None, and all that rests on it is Missing."""
        configured, seconds = self._configured, self._configured.window_seconds
        if engine is not None:
            self._engine.push(engine)
            self._prefill.update(self._engine)
        if cache is not None:
            self._cache.push(cache)
        figures = engine_figures(engine, self._engine, seconds)
        figures |= tier_figures(engine, self._engine, cache, self._cache, seconds)
        figures["kv_bytes_per_token"] = self._kv_bytes_figure(engine, cache, status, at)
        figures |= self._loads.figures(
            cache,
            self._cache,
            since=since,
            min_loads=configured.min_loads,
            window_seconds=seconds,
        )
        figures |= adapter_figures(cache, at, self._loads.bytes_per_load)
        rate = prefill_rate(
            configured.prefill_rate, self._prefill, self._load_tokens(), at, monotonic
        )
        figures |= cost_figures(figures, rate, self._engine, seconds)
        figures |= self._arrivals.figures(
            figures,
            cache,
            self._cache,
            status,
            at=at,
            since=since,
            window_seconds=seconds,
            max_loads=max_loads,
            bytes_per_load=self._loads.bytes_per_load,
        )
        self._count_saved(figures, cache)
        if cache is None:
            return figures
        slots = status.prefetch_slots(self._loads.bytes_per_load) if status else None
        return self._bounds.bounded(
            figures, self._cache, since, slots.count if slots else None, self._arrivals.demand
        )

    def _kv_bytes_figure(
        self,
        engine: Sample | None,
        cache: Sample | None,
        status: lmcache_mp.CacheStatus | None,
        at: float,
    ) -> Figure:
        window = self._cache.window(_KV_BYTES_WINDOW_SECONDS) if cache is not None else None
        moved = moved_kv_bytes(window, status.chunk_size_tokens if status else None)
        if moved is not None:
            self._kv_bytes = moved
        if self._kv_bytes is not None:
            return self._kv_bytes
        return other_kv_bytes(self._configured.kv_bytes_per_token, engine, status, at)

    def _load_tokens(self) -> float | None:
        size, per_token = self._loads.bytes_per_load, self._kv_bytes
        return None if size is None or per_token is None else size / per_token.value

    def _count_saved(self, figures: Mapping[str, Figure], cache: Sample | None) -> None:
        rate = figures["prefill"]
        tokens = cache.values.get("hit_l2_tokens") if cache is not None else None
        if tokens is None:
            return
        before, self._saved_tokens = self._saved_tokens, tokens
        if before is not None and tokens >= before and isinstance(rate, Reading):
            self._saved = (self._saved or 0.0) + (tokens - before) / rate.value
