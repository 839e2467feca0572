"""The loop over HTTP when the store breaks: what it asks of the gate, tells and shows."""

from __future__ import annotations

from typing import Any

import pytest

from guard.commands.words import status_text
from guard.service.status import status
from tests.test_loop import Bench, run


def posted(bench: Bench, operation: str) -> list[dict[str, Any]]:
    return [p for path, p in bench.peers.posts if path.endswith(f"/{operation}")]


def told(bench: Bench, kind: str) -> list[tuple[str, Any]]:
    return [
        (line["action"], line.get("ailment") or line.get("outcome"))
        for line in bench.journal.lines
        if line["kind"] == kind
    ]


async def settled(bench: Bench) -> None:
    await bench.learn_prefill()
    await bench.seconds(20)
    assert bench.loop.view().healing is None
    assert bench.journal.actions() == []


def test_frozen_is_out_within_5_s_and_back_when_thawed() -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        peers = bench.peers
        peers.frozen = True
        assert await bench.seconds(10, lambda: peers.share == 0) <= 5
        view = bench.loop.view()
        assert view.decision is not None
        assert (view.decision.state, view.decision.cause) == ("bypassed", "frozen")
        line = next(line for line in bench.journal.lines if line["kind"] == "decision")
        assert (line["action"], line["reason_code"]) == ("bypass", "frozen")
        await bench.seconds(25)
        peers.frozen = False
        waited = await bench.seconds(60, lambda: bench.loop.view().decision.state == "helping")
        assert waited < 60
        assert peers.share == 1
        assert posted(bench, "abort") == posted(bench, "rebuild") == []

    run(scenario)


def hang(bench: Bench) -> None:
    peers = bench.peers
    peers.frozen, peers.hung_loads, peers.hung_since = True, 4, bench.clock.now


def test_loads_that_hang_are_aborted_and_the_result_is_told() -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        hang(bench)
        waited = await bench.seconds(20, lambda: bool(posted(bench, "abort")))
        assert waited <= 9
        await bench.seconds(10)
        (abort,) = posted(bench, "abort")
        assert abort["holder"] == "kvguard:test"
        assert abort["release_within_s"] == 10
        assert abort["release_bytes_per_s"] == pytest.approx(24_576 * 2000, rel=0.8)
        assert ("abort", "done") in told(bench, "operation")
        first, second, *others = bench.journal.actions()
        assert (first, second) == ("bypass", "abort")
        assert set(others) <= {"probe", "probe_lost"}
        assert bench.peers.hung_loads == 0
        assert bench.loop.view().healing_attempts_total == {("abort", "done"): 1}

    run(scenario)


def test_a_gate_that_refuses_the_abort_is_asked_again_later() -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        hang(bench)
        bench.peers.refuse_operations = True
        await bench.seconds(30)
        assert 2 <= len(posted(bench, "abort")) <= 4
        assert ("abort", "conflict") in told(bench, "operation")

    run(scenario)


def test_a_gate_that_cannot_abort_is_said_once() -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        hang(bench)
        await bench.seconds(60)
        assert posted(bench, "abort") == []
        assert bench.journal.actions().count("abort_refused") == 1

    run(scenario, can_abort=False)


def test_an_older_gate_is_guarded_as_before() -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        hang(bench)
        await bench.seconds(30)
        assert bench.peers.share == 0
        assert posted(bench, "abort") == posted(bench, "rebuild") == []
        view = bench.loop.view()
        assert view.snapshot is not None
        assert view.snapshot.get("lost_lookups").reason == "not_given"  # type: ignore[union-attr]

    run(scenario, old_gate=True)


