"""What happens when something dies: the guard, the store, the cache server, the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .acceptance import SLOW_BYTES_PER_SECOND, prepare, shows_slow
from .conftest import Bench
from .guard_handle import Guard
from .load import Load
from .stack import MODEL_NAME, Stack

# The order of what this engine's prefill does here; that the guard learns it by itself is
# shown by the acceptance run.
PREFILL_RATE = 2800
LEASE_SECONDS = 30.0
LEASE_SPREAD = 0.2
ACTIONS = ("bypass", "shed", "admit", "return")


@pytest.fixture(scope="module", autouse=True)
def _nobody_inherits_the_ruins(bench: Bench) -> Iterator[None]:
    yield
    bench.close()


@pytest.fixture
def guard(gated_stack: Stack, request: pytest.FixtureRequest) -> Iterator[Guard]:
    """An enforcing guard with a state directory of its own."""
    guard = gated_stack.start_guard(
        state=f"survival-{request.node.name}", args=("--prefill-rate", str(PREFILL_RATE))
    )
    yield guard
    gated_stack.link.set_rate(None)
    guard.kill()


def decisions(guard: Guard, begin: float) -> list[dict[str, Any]]:
    """What the guard did (not what it only says) since `begin`, Unix time."""
    return [
        line
        for line in guard.journal()
        if line["at"] >= begin and line["kind"] == "decision" and line["action"] in ACTIONS
    ]


def source(status: dict[str, Any], name: str) -> dict[str, Any]:
    found = [entry for entry in status["sources"] if entry["name"] == name]
    assert found, f"no source {name!r} in {status['sources']}"
    return dict(found[0])


def assert_still_ticking(guard: Guard) -> None:
    before = guard.status()["ticks"]
    guard.wait_for(lambda status: status["ticks"] >= before + 3, 15, "three more ticks")
    answer = httpx.get(f"{guard.url}/healthz", timeout=5)
    assert answer.status_code == 200
    assert guard.process.running


def test_a_guard_killed_while_bypassed_lets_l2_back_in(gated_stack: Stack, guard: Guard) -> None:
    with Load(gated_stack.engine_url, MODEL_NAME, seed=11) as load:
        prepare(gated_stack, load)
        load.start()
        guard.wait_for(lambda s: (s["admission"] or {}).get("share") == 1, 30, "seeing the gate")
        gated_stack.link.set_rate(SLOW_BYTES_PER_SECOND)
        guard.wait_for(
            lambda s: s["state"] == "bypassed" and s["admission"]["share"] == 0, 60, "a bypass"
        )
        guard.kill()
        killed = time.monotonic()
        gated_stack.link.set_rate(None)

        held = gated_stack.gate_status()
        assert held["admission"]["share"] == 0
        assert held["lease"]["holder"].startswith("kvguard:")
        longest = LEASE_SECONDS * (1 + LEASE_SPREAD)
        while gated_stack.gate_status()["admission"]["share"] == 0:
            assert time.monotonic() - killed < longest + 5, gated_stack.gate_status()
            time.sleep(0.5)
        lasted = time.monotonic() - killed
        status = gated_stack.gate_status()

    assert lasted > LEASE_SECONDS * (1 - LEASE_SPREAD) - 10  # renewed every 5 s
    assert status["lease"] is None
    assert status["admission"] == status["default"]
    assert load.send(0).cached_tokens
    assert [request.error for request in load.requests if request.error] == []


def test_without_the_store_the_guard_acts_only_on_what_it_sees(
    gated_stack: Stack, guard: Guard
) -> None:
    with Load(gated_stack.engine_url, MODEL_NAME, seed=12) as load:
        prepare(gated_stack, load)
        load.start()
        guard.wait_for(
            lambda s: s["readings"]["load_bandwidth.path"].get("value"), 30, "a bandwidth"
        )
        begin = time.time()
        gated_stack.store.kill()
        # Hits have ended; what loads did a minute ago says nothing of a store that is gone.
        _, status = guard.wait_for(
            lambda s: s["state"] != "helping", 60, "no longer saying that L2 helps"
        )
        assert_still_ticking(guard)

    assert status["state"] != "overloaded"
    for line in decisions(guard, begin):
        assert line["action"] != "bypass" or shows_slow(line), line
    # The engine recomputes what it cannot have.
    assert [request.error for request in load.requests if request.error] == []
    gated_stack.start_store()


def test_without_the_cache_server_the_guard_holds_and_says_so(
    gated_stack: Stack, guard: Guard
) -> None:
    guard.wait_for(lambda s: s["control"] == "gate", 30, "seeing the gate")
    begin = time.time()
    gated_stack.cache.kill()
    _, status = guard.wait_for(
        lambda s: s["state"] == "unknown" and "cache" in s["reason"], 15, "missing the cache"
    )
    assert not source(status, "cache_metrics")["up"]
    assert not source(status, "cache_status")["up"]
    assert source(status, "engine")["up"]
    assert source(status, "cache_metrics")["error"]
    assert status["admission"] is None
    assert_still_ticking(guard)
    assert decisions(guard, begin) == []

    gated_stack.start_cache()
    guard.wait_for(
        lambda s: s["control"] == "gate" and (s["admission"] or {}).get("share") == 1,
        30,
        "seeing the new gate",
    )


def test_without_the_engine_the_guard_holds_and_says_so(gated_stack: Stack, guard: Guard) -> None:
    if not gated_stack.cache.running:
        gated_stack.start_cache()
    guard.wait_for(lambda s: source(s, "engine")["up"], 30, "seeing the engine")
    begin = time.time()
    gated_stack.engine.kill()
    _, status = guard.wait_for(
        lambda s: s["state"] == "unknown" and "engine" in s["reason"], 15, "missing the engine"
    )
    assert not source(status, "engine")["up"]
    assert source(status, "cache_metrics")["up"]
    assert_still_ticking(guard)
    assert decisions(guard, begin) == []
