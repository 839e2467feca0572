"""A guard beside a gate that wants a token: with it it acts, without it it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.test_loop import Bench, run


def with_token(bench: Bench, path: Path) -> None:
    bench.peers.token = "secret"
    bench.settings = replace(bench.settings, gate_token_file=path)
    bench.loop = bench.start()


async def bypass(bench: Bench) -> None:
    await bench.loop.set_override(
        "bypass", who="ana", reason="drill", ttl_seconds=60, if_revision=None
    )


def test_the_token_goes_with_every_write_and_may_be_exchanged(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")

    async def scenario(bench: Bench) -> None:
        with_token(bench, path)
        await bench.seconds(3)
        await bypass(bench)
        assert bench.peers.share == 0
        bench.peers.token = "another"
        path.write_text("another")
        await bench.loop.set_override(
            "auto", who="ana", reason="", ttl_seconds=None, if_revision=None
        )
        assert bench.peers.share == 1

    run(scenario)


def test_a_refused_token_and_an_unreadable_file_are_told_not_pretended(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("wrong")

    async def scenario(bench: Bench) -> None:
        with_token(bench, path)
        await bench.seconds(3)
        await bypass(bench)
        assert bench.peers.share == 1
        assert "403" in bench.loop.view().control
        path.unlink()
        await bench.seconds(6)
        assert "cannot be read" in bench.loop.view().control
        assert "secret" not in str(bench.journal.lines)
        assert "wrong" not in [line.get("token") for line in bench.journal.lines]

    run(scenario)
