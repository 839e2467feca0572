"""The selective reader against prometheus_client's parser: captures and generated bodies."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from guard.errors import ExpositionError, MalformedLineError
from guard.exposition import SeriesKey, count_lines, read

HERE = Path(__file__).parent
CAPTURES = sorted((HERE / "captures").glob("*/*.prom"))
BENCH = HERE.parent / "bench" / "exposition.py"

# KVGUARD_FUZZ=50 tries fifty times as hard.
EFFORT = int(os.environ.get("KVGUARD_FUZZ", "1"))

Samples = dict[SeriesKey, float]


def oracle(text: str) -> Samples:
    """All samples as prometheus_client reads them, under the names that are written.

    prometheus_client renames the samples of a counter declared without `_total`; the text
    format knows no such thing, so that is undone here.
    """
    bare = set(re.findall(r"^# TYPE (\S+)(?<!_total) counter$", text, re.MULTILINE))
    samples: Samples = {}
    for family in parse_text(text):
        for sample in family.samples:
            name = sample.name
            if family.type == "counter" and family.name in bare:
                name = name.removesuffix("_total")
            samples[name, frozenset(sample.labels.items())] = float(sample.value)
    return samples


def names_of(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


def comparable(samples: Samples) -> dict[SeriesKey, float | str]:
    return {key: "NaN" if math.isnan(value) else value for key, value in samples.items()}


def only(samples: Samples, wanted: set[str]) -> dict[SeriesKey, float | str]:
    return comparable({key: value for key, value in samples.items() if key[0] in wanted})


class TestCaptures:
    @pytest.mark.parametrize("path", CAPTURES, ids=lambda path: f"{path.parent.name}/{path.stem}")
    def test_every_sample_of_every_capture(self, path: Path) -> None:
        text = path.read_text()
        expected = oracle(text)
        names = names_of(expected)
        assert comparable(read(text, names)) == comparable(expected)
        assert comparable(read(path.read_bytes(), names)) == comparable(expected)
        assert len(expected) <= count_lines(text) <= text.count("\n")

    def test_all_folders_are_there(self) -> None:
        assert {path.parent.name for path in CAPTURES} == {
            "lmcache-0.5.6",
            "mooncake-0.3.13",
            "sglang-0.5.23",
            "vllm-0.32",
            "vllm-lmcache-l2",
        }
        assert len(CAPTURES) > 60

    @pytest.mark.parametrize("path", CAPTURES[::9], ids=lambda path: path.stem)
    def test_one_name_at_a_time(self, path: Path) -> None:
        text = path.read_text()
        expected = oracle(text)
        for name in names_of(expected):
            assert comparable(read(text, {name})) == only(expected, {name})

    @pytest.mark.parametrize("path", CAPTURES[::9], ids=lambda path: path.stem)
    def test_crlf(self, path: Path) -> None:
        text = path.read_text()
        names = names_of(oracle(text))
        assert comparable(read(text.replace("\n", "\r\n"), names)) == comparable(read(text, names))

    @pytest.mark.parametrize("path", CAPTURES[::9], ids=lambda path: path.stem)
    def test_every_cut_is_noticed_unless_it_falls_between_lines(self, path: Path) -> None:
        raw = path.read_bytes()
        names = names_of(oracle(raw.decode()))
        for cut in range(0, len(raw), 997):
            if cut and raw[cut - 1 : cut] == b"\n":
                continue
            with pytest.raises(ExpositionError):
                read(raw[:cut], names)


# Names that are beginnings of one another, and one that nobody wants.
NAMES = ("up", "up_", "up_total", "up_bucket", "up_sum", "a:b", "a", "a_b1", "_x", "other")
WANTED = set(NAMES) - {"other", "up_"}
blanks = st.sampled_from(["", "", "", " ", "  ", "\t", " \t "])
gaps = st.sampled_from([" ", " ", " ", "  ", "\t", "\t \t"])
label_names = st.sampled_from(["le", "engine", "model_name", "a", "b", "_", "l2"])
# No surrogates (they are no UTF-8); everything else may stand in a label value.
characters = st.characters(exclude_categories=["Cs"]) | st.sampled_from('\\"\n}{#,= \t\rn0')
label_values = st.text(characters, max_size=8)
quoted_labels = st.dictionaries(label_names, label_values, max_size=4)
numbers = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.integers(-(2**63), 2**63).map(str),
    st.sampled_from(
        ["NaN", "nan", "+Inf", "-Inf", "Inf", "inf", "-inf", "1e5", "1E+05", "+3", "-0", "5.", ".5"]
    ),
)
timestamps = st.integers(-(10**13), 10**13).map(str)
exemplars = st.sampled_from(
    ["# {} 1", '# {trace_id="a b}#,"} 0.67', '# {a="b",c="d"} 1.5 1520879607.789', "#\t{ }\t2"]
)


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@st.composite
def sample_lines(draw: st.DrawFn) -> tuple[str, str]:
    """A sample line, and the same without what prometheus_client's text parser cannot take."""
    parts: list[str] = [draw(blanks), draw(st.sampled_from(NAMES)), draw(blanks)]
    labels = draw(st.none() | quoted_labels)
    if labels is None:
        parts.append(draw(gaps))
    else:
        parts.append("{" + draw(blanks))
        for position, (key, value) in enumerate(labels.items()):
            if position:
                parts.append(draw(blanks) + "," + draw(blanks))
            parts.append(f'{key}{draw(blanks)}={draw(blanks)}"{escaped(value)}"')
        if labels and draw(st.booleans()):
            parts.append(draw(blanks) + ",")
        parts.append(draw(blanks) + "}" + draw(blanks))
    parts.append(draw(numbers))
    if draw(st.integers(0, 3)) == 0:
        # Its text parser splits at blanks or at tabs, never at both in one line.
        parts.append(" " + draw(timestamps))
    plain = "".join(parts)
    line = plain
    if draw(st.integers(0, 4)) == 0:
        line += draw(gaps) + draw(exemplars)
    end = draw(blanks) + draw(st.sampled_from(["\n", "\n", "\r\n"]))
    return line + end, plain + end