@pytest.mark.parametrize(
    ("outcome", "ailment"), [("done", "connection_lost"), ("missing", "store_emptied")]
)
def test_a_lost_connection_is_healed_without_a_bypass(outcome: str, ailment: str) -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        peers = bench.peers
        peers.connection_lost, peers.lost_outcome = True, outcome
        await bench.seconds(6, lambda: bool(posted(bench, "rebuild")))
        (probe,) = posted(bench, "probe")
        assert probe["of"] == "lost"
        (rebuild,) = posted(bench, "rebuild")
        assert rebuild["cause"] == ailment
        assert rebuild["holder"] == "kvguard:test"
        shown = status(bench.loop.view(), "1")["healing"]
        assert (shown["ailment"], shown["attempts"], shown["incurable"]) == (ailment, 1, None)
        assert "healing: " + ailment.replace("_", " ") in status_text(
            status(bench.loop.view(), "1"), bench.clock.now
        )
        await bench.seconds(10)
        assert told(bench, "healing") == [
            ("began", ailment),
            ("rebuild", "done"),
            ("ended", ailment),
        ]
        assert bench.loop.view().healing is None
        assert bench.loop.view().healing_attempts_total == {(ailment, "done"): 1}
        assert len(posted(bench, "rebuild")) == 1
        assert bench.journal.actions() == []

    run(scenario)


def test_observe_says_what_it_would_rebuild_and_asks_for_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(5)
        bench.peers.connection_lost = True
        await bench.seconds(60)
        assert bench.peers.posts == []
        assert told(bench, "healing") == [
            ("began", "connection_lost"),
            ("would_rebuild", "connection_lost"),
        ]

    run(scenario, mode="observe")


def test_nothing_is_rebuilt_where_another_leads_or_while_blind() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.seconds(5)
        peers = bench.peers
        peers.connection_lost = True
        peers.holder, peers.lease_until = "person:curl", bench.clock.now + 30
        peers.revision += 1
        await bench.seconds(20)
        assert peers.posts == [] or not posted(bench, "rebuild")
        assert bench.loop.view().healing is not None
        peers.engine_up = False
        await bench.seconds(40)
        assert posted(bench, "rebuild") == []
        peers.engine_up = True
        await bench.seconds(8)
        assert posted(bench, "rebuild")

    run(scenario)


def test_a_store_that_is_away_is_paged_and_l2_returns_with_it() -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        peers = bench.peers
        peers.connection_lost, peers.store_problem = True, "valkey:6379 refused the connection"
        await bench.seconds(90)
        view = bench.loop.view()
        assert view.healing is not None
        assert view.healing.ailment == "store_unreachable"
        text = status_text(status(view, "1"), bench.clock.now, colour=True)
        assert "\x1b[31mCANNOT BE HEALED" in text
        assert "bring it back" in text
        peers.store_problem = None
        waited = await bench.seconds(60, lambda: not peers.connection_lost)
        assert waited <= 45
        await bench.seconds(8)
        assert bench.loop.view().healing is None

    run(scenario)


def test_a_rebuild_that_does_not_help_backs_off_over_a_restart_and_pages() -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        peers = bench.peers
        peers.connection_lost, peers.rebuild_helps = True, False
        await bench.seconds(30)
        before = len(posted(bench, "rebuild"))
        assert before >= 2
        await bench.loop.close()
        bench.loop = bench.start()
        await bench.seconds(2)
        assert bench.loop.view().healing is not None
        assert len(posted(bench, "rebuild")) == before
        await bench.seconds(150)
        healing = bench.loop.view().healing
        assert healing is not None
        assert "did not help" in str(healing.incurable)

    run(scenario)


def test_a_rebuild_goes_on_under_a_persons_word_and_in_their_name() -> None:
    async def scenario(bench: Bench) -> None:
        await settled(bench)
        await bench.loop.set_override(
            "admit", who="ben", reason="watching", ttl_seconds=600, if_revision=None
        )
        bench.peers.connection_lost = True
        await bench.seconds(10)
        (rebuild,) = posted(bench, "rebuild")
        assert rebuild["holder"] == "person:ben"
        assert bench.peers.share == 1

    run(scenario)
