"""The token that every operation must bring, where a gate is told to ask for one.

LMCache's own routes have no authentication, and hand an adapter nothing of a request but its
body, so that is where the token comes.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = "token"
MAX_TOKEN_BYTES = 4096


class WrongToken(Exception):
    """No token, or another one than in the file. HTTP status 403."""

    status = 403


class AdmissionToken:
    """What the file at `path` holds, without white space around it; None asks for nothing.

    The file is read at every operation, so that a token can be exchanged while the server
    runs. One that cannot be read then lets nobody in. Raises ValueError on construction
    when it cannot be read or holds no usable token.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            try:
                self._expected()
            except WrongToken as error:
                raise ValueError(f"admission_token_file: {error}") from None

    def admit(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The payload without its token. Raises WrongToken."""
        rest = dict(payload)
        given = rest.pop(KEY, None)
        if self._path is None:
            return rest
        expected = self._expected()
        if not isinstance(given, str):
            raise WrongToken(f"this gate wants a {KEY} in the body of every operation")
        if not hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected):
            raise WrongToken(f"the {KEY} is not the one that this gate wants")
        return rest

    def _expected(self) -> bytes:
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                token = file.read(MAX_TOKEN_BYTES + 1).strip()
        except OSError as error:
            raise WrongToken(f"{self._path} cannot be read: {error.strerror}") from None
        if not token or len(token) > MAX_TOKEN_BYTES:
            raise WrongToken(f"{self._path} must hold a token of 1 to {MAX_TOKEN_BYTES} bytes")
        return token
