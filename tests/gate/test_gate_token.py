"""The token that a gate may want: who has it is let in, nobody else, whatever they send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from guard.gate.token import MAX_TOKEN_BYTES, AdmissionToken, WrongToken


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("  secret\n")
    return file


def test_without_a_file_nothing_is_asked_and_a_token_is_no_unknown_key() -> None:
    assert AdmissionToken(None).admit({"share": 0, "token": 5}) == {"share": 0}


def test_the_token_is_taken_out_of_what_is_let_in(path: Path) -> None:
    payload = {"share": 0, "token": "secret"}
    assert AdmissionToken(str(path)).admit(payload) == {"share": 0}
    assert payload["token"] == "secret"


@pytest.mark.parametrize(
    "given", ["", "secret ", "Secret", "secre", None, 5, True, b"secret", ["secret"], "\ud800"]
)
def test_any_other_token_is_refused(path: Path, given: Any) -> None:
    with pytest.raises(WrongToken, match="token"):
        AdmissionToken(str(path)).admit({"token": given})


def test_no_token_is_refused_and_told_what_is_wanted(path: Path) -> None:
    with pytest.raises(WrongToken, match="wants a token in the body"):
        AdmissionToken(str(path)).admit({})


def test_it_can_be_exchanged_and_lets_nobody_in_while_it_cannot_be_read(path: Path) -> None:
    token = AdmissionToken(str(path))
    path.write_text("new")
    assert token.admit({"token": "new"}) == {}
    path.unlink()
    with pytest.raises(WrongToken, match="cannot be read"):
        token.admit({"token": "new"})


@pytest.mark.parametrize("content", [b"", b" \n", b"x" * (MAX_TOKEN_BYTES + 1)])
def test_a_file_without_a_usable_token_is_told_at_once(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must hold a token of 1 to"):
        AdmissionToken(str(path))


def test_a_file_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"admission_token_file: .*cannot be read"):
        AdmissionToken(str(tmp_path / "none"))
