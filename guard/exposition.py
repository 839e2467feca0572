"""A selective reader of the Prometheus text exposition format.

A tick wants some forty names out of thousands of lines. One compiled expression walks the
body from line to line and stops only at wanted names, so all other lines cost a comparison
of their first characters and are never decoded, parsed or judged.

What is read is text format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/)
as Prometheus itself reads it, with names as they are written: no `_total` is added or taken
away. Accepted besides: OpenMetrics' exemplars, `# EOF` and fractional timestamps, quoted
(UTF-8) names inside the braces, CRLF line ends, and a signed NaN, which is what C++ peers
print for 0/0 and which must cost one reading, not the whole scrape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from functools import lru_cache

from guard.errors import ExpositionError, MalformedLineError

Labels = frozenset[tuple[str, str]]
SeriesKey = tuple[str, Labels]
Body = str | bytes | bytearray | memoryview

_NO_LABELS: Labels = frozenset()
_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OPENING = re.compile(rb"[ \t]*\{")

_QUOTED = rb'"((?:[^"\\\n]++|\\[^\n])*+)"'
_LABEL = re.compile(rb"[ \t]*([a-zA-Z_][a-zA-Z0-9_]*|" + _QUOTED + rb")[ \t]*=[ \t]*" + _QUOTED)
_QUOTED_NAME = re.compile(rb"[ \t]*" + _QUOTED)
_SEPARATOR = re.compile(rb"[ \t]*(?:,[ \t]*(\}?)|(\}))")
_EMPTY = re.compile(rb"[ \t]*\}")
_ESCAPE = re.compile(r'\\([\\"n])')

_NUMBER = rb"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
# What Go's ParseFloat takes, less the hexadecimal floats and underscores that Prometheus
# refuses, plus the signed NaN (see above).
_VALUE = rb"(?:" + _NUMBER + rb"|[+-]?(?i:inf|infinity|nan))"
_TAIL = re.compile(
    rb"[ \t]*(" + _VALUE + rb")(?:[ \t]+" + _NUMBER + rb")?(?:[ \t]+#[ \t]*\{(.*))?[ \t]*"
)
_EXEMPLAR_TAIL = re.compile(rb"[ \t]+" + _VALUE + rb"(?:[ \t]+" + _NUMBER + rb")?[ \t]*")

# The labels as client libraries print them, for which two calls do.
_PLAIN_LABELS = re.compile(rb'(?:[a-zA-Z_][a-zA-Z0-9_]*="[^"\\\n]*"(?:,|(?=\})))*+\}')
_PLAIN_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')

# What decides whether a body without one wanted sample is an exposition at all.
_KEYWORD_COMMENT = re.compile(rb"#[ \t]*(?:HELP|TYPE|UNIT|EOF)(?![^ \t\r])")
_SAMPLE_SHAPE = re.compile(
    rb"(?:[a-zA-Z_:][a-zA-Z0-9_:]*(?:[ \t]*\{.*\}|(?=[ \t]))|\{[ \t]*" + _QUOTED + rb"[ \t]*[,}].*)"
    rb"[ \t]*" + _VALUE + rb"(?:[ \t]+[^\n]*)?"
)
_JUDGED_BYTES = 65_536
_JUDGED_LINES = 256

_SHOWN = 120


def read(text_or_bytes: Body, wanted: Collection[str]) -> dict[SeriesKey, float]:
    """The samples of exactly the `wanted` names: (name, label items) to value.

    `wanted` are sample names as they are written in the body, `_total`, `_bucket`, `_sum` and
    `_count` included. Values are passed on as they come, NaN and the infinities too: what a
    NaN means is the caller's to say. Timestamps and exemplars are checked and dropped. A
    series that occurs twice keeps its last value, as it does for whoever collects
    prometheus_client's samples into a dict (Prometheus keeps one and counts the others as
    dropped). A body with samples but none of the wanted ones is an empty dict.

    Raises ExpositionError when the body is no exposition: empty, HTML, JSON, compressed,
    binary, or with a last line that no newline ends (the answer was cut off).
    Raises MalformedLineError for a line of a wanted name that cannot be read, bytes that are
    no UTF-8 included; lines of other names are not looked at.
    """
    if isinstance(wanted, str):
        raise TypeError("wanted must be a collection of names, not one string")
    data = _checked(text_or_bytes)
    names = frozenset(wanted)
    samples: dict[SeriesKey, float] = {}
    known = _known_series
    for series, value, rest, odd in _scanner(names).findall(data):
        if value:
            try:
                key = known.get(series)
                samples[_key_of(series) if key is None else key] = float(value)
                continue
            except ValueError:
                rest = b" " + value
        _read_line(series + rest + odd, names, samples)
    if not samples and not _is_exposition(data):
        raise ExpositionError(_not_one(data[1:], _looks_like(data[1:])))
    return samples


def count_lines(body: Body) -> int:
    """How many lines are no comment: the most samples that the body can hold.

    Costs a fraction of `read`, so that a scrape's sample limit can be held before reading.
    Blank lines count, indented comments too. Raises nothing.
    """
    data = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
    if not data:
        return 0
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    return lines - data.count(b"\n#") - data.startswith(b"#")


def _checked(body: Body) -> bytes:
    """The body as bytes, with one newline before every line and one at its end.

    Raises ExpositionError for what no look at its lines can save.
    """
    if isinstance(body, str):
        # Lone surrogates become invalid UTF-8: harmless until a wanted line has one.
        body = body.encode("utf-8", "surrogatepass")
    data = b"".join((b"\n", body))
    start = data[1:512].lstrip()
    if not start and not data.strip():
        raise ExpositionError(
            "no Prometheus text exposition: the body is empty"
            if len(data) == 1
            else f"no Prometheus text exposition: nothing but white space, {_shown(data[1:])}"
        )
    if start.startswith((b"<", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b")):
        raise ExpositionError(_not_one(data[1:], _looks_like(data[1:])))
    if data.endswith(b"\n"):
        return data
    last = data[data.rfind(b"\n") + 1 :]
    if last.strip(b" \t\r") == b"# EOF":
        # OpenMetrics lets this one line go without its newline.
        return data + b"\n"
    kind = _looks_like(data[1:])
    if kind:
        raise ExpositionError(_not_one(data[1:], kind))
    raise ExpositionError(
        f"the exposition was cut off: its last line has no newline, {_shown(last)}; "
        f"the body of {len(data) - 1} bytes starts with {_shown(data[1:])}"
    )


@lru_cache(maxsize=64)
def _scanner(names: frozenset[str]) -> re.Pattern[bytes]:
    """The expression that stops at wanted lines, and costs next to nothing at the others.

    Groups: the series and the value of a line in the form that client libraries print; or the
    beginning and the rest of a wanted line in any other form; or a line that is indented or
    starts with a brace, wanted or not. The plain form cannot hold a value that overflows, and
    its labels end at the line's first `}`: `_key_of` finds out when that one was quoted.
    """
    legacy = [name for name in names if _NAME.fullmatch(name.encode("utf-8", "surrogatepass"))]
    any_name = _any_of(legacy).encode() if legacy else rb"(?!)"
    return re.compile(
        rb"(?m)\n(?:((?:" + any_name + rb")(?:\{[^}\n]*+\}|(?=[ \t{\r\n])))"
        rb"(?: (-?+[0-9.]{1,32}+(?:e[+-]?+[0-9]{1,2})?+)\r?+$|([^\n]*+))"
        rb"|([ \t{][^\n]*+))"
    )


def _any_of(words: Iterable[str]) -> str:
    """An expression for any of the words that shares their common beginnings: the engine
    tries alternatives one by one, and forty that all start alike cost forty tries a line."""
    branches: dict[str, list[str]] = {}
    ends_here = False
    for word in words:
        if word:
            branches.setdefault(word[0], []).append(word[1:])
        else:
            ends_here = True
    if not branches:
        return ""
    alternatives = [first + _any_of(rests) for first, rests in sorted(branches.items())]
    if len(alternatives) == 1 and not ends_here:
        return alternatives[0]
    return "(?:" + "|".join(alternatives) + ")" + ("?" if ends_here else "")


# A peer prints the same series at every tick. Emptied when full: series that come and go
# must not fill the memory, and an orderly eviction costs more than reading them again.
_known_series: dict[bytes, SeriesKey] = {}
_KNOWN_SERIES = 8192
_KNOWN_BYTES = 512


def _key_of(series: bytes) -> SeriesKey:
    """Name and labels of a series in plain form. Raises ValueError when it is not."""
    name, brace, inside = series.partition(b"{")
    if len(series) > _KNOWN_BYTES:
        return name.decode(), _plain_labels(inside) if brace else _NO_LABELS
    key = name.decode(), _known_labels(inside) if brace else _NO_LABELS
    if len(_known_series) >= _KNOWN_SERIES:
        _known_series.clear()
    _known_series[series] = key
    return key


def _plain_labels(inside: bytes) -> Labels:
    """What the braces hold, the closing one included, if it is as client libraries print it."""
    if _PLAIN_LABELS.fullmatch(inside) is None:
        raise ValueError("its labels are not in plain form")
    plain = _PLAIN_LABEL.findall(inside.decode())
    labels = dict(plain)
    if len(labels) != len(plain) or "__name__" in labels:
        raise ValueError("its labels are not in plain form")
    return frozenset(plain)


_known_labels = lru_cache(maxsize=1024)(_plain_labels)


def _read_line(line: bytes, names: frozenset[str], samples: dict[SeriesKey, float]) -> None:
    """Adds the sample of any line, if its name is wanted."""
    line = line.strip(b" \t\r")
    if line.startswith(b"{"):
        _read_braced(line, names, samples)
        return
    found = _NAME.match(line)
    if found is None or (name := found[0].decode()) not in names:
        return
    end = found.end()
    if line[end : end + 1] not in (b"", b" ", b"\t", b"{"):
        return
    try:
        labels = _NO_LABELS
        if (brace := _OPENING.match(line, end)) is not None:
            quoted_name, labels, end = _labels(line, brace.end())
            if quoted_name is not None:
                raise ValueError("a second metric name inside the braces")
        samples[name, labels] = _value(line, end)
    except ValueError as error:
        raise _malformed(name, line, error) from None


def _read_braced(line: bytes, names: frozenset[str], samples: dict[SeriesKey, float]) -> None:
    """Adds the sample of a line that has its name, quoted, inside its braces."""
    try:
        name, labels, end = _labels(line, 1)
        if name is not None and name in names:
            samples[name, labels] = _value(line, end)
    except ValueError as error:
        # Which name it has is not known: it fails when it holds a wanted one.
        for name in names:
            if b'"' + name.encode("utf-8", "surrogatepass") + b'"' in line:
                raise _malformed(name, line, error) from None


def _labels(line: bytes, position: int) -> tuple[str | None, Labels, int]:
    """What the braces hold from `position`, just behind the opening one: a quoted metric
    name if there is one, the labels, and the position behind the closing brace."""
    name: str | None = None
    labels: dict[str, str] = {}
    if (empty := _EMPTY.match(line, position)) is not None:
        return None, _NO_LABELS, empty.end()
    while True:
        if (label := _LABEL.match(line, position)) is not None:
            plain, quoted, value = label.groups()
            key = plain.decode() if quoted is None else _unescaped(quoted)
            if key == "__name__":
                raise ValueError("__name__ as a label")
            if key in labels:
                raise ValueError(f"label {key!r} occurs twice")
            labels[key] = _unescaped(value)
            position = label.end()
        elif (quoted_name := _QUOTED_NAME.match(line, position)) is not None:
            if name is not None:
                raise ValueError("a second metric name inside the braces")
            name = _unescaped(quoted_name[1])
            position = quoted_name.end()
        else:
            raise ValueError("its labels cannot be read")
        separator = _SEPARATOR.match(line, position)
        if separator is None:
            raise ValueError("its labels cannot be read")
        position = separator.end()
        if separator[1] or separator[2]:
            return name, frozenset(labels.items()), position


def _unescaped(raw: bytes) -> str:
    """A quoted text: `\\\\`, `\\"` and `\\n` stand for one character, other backslashes for
    themselves, as Prometheus reads them. Raises ValueError (UnicodeDecodeError) for no UTF-8."""
    text = raw.decode("utf-8")
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


def _value(line: bytes, position: int) -> float:
    """The value behind name and labels; timestamp and exemplar are checked and dropped."""
    tail = _TAIL.fullmatch(line, position)
    if tail is None:
        raise ValueError("its value or what follows it cannot be read")
    if (exemplar := tail[2]) is not None:
        name, _, end = _labels(exemplar, 0)
        if name is not None or _EXEMPLAR_TAIL.fullmatch(exemplar, end) is None:
            raise ValueError("its exemplar cannot be read")
    value = float(tail[1])
    if math.isinf(value) and b"n" not in tail[1].lower():
        raise ValueError("its value is out of range")
    return value


def _is_exposition(data: bytes) -> bool:
    """Whether a body without wanted samples is an exposition all the same.

    A HELP, TYPE, UNIT or EOF comment settles it, else its first lines are judged: at least
    half must be samples in shape, whatever their names. Free comments alone are one too.
    """
    good = bad = 0
    lines = data[:_JUDGED_BYTES].split(b"\n")
    if len(data) > _JUDGED_BYTES:
        del lines[-1]
    for line in lines[:_JUDGED_LINES]:
        line = line.strip(b" \t\r")
        if line.startswith(b"#"):
            if _KEYWORD_COMMENT.match(line) is not None:
                return True
        elif line:
            if _SAMPLE_SHAPE.fullmatch(line) is not None:
                good += 1
            else:
                bad += 1
    return bad <= good


def _looks_like(body: bytes) -> str:
    """What a body that is no exposition seems to be, in words; empty when unclear."""
    start = body[:512].lstrip()
    if start.startswith(b"<"):
        return "it looks like HTML or XML"
    if start.startswith(b"\x1f\x8b"):
        return "it is compressed with gzip"
    if start.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return "it starts with a byte order mark"
    if re.match(rb'[{\[]\s*(?:"(?:[^"\\\n]|\\.)*"\s*[:,\]]|[{\[\]}]|-?[0-9])', start):
        return "it looks like JSON"
    if b"\x00" in start:
        return "it is binary"
    return ""


def _not_one(body: bytes, kind: str) -> str:
    reason = kind or "no line of it is one"
    return f"no Prometheus text exposition: {reason}; {len(body)} bytes that start with " + _shown(
        body
    )


def _malformed(name: str, line: bytes, error: ValueError) -> MalformedLineError:
    reason = "it is no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
    return MalformedLineError(f"a line of {name} cannot be read ({reason}): {_shown(line)}")


def _shown(raw: bytes) -> str:
    """The beginning of `raw` for a message: quoted, bounded, printable."""
    return repr(raw[:_SHOWN])[1:] + ("…" if len(raw) > _SHOWN else "")