comment_lines = st.one_of(
    st.sampled_from(
        [
            "# HELP up Is it up? A \\\\ and a \\n and {braces} 1\n",
            "# TYPE up gauge\n",
            "# HELP a:b\n",
            "# TYPE up_bucket untyped\n",
            "# EOF\n",
            "#\n",
            "#up 3\n",
            "  # up 4\r\n",
            '# up{a="b"} 5\n',
            "\n",
            "   \r\n",
        ]
    )
)
bodies = st.lists(sample_lines() | comment_lines.map(lambda line: (line, line)), max_size=8).filter(
    lambda lines: any(line.strip() for line, _ in lines)
)


class TestGenerated:
    @settings(max_examples=250 * EFFORT, deadline=None)
    @given(bodies)
    def test_equals_prometheus_client(self, lines: list[tuple[str, str]]) -> None:
        text = "".join(line for line, _ in lines)
        expected = oracle("".join(plain for _, plain in lines))
        assert comparable(read(text, WANTED)) == only(expected, WANTED)
        assert comparable(read(text.encode(), WANTED)) == only(expected, WANTED)
        assert count_lines(text) >= len(expected)

    @settings(max_examples=100 * EFFORT, deadline=None)
    @given(bodies, st.sets(st.sampled_from(NAMES)))
    def test_any_wanted_set_is_a_selection(
        self, lines: list[tuple[str, str]], wanted: set[str]
    ) -> None:
        text = "".join(line for line, _ in lines)
        everything = read(text, NAMES)
        assert comparable(read(text, wanted)) == only(everything, wanted)

    @settings(max_examples=100 * EFFORT, deadline=None)
    @given(st.dictionaries(label_names, label_values, min_size=1), st.floats(allow_nan=False))
    def test_what_prometheus_client_writes_comes_back(
        self, labels: dict[str, str], value: float
    ) -> None:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        registry = CollectorRegistry()
        Gauge("up", "help", list(labels), registry=registry).labels(**labels).set(value)
        assert read(generate_latest(registry), {"up"}) == {("up", frozenset(labels.items())): value}

    @settings(max_examples=100 * EFFORT, deadline=None)
    @given(
        st.dictionaries(st.sampled_from(["a", "b"]), label_values, min_size=1),
        st.sampled_from(["# {} 1", '# {t="x y}#,"} 0.67', '# {t="1"} 1.5 1520879607.789']),
    )
    def test_openmetrics_exemplars_against_the_openmetrics_parser(
        self, labels: dict[str, str], exemplar: str
    ) -> None:
        inside = ",".join(f'{key}="{escaped(value)}"' for key, value in labels.items())
        text = f"# TYPE up counter\nup_total{{{inside}}} 17.0 1520879607.789 {exemplar}\n# EOF\n"
        (family,) = parse_openmetrics(text)
        (sample,) = family.samples
        assert sample.exemplar is not None
        key = (sample.name, frozenset(sample.labels.items()))
        assert read(text, {"up_total"}) == {key: sample.value}
        assert read(text.removesuffix("\n"), {"up_total"}) == {key: sample.value}


