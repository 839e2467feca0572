"""From samples to figures: the estimate stage of a tick.

The estimator owns the histories and the few things worth remembering (s, T0, C, R's
blocks); everything it publishes is a Reading or a Missing with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from guard import economics
from guard.estimate.bandwidth import Fit, fit, in_flight_bound, load_sums, path_bandwidth
from guard.estimate.prefill import PrefillEstimator
from guard.estimate.utilization import Capacity, observe_capacity, utilization
from guard.estimate.windows import History, Window
from guard.readings import Figure, Missing, Reading
from guard.sources import gate, lmcache_mp, vllm
from guard.sources.samples import Sample

BYTES_PER_SECOND = "bytes_per_second"
SECONDS = "seconds"
RATIO = "ratio"
TOKENS = "tokens"
# The shortest of these windows that holds enough loads is taken: a change shows soon in
# busy traffic, and thin traffic is still measured.
_WINDOWS_SECONDS = (10.0, 20.0, 60.0, 120.0)
# A bound from loads younger than this says more about polling than about the store.
_BOUND_MIN_SECONDS = 1.0
# A path figure that is only 'at most' takes part in ρ when B_prompt shows contention.
_CONTENDED = 0.7

_ENGINE_COUNTERS = frozenset(w.name for w in vllm.WANTS if w.kind == "counter")
_CACHE_COUNTERS = frozenset(w.name for w in lmcache_mp.WANTS if w.kind == "counter") | frozenset(
    f"gate.{w.name}" for w in gate.WANTS if w.kind == "counter"
)


@dataclass(frozen=True, slots=True)
class Configured:
    """What a person told us: used where it cannot be measured (s), or instead (R)."""

    kv_bytes_per_token: float | None = None
    prefill_rate: float | None = None
    min_loads: float = 3.0
    window_seconds: float = 20.0


class Estimator:
    """Feed it one tick's samples, get all figures. Holds no clock and does no I/O."""

    def __init__(self, configured: Configured) -> None:
        self._configured = configured
        self._engine = History(_ENGINE_COUNTERS)
        self._cache = History(_CACHE_COUNTERS)
        self._prefill = PrefillEstimator()
        self._kv_bytes: Reading | None = None
        self._fixed: Reading | None = None
        self._capacity: Capacity | None = None
        self._bytes_per_key: float | None = None
        self._load_tokens: float | None = None
        self._saved: float | None = None
        self._saved_tokens: float | None = None

    @property
    def prefill_seconds_saved(self) -> float | None:
        """Prefill seconds that completed L2 loads made unnecessary since the guard
        started, at the R of each moment; None before the first."""
        return self._saved

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
        if engine is not None:
            self._engine.push(engine)
            self._prefill.update(self._engine)
        if cache is not None:
            self._cache.push(cache)
        figures: dict[str, Figure] = {}
        figures.update(self._from_engine(engine))
        figures.update(self._from_hits(engine, cache))
        figures["kv_bytes_per_token"] = self._kv_bytes_figure(engine, cache, status, at)
        figures.update(self._from_loads(cache, at, since))
        figures.update(self._economics(figures, at, monotonic))
        figures.update(self._from_arrivals(figures, cache, status, at, since, max_loads))
        self._count_saved(figures, cache)
        return figures

    # engine -------------------------------------------------------------------------

    def _from_engine(self, engine: Sample | None) -> dict[str, Figure]:
        names = {"requests_running": "running", "requests_waiting": "waiting"}
        figures: dict[str, Figure] = {
            figure: _gauge(engine, name, "requests", "engine", "engine_down")
            for figure, name in names.items()
        }
        figures["requests_deferred"] = _gauge(
            engine, "waiting_deferred", "requests", "engine", "engine_down"
        )
        window = self._engine.window(self._configured.window_seconds)
        seconds = requests = None
        if engine is not None and window is not None:
            seconds, requests = window.delta("ttft_seconds"), window.delta("ttft_requests")
        if engine is None:
            figures["time_to_first_token"] = Missing("engine_down")
        elif window is None or seconds is None or requests is None:
            figures["time_to_first_token"] = Missing("too_few_samples")
        elif requests <= 0:
            figures["time_to_first_token"] = Missing("idle")
        else:
            figures["time_to_first_token"] = Reading(
                seconds / requests, SECONDS, window.at, f"engine, mean of {requests:.0f} requests"
            )
        return figures

    def _from_hits(self, engine: Sample | None, cache: Sample | None) -> dict[str, Figure]:
        seconds = self._configured.window_seconds
        engine_window = self._engine.window(seconds) if engine is not None else None
        cache_window = self._cache.window(seconds) if cache is not None else None
        prompt = engine_window.delta("prompt_tokens") if engine_window else None

        def of(window: Window | None, part: str, whole: float | None, down: str) -> Figure:
            if window is None:
                return Missing(down)
            tokens = window.delta(part)
            if tokens is None or whole is None:
                return Missing("series_absent", f"{part} was not there at both ends")
            if whole <= 0:
                return Missing("idle", "no tokens asked for: idle is no ratio")
            return Reading(tokens / whole, RATIO, window.at, f"Δ{part} over {window.seconds:.0f} s")

        requested = cache_window.delta("requested_tokens") if cache_window else None
        engine_down = "engine_down" if engine is None else "too_few_samples"
        cache_down = "cache_down" if cache is None else "too_few_samples"
        external = of(engine_window, "external_tokens", prompt, engine_down)
        tiers: dict[str, Figure] = {"external_token.all": external}
        for tier in ("l1", "l2"):
            part = f"hit_{tier}_tokens"
            tiers[f"hit.{tier}"] = of(cache_window, part, requested, cache_down)
            tiers[f"external_token.{tier}"] = (
                Missing(engine_down)
                if engine_window is None
                else of(cache_window, part, prompt, cache_down)
            )
        return tiers

    # s ------------------------------------------------------------------------------

    def _kv_bytes_figure(
        self,
        engine: Sample | None,
        cache: Sample | None,
        status: lmcache_mp.CacheStatus | None,
        at: float,
    ) -> Figure:
        chunk = status.chunk_size_tokens if status else None
        window = self._cache.window(120.0) if cache is not None else None
        if window is not None and chunk:
            moved, chunks = window.delta("gate.all.bytes"), window.delta("gate.load_chunks")
            if moved and chunks and chunks > 0:
                self._kv_bytes = Reading(
                    moved / (chunks * chunk),
                    "bytes_per_token",
                    window.at,
                    f"gate: bytes moved of {chunks:.0f} chunks",
                )
        if self._kv_bytes is not None:
            return self._kv_bytes
        if self._configured.kv_bytes_per_token:
            return Reading(self._configured.kv_bytes_per_token, "bytes_per_token", at, "configured")
        if status and status.bytes_per_object and chunk:
            return Reading(
                status.bytes_per_object / chunk,
                "bytes_per_token",
                at,
                "approximate: L1 bytes per object (one rank, one object group)",
            )
        per_rank = engine.values.get("kv_bytes_per_token_one_rank") if engine else None
        if per_rank:
            return Reading(
                per_rank, "bytes_per_token", at, "approximate: engine's own cache, one rank"
            )
        return Missing("no_load_yet", "set kv_bytes_per_token, or wait for the first L2 load")

    # loads --------------------------------------------------------------------------

    def _load_window(self, since: float) -> Window | None:
        chosen = None
        for seconds in _WINDOWS_SECONDS:
            window = self._cache.window(seconds, since)
            if window is None:
                return None
            chosen = window
            if (window.delta("gate.all.loads") or 0.0) >= self._configured.min_loads:
                return window
        return chosen

    def _from_loads(self, cache: Sample | None, at: float, since: float) -> dict[str, Figure]:
        names = (
            "load_bandwidth.alone",
            "load_bandwidth.prompt",
            "load_bandwidth.path",
            "load_bandwidth.recent",
            "in_flight_bandwidth_bound",
            "hit_fixed.lookup",
            "hit_fixed.load",
            "load_wait",
            "estimate_loads.alone",
            "estimate_loads.prompt",
            "oldest_load",
            "loads_in_flight",
        )
        if cache is None:
            return {name: Missing("cache_down") for name in names}
        if not lmcache_mp.has_gate(cache):
            figures: dict[str, Figure] = {name: Missing("no_gate") for name in names}
            figures["load_bandwidth.prompt"] = self._stock_bandwidth()
            return figures
        figures = {name: Missing("too_few_samples") for name in names}
        figures["loads_in_flight"] = _gauge(
            cache, "gate.loads_in_flight", "requests", "gate", "cache_down"
        )
        figures["oldest_load"] = _gauge(
            cache, "gate.oldest_load_seconds", SECONDS, "gate", "nothing_in_flight"
        )
        window = self._load_window(since)
        if window is not None:
            figures.update(self._fits(window, at))
        recent = path_bandwidth(window, self._configured.min_loads) if window else None
        figures["load_bandwidth.recent"] = _path_figure(recent, window)
        longer = self._cache.window(
            max(self._configured.window_seconds, window.seconds if window else 0.0), since
        )
        path = path_bandwidth(longer, self._configured.min_loads) if longer else None
        figures["load_bandwidth.path"] = _path_figure(path, longer)
        figures["in_flight_bandwidth_bound"] = self._bound(cache)
        return figures

    def _stock_bandwidth(self) -> Figure:
        window = self._cache.window(120.0)
        if window is None:
            return Missing("too_few_samples")
        total = window.delta("load_rate_sum_gb_per_second")
        count = window.delta("load_rate_count")
        if total is None or count is None:
            return Missing("series_absent", "no L2 load since the cache started")
        if count <= 0:
            return Missing("too_few_loads")
        return Reading(
            total / count * 1e9,
            BYTES_PER_SECOND,
            window.at,
            f"approximate: unweighted mean rate of {count:.0f} loads, no gate",
        )

    def _fits(self, window: Window, at: float) -> dict[str, Figure]:
        figures: dict[str, Figure] = {}
        everything, alone = load_sums(window, "all"), load_sums(window, "alone")
        if everything is None or alone is None:
            reason = Missing("series_absent", "the gate's load sums are not complete")
            return {"load_bandwidth.alone": reason, "load_bandwidth.prompt": reason}
        seconds = f"over {window.seconds:.0f} s"
        figures["estimate_loads.alone"] = Reading(alone.loads, "requests", window.at, seconds)
        figures["estimate_loads.prompt"] = Reading(everything.loads, "requests", window.at, seconds)
        if everything.loads >= 1:
            self._load_tokens = self._tokens(everything.bytes / everything.loads)
        enough = self._configured.min_loads
        alone_fit = fit(alone) if alone.loads >= enough else None
        if alone_fit is None:
            idle = everything.loads < 1
            figures["load_bandwidth.alone"] = Missing("idle" if idle else "too_few_alone_loads")
        else:
            self._publish_alone(figures, alone_fit, alone.loads, window)
        if everything.loads >= enough and everything.seconds > 0:
            figures["load_bandwidth.prompt"] = Reading(
                everything.bytes / everything.seconds,
                BYTES_PER_SECOND,
                window.at,
                f"{everything.loads:.0f} loads {seconds}",
            )
            if alone_fit is not None:
                mean_bytes = everything.bytes / everything.loads
                unloaded = (alone_fit.fixed_seconds or 0.0) + mean_bytes / alone_fit.bandwidth
                figures["load_wait"] = Reading(
                    max(0.0, everything.seconds / everything.loads - unloaded),
                    SECONDS,
                    window.at,
                    "mean load less what it would take alone",
                )
        else:
            figures["load_bandwidth.prompt"] = Missing(
                "idle" if everything.loads < 1 else "too_few_loads"
            )
        if self._fixed is not None:
            figures["hit_fixed.load"] = self._fixed
        elif alone_fit is not None:
            figures["hit_fixed.load"] = Missing("not_identifiable", "load sizes do not spread")
        else:
            figures["hit_fixed.load"] = Missing("too_few_alone_loads")
        served = [
            window.delta(f"gate.lookups.{answer}") or 0.0 for answer in ("hit", "partial", "miss")
        ]
        lookup = window.delta("gate.lookup_seconds")
        if lookup is not None and sum(served) > 0:
            figures["hit_fixed.lookup"] = Reading(
                lookup / sum(served), SECONDS, window.at, f"mean of {sum(served):.0f} lookups"
            )
        else:
            figures["hit_fixed.lookup"] = Missing("idle")
        return figures

    def _publish_alone(
        self, figures: dict[str, Figure], alone: Fit, loads: float, window: Window
    ) -> None:
        how = f"{loads:.0f} loads alone over {window.seconds:.0f} s"
        if alone.fixed_seconds is not None:
            self._fixed = Reading(
                alone.fixed_seconds, SECONDS, window.at, f"intercept of {loads:.0f} loads alone"
            )
        else:
            how += ", fixed cost included"
        figures["load_bandwidth.alone"] = Reading(alone.bandwidth, BYTES_PER_SECOND, window.at, how)

    def _bound(self, cache: Sample) -> Figure:
        in_flight = cache.values.get("gate.in_flight_bytes")
        oldest = cache.values.get("gate.oldest_load_seconds")
        if not in_flight or oldest is None:
            return Missing("nothing_in_flight")
        bound = in_flight_bound(
            in_flight,
            oldest,
            cache.values.get("gate.last_completion_age_seconds"),
            self._fixed.value if self._fixed else 0.0,
            _BOUND_MIN_SECONDS,
        )
        if bound is None:
            return Missing("in_flight_too_young")
        return Reading(
            bound,
            BYTES_PER_SECOND,
            cache.at,
            f"at most: {in_flight / 1e6:.1f} MB in flight, none of it completed",
        )

    def _tokens(self, load_bytes: float) -> float | None:
        per_token = self._kv_bytes.value if self._kv_bytes else None
        return load_bytes / per_token if per_token else None

    # what it costs and what it saves ------------------------------------------------

    def _economics(
        self, figures: Mapping[str, Figure], at: float, monotonic: float
    ) -> dict[str, Figure]:
        new: dict[str, Figure] = {}
        rate = self._rate(at, monotonic)
        new["prefill"] = rate
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
            assert isinstance(lacking, Missing)
            new["break_even_bandwidth"] = new["break_even_tokens"] = lacking
            new["prefill_utilization"] = lacking
            return new
        needed = economics.break_even_bandwidth(kv_bytes.value, rate.value)
        new["break_even_bandwidth"] = Reading(
            needed, BYTES_PER_SECOND, max(rate.at, kv_bytes.at), "s·R"
        )
        bandwidth, fixed = figures["load_bandwidth.alone"], new["hit_fixed.total"]
        if isinstance(bandwidth, Reading) and isinstance(fixed, Reading):
            new["break_even_tokens"] = Reading(
                economics.break_even_tokens(
                    fixed.value, kv_bytes.value, rate.value, bandwidth.value
                ),
                TOKENS,
                bandwidth.at,
                "T0/(1/R − s/B), B of loads alone",
            )
        else:
            new["break_even_tokens"] = bandwidth if isinstance(bandwidth, Missing) else fixed
        new["prefill_utilization"] = self._prefill_utilization(rate)
        return new

    def _rate(self, at: float, monotonic: float) -> Figure:
        if self._configured.prefill_rate:
            return Reading(self._configured.prefill_rate, "tokens_per_second", at, "configured")
        rate = self._prefill.rate(self._load_tokens, monotonic)
        if rate is None:
            return Missing(
                self._prefill.last_refusal, "no clean window yet; prefill_rate can be configured"
            )
        where = "of about the loaded length" if rate.nearby else "nearest in length to the loads"
        return Reading(
            rate.tokens_per_second,
            "tokens_per_second",
            rate.at,
            f"high quantile of {rate.blocks} clean windows {where}",
        )

    def _prefill_utilization(self, rate: Reading) -> Figure:
        window = self._engine.window(self._configured.window_seconds)
        computed = window.delta("computed_tokens") if window else None
        if window is None or computed is None or window.seconds <= 0:
            return Missing("too_few_samples")
        return Reading(
            computed / window.seconds / rate.value, RATIO, window.at, "computed tokens / R"
        )

    # arrivals -----------------------------------------------------------------------

    def _from_arrivals(
        self,
        figures: Mapping[str, Figure],
        cache: Sample | None,
        status: lmcache_mp.CacheStatus | None,
        at: float,
        since: float,
        max_loads: float | None,
    ) -> dict[str, Figure]:
        names = ("slots", "path", "max")
        new: dict[str, Figure] = {}
        backlog = None
        if cache is not None:
            parts = [cache.values.get("queue.submission"), cache.values.get("queue.pending")]
            if None not in parts:
                backlog = sum(p for p in parts if p is not None)
        new["backlog"] = (
            Missing("cache_down" if cache is None else "cache_status_absent")
            if backlog is None
            else Reading(backlog, "requests", at, "submission + pending queue of the cache")
        )
        window = self._cache.window(self._configured.window_seconds, since) if cache else None
        if cache is not None and not lmcache_mp.has_gate(cache):
            lacking = Missing("no_gate")
        else:
            lacking = Missing("cache_down" if cache is None else "too_few_samples")
        if window is None or lacking.reason == "no_gate":
            for name in names:
                new[f"load_utilization.{name}"] = lacking
            new["load_bandwidth.capacity"] = new["backlog_growth"] = lacking
            new["declined"] = lacking
            return new
        submitted, keys = window.delta("gate.submitted_bytes"), window.delta("gate.lookup_keys")
        denied = window.delta("gate.denied_keys") or 0.0
        if submitted and keys and keys - denied > 0:
            self._bytes_per_key = submitted / (keys - denied)
        slots = float(status.max_in_flight) if status and status.max_in_flight else None
        path, alone = figures["load_bandwidth.path"], figures["load_bandwidth.alone"]
        self._capacity = observe_capacity(
            self._capacity,
            window,
            path.value if isinstance(path, Reading) else None,
            alone.value if isinstance(alone, Reading) else None,
            slots,
            max_loads,
        )
        use = utilization(window, self._capacity, slots, self._bytes_per_key)
        new["load_bandwidth.capacity"] = (
            Missing("too_few_loads")
            if self._capacity is None
            else Reading(
                self._capacity.bytes_per_second,
                BYTES_PER_SECOND,
                window.at,
                "a full window" if self._capacity.saturated else "at least: no full window yet",
            )
        )
        new["backlog_growth"] = _optional(use.backlog_growth, "requests", window.at, "Δ queues")
        new["declined"] = _optional(use.declined_ratio, RATIO, window.at, "loads over max_loads")
        new["load_utilization.slots"] = _optional(
            use.slots, RATIO, window.at, "λ·h/c from arrivals"
        )
        new["load_utilization.path"] = _optional(
            use.path, RATIO, window.at, "D/C" + (", at most" if use.path_at_most else "")
        )
        prompt = figures["load_bandwidth.prompt"]
        contended = (
            bool(backlog)
            or bool(use.declined_ratio)
            or (
                isinstance(prompt, Reading)
                and isinstance(alone, Reading)
                and prompt.value < _CONTENDED * alone.value
            )
        )
        candidates = [("slots", use.slots)]
        if not use.path_at_most or contended:
            candidates.append(("path", use.path))
        known = [(value, name) for name, value in candidates if value is not None]
        new["load_utilization.max"] = (
            Reading(max(known)[0], RATIO, window.at, f"the {max(known)[1]} figure")
            if known
            else Missing("idle")
        )
        return new

    def _count_saved(self, figures: Mapping[str, Figure], cache: Sample | None) -> None:
        rate = figures["prefill"]
        tokens = cache.values.get("hit_l2_tokens") if cache is not None else None
        if tokens is None:
            return
        before, self._saved_tokens = self._saved_tokens, tokens
        if before is not None and tokens >= before and isinstance(rate, Reading):
            self._saved = (self._saved or 0.0) + (tokens - before) / rate.value


def _gauge(sample: Sample | None, name: str, unit: str, source: str, down: str) -> Figure:
    if sample is None:
        return Missing(down)
    if name in sample.not_a_number:
        return Missing("not_a_number")
    value = sample.values.get(name)
    if value is None:
        return Missing("nothing_in_flight" if down == "nothing_in_flight" else "series_absent")
    return Reading(value, unit, sample.at, source)


def _path_figure(value: float | None, window: Window | None) -> Figure:
    if window is None:
        return Missing("too_few_samples")
    if value is None:
        loads = window.delta("gate.all.loads")
        return Missing("idle" if loads == 0 else "too_few_loads")
    return Reading(value, BYTES_PER_SECOND, window.at, f"bytes / busy over {window.seconds:.0f} s")


def _optional(value: float | None, unit: str, at: float, source: str) -> Figure:
    return Missing("idle") if value is None else Reading(value, unit, at, source)
