"""Status as words for a person at a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

_UNITS = {
    "bytes_per_second": "B/s",
    "tokens_per_second": "tokens/s",
    "bytes_per_token": "B/token",
    "seconds": "s",
    "tokens": "tokens",
    "requests": "",
}
# The longest interval between ticks is 60 s.
_OLD_SECONDS = 90.0
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
# What one look must show, in this order: figure, how it is called here.
_SHOWN = (
    ("load_bandwidth.alone", "B   loads alone"),
    ("load_bandwidth.prompt", "    one prompt gets"),
    ("break_even_bandwidth", "B*  break-even"),
    ("hit_fixed.total", "T0  fixed cost of a hit"),
    ("break_even_tokens", "n*  break-even length"),
    ("load_utilization.max", "ρ   load utilisation"),
    ("hit.l2", "    hit ratio of L2"),
    ("prefill", "R   prefill rate"),
    ("kv_bytes_per_token", "s   KV bytes per token"),
)


def status_text(status: Mapping[str, Any], now: float, colour: bool = False) -> str:
    """The verdict first, then the figures it rests on, then what is missing or down.
    `now` is Unix time: a verdict that the loop no longer renews is called old. With
    `colour` what only a person can cure is red."""
    cause = status.get("cause")
    lines = [
        f"{str(status.get('state')).upper()}{f' ({cause})' if cause else ''}: "
        f"{status.get('reason')}",
        f"mode {status.get('mode')}, control: {status.get('control')}",
    ]
    at = status.get("at")
    if at is not None and now - at > _OLD_SECONDS:
        lines.insert(0, f"OLD: the guard's last tick was at {clock_time(at)}")
    admission = status.get("admission")
    if admission:
        lease = admission.get("lease_expires_at")
        until = f", lease until {clock_time(lease)}" if lease else ""
        lines.append(
            f"in force: {admission['share']:.0%} of lookups, at least "
            f"{admission['min_chunks']} chunks{until}"
        )
    healing = status.get("healing")
    if healing:
        lines.append(_healing(healing, now, colour))
    word = status.get("override")
    if word:
        lines.append(
            f"override: {word['mode']} by {word['who']} until {clock_time(word['expires_at'])}: "
            f"{word['reason']}"
        )
    readings: Mapping[str, Mapping[str, Any]] = status.get("readings") or {}
    for name, label in _SHOWN:
        lines.append(f"  {label:<24}{figure_text(readings.get(name))}")
    shown = {name for name, _ in _SHOWN}
    missing: dict[str, list[str]] = {}
    for name, figure in readings.items():
        if "missing" in figure and name not in shown:
            missing.setdefault(figure["missing"], []).append(name)
    for reason, names in missing.items():
        lines.append(f"missing ({reason.replace('_', ' ')}): {', '.join(names)}")
    for source in status.get("sources") or ():
        if not source.get("up"):
            lines.append(f"down: {source['name']} {source['url']}: {source.get('error')}")
    if status.get("journal_error"):
        lines.append(f"journal: {status['journal_error']}")
    return "\n".join(lines)


def _healing(healing: Mapping[str, Any], now: float, colour: bool) -> str:
    since, next_at = healing.get("since"), healing.get("next_at")
    name = str(healing.get("ailment")).replace("_", " ")
    lasts = f" for {max(0.0, now - since):.0f} s" if since is not None else ""
    tried = f", {healing['attempts']} cures tried" if healing.get("attempts") else ""
    again = f", next in {next_at - now:.0f} s" if next_at is not None and next_at > now else ""
    line = f"healing: {name}{lasts}: {healing.get('words')}{tried}{again}"
    if not healing.get("incurable"):
        return line
    line = f"CANNOT BE HEALED: {healing['incurable']} ({line})"
    return f"{_RED}{line}{_PLAIN}" if colour else line


def figure_text(figure: Mapping[str, Any] | None) -> str:
    """One figure: its value and where it comes from, or why there is none."""
    if figure is None:
        return "missing: not measured"
    if "missing" in figure:
        detail = f" ({figure['detail']})" if figure.get("detail") else ""
        return f"missing: {str(figure['missing']).replace('_', ' ')}{detail}"
    if figure.get("infinite"):
        return f"infinite: no length pays  [{figure.get('source')}]"
    return f"{value_text(figure['value'], str(figure['unit']))}  [{figure.get('source')}]"


def value_text(value: float, unit: str) -> str:
    """A value with three digits and a decimal prefix: `1.25 GB/s`, `180 ms`, `0.93`."""
    if unit == "ratio":
        return f"{value:.3g}"
    name = _UNITS.get(unit, unit)
    if unit == "seconds" and 0 < abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    if name.startswith("B"):
        for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= factor:
                return f"{value / factor:.3g} {prefix}{name}"
    digits = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {name}".rstrip()


def clock_time(unix: float) -> str:
    """A Unix time on this machine's clock, with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix))
