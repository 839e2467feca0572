"""A selective reader of the Prometheus text format, for the tick.

prometheus_client's parser reads everything and costs 82 ms for 5 000 lines; a tick needs
a few dozen names out of them. This reader looks at each line's name, reads the wanted
ones fully, and is held to prometheus_client's parser by the tests.
Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
from collections.abc import Collection

from guard.errors import ExpositionError, MalformedLineError

SeriesKey = tuple[str, frozenset[tuple[str, str]]]

_LABEL = re.compile(
    r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*([,}])', re.S
)
_CLOSE = re.compile(r"[ \t]*}")
_SAMPLE = re.compile(
    r"[ \t]*[a-zA-Z_:][a-zA-Z0-9_:]*[ \t]*(\{.*\})?[ \t]*"
    r"[-+]?([0-9.][0-9.eE+-]*|(?i:nan|inf(inity)?))([ \t]+-?[0-9.]+)?([ \t]*|[ \t]+#.*)\r?"
)
_ESCAPE = re.compile(r'\\[\\"n]')
_ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_NO_LABELS: frozenset[tuple[str, str]] = frozenset()
_CACHE_LIMIT = 8192
_EXCERPT = 80
# Text before the value of a line -> its series; labels seldom change between ticks.
_series_cache: dict[str, SeriesKey] = {}


def read(
    text_or_bytes: str | bytes | bytearray | memoryview, wanted: Collection[str]
) -> dict[SeriesKey, float]:
    """The samples whose name is in `wanted`: {(name, frozenset of label items): value}.

    Names are sample names (`…_total`, `…_bucket`, `…_sum`). NaN and ±Inf are passed on as
    they came; timestamps and exemplars are read over. Of a series that comes twice, the
    last counts. A body without any wanted name gives an empty dict.

    Raises ExpositionError when the body is no exposition at all (empty, HTML, JSON, cut
    off in its last line), naming what came; MalformedLineError when the line of a wanted
    name cannot be read. A malformed line of any other name is passed over.
    """
    if isinstance(text_or_bytes, str):
        text = text_or_bytes
    else:
        # Bytes that are no UTF-8 matter only in a wanted line, where they are refused.
        text = bytes(text_or_bytes).decode("utf-8", "surrogateescape")
    if not text.endswith("\n"):
        _refuse_end(text)
    names = wanted if isinstance(wanted, (set, frozenset)) else frozenset(wanted)
    lines = text.split("\n")
    found: dict[SeriesKey, float] = {}
    cache = _series_cache
    for line in lines:
        if line.startswith("#"):
            continue
        head = line.partition("{")[0]
        if head not in names:
            token = head.split(None, 1)
            if not token or token[0] not in names:
                continue
        before, _, number = line.rpartition(" ")
        key = cache.get(before)
        if key is not None and "_" not in number:
            try:
                found[key] = float(number)
                continue
            except ValueError:
                pass  # the full reader says what is wrong with it
        key, value, cacheable = _read_line(line)
        if cacheable:
            if len(cache) >= _CACHE_LIMIT:
                cache.clear()
            cache[before] = key
        found[key] = value
    if not found:
        _require_exposition(text, lines)
    return found


def _read_line(line: str) -> tuple[SeriesKey, float, bool]:
    """Series, value, and whether the text before the last space names just the series."""
    if any("\ud800" <= c <= "\udfff" for c in line):
        raise MalformedLineError(f"not valid UTF-8: {_excerpt(line)}")
    name, brace, rest = line.partition("{")
    labels = _NO_LABELS
    if brace and len(name.split()) == 1:
        name = name.strip()
        pairs, end = _read_labels(line, len(line) - len(rest))
        labels = frozenset(pairs.items())
        tail = line[end:]
    else:
        name, _, tail = line.strip().replace("\t", " ").partition(" ")
    fields = tail.partition("#")[0].split()
    if not 1 <= len(fields) <= 2:
        raise MalformedLineError(f"no value, or too many: {_excerpt(line)}")
    try:
        if "_" in fields[0]:
            raise ValueError(fields[0])
        value = float(fields[0])
        if len(fields) == 2:
            float(fields[1])
    except ValueError:
        raise MalformedLineError(f"a value that is no number: {_excerpt(line)}") from None
    cacheable = len(fields) == 1 and "#" not in tail and tail.rstrip("\r") == f" {fields[0]}"
    return (name, labels), value, cacheable


def _read_labels(line: str, position: int) -> tuple[dict[str, str], int]:
    pairs: dict[str, str] = {}
    while True:
        close = _CLOSE.match(line, position)
        if close:
            return pairs, close.end()
        match = _LABEL.match(line, position)
        if match is None:
            raise MalformedLineError(f"labels that cannot be read: {_excerpt(line)}")
        name, value, after = match.groups()
        if name in pairs:
            raise MalformedLineError(f"label {name!r} comes twice: {_excerpt(line)}")
        pairs[name] = _ESCAPE.sub(lambda m: _ESCAPED[m.group()], value) if "\\" in value else value
        position = match.end()
        if after == "}":
            return pairs, position


def _refuse_end(text: str) -> None:
    if not text.strip():
        raise ExpositionError("the body is empty; a Prometheus text exposition was expected")
    _refuse_foreign(text)
    last = text.rsplit("\n", 1)[-1]
    raise ExpositionError(f"the last line is cut off (no line end): {_excerpt(last)}")


def _refuse_foreign(text: str) -> None:
    start = text.lstrip()
    kind = {"<": "HTML or XML", "{": "JSON", "[": "JSON"}.get(start[:1])
    if kind and not _SAMPLE.fullmatch(start.partition("\n")[0]):
        raise ExpositionError(
            f"{kind} came instead of a Prometheus text exposition: {_excerpt(start)}"
        )


def _require_exposition(text: str, lines: list[str]) -> None:
    """Nothing wanted was found: that is fine only if this is an exposition at all."""
    if not text.strip():
        raise ExpositionError("the body is empty; a Prometheus text exposition was expected")
    _refuse_foreign(text)
    for line in lines:
        if line.startswith("#") or _SAMPLE.fullmatch(line):
            return
    raise ExpositionError(f"no Prometheus text exposition: {_excerpt(text.lstrip())}")


def _excerpt(text: str) -> str:
    shown = text[:_EXCERPT].encode("utf-8", "backslashreplace").decode()
    return repr(shown) + ("…" if len(text) > _EXCERPT else "")
