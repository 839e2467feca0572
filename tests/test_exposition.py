"""The selective reader against prometheus_client's parser, and against what is no exposition."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from guard import exposition
from guard.errors import ExpositionError, MalformedLineError

CAPTURES = sorted((Path(__file__).parent / "captures").rglob("*.prom"))


def oracle(text: str) -> dict[exposition.SeriesKey, float]:
    """What prometheus_client reads. Without the TYPE lines: of a counter whose samples
    carry no `_total` it renames them, while the format (and Prometheus) keeps names."""
    text = "\n".join(line for line in text.split("\n") if not line.startswith("# TYPE"))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        left[k] == right[k] or (math.isnan(left[k]) and math.isnan(right[k])) for k in left
    )


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_equal_to_the_full_parser_on_captures(capture: Path) -> None:
    body = capture.read_bytes()
    expected = oracle(body.decode())
    assert expected
    assert same(exposition.read(body, {name for name, _ in expected}), expected)


def test_there_are_captures() -> None:
    assert len(CAPTURES) > 50


NAMES = st.sampled_from(["a", "a_total", "ns:b_bucket", "_c", "a_totals"])
VALUES = st.one_of(
    st.floats().map(repr), st.sampled_from(["NaN", "+Inf", "-Inf", "1e9", "0", "-0.5"])
)
LABEL_VALUES = st.text(
    alphabet=st.one_of(
        st.sampled_from('\\"\n{}#, =\t'), st.characters(exclude_categories=["Cs", "Cc"])
    ),
    max_size=12,
)
LABELS = st.dictionaries(st.sampled_from(["x", "le", "model_name", "_y"]), LABEL_VALUES, max_size=3)


@st.composite
def lines(draw: st.DrawFn) -> str:
    name, labels, value = draw(NAMES), draw(LABELS), draw(VALUES)
    space = draw(st.sampled_from([" ", "  ", "\t"]))
    if labels:
        inner = ",".join(
            '{}="{}"'.format(
                key, text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
            )
            for key, text in labels.items()
        )
        name += "{" + inner + draw(st.sampled_from(["", ","])) + "}"
    else:
        name += draw(st.sampled_from(["", "{}"]))
    return name + space + value + draw(st.sampled_from(["", " 1795970684668"]))


@settings(max_examples=400, deadline=None)
@given(st.lists(lines(), min_size=1, max_size=8), st.sets(NAMES, min_size=1), st.booleans())
def test_equal_to_the_full_parser_on_anything_well_formed(
    body: list[str], wanted: set[str], comments: bool
) -> None:
    text = "\n".join((["# HELP a {} help", "# TYPE a counter", ""] if comments else []) + body)
    text += "\n"
    expected = {key: value for key, value in oracle(text).items() if key[0] in wanted}
    assert same(exposition.read(text, wanted), expected)
    assert same(exposition.read(text.replace("\n", "\r\n").encode(), wanted), expected)


def test_exemplars_are_read_over() -> None:
    text = 'a_bucket{le="1"} 4 # {trace_id="} 7"} 0.67 1.5\na_total 3 # {x="y"} 1\n'
    assert exposition.read(text, {"a_bucket", "a_total"}) == {
        ("a_bucket", frozenset({("le", "1")})): 4.0,
        ("a_total", frozenset()): 3.0,
    }


def test_a_cached_series_is_read_again_with_its_new_value() -> None:
    for value in (1.0, 2.0, math.inf):
        assert exposition.read(f'a{{x="y"}} {value}\n', {"a"}) == {
            ("a", frozenset({("x", "y")})): value
        }


def test_of_a_series_that_comes_twice_the_last_counts() -> None:
    assert exposition.read("a 1\na 2\n", {"a"}) == {("a", frozenset()): 2.0}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "empty"),
        (" \n\n", "white space"),
        ("<html><body>busy</body></html>\n", "HTML"),
        ("<html>", "HTML"),
        ('{"error": "not found"}\n', "JSON"),
        ("[]", "JSON"),
        ('{"detail":"Not Found"}', "JSON"),
        ("a 1\na_total 12", "cut off"),
        ("just some words of a proxy, sorry\n", "no Prometheus text exposition"),
        (b"\x1f\x8b\x08\x00\xff\xfe\n", "no Prometheus text exposition"),
    ],
)
def test_what_is_no_exposition_is_an_error_that_names_it(body: str | bytes, says: str) -> None:
    with pytest.raises(ExpositionError, match=says):
        exposition.read(body, {"a"})


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a one",
        "a 1_000",
        "a 1 2 3",
        "a 1 soon",
        'a{x="y" 1',
        "a{x=y} 1",
        'a{x="y"',
        'a{x="y",x="z"} 1',
        'a{x="y"}',
        b'a{x="\xff"} 1',
    ],
)
def test_a_malformed_line_fails_only_where_its_name_is_wanted(line: str | bytes) -> None:
    body = b"b 2\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n"
    with pytest.raises(MalformedLineError):
        exposition.read(body, {"a"})
    assert exposition.read(body, {"b"}) == {("b", frozenset()): 2.0}
    assert exposition.read(body, {"other"}) == {}


def test_only_comments_is_an_exposition() -> None:
    assert exposition.read("# HELP a b\n# EOF\n", {"a"}) == {}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_dict_or_a_typed_error(body: bytes) -> None:
    try:
        found = exposition.read(body, {"a", "_c"})
    except ExpositionError:
        return
    assert {name for name, _ in found} <= {"a", "_c"}
