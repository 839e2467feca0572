"""The directory that outlives the process: the journal and one small state file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from guard.errors import StateDirectoryError
from guard.journal.decisions import plain, sync_directory

SCHEMA = 1
SYSTEM_DIRECTORY = Path("/var/lib/kvguard")


class StateDirectory:
    """One guard's directory. `path` is it, `journal_path` the journal in it."""

    def __init__(self, path: Path) -> None:
        """Create the directory (mode 0700) where it is missing.

        Raises StateDirectoryError: it cannot be created or written.
        """
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise StateDirectoryError(
                f"state directory {path} cannot be used: {error.strerror or error}; "
                "give another one with --state-dir"
            ) from None

    @classmethod
    def choose(cls, given: Path | None, system: Path = SYSTEM_DIRECTORY) -> StateDirectory:
        """The given directory; without one /var/lib/kvguard when it can be written, else
        ~/.local/state/kvguard. Raises StateDirectoryError."""
        if given is not None:
            return cls(given.expanduser())
        try:
            return cls(system)
        except StateDirectoryError:
            pass
        try:
            home = Path.home()
        except RuntimeError:
            raise StateDirectoryError(
                f"{system} cannot be written and there is no home directory; give --state-dir"
            ) from None
        return cls(home / ".local" / "state" / "kvguard")

    @property
    def journal_path(self) -> Path:
        """The journal, JSON lines."""
        return self.path / "decisions.jsonl"

    @property
    def state_path(self) -> Path:
        """The state file, one JSON object."""
        return self.path / "state.json"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory against a second guard; the kernel frees it on any exit.

        Raises StateDirectoryError when another guard holds it.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StateDirectoryError(
                    f"state directory {self.path} is in use by another kvguard; "
                    "give each its own --state-dir"
                ) from None
            yield
        finally:
            os.close(descriptor)

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the state file in one step: a crash leaves the old or the new one.

        Raises StateDirectoryError when it cannot be written; the old one then stands.
        """
        content = json.dumps({**plain(state), "schema": SCHEMA}, allow_nan=False).encode()
        temporary = self.path / "state.json.new"
        try:
            with temporary.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.state_path)
            sync_directory(self.path)
        except OSError as error:
            raise StateDirectoryError(
                f"{self.state_path} cannot be written: {error.strerror or error}"
            ) from None

    def load(self) -> tuple[dict[str, Any] | None, str | None]:
        """The saved state, and a note when there is one that cannot be used.

        (None, None) when nothing was saved. A state of a newer schema, or one that is no
        JSON object, is left alone and told in the note: the guard then starts afresh.
        """
        try:
            content = self.state_path.read_bytes()
        except FileNotFoundError:
            return None, None
        except OSError as error:
            return None, f"{self.state_path} cannot be read: {error.strerror or error}"
        try:
            state = json.loads(content)
        except (ValueError, RecursionError):
            return None, f"{self.state_path} is no JSON; starting afresh"
        schema = state.get("schema") if isinstance(state, dict) else None
        if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
            return None, f"{self.state_path} is no kvguard state; starting afresh"
        if schema > SCHEMA:
            return None, (
                f"{self.state_path} has schema {schema}, newer than the known {SCHEMA}; "
                "it is left alone: observing only, until this guard is as new as its state"
            )
        return state, None
