"""The token that a gate may want of every operation, read from a file at each use, so that it
can be exchanged while the guard runs."""

from __future__ import annotations

from pathlib import Path

# As in guard/gate/token.py, which may be of another version than the guard.
MAX_TOKEN_BYTES = 4096


def read_token(path: Path) -> str:
    """The file's token, without white space around it.

    Raises ValueError that says what is wrong and where: no file that can be read, nothing in
    it, more than 4096 bytes, or no text.
    """
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not token or len(token) > MAX_TOKEN_BYTES:
        raise ValueError(f"{path} must hold a token of 1 to {MAX_TOKEN_BYTES} bytes")
    try:
        return token.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} must hold text in UTF-8") from None
