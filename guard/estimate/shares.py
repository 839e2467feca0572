"""What the engine serves, and how much of it comes from which tier."""

from __future__ import annotations

from guard.estimate.figures import RATIO, REQUESTS, SECONDS, gauge
from guard.estimate.windows import History, Window
from guard.readings import Figure, Missing, Reading
from guard.sources.samples import Sample


def engine_figures(engine: Sample | None, history: History, seconds: float) -> dict[str, Figure]:
    """Requests running, waiting and deferred (waiting for external KV), and the mean TTFT
    of the last `seconds`."""
    names = {"running": "running", "waiting": "waiting", "deferred": "waiting_deferred"}
    figures: dict[str, Figure] = {
        f"requests_{figure}": gauge(engine, name, REQUESTS, "engine", "engine_down")
        for figure, name in names.items()
    }
    figures["time_to_first_token"] = _time_to_first_token(engine, history.window(seconds))
    return figures


def _time_to_first_token(engine: Sample | None, window: Window | None) -> Figure:
    if engine is None:
        return Missing("engine_down")
    took = window.delta("ttft_seconds") if window else None
    requests = window.delta("ttft_requests") if window else None
    if window is None or took is None or requests is None:
        return Missing("too_few_samples")
    if requests <= 0:
        return Missing("idle")
    return Reading(took / requests, SECONDS, window.at, f"engine, mean of {requests:.0f} requests")


def tier_figures(
    engine: Sample | None,
    engine_history: History,
    cache: Sample | None,
    cache_history: History,
    seconds: float,
) -> dict[str, Figure]:
    """External-token ratio (of all prompt tokens) and hit ratio (of all tokens that the
    cache was asked for), by tier. `external_token.all` is the engine's own count: L1, L2
    and any prefill/decode transfer together."""
    engine_window = engine_history.window(seconds) if engine is not None else None
    cache_window = cache_history.window(seconds) if cache is not None else None
    prompt = engine_window.delta("prompt_tokens") if engine_window else None
    requested = cache_window.delta("requested_tokens") if cache_window else None
    engine_down = "engine_down" if engine is None else "too_few_samples"
    cache_down = "cache_down" if cache is None else "too_few_samples"
    figures = {"external_token.all": _share(engine_window, "external_tokens", prompt, engine_down)}
    for tier in ("l1", "l2"):
        part = f"hit_{tier}_tokens"
        figures[f"hit.{tier}"] = _share(cache_window, part, requested, cache_down)
        figures[f"external_token.{tier}"] = (
            Missing(engine_down)
            if engine_window is None
            else _share(cache_window, part, prompt, cache_down)
        )
    return figures


def _share(window: Window | None, part: str, whole: float | None, down: str) -> Figure:
    if window is None:
        return Missing(down)
    tokens = window.delta(part)
    if tokens is None or whole is None:
        return Missing("series_absent", f"{part} was not there at both ends")
    if whole <= 0:
        return Missing("idle", "no tokens asked for: idle is no ratio")
    return Reading(tokens / whole, RATIO, window.at, f"Δ{part} over {window.seconds:.0f} s")