VALID = (
    b'# HELP up h\n# TYPE up gauge\nup{a="1",le="+Inf"} 5\nup{a="x\\"}y"} 1e3 17\n'
    b'up_total 7\na:b{} 1\nother{a="b"} 2\n'
)


class TestMutated:
    """Whatever a body has become, there is an answer or an ExpositionError, never another
    error; and where prometheus_client still reads it, the answer is the same or refused."""

    @settings(
        max_examples=300 * EFFORT, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(
        st.lists(
            st.tuples(
                st.integers(0, len(VALID) - 1),
                st.integers(0, 3),
                st.binary(min_size=1, max_size=2)
                | st.sampled_from([b'"', b"\\", b"{", b"}", b",", b"=", b" ", b"\n", b"#", b"\r"]),
            ),
            min_size=1,
            max_size=5,
        )
    )
    @example([(0, 0, b"\x0c")])
    def test_mutations(self, edits: list[tuple[int, int, bytes]]) -> None:
        raw = bytearray(VALID)
        for position, dropped, inserted in edits:
            raw[position : position + dropped] = inserted
        ours: Samples | str
        try:
            ours = read(raw, WANTED)
        except ExpositionError as error:
            ours = str(error)
        if isinstance(ours, str):
            assert len(ours) < 1200
            return
        try:
            text = bytes(raw).decode()
            theirs = only(oracle(text), WANTED)
        except (ValueError, OverflowError):
            return
        # Known differences, each with its test in test_exposition.py: a name given as a label,
        # and white space that is neither blank, tab nor part of a line end.
        assume("__name__" not in text)
        assume(re.search(r"[^\S \t\r\n]|\r(?!\n)", text) is None)
        assert comparable(ours) == theirs

    @settings(max_examples=300 * EFFORT, deadline=None)
    @given(st.binary(max_size=80))
    def test_junk(self, raw: bytes) -> None:
        try:
            samples = read(raw, WANTED)
        except ExpositionError:
            return
        assert b"#" in raw or names_of(samples) or re.search(rb"[a-zA-Z_:\"].*[0-9nN]", raw)

    @settings(max_examples=300 * EFFORT, deadline=None)
    @given(st.text(st.sampled_from('up{}=",\\ \n1#.e\té'), max_size=30))
    def test_near_misses(self, tail: str) -> None:
        text = f"# TYPE up gauge\nup{tail}\n"
        try:
            ours = comparable(read(text, {"up"}))
        except MalformedLineError:
            return
        try:
            theirs = only(oracle(text), {"up"})
        except ValueError:
            # It judges every line, we the wanted ones: what is left must still be read alike.
            return
        assert ours == theirs


def test_at_least_25_times_faster_than_prometheus_client() -> None:
    spec = importlib.util.spec_from_file_location("bench_exposition", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    measure = functools.partial(bench.measure, lines=5000, repeat=10)
    theirs, ours, first, samples = measure()
    assert samples > 500
    assert theirs / ours >= 25
    assert theirs / first >= 25
