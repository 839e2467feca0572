"""Why a figure may be missing: each reason in one sentence, and what to do about it."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "cache_down": "The cache server did not answer this tick; see `kvguard_source_up`.",
    "cache_status_absent": "The cache's `/status` did not answer, or does not tell its queues.",
    "engine_down": "An engine did not answer this tick.",
    "engine_metrics_absent": "The engine does not have the prefill metrics of vLLM 0.17 or newer.",
    "idle": "Nothing happened that the figure could be of. Idle is not slow, and not 0.",
    "in_flight_too_young": "What is in flight is too young to bound anything: under a second "
    "beyond the fixed cost.",
    "no_gate": "The cache runs without kvguard's gate: see install.md.",
    "no_load_yet": "Nothing was loaded from L2 yet; `kv_bytes_per_token` can be configured.",
    "no_prefill_yet": "No window with enough finished requests yet; `prefill_rate` can be "
    "configured.",
    "not_a_number": "The peer published NaN.",
    "not_given": "The gate is of an older version, which does not give it: install this one's.",
    "not_identifiable": "The loads are of much the same size, so that what is fixed cannot be "
    "told from what grows with size.",
    "not_measured": "Nothing measures it yet.",
    "nothing_answered_yet": "L2 has answered nothing since the gate was started.",
    "nothing_completed_yet": "No load has completed since the gate was started.",
    "nothing_in_flight": "Nothing is in flight.",
    "prompts_too_short": "Prompts compute fewer than 512 tokens each: too few to show R; "
    "`prefill_rate` can be configured.",
    "series_absent": "The peer does not have the series, or did not at the window's beginning: "
    "LMCache's come with their first increment.",
    "slots_unknown": "The cache's `/status` does not tell how many lookups it lets run at once.",
    "too_few_alone_loads": "Fewer loads ran alone than `policy.min_loads`: the store's own "
    "bandwidth cannot be told from queueing.",
    "too_few_loads": "Fewer loads completed than `policy.min_loads`.",
    "too_few_samples": "Fewer than two samples since the peer started or since L2 left or "
    "entered the path.",
    "too_many_external_hits": "Over a tenth of the prompts' tokens were loaded, which hides R; "
    "`prefill_rate` can be configured.",
    "too_many_running": "More than about two requests ran at once, which hides R; "
    "`prefill_rate` can be configured.",
}
