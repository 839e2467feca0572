"""Control of LMCache's MP server: only through the gate's own operations.

The one route used is `POST /reconfigure/plugin/l2/{admission,probe,abort,rebuild}`. Every
write is a compare-and-set on the gate's revision, and counts as done only by the state it
answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guard.control.token_file import read_token
from guard.errors import (
    ControlConflict,
    ControlRefused,
    ControlUnreachable,
    SourceError,
    SourceUnreadable,
)
from guard.policy.types import Operation
from guard.sources.gate import GateStatus, from_state, parse_status
from guard.sources.http import HttpClient

STATUS_PATH = "/reconfigure/plugin/l2/status"
ADMISSION_PATH = "/reconfigure/plugin/l2/admission"
PROBE_PATH = "/reconfigure/plugin/l2/probe"
OPERATION_PATH = "/reconfigure/plugin/l2/"  # and the operation's name


class GateControl:
    """The gate of one cache server. Holds no state of its own: what is in force is what
    the gate says. `token_file` holds what a gate with `admission_token_file` wants."""

    def __init__(
        self,
        client: HttpClient,
        cache_url: str,
        timeout_seconds: float,
        token_file: Path | None = None,
    ) -> None:
        self._client = client
        self._base = cache_url.rstrip("/")
        self._timeout = timeout_seconds
        self._token_file = token_file

    @property
    def status_url(self) -> str:
        """Where the gate's status is read."""
        return self._base + STATUS_PATH

    async def status(self) -> GateStatus | None:
        """The gate's status, None where this cache server has no gate.

        Raises SourceError.
        """
        return parse_status(self.status_url, await self._client.get(self.status_url, self._timeout))

    async def write(
        self,
        known: GateStatus,
        *,
        share: float,
        min_chunks: int,
        max_loads: int | None,
        holder: str,
        reason: str,
        lease_seconds: float,
    ) -> GateStatus:
        """Write an admission under a lease, if nobody wrote since `known` was read.

        Returns the state that the gate answered. Raises ControlConflict (someone else wrote
        first), ControlRefused (the gate said no, or answered another admission than asked
        for), ControlUnreachable (whether it acted is unknown: read the status again).
        """
        payload: dict[str, Any] = {
            "adapter_index": known.adapter_index,
            "share": share,
            "min_chunks": min_chunks,
            "holder": printable(holder),
            "reason": printable(reason),
            "lease_s": lease_seconds,
            "if_revision": known.revision,
        }
        if max_loads is not None:
            payload["max_loads"] = max_loads
        document = await self._post(ADMISSION_PATH, payload)
        state = self._state(document, known.adapter_index)
        if state.share != share or state.holder != payload["holder"]:
            raise ControlRefused(
                f"{self._base}{ADMISSION_PATH}: asked for share {share:g} as {holder}, the gate "
                f"answered share {state.share:g} held by {state.holder}; not in force"
            )
        return state

    async def probe(
        self,
        known: GateStatus,
        *,
        chunks: int,
        count: int,
        max_bytes: int,
        deadline_seconds: float,
        lost: bool = False,
    ) -> int | None:
        """Ask the gate to re-read known keys, or those that it lost; the result comes with
        a later status, under the id given here (None where the gate gave none).

        Raises ControlConflict (a probe runs), ControlRefused, ControlUnreachable.
        """
        payload: dict[str, Any] = {
            "adapter_index": known.adapter_index,
            "chunks": chunks,
            "count": count,
            "max_bytes": max_bytes,
            "deadline_s": deadline_seconds,
        }
        if lost:  # a gate of an older version does not know the key
            payload["of"] = "lost"
        return _id(await self._post(PROBE_PATH, payload))

    async def operate(
        self, known: GateStatus, operation: Operation, *, holder: str, reason: str
    ) -> int | None:
        """Have the gate abort or rebuild, if nobody wrote since `known` was read; the
        result comes with a later status, under the id given here.

        Raises ControlConflict (one runs, it is not allowed here, or someone else wrote),
        ControlRefused, ControlUnreachable (whether it acted is unknown).
        """
        payload: dict[str, Any] = {
            "adapter_index": known.adapter_index,
            "holder": printable(holder),
            "reason": printable(reason),
            "if_revision": known.revision,
        }
        if operation.kind == "abort":
            payload["release_bytes_per_s"] = operation.release_bytes_per_second
            payload["release_within_s"] = operation.release_within_seconds
        else:
            payload["cause"] = operation.cause
        return _id(await self._post(OPERATION_PATH + operation.kind, payload))

    async def _post(self, path: str, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        url = self._base + path
        if self._token_file is not None:
            try:
                payload = {**payload, "token": read_token(self._token_file)}
            except ValueError as error:
                raise ControlRefused(f"gate.token_file: {error}; {url} was not called") from error
        try:
            code, body = await self._client.post(url, payload, self._timeout)
        except SourceError as error:
            raise ControlUnreachable(f"{error}; whether the gate acted is unknown") from error
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            document = {"error": body[:200].decode("utf-8", "replace")}
        if code == 200:
            return document
        said = str(document.get("error") or document.get("detail") or f"HTTP {code}")[:300]
        if code == 409:
            current = document.get("state")
            raise ControlConflict(f"{url}: {said}", current if isinstance(current, dict) else None)
        raise ControlRefused(f"{url} refused (HTTP {code}): {said}")

    def _state(self, document: Mapping[str, Any], adapter_index: int) -> GateStatus:
        try:
            return from_state(self._base + ADMISSION_PATH, document, adapter_index)
        except SourceUnreadable as error:
            raise ControlUnreachable(f"{error}; whether the gate acted is unknown") from error


def _id(document: Mapping[str, Any]) -> int | None:
    given = document.get("id")
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def printable(text: str) -> str:
    """At most 128 printable characters, as the gate takes them for holder and reason."""
    flat = "".join(c if c.isprintable() else " " for c in text)
    return flat if len(flat) <= 128 else flat[:127] + "…"
