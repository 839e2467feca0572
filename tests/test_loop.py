"""The loop end to end over HTTP: what it does to a gate, and what it never does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from guard.errors import ControlConflict
from guard.loop import Loop, LoopSettings
from guard.readings import Missing
from tests.peers import Clock, Peers


class Journal:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.error: str | None = None

    def write(self, kind: str, **fields: Any) -> None:
        self.lines.append({"kind": kind, **fields})

    def actions(self) -> list[str]:
        return [line["action"] for line in self.lines if line["kind"] == "decision"]


class Store:
    def __init__(self) -> None:
        self.document: Mapping[str, Any] | None = None

    def load(self) -> Mapping[str, Any] | None:
        return self.document

    def save(self, document: Mapping[str, Any]) -> None:
        self.document = document


class Bench:
    """Peers, a guard, and one clock for all of them."""

    def __init__(self, peers: Peers, clock: Clock, mode: str, store: Store) -> None:
        self.peers, self.clock, self.store = peers, clock, store
        self.journal = Journal()
        self.settings = LoopSettings(
            engines=(peers.url + "/engine",),
            cache=peers.url,
            mode=mode,  # type: ignore[arg-type]
            interval_seconds=4.0,
            holder="kvguard:test",
        )
        self.loop = self.start()

    def start(self) -> Loop:
        return Loop(
            self.settings,
            self.journal,
            self.store,
            wall=self.clock,
            monotonic=self.clock,
            chance=lambda: 0.5,
        )

    async def seconds(self, count: int, until: Callable[[], bool] = lambda: False) -> int:
        for passed in range(count):
            if until():
                return passed
            self.clock.now += 1.0
            self.peers.traffic()
            await self.loop.tick()
        return count

    async def learn_prefill(self) -> None:
        await self.loop.set_override(
            "bypass", who="ana", reason="measure R", ttl_seconds=600, if_revision=None
        )
        await self.seconds(30)
        await self.loop.set_override(
            "auto", who="ana", reason="done", ttl_seconds=None, if_revision=None
        )


def run(scenario: Callable[[Bench], Awaitable[None]], mode: str = "enforce", **peer: Any) -> None:
    async def body() -> None:
        clock = Clock()
        async with Peers(clock, **peer) as peers:
            bench = Bench(peers, clock, mode, Store())
            await scenario(bench)
            await bench.loop.close()

    asyncio.run(body())


def test_out_when_slow_and_back_when_fast_with_reasons() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.learn_prefill()
        peers = bench.peers
        await bench.seconds(30)
        view = bench.loop.view()
        assert view.decision is not None
        assert view.decision.state == "helping"
        assert view.snapshot is not None
        assert view.snapshot.value("prefill") == pytest.approx(2000.0)
        assert view.snapshot.value("kv_bytes_per_token") == pytest.approx(24_576.0)
        assert bench.journal.actions() == []
        peers.bandwidth = 12e6
        waited = await bench.seconds(30, lambda: peers.share == 0)
        assert waited < 25
        assert peers.holder == "kvguard:test"
        assert peers.max_loads == 5
        decided = [line for line in bench.journal.lines if line["kind"] == "decision"]
        assert "MB/s" in decided[-1]["reason"]
        await bench.seconds(20)
        peers.bandwidth = 250e6
        waited = await bench.seconds(60, lambda: bench.loop.view().decision.state == "helping")
        assert waited < 60
        assert peers.share == 1
        assert bench.journal.actions().count("bypass") == 1

    run(scenario)


def test_evidence_on_loads_begins_anew_when_l2_leaves_the_path() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(20)
        view = bench.loop.view()
        assert view.snapshot is not None
        assert view.snapshot.value("load_bandwidth.recent")
        await bench.loop.set_override(
            "bypass", who="ben", reason="now", ttl_seconds=60, if_revision=None
        )
        await bench.seconds(2)
        view = bench.loop.view()
        assert view.snapshot is not None
        for name in ("alone", "recent", "path", "prompt"):
            figure = view.snapshot.get(f"load_bandwidth.{name}")
            assert isinstance(figure, Missing), (name, figure)

    run(scenario)


def test_a_limit_on_loads_that_follows_their_size_is_not_written_at_every_tick() -> None:
    async def scenario(bench: Bench) -> None:
        bench.peers.prefetch = {"inflight_watermark": 0.5}
        bench.peers.l1_bytes = 20 * 50_331_648.0  # ten loads of 2 048 tokens in half of it
        await bench.seconds(15)
        assert bench.peers.max_loads == 7
        bench.peers.l1_bytes *= 1.1
        await bench.seconds(15)
        assert bench.peers.max_loads == 7
        bench.peers.l1_bytes *= 2
        await bench.seconds(15)
        assert bench.peers.max_loads == 19

    run(scenario)


def test_observe_never_writes() -> None:
    async def scenario(bench: Bench) -> None:
        bench.peers.bandwidth = 12e6
        await bench.seconds(60)
        assert bench.peers.posts == []

    run(scenario, mode="observe")


def test_a_killed_guard_leaves_a_lease_that_runs_out() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.learn_prefill()
        bench.peers.bandwidth = 12e6
        await bench.seconds(40, lambda: bench.peers.share == 0)
        assert bench.peers.share == 0
        for _ in range(31):  # no tick: the guard is dead
            bench.clock.now += 1
            bench.peers.traffic()
        assert bench.peers.share == 1

    run(scenario)


def test_a_guard_that_restarts_takes_up_the_bypass() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.learn_prefill()
        bench.peers.bandwidth = 12e6
        await bench.seconds(40, lambda: bench.peers.share == 0)
        await bench.loop.close()
        bench.loop = bench.start()
        await bench.seconds(40)
        assert bench.peers.share == 0
        assert bench.loop.view().control == "gate"

    run(scenario)


def test_a_persons_bypass_outlives_the_guard_and_auto_ends_it() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(3)
        await bench.loop.set_override(
            "bypass", who="ben", reason="store upgrade", ttl_seconds=3600, if_revision=0
        )
        assert (bench.peers.share, bench.peers.holder) == (0, "person:ben")
        assert bench.peers.lease_given == pytest.approx(3600)
        with pytest.raises(ControlConflict):
            await bench.loop.set_override(
                "admit", who="eve", reason="stale", ttl_seconds=60, if_revision=0
            )
        await bench.loop.set_override(
            "auto", who="ben", reason="done", ttl_seconds=None, if_revision=1
        )
        await bench.seconds(2)
        assert bench.peers.share == 1

    run(scenario)


def test_an_override_acts_in_observe_too_and_is_let_go_when_it_ends() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(2)
        await bench.loop.set_override(
            "bypass", who="ben", reason="now", ttl_seconds=10, if_revision=None
        )
        assert bench.peers.share == 0
        await bench.seconds(15)
        assert bench.peers.share == 1
        assert any(line.get("action") == "expired" for line in bench.journal.lines)

    run(scenario, mode="observe")


def test_anothers_hold_is_left_alone() -> None:
    async def scenario(bench: Bench) -> None:
        peers = bench.peers
        peers.share, peers.holder, peers.lease_until = 0.0, "person:curl", bench.clock.now + 9999
        await bench.seconds(20)
        assert peers.posts == []
        assert bench.loop.view().control == "held by person:curl"

    run(scenario)


@pytest.mark.parametrize("dead", ["engine_up", "cache_up"])
def test_a_dead_peer_is_said_and_nothing_changes(dead: str) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.learn_prefill()
        await bench.seconds(5)
        setattr(bench.peers, dead, False)
        share, writes = bench.peers.share, len(bench.peers.posts)
        await bench.seconds(20)
        view = bench.loop.view()
        assert view.decision is not None
        assert view.decision.state == "unknown"
        assert any(not source.up and source.error for source in view.sources)
        assert bench.peers.share == share
        assert {p["share"] for _, p in bench.peers.posts[writes:]} <= {share}
        setattr(bench.peers, dead, True)
        await bench.seconds(15)
        assert bench.loop.view().decision.state != "unknown"

    run(scenario)


def test_one_late_answer_is_no_blindness() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.learn_prefill()
        await bench.seconds(10)
        bench.peers.cache_up = False
        await bench.seconds(2)
        assert bench.loop.view().decision.state == "helping"
        bench.peers.cache_up = True
        await bench.seconds(2)
        assert bench.loop.view().decision.state == "helping"

    run(scenario)


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_a_persons_bypass_ends_with_their_word_even_while_the_engine_is_dead(mode: str) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(3)
        bench.peers.engine_up = False
        await bench.seconds(3)
        await bench.loop.set_override(
            "bypass", who="ben", reason="try", ttl_seconds=600, if_revision=None
        )
        assert bench.peers.share == 0
        await bench.seconds(3)
        await bench.loop.set_override(
            "auto", who="ben", reason="done", ttl_seconds=None, if_revision=None
        )
        await bench.seconds(3)
        assert bench.peers.share == 1
        await bench.seconds(40)
        assert bench.peers.share == 1

    run(scenario, mode=mode)


def test_stock_lmcache_is_observed_only_and_says_so() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(20)
        view = bench.loop.view()
        assert view.control == "observe only: no control available"
        assert view.admission is None
        assert bench.peers.posts == []
        told = [line for line in bench.journal.lines if line["kind"] == "control"]
        assert [line["reason"] for line in told] == ["observe only: no control available"]
        assert view.snapshot is not None
        assert view.snapshot.get("load_bandwidth.alone") == Missing("no_gate")

    run(scenario, gated=False)


def test_a_bypass_that_nothing_obeys_is_not_shown_as_one() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(5)
        view = await bench.loop.set_override(
            "bypass", who="ben", reason="try", ttl_seconds=60, if_revision=None
        )
        await bench.seconds(2)
        for shown in (view, bench.loop.view()):
            assert shown.decision is not None
            assert shown.decision.state not in ("bypassed", "probing")
            assert shown.decision.cause is None
            assert "not in force, no gate was seen" in shown.decision.reason
            assert "ben said bypass" in shown.decision.reason

    run(scenario, gated=False)


def test_a_bypass_that_the_gate_refuses_is_not_shown_as_one() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(5)
        bench.peers.refuse = True
        await bench.loop.set_override(
            "bypass", who="ben", reason="try", ttl_seconds=60, if_revision=None
        )
        view = bench.loop.view()
        assert view.decision is not None
        assert view.decision.state not in ("bypassed", "probing")
        assert "not in force, the gate admits 100%" in view.decision.reason
        assert view.control.startswith("not in force")
        bench.peers.refuse = False
        await bench.seconds(2)
        assert bench.loop.view().decision.state == "bypassed"

    run(scenario)


@pytest.mark.parametrize("body", [b"", b"<html>busy</html>", b'{"error":"x"}', b"a 1\nvllm:num"])
def test_nonsense_from_peers_is_a_dead_source_not_a_figure(body: bytes) -> None:
    async def scenario(bench: Bench) -> None:
        bench.peers.answer_with = body
        await bench.seconds(5)
        view = bench.loop.view()
        assert all(not source.up for source in view.sources)
        assert all(isinstance(f, Missing) for f in view.snapshot.figures.values())

    run(scenario)


def test_a_new_gate_behind_the_same_address_is_written_again() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(5)
        await bench.loop.set_override(
            "bypass", who="ben", reason="upgrade", ttl_seconds=900, if_revision=None
        )
        peers = bench.peers
        peers.epoch, peers.revision, peers.share = "00000000000000bb", 1, 1.0
        peers.holder = peers.lease_until = None
        await bench.seconds(2)
        assert peers.share == 0

    run(scenario)
