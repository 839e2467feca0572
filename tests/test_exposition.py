"""What the selective reader takes, refuses, and says, beyond agreeing with an oracle."""

from __future__ import annotations

import gzip
import json
import math
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from guard import exposition
from guard.errors import ExpositionError, MalformedLineError
from guard.exposition import Body, count_lines, read


def one(body: Body, name: str = "up") -> tuple[dict[str, str], float]:
    """Labels and value of the only sample that the body has under this name."""
    ((key, value),) = read(body, [name]).items()
    assert key[0] == name
    return dict(key[1]), value


def prometheus_client_reads(text: str) -> dict[str, object]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class TestForms:
    @pytest.mark.parametrize(
        ("line", "labels", "value"),
        [
            ("up 1", {}, 1),
            ("up\t1", {}, 1),
            ("up  \t 1", {}, 1),
            ("  up 1  ", {}, 1),
            ("up{} 1", {}, 1),
            ("up { } 1", {}, 1),
            ('up{a="b"}1', {"a": "b"}, 1),
            ('up{a="b",} 1', {"a": "b"}, 1),
            ('up{a="b" , } 1', {"a": "b"}, 1),
            ('up{ a = "b" , c="d" } 1', {"a": "b", "c": "d"}, 1),
            ('up{a="}"} 1', {"a": "}"}, 1),
            ('up{a="} 7"} 1', {"a": "} 7"}, 1),
            ('up{a="x # {y"} 1', {"a": "x # {y"}, 1),
            ('up{a=", b=\\"c\\""} 1', {"a": ', b="c"'}, 1),
            ('up{a="\\\\"} 1', {"a": "\\"}, 1),
            ('up{a="\\\\n\\n"} 1', {"a": "\\n\n"}, 1),
            ('up{a="\\d"} 1', {"a": "\\d"}, 1),
            ('up{a="é\u2028\x85€"} 1', {"a": "é\u2028\x85€"}, 1),
            ('up{a=""} 1', {"a": ""}, 1),
            ("up 1 1395066363000", {}, 1),
            ("up 1 -3982045", {}, 1),
            ("up 1 # {} 2", {}, 1),
            ('up{a="b"} 1 5 # {c="}"} 2 3.5', {"a": "b"}, 1),
            ("up +Inf", {}, math.inf),
            ("up -Inf", {}, -math.inf),
            ("up 1.7560473e+07", {}, 1.7560473e7),
            ("up 1E3", {}, 1000),
            ("up -0", {}, 0),
            ("up 5.", {}, 5),
            ("up .5", {}, 0.5),
            ("up 1e-999", {}, 0),
            ("up 12345678901234567890123456789012345678901234567890", {}, 1.2345678901234567e49),
        ],
    )
    @pytest.mark.parametrize("ending", ["\n", "\r\n"])
    def test_a_line(self, line: str, labels: dict[str, str], value: float, ending: str) -> None:
        assert one(line + ending) == (labels, value)
        assert one("# TYPE x gauge\nx 1\n" + line + ending + "x 2\n") == (labels, value)

    @pytest.mark.parametrize("value", ["NaN", "nan", "-nan", "+NaN"])
    def test_nan_is_passed_on(self, value: str) -> None:
        """A sign in front of NaN is what a C++ peer prints for 0/0. Go's ParseFloat, which
        the format refers to, refuses it, and prometheus_client takes it: so do we, since
        then one reading is missing and not the whole peer."""
        assert math.isnan(one(f"up {value}\n")[1])

    def test_all_kinds_of_bodies(self) -> None:
        text = 'up{a="é"} 1\n'
        raw = text.encode()
        for body in (text, raw, bytearray(raw), memoryview(raw), memoryview(raw + raw)[::1]):
            assert one(body) == ({"a": "é"}, 1)

    def test_names_are_whole_names(self) -> None:
        text = "up_total 1\nup 2\nupdate 3\nu 4\nup:x 5\nup_ 6\nxup 7\n"
        assert one(text) == ({}, 2)
        assert {name for name, _ in read(text, ["up", "up_", "u", "missing"])} == {"up", "up_", "u"}

    def test_comments_of_wanted_names_are_no_samples(self) -> None:
        text = "# HELP up 1\n# TYPE up gauge\n# up 2\n#up 3\n  # up 4\nup 5\n# EOF\n"
        assert one(text) == ({}, 5)

    def test_many_labels_and_a_huge_value(self) -> None:
        labels = {f"l{i}": "x" * 100 for i in range(500)} | {"big": 'é\\"' * 300_000}
        quoted = ",".join(
            '{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"'))
            for key, value in labels.items()
        )
        assert one(f"up{{{quoted}}} 1\n") == (labels, 1)

    def test_a_series_that_comes_twice_keeps_its_last_value(self) -> None:
        assert one('up{a="1",b="2"} 1\nup{b="2",a="1"} 2\n') == ({"a": "1", "b": "2"}, 2)

    def test_names_inside_the_braces(self) -> None:
        text = '{"up"} 1\n{"my.metric",a="b"} 2\n {"a.b","label.x"="y"} 3\r\n{"other"} x\n{oops\n'
        assert read(text, ["up", "my.metric", "a.b"]) == {
            ("up", frozenset()): 1,
            ("my.metric", frozenset({("a", "b")})): 2,
            ("a.b", frozenset({("label.x", "y")})): 3,
        }

    def test_nothing_wanted_is_nothing_found(self) -> None:
        assert read("up 1\n", []) == {}

    def test_one_string_is_no_collection_of_names(self) -> None:
        with pytest.raises(TypeError):
            read("up 1\n", "up")


