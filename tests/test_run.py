"""How `kvguard run` begins and ends, with a loop that does nothing but say so."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from guard import assemble
from guard.commands import run as command
from guard.journal.decisions import Journal
from tests.fakes import FakeGuard, hurting_view


class FakeLoop(FakeGuard):
    """Sends SIGTERM to its own process once it runs; `done` is what happened, in order."""

    def __init__(self, hangs: bool = False, fails: Exception | None = None) -> None:
        super().__init__(hurting_view())
        self.done: list[str] = []
        self._hangs = hangs
        self._failure = fails

    async def run(self, stop: asyncio.Event) -> None:
        if self._failure is not None:
            raise self._failure
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        if self._hangs:
            await asyncio.Event().wait()
        self.done.append("ran")

    async def release(self) -> bool:
        self.done.append("released")
        return True

    async def close(self) -> None:
        self.done.append("closed")


def run(loop: FakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> str:
    monkeypatch.setattr(assemble, "build", lambda *_: loop)
    given = {
        "listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "state_dir": str(tmp_path),
        **flags,
    }
    command.run(given)
    last = Journal(tmp_path / "decisions.jsonl").tail(1)[0]
    assert last["kind"] == "stop"
    return str(last["reason"])


def test_the_lease_is_left_to_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FakeLoop()
    assert "runs out by itself" in run(loop, tmp_path, monkeypatch)
    assert loop.done == ["ran", "closed"]


def test_release_on_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FakeLoop()
    assert run(loop, tmp_path, monkeypatch, release_on_exit=True) == "L2 given back"
    assert loop.done == ["ran", "released", "closed"]


def test_a_last_tick_that_hangs_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_LAST_TICK_SECONDS", 0.05)
    loop = FakeLoop(hangs=True)
    run(loop, tmp_path, monkeypatch, release_on_exit=True)
    assert loop.done == ["released", "closed"]


def test_a_loop_that_ends_takes_the_process_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="defect"):
        run(FakeLoop(fails=RuntimeError("a defect")), tmp_path, monkeypatch)


def test_default_ports_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(FakeLoop(), tmp_path, monkeypatch)
    told = capsys.readouterr().err
    assert "engine http://127.0.0.1:8000 (nobody named it: the default port)" in told
    journal = command.ToldJournal(tmp_path / "d.jsonl", {"engine": "looked there"})
    journal.write("source", source="engine", up=False, reason="no answer")
    assert "hint='looked there'" in capsys.readouterr().err
