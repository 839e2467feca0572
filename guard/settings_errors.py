"""What is wrong with settings, in one line that says where it stands: flag, variable or file."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

ENV_PREFIX = "KVGUARD_"
# Kubernetes gives every pod beside a Service named `kvguard` variables of these forms.
_KUBERNETES = re.compile(
    r"KVGUARD_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)\w*)?)"
)


def environment_keys() -> dict[str, str]:
    """Our environment variables and the dotted setting each one means."""
    return {
        variable: variable[len(ENV_PREFIX) :].lower().replace("__", ".")
        for variable, value in os.environ.items()
        if variable.upper().startswith(ENV_PREFIX)
        and value
        and not _KUBERNETES.fullmatch(variable.upper())
    }


def unknown(key: str, where: str, known: Sequence[str], as_written: str | None = None) -> str:
    """The line for a setting nobody knows, with the nearest of `known`. `where` is where it
    stands; `as_written` is how, for a variable of the environment."""
    last = key.rpartition(".")[2]
    candidates = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not candidates:
        # `trip_ratio` outside its section is nearest to `policy.trip_ratio`
        by_last = {name.rpartition(".")[2]: name for name in known}
        close = difflib.get_close_matches(last, by_last, n=1, cutoff=0.0)
        candidates = [by_last[close[0]]]
    nearest = candidates[0]
    if as_written is not None:
        nearest = ENV_PREFIX + nearest.replace(".", "__").upper()
    name = as_written or key
    source = where if as_written is None else "the environment"
    return f"unknown setting {name!r} in {source}; the nearest known one is {nearest!r}"


def explain(
    error: ValidationError,
    known: Sequence[str],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
) -> str:
    """One line for what pydantic found: the first problem, where it stands, and how many
    more there are. `flags` and `environment` say who gave what."""
    problems = error.errors(include_url=False, include_input=False, include_context=True)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    names = [part for part in first["loc"] if isinstance(part, str) and part.isidentifier()]
    key = ".".join(names)
    if first["type"] == "extra_forbidden":
        key = ".".join(str(part) for part in first["loc"])
        return unknown(key, _origin(key, flags, environment), known)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        message = "a section with settings of its own ('key: value') is wanted"
    message = message[:1].lower() + message[1:]
    origin = _origin(key, flags, environment)
    subject = "" if not key else f"{origin}: " if origin[:2] == "--" else f"{key} in {origin}: "
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return _one_line(f"{subject}{message}{more}")


def _origin(key: str, flags: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Where a setting was given, by the order in which the layers win."""
    top = key.partition(".")[0]
    if top in flags:
        return f"--{top.replace('_', '-')}"
    for variable, name in environment.items():
        if name in (key, top):
            return f"environment variable {variable}"
    for variable, name in environment.items():
        if name.startswith(f"{key}."):
            return f"environment variable {variable}"
    path = flags.get("config") or next(
        (os.environ[variable] for variable, name in environment.items() if name == "config"), None
    )
    return str(path) if path else "the settings"


def _one_line(text: str) -> str:
    return " ".join(text.split())
