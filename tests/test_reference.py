"""The reference pages are what the code says, and the code says nothing they do not know."""

from __future__ import annotations

import ast
import functools
import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import guard
from guard.estimate.estimator import Estimator
from guard.estimate.figures import Configured
from guard.readings import Missing
from guard.reference import metrics_page
from guard.reference.figures import ORIGINS
from guard.reference.reasons import REASONS
from guard.service.figure_metrics import METRICS
from guard.sources import lmcache_mp, vllm
from guard.sources.samples import Sample

GUARD = Path(guard.__file__).parent
DOCS = Path(__file__).parent.parent / "docs"
CAPTURES = Path(__file__).parent / "captures"


def test_the_page_of_metrics_is_what_the_code_says() -> None:
    written = (DOCS / "metrics.md").read_text()
    assert written == metrics_page.page(), "make reference writes it anew"


def test_every_figure_has_an_origin_and_every_origin_a_figure() -> None:
    assert ORIGINS.keys() == {row.figure for row in METRICS}


def test_reasons_are_explained_and_in_use() -> None:
    used = {reason for origin in ORIGINS.values() for reason in origin.missing}
    assert used == set(REASONS)


def test_no_family_is_absent_for_a_reason_of_its_own_past() -> None:
    page = metrics_page.page()
    for name in metrics_page._ABSENT:
        assert f"`{name}`" in page


def literals_of_missing(path: Path) -> set[str]:
    """What the first argument of every `Missing(…)` in a file can be, as far as literals go."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Missing":
            first = node.args[0]
            branches = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
            found |= {
                each.value
                for each in branches
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    return found


def test_every_reason_in_the_code_is_explained() -> None:
    named = set().union(*map(literals_of_missing, (GUARD / "estimate").glob("*.py")))
    assert len(named) > 15
    assert named <= set(REASONS)


@functools.cache
def samples(gated: bool) -> list[tuple[Sample, Sample]]:
    """Every engine's capture beside every cache's."""
    engines = [
        vllm.parse("http://e/metrics", path.read_bytes(), 0.0, 0.0)
        for path in sorted(CAPTURES.glob("vllm*/*.prom"))
    ]
    caches = [
        lmcache_mp.parse_metrics("http://c/metrics", path.read_bytes(), 0.0, 0.0)
        for path in sorted(CAPTURES.glob("lmcache*/*.prom"))
        if ("gate" in path.name) == gated
    ]
    assert engines
    assert caches
    longest = max(len(engines), len(caches))
    pairs = zip(itertools.cycle(engines), itertools.cycle(caches), strict=False)
    return list(itertools.islice(pairs, longest))


@pytest.mark.parametrize("configured", [Configured(), Configured(4096.0, 2000.0)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("down", ["none", "engine", "cache", "both"])
def test_no_figure_is_missing_for_a_reason_it_does_not_declare(
    configured: Configured, gated: bool, down: str
) -> None:
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for one_engine, one_cache in samples(gated):
        estimator = Estimator(configured)
        for tick in range(9):
            at = tick * 5.0
            engine = replace(one_engine, at=at, monotonic=at)
            cache = replace(one_cache, at=at, monotonic=at)
            answers_engine = down not in ("engine", "both") or tick % 3 == 0
            answers_cache = down not in ("cache", "both") or tick % 2 == 0
            figures = estimator.update(
                engine if answers_engine else None, cache if answers_cache else None, None, at, at
            )
            for name, figure in figures.items():
                if isinstance(figure, Missing):
                    seen[name].add(figure.reason)
    assert seen
    undeclared = {name: reasons - set(ORIGINS[name].missing) for name, reasons in seen.items()}
    assert {name: reasons for name, reasons in undeclared.items() if reasons} == {}
