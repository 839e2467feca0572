"""The commands that talk to a running guard: status, bypass, admit, auto."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from guard.addresses import peer_url
from guard.commands.words import clock_time, status_text
from guard.errors import ControlConflict, ControlRefused, GuardUnreachable, SettingsError
from guard.policy.types import MAX_TTL_SECONDS
from guard.service.status import SCHEMA
from guard.view import OBSERVE_ONLY

DEFAULT_GUARD = "http://127.0.0.1:9469"
_TIMEOUT_SECONDS = 15.0
_EXIT_BY_STATE = {"idle": 0, "helping": 0, "unknown": 11}
_EXIT_TROUBLE = 10
_EXIT_NO_CONTROL = 1
_TTL_PART = re.compile(r"(\d+(?:\.\d+)?)(d|h|m|s|)")
_UNIT_SECONDS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "": 1.0}


def show_status(guard: str, as_json: bool) -> int:
    """Print the guard's status; the exit code says the verdict.

    Raises GuardUnreachable and SettingsError.
    """
    status, body = _call("GET", guard, "/api/v1/status")
    document = _document(guard, body)
    if status != 200:
        raise GuardUnreachable(f"the guard at {guard} answered {status}: {document.get('error')}")
    if as_json:
        print(body.decode())
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(status_text(document, time.time(), colour))
    return _EXIT_BY_STATE.get(str(document.get("state")), _EXIT_TROUBLE)


def set_override(guard: str, mode: str, ttl: str | None, reason: str, who: str | None) -> int:
    """Set or end the override and say what is so now.

    0 when it is set; 1 when it is set but the guard has nothing to act with.
    Raises GuardUnreachable, SettingsError (a TTL that is none), ControlConflict and
    ControlRefused (the guard said no).
    """
    wanted: dict[str, Any] = {"mode": mode, "reason": reason, "who": who or user_name()}
    if ttl is not None:
        wanted["ttl_s"] = seconds(ttl)
    status, body = _call("POST", guard, "/api/v1/override", wanted)
    answer = _document(guard, body)
    if status == 409:
        raise ControlConflict(str(answer.get("error")), answer.get("state"))
    if status != 200:
        raise ControlRefused(f"the guard at {guard} answered {status}: {answer.get('error')}")
    word = answer.get("override")
    if word is None:
        print("auto: the policy decides again")
    else:
        print(
            f"{word['mode']}: set by {word['who']} until {clock_time(word['expires_at'])} "
            f"({word['reason']}); 'kvguard auto' ends it"
        )
    control = str(answer.get("control"))
    if control != "gate" and mode != "auto":
        print(f"kvguard: set, but not in force: {control}", file=sys.stderr)
    return _EXIT_NO_CONTROL if control == OBSERVE_ONLY and mode != "auto" else 0


def seconds(text: str) -> float:
    """A duration as seconds: `1800`, `30m`, `1h30m`.

    Raises SettingsError when it is none, or not above 0 and at most 24 h.
    """
    parts = _TTL_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise SettingsError(f"--ttl {text!r} is no duration; write 1800, 30m or 1h30m")
    if len(parts) > 1 and any(not unit for _, unit in parts):
        raise SettingsError(f"--ttl {text!r} has a number without its unit; write 1h30m")
    total = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    if not 0 < total <= MAX_TTL_SECONDS:
        raise SettingsError(f"--ttl {text!r} must be above 0 and at most 24h")
    return total


def user_name() -> str:
    """Who calls, as the system knows it."""
    with contextlib.suppress(OSError, KeyError, ImportError):
        name = "".join(c for c in getpass.getuser() if c.isprintable())
        if name:
            return name[:128]
    return "unnamed"


def _call(
    method: str, guard: str, path: str, payload: Mapping[str, Any] | None = None
) -> tuple[int, bytes]:
    import httpx  # the always-on process does without it

    try:
        base = peer_url(guard)
    except ValueError as error:
        raise SettingsError(f"--guard: {error}") from None
    try:
        # No proxy from the environment: the guard is on loopback.
        with httpx.Client(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            answer = client.request(method, base + path, json=payload)
    except httpx.HTTPError as error:
        raise GuardUnreachable(
            f"no guard answers at {base} ({error}); is 'kvguard run' up? Give its address "
            "with --guard"
        ) from None
    return answer.status_code, answer.content


def _document(guard: str, body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict) or not ("schema" in document or "error" in document):
        raise GuardUnreachable(f"what answers at {guard} is no kvguard")
    schema = document.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        print(
            f"kvguard: the guard speaks schema {schema}, this command knows {SCHEMA}; "
            "some of it may not be shown",
            file=sys.stderr,
        )
    return document
