"""The journal and the state directory, with torn lines, full disks and newer schemas."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from guard.errors import StateDirectoryError
from guard.journal import decisions
from guard.journal.decisions import Journal
from guard.journal.state_directory import StateDirectory
from guard.policy.types import Admission


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_a_line_says_when_and_what(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "d.jsonl", clock=lambda: 1_800_000_000.25)
    assert journal.write("action", reason="B 12 MB/s", admission=Admission(0.0, 2), keys=("a", "b"))
    assert lines(journal.path) == [
        {
            "schema": 1,
            "at": 1_800_000_000.25,
            "time": "2027-01-15T08:00:00.250+00:00",
            "kind": "action",
            "reason": "B 12 MB/s",
            "admission": {"share": 0.0, "min_chunks": 2},
            "keys": ["a", "b"],
        }
    ]
    assert journal.path.stat().st_mode & 0o777 == 0o600
    assert journal.error is None


def test_nan_and_infinity_are_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "d.jsonl")
    journal.write("x", a=float("nan"), b=float("inf"), c={"d": -float("inf")}, at=3, e=object)
    (record,) = lines(journal.path)
    assert (record["a"], record["b"], record["c"]) == (None, "Infinity", {"d": "-Infinity"})
    assert record["at_"] == 3
    assert isinstance(record["e"], str)


def test_a_torn_line_is_closed_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    Journal(path).write("one")
    with path.open("ab") as file:
        file.write(b'{"schema":1,"kind":"to')
    journal = Journal(path)
    journal.write("two")
    journal.write("three")
    assert [record["kind"] for record in journal.tail(10)] == ["one", "two", "three"]
    assert path.read_bytes().count(b"\n") == 4


def test_tail_reads_only_the_end_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "_BLOCK_BYTES", 37)
    journal = Journal(tmp_path / "d.jsonl")
    assert journal.tail(5) == []
    for number in range(20):
        journal.write("n", number=number, text="ρ" * number)
    for count in (1, 3, 20, 50):
        wanted = list(range(20))[-count:]
        assert [record["number"] for record in journal.tail(count)] == wanted
    assert journal.tail(0) == []


def test_a_disk_that_fails_never_raises_and_the_gap_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "d.jsonl")
    journal.write("before")
    real = os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) > 5:
            return real(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda d, data: half(d, bytes(data)))
        for _ in range(2):
            assert not journal.write("x" * 3)
    assert journal.error is not None
    assert "No space left" in journal.error
    assert (journal.lost, journal.failures) == (2, 2)
    assert journal.write("after")
    assert (journal.error, journal.lost, journal.failures) == (None, 0, 2)
    last = journal.tail(1)[0]
    assert (last["kind"], last["lost_before"]) == ("after", 2)


def test_a_field_that_cannot_be_told_does_not_raise(tmp_path: Path) -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    journal = Journal(tmp_path / "d.jsonl")
    assert not journal.write("x", bad=Bad())
    assert journal.error is not None
    assert journal.write("y", text="\ud800 lone surrogate")


def test_every_line_is_fsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    journal = Journal(tmp_path / "d.jsonl")
    journal.write("one")
    assert len(synced) == 2  # the file, and the directory that now names it
    journal.write("two")
    assert len(synced) == 3


def test_choice_of_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = StateDirectory.choose(tmp_path / "given")
    assert given.path == tmp_path / "given"
    assert given.path.stat().st_mode & 0o777 == 0o700
    assert StateDirectory.choose(None, tmp_path / "var").path == tmp_path / "var"
    blocked = tmp_path / "file"
    blocked.touch()
    fallback = StateDirectory.choose(None, blocked / "kvguard")
    assert fallback.path == tmp_path / "home/.local/state/kvguard"
    with pytest.raises(StateDirectoryError, match="--state-dir"):
        StateDirectory.choose(blocked)


def test_state_is_kept_and_replaced_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = StateDirectory(tmp_path)
    assert directory.load() == (None, None)
    directory.save({"phase": "open", "since": float("inf")})
    assert directory.load() == ({"phase": "open", "since": "Infinity", "schema": 1}, None)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateDirectoryError, match="No space left"):
        directory.save({"phase": "closed"})
    state, _ = directory.load()
    assert state is not None
    assert state["phase"] == "open"


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ('{"schema": 2, "phase": "open"}', "newer than the known 1"),
        ('{"phase": "open"}', "no kvguard state"),
        ('{"schema": true}', "no kvguard state"),
        ("[1]", "no kvguard state"),
        ('{"schema": 1', "no JSON"),
        ("\xff", "no JSON"),
    ],
)
def test_a_state_of_no_use_is_told_not_taken(tmp_path: Path, content: str, note: str) -> None:
    directory = StateDirectory(tmp_path)
    directory.state_path.write_bytes(content.encode("latin-1"))
    state, told = directory.load()
    assert state is None
    assert told is not None
    assert note in told
    assert directory.state_path.exists()


def test_two_guards_do_not_share_a_directory(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path)
    with directory.lock(), pytest.raises(StateDirectoryError, match="in use"):  # noqa: SIM117
        with StateDirectory(tmp_path).lock():
            pass
    with directory.lock():
        pass