class TestMemory:
    def test_what_is_remembered_of_a_peer_is_bounded(self) -> None:
        text = "".join(f'up{{i="{i}"}} {i}\n' for i in range(20_000))
        for _ in range(2):
            assert len(read(text, ["up"])) == 20_000
            assert len(exposition._known_series) <= 8192
        long = "x" * 1000
        for _ in range(2):
            assert one(f'up{{a="{long}"}} 1\n') == ({"a": long}, 1)
        assert not any(long.encode() in series for series in exposition._known_series)

    def test_what_is_remembered_is_right(self) -> None:
        for value in (1, 2):
            text = f'up{{a="x"}} {value}\nup{{a="y"}} {value}\nup {value}\nother{{a="x"}} {value}\n'
            assert set(read(text, ["up", "other"]).values()) == {value}
            assert len(read(text, ["up", "other"])) == 4


class TestMalformed:
    @pytest.mark.parametrize(
        "line",
        [
            "up",
            "up ",
            "up{}",
            "up{a} 1",
            "up{a=b} 1",
            'up{a="b} 1',
            'up{a="b"',
            'up{a="b"} ',
            'up{a="b"}} 1',
            'up{a="b" c="d"} 1',
            'up{a="b"c="d"} 1',
            'up{a="b",,c="d"} 1',
            'up{="b"} 1',
            'up{1a="b"} 1',
            'up{a.b="c"} 1',
            'up{a="b",a="b"} 1',
            'up{a="b",a="c"} 1',
            'up{"other"} 1',
            'up{__name__="x"} 1',
            'up{a="\\"} 1',
            "up 1 2 3",
            "up 1 x",
            "up 1 1e",
            "up x",
            "up 1_000",
            "up 0x10",
            "up 1e",
            "up ..",
            "up 1.2.3",
            "up - 1",
            "up --1",
            "up 1,5",
            "up 1e400",
            "up " + "9" * 400,
            "up " + "9" * 400 + ".",
            "up １",
            "up 1\x0c",
            "up 1 # comment",
            "up 1 # {",
            "up 1 # {}",
            "up 1 # {} x",
            'up 1 # {"a"} 1',
            'up 1 # {a="b} 1',
            '{"up"} x',
            '{"up"',
            '{"up","up"} 1',
            '{"up",a="b" 1',
        ],
    )
    def test_only_a_wanted_name_makes_it_fail(self, line: str) -> None:
        for ending in ("\n", "\r\n"):
            body = "# TYPE x gauge\nx 1\n" + line + ending
            with pytest.raises(MalformedLineError, match="a line of up cannot be read") as caught:
                read(body, ["x", "up"])
            assert repr(line.strip().encode()[:20])[2:-1] in str(caught.value)
            assert len(str(caught.value)) < 700
            assert read(body, ["x"]) == {("x", frozenset()): 1}
            assert read(body, ["y"]) == {}

    def test_invalid_utf8(self) -> None:
        for bad in (b'up{a="\xff"} 1\n', b'up{a="\xc3"} 1\n', b'up 1 # {a="\xff"} 1\n'):
            with pytest.raises(MalformedLineError, match="UTF-8"):
                read(b"x 1\n" + bad, ["x", "up"])
            assert read(b"x 1\n" + bad, ["x"]) == {("x", frozenset()): 1}
        with pytest.raises(MalformedLineError, match="UTF-8"):
            read('up{a="\udcff"} 1\n', ["up"])
        assert read('up{a="\udcff"} 1\n', ["x"]) == {}

    def test_a_long_line_is_shown_bounded(self) -> None:
        with pytest.raises(MalformedLineError) as caught:
            read('up{a="' + "x" * 1_000_000 + "} 1\n", ["up"])
        assert len(str(caught.value)) < 700

    def test_it_is_an_exposition_error(self) -> None:
        assert issubclass(MalformedLineError, ExpositionError)


