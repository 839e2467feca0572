"""Checks of what people and programs write to the gate; each names the key and its range.

JSON as hosts parse it may hold NaN, infinities, booleans where numbers belong, numbers of
a thousand digits and strings of a megabyte; none of these may pass or be echoed whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

MAX_TEXT = 128
_SHOWN = 40


class InvalidWrite(Exception):
    """Wrong input; says which key, what it may be, and what it was. HTTP status 400."""

    status = 400


def number(key: str, value: Any, low: float, high: float, *, over: bool = False) -> float:
    """A finite number from `low` to `high`, or over `low`. Raises InvalidWrite."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (low < value <= high if over else low <= value <= high):
        bound = "over" if over else "from"
        raise InvalidWrite(
            f"{key} must be a number {bound} {low:g} to {high:g}, not {shown(value)}"
        )
    return float(value)


def integer(key: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number from `low` to `high`, or without upper bound. Raises InvalidWrite."""
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        upper = "" if high is None else f" to {high}"
        raise InvalidWrite(f"{key} must be a whole number from {low}{upper}, not {shown(value)}")
    return int(value)


def boolean(key: str, value: Any) -> bool:
    """True or false itself. Raises InvalidWrite."""
    if not isinstance(value, bool):
        raise InvalidWrite(f"{key} must be true or false, not {shown(value)}")
    return value


def text(key: str, value: Any, longest: int = MAX_TEXT) -> str:
    """At most `longest` printable characters. Raises InvalidWrite."""
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise InvalidWrite(
            f"{key} must be text of at most {longest} printable characters, not {shown(value)}"
        )
    return value


def no_other_keys(values: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises InvalidWrite when `values` has a key that is not `known`."""
    for key in values:
        if key not in known:
            raise InvalidWrite(f"unknown key {shown(key)}; known are {', '.join(sorted(known))}")


def shown(value: Any) -> str:
    """What a message may quote of a value that somebody sent."""
    if isinstance(value, str):
        quoted = repr(value[:_SHOWN])
        return quoted if len(value) <= _SHOWN else f"{quoted}… ({len(value)} characters)"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "a number of over 64 bits"
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"
