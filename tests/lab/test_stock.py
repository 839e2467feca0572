"""Stock LMCache, without the gate: everything is shown, and nothing is pretended."""

from __future__ import annotations

import os
import subprocess
import time

import httpx

from .acceptance import SLOW_BYTES_PER_SECOND
from .guard_handle import kvguard_program
from .load import Load
from .stack import MODEL_NAME, Stack

OBSERVE_ONLY = "observe only: no control available"
PREFILL_RATE = 2800


def test_stock_lmcache_is_observed_and_nothing_is_pretended(stock_stack: Stack) -> None:
    with Load(stock_stack.engine_url, MODEL_NAME, seed=21) as load:
        load.warm()
        stock_stack.wait_stores_quiet()
        load.warm()
        guard = stock_stack.start_guard(state="stock", args=("--prefill-rate", str(PREFILL_RATE)))
        load.start()
        time.sleep(20)
        stock_stack.link.set_rate(SLOW_BYTES_PER_SECOND)
        _, slow = guard.wait_for(lambda s: s["state"] != "helping", 150, "not calling it helping")
        override = guard.override("bypass", ttl_s=60, reason="nothing can obey this")
        overridden = guard.status()
        guard.override("auto")
        stock_stack.link.set_rate(None)
        page = httpx.get(f"{guard.url}/", timeout=5).text
        metrics = guard.metrics()
        told = subprocess.run(
            [kvguard_program(), "status", "--guard", guard.url],
            env={k: v for k, v in os.environ.items() if not k.startswith("KVGUARD_")},
            capture_output=True,
            text=True,
            timeout=30,
        )
        journal = guard.journal()

    # What the engine and the cache can tell is shown …
    readings = slow["readings"]
    for name in ("break_even_bandwidth", "prefill", "kv_bytes_per_token", "external_token", "hit."):
        assert any(key.startswith(name) and "value" in readings[key] for key in readings), name
    # … what needs the gate is missing, with the reason.
    assert readings["load_bandwidth.alone"]["missing"]
    # No surface claims that anything was done about it.
    for surface in (slow["control"], page, told.stdout, override["control"]):
        assert OBSERVE_ONLY in surface
    assert OBSERVE_ONLY in str(journal)
    assert slow["admission"] is None
    assert slow["holder"] is None
    assert overridden["state"] != "bypassed"
    assert "kvguard_bypass_active" not in "".join(
        line for line in metrics.splitlines() if line.endswith(" 1.0")
    )
    assert not [line for line in metrics.splitlines() if line.startswith("kvguard_admission_share")]
    acted = [line for line in journal if line.get("action") in ("bypass", "shed", "return")]
    assert [line for line in acted if line["kind"] == "decision"] == []
    assert [request.error for request in load.requests if request.error] == []