class TestNoExposition:
    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("", "empty"),
            (" ", "white space"),
            ("\n\n \r\n\t", "white space"),
            ("\n" * 2000, "white space"),
            ("<!DOCTYPE html>\n<html><body>up 1</body></html>\n", "HTML"),
            ("\n" * 400 + "  <html>\nup 1\n</html>\n", "HTML"),
            ("<pre>\n# TYPE up gauge\nup 1\n</pre>\n", "HTML"),
            ("<?xml version='1.0'?>\n", "XML"),
            ("{}", "JSON"),
            ("[]\n", "JSON"),
            ('{"status": "ok"}', "JSON"),
            ('{"detail":"Not Found"}\n', "JSON"),
            (json.dumps({"a": [1, {"up": 1}]}, indent=2) + "\n", "JSON"),
            ('[{"a": 1}]', "JSON"),
            ("[1, 2]\n", "JSON"),
            ("404 page not found\n", "404 page not found"),
            ("Not Found\n", "Not Found"),
            ("upstream connect error or disconnect/reset before headers\n", "upstream"),
            ("Internal Server Error", "cut off"),
            ("ok\n", "no line of it is one"),
            ("# Title\n\nSome words here.\nAnd more: 1, 2.\n", "# Title"),
            (gzip.compress(b"up 1\n" * 9), "gzip"),
            (gzip.compress(b"up 1\n" * 9) + b"\n", "gzip"),
            (b"\xef\xbb\xbfup 1\n", "byte order mark"),
            ("up 1\n".encode("utf-16"), "byte order mark"),
            (b"\x08\x01\x00\x12up\x00\n\x00\n", "binary"),
            (bytes(range(128, 256)) + b"\n", "start"),
        ],
    )
    def test_it_is_an_error_that_names_what_came(self, body: str | bytes, said: str) -> None:
        with pytest.raises(ExpositionError, match=said) as caught:
            read(body, ["up"])
        assert not isinstance(caught.value, MalformedLineError)
        assert len(str(caught.value)) < 1200
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize(
        "tail",
        ["up", "up 1", "up 12", 'up{a="b', "# HELP up", "# TYPE up gau", "x 1", " ", "x 1\r"],
    )
    def test_a_last_line_that_is_cut_off(self, tail: str) -> None:
        with pytest.raises(ExpositionError, match="cut off"):
            read("# TYPE up gauge\nup 7\n" + tail, ["up"])

    def test_a_cut_number_never_passes_for_a_smaller_one(self) -> None:
        whole = "up 123456\n"
        for cut in range(len(whole)):
            with pytest.raises(ExpositionError):
                read(whole[:cut], ["up"])

    @pytest.mark.parametrize("body", ["up 1\n# EOF", "up 1\n  # EOF", "up 1\r\n# EOF\r\n"])
    def test_openmetrics_end_needs_no_newline(self, body: str) -> None:
        assert one(body) == ({}, 1)

    @pytest.mark.parametrize(
        "body",
        [
            "x 1\n",
            "# HELP up Is it up?\n# TYPE up gauge\n",
            "# just a comment\n",
            "# EOF\n",
            "# EOF",
            'broken{ 1\nx{a="b"} 2\n',
            "# TYPE x gauge\nx x\nx y\nx z\n",
            '{"x"} 1\n',
            '{"x",a="}"} 1\n',
            "x 1 2 # {} 3\n",
            "\n\n  x 1\n\n",
        ],
    )
    def test_an_exposition_without_the_wanted_names_is_empty(self, body: str) -> None:
        assert read(body, ["up"]) == {}


