"""The journal: one JSON object a line, appended and fsynced, in the state directory.

It never raises into the loop: a guard whose disk is full keeps guarding, says so
(`error`), counts what it could not write, and tells the gap in the next line it can.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = 1
_RESERVED = frozenset({"schema", "at", "time", "kind", "lost_before"})
_BLOCK_BYTES = 64 * 1024


class Journal:
    """Appends what happened to `path`. `clock` gives Unix time in seconds.

    `error` is why the last write failed, None while all is well; `lost` counts the lines
    not written since the last one that was, `failures` all of them.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.error: str | None = None
        self.lost = 0
        self.failures = 0
        self._clock = clock

    def write(self, kind: str, **fields: Any) -> bool:
        """Append one line and see it onto the disk; True when it is there.

        A field that has the name of one of the line's own (`at`, `kind` …) is kept with
        an underscore after its name. A NaN becomes null, an infinity the word.
        """
        at = self._clock()
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "at": at,
            "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
            "kind": kind,
        }
        if self.lost:
            record["lost_before"] = self.lost
        try:
            for name, value in fields.items():
                record[f"{name}_" if name in _RESERVED else name] = plain(value)
            line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode(
                "utf-8", "backslashreplace"
            )
            self._append(line + b"\n")
        except Exception as error:  # the loop must go on, whatever a disk or a field does
            self.lost += 1
            self.failures += 1
            self.error = f"{self.path} cannot be written: {error}"
            return False
        self.lost = 0
        self.error = None
        return True

    def tail(self, count: int) -> list[dict[str, Any]]:
        """The last `count` whole lines, oldest first; a torn line is passed over.

        Raises OSError when the file is there but cannot be read.
        """
        if count <= 0:
            return []
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            position = file.seek(0, os.SEEK_END)
            text = b""
            records: list[dict[str, Any]] = []
            while position > 0 and len(records) < count:
                start = max(0, position - _BLOCK_BYTES)
                file.seek(start)
                text = file.read(position - start) + text
                position = start
                first, *whole = text.split(b"\n")
                lines = whole if position > 0 else [first, *whole]
                text = first
                records = [*_records(lines), *records]
            return records[-count:]

    def _append(self, line: bytes) -> None:
        new = not self.path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a crash or a full disk tore the line before
            view = memoryview(line)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            sync_directory(self.path.parent)


def _records(lines: list[bytes]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def sync_directory(path: Path) -> None:
    """See a directory's entries onto the disk, so that a new file outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: dataclasses and mappings as objects, NaN as null,
    infinities as words, anything unknown as its text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)