class TestWhereTheOracleLeavesTheSpecification:
    """prometheus_client's text parser calls itself laxer than Prometheus' own. Where the two
    part, the format's page and Prometheus' parser decide, and these lines say how."""

    def test_names_stay_as_written(self) -> None:
        text = "# TYPE up counter\nup 1\n"
        assert prometheus_client_reads(text) == {"up_total": 1}
        assert read(text, ["up", "up_total"]) == {("up", frozenset()): 1}

    @pytest.mark.parametrize(
        "line",
        [
            "up 1 2 3",  # one value, at most one timestamp
            "up 1e400",  # out of float64's range, which ParseFloat reports
            "up １",  # digits are ASCII
            "up 1\x0b",  # blanks and tabs are the only white space
            "up{,} 1",  # a comma only behind a label
            'up{,a="b"} 1',
            "up{a=} 1",  # a label without a value
        ],
    )
    def test_lines_that_only_prometheus_client_takes(self, line: str) -> None:
        assert prometheus_client_reads(line + "\n")
        with pytest.raises(MalformedLineError):
            read(line + "\n", ["up"])

    def test_reserved_label_names_are_labels(self) -> None:
        text = 'up{__meta="1"} 1\n'
        with pytest.raises(ValueError, match="Invalid labels"):
            prometheus_client_reads(text)
        assert one(text) == ({"__meta": "1"}, 1)

    def test_a_name_given_as_a_label_is_refused(self) -> None:
        text = '{__name__="up"} 1\n'
        assert prometheus_client_reads(text) == {"up": 1}
        with pytest.raises(MalformedLineError):
            read(text, ["up"])

    def test_a_missing_last_newline_is_a_cut(self) -> None:
        assert prometheus_client_reads("up 1") == {"up": 1}
        with pytest.raises(ExpositionError):
            read("up 1", ["up"])


class TestCountLines:
    @pytest.mark.parametrize(
        ("body", "lines"),
        [
            ("", 0),
            ("up 1\n", 1),
            ("up 1", 1),
            ("# HELP up\n# TYPE up gauge\nup 1\nup 2\n", 2),
            ("#\n", 0),
            ("#", 0),
            ("\n", 1),
            ("up 1\r\nup 2\r\n", 2),
        ],
    )
    def test_counts_what_is_no_comment(self, body: str, lines: int) -> None:
        assert count_lines(body) == lines
        assert count_lines(memoryview(body.encode())) == lines

    def test_is_never_less_than_the_samples(self) -> None:
        text = "".join(f'up{{i="{i}"}} 1\n' for i in range(100))
        assert count_lines(text) == len(read(text, ["up"])) == 100


@pytest.mark.parametrize(
    "line",
    [
        "up " + "1" * 1_000_000 + "x",
        "up " + " " * 1_000_000 + "x",
        "up 1" + " " * 1_000_000 + "x",
        'up{a="' + "\\" * 1_000_000,
        "up{" + 'a="b",' * 100_000,
        "up{" + " " * 1_000_000,
        "up 1 # {" + "}" * 500_000,
        "x{" + "}" * 50_000 + "y",
        "\n " * 100_000,
    ],
    ids=lambda line: ascii(line[:9]),
)
def test_no_body_takes_long(line: str) -> None:
    """A peer gone wrong must not hold the tick: every expression stays linear."""
    start = time.process_time()
    try:
        read("# TYPE x gauge\n" + line + "\n", ["up"])
    except MalformedLineError:
        pass
    assert time.process_time() - start < 1
