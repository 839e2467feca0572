"""Do the intervals hold what they promise? Loads in virtual time, of a store we chose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.estimate.bandwidth import LoadSums
from guard.estimate.estimator import Estimator
from guard.estimate.figures import Configured
from guard.estimate.intervals import blocks, jackknife
from guard.estimate.steady import agree
from guard.estimate.windows import Window
from guard.readings import Figure, Reading
from guard.sources.lmcache_mp import CacheStatus
from guard.sources.samples import Sample
from tests.virtual_cache import CHUNK_BYTES, Store, VirtualCache

STATUS = CacheStatus(256, 8, 0, 0, 0, 0, True, None)
WINDOWS = 200
EVERY = 5.0  # seconds between two scrapes: as long as a block
BANDWIDTH, FIXED = 100e6, 0.05
MEAN_BYTES = 6.5 * CHUNK_BYTES
PATH = Store(FIXED, BANDWIDTH)
STREAMS = Store(FIXED, BANDWIDTH, streams=True)


def watch(estimator: Estimator, samples: Iterable[Sample]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for sample in samples:
        figures = estimator.update(None, sample, STATUS, sample.at, sample.monotonic)
    return figures


def two_minutes(store: Store, rho: float, seed: int) -> dict[str, Figure]:
    """The figures after two minutes at an offered ρ. On a path they come after an overload,
    which shows its capacity, and its end."""
    estimator = Estimator(Configured())
    if store.streams:
        rate = rho * 8 / (FIXED + store.lookup_seconds + MEAN_BYTES / BANDWIDTH)
        cache = VirtualCache(store, rate, seed)
        watch(estimator, cache.run(30, EVERY))
    else:
        cache = VirtualCache(store, 1.5 * BANDWIDTH / MEAN_BYTES, seed)
        watch(estimator, cache.run(60, EVERY))
        cache.rate = rho * BANDWIDTH / MEAN_BYTES
        watch(estimator, cache.run(90, EVERY))
    return watch(estimator, cache.run(125, EVERY))


def mean_rate(store: Store, rho: float) -> float:
    """Σb/Σd of all loads, by a run long enough to be the truth."""
    per_second = (
        rho * 8 / (FIXED + store.lookup_seconds + MEAN_BYTES / BANDWIDTH)
        if store.streams
        else rho * BANDWIDTH / MEAN_BYTES
    )
    cache = VirtualCache(store, per_second, 1)
    *_, last = cache.run(20_000, 100)
    return last.values["gate.all.bytes"] / last.values["gate.all.seconds"]


@pytest.mark.parametrize("positive", [True, False])
@given(values=st.lists(st.floats(0.1, 100), min_size=6, max_size=24))
def test_the_interval_holds_the_estimate(positive: bool, values: list[float]) -> None:
    parts = [(value, 1.0) for value in values]
    found = jackknife(parts, lambda sums: sums[0] / sums[1], positive=positive)
    mean = math.fsum(values) / len(values)
    assert found is not None
    assert found.low <= mean * (1 + 1e-9)
    assert found.high >= mean * (1 - 1e-9)


def test_the_interval_of_a_mean_is_students() -> None:
    values = [Random(7).gauss(10, 1) for _ in range(1)] + [9.0, 10.5, 11.0, 8.5, 10.0, 9.5]
    found = jackknife([(v, 1.0) for v in values], lambda s: s[0] / s[1], positive=False)
    mean = math.fsum(values) / len(values)
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / 6 / 7)
    assert found is not None
    assert found.high - found.low == pytest.approx(2 * 2.447 * error, rel=1e-6)


def test_too_few_blocks_and_undefined_figures_have_no_interval() -> None:
    assert jackknife([(1.0,)] * 5, lambda sums: sums[0]) is None
    assert jackknife([(1.0,)] * 8, lambda sums: None) is None
    one = [(0.0,)] * 7 + [(1.0,)]  # without its only block nothing is left
    assert jackknife(one, lambda sums: sums[0]) is None


def window(moments: list[float]) -> Window:
    return Window([Sample(at, at, "x", {"n": at}) for at in moments])


@given(st.lists(st.floats(0.2, 3.0), min_size=3, max_size=150))
def test_blocks_cover_the_window_once(steps: list[float]) -> None:
    moments = [math.fsum(steps[:count]) for count in range(len(steps) + 1)]
    whole = window(moments)
    parts = blocks(whole)
    if parts:
        assert math.fsum(part.delta("n") or 0.0 for part in parts) == pytest.approx(moments[-1])
        assert all(part.seconds >= 4.5 for part in parts)
    else:
        assert whole.seconds < 4.5


def line(bandwidth: float, sizes: list[float], noise: float = 0.0, seed: int = 1) -> LoadSums:
    random = Random(seed)
    loads = [(b, (0.05 + b / bandwidth) * random.uniform(1 - noise, 1 + noise)) for b in sizes]
    return LoadSums(
        len(loads),
        math.fsum(b for b, _ in loads),
        math.fsum(d for _, d in loads),
        math.fsum(b * b for b, _ in loads),
        math.fsum(b * d for b, d in loads),
        math.fsum(d * d for _, d in loads),
    )


SIZES = [4e6, 8e6, 20e6, 30e6, 50e6]


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_loads_of_one_store_agree_and_of_another_do_not(noise: float, seed: int) -> None:
    before, now = line(1e8, SIZES * 4, noise, seed), line(1e8, SIZES, noise, seed + 100)
    assert agree(now, before)
    assert agree(before, now)
    slower = line(3e7, SIZES[:3], noise, seed + 200)
    assert not agree(slower, before)
    assert not agree(before, slower)


def test_no_load_agrees_with_anything() -> None:
    assert agree(line(1e8, SIZES), line(1e8, []))


def test_what_was_before_a_change_is_not_mixed_in() -> None:
    estimator = Estimator(Configured())
    cache = VirtualCache(Store(FIXED, BANDWIDTH, noise=0.1), 0.08 * BANDWIDTH / MEAN_BYTES, 3)
    steady = watch(estimator, cache.run(120))["load_bandwidth.alone"]
    assert isinstance(steady, Reading)
    assert steady.value == pytest.approx(BANDWIDTH, rel=0.1)
    assert "over 119 s" in steady.source
    cache.store = Store(FIXED, BANDWIDTH / 4, noise=0.1)
    watch(estimator, cache.run(20))  # in which the last loads of before still count
    after = [watch(estimator, cache.run(1))["load_bandwidth.alone"] for _ in range(60)]
    seen = [figure.value for figure in after if isinstance(figure, Reading)]
    assert len(seen) > 5
    assert max(seen) < 0.4 * BANDWIDTH


def test_a_figure_lies_within_its_bounds() -> None:
    for seed in range(5):
        for name, figure in two_minutes(PATH, 0.3, seed).items():
            if isinstance(figure, Reading) and figure.low is not None:
                assert figure.high is not None
                assert figure.low <= figure.value <= figure.high, name
    with pytest.raises(ValueError, match="enclose"):
        Reading(1.0, "ratio", 0.0, "x", 2.0, 3.0)


def coverage(results: list[dict[str, Figure]], name: str, truth: float) -> tuple[float, float]:
    """Of how many the interval holds the truth, and how many have one, both as shares."""
    bounded = [
        (figure.low, figure.high)
        for each in results
        if isinstance(figure := each[name], Reading)
        and figure.low is not None
        and figure.high is not None
    ]
    held = sum(low <= truth <= high for low, high in bounded)
    return held / max(1, len(bounded)), len(bounded) / len(results)


@pytest.mark.parametrize(
    ("store", "rho", "utilization"),
    [(PATH, 0.3, "path"), (PATH, 0.6, "path"), (STREAMS, 0.5, "slots")],
    ids=["path 0.3", "path 0.6", "streams 0.5"],
)
def test_intervals_cover_the_truth(store: Store, rho: float, utilization: str) -> None:
    results = [two_minutes(store, rho, seed) for seed in range(WINDOWS)]
    wanted = {
        f"load_utilization.{utilization}": (rho, 0.9),
        "load_bandwidth.prompt": (mean_rate(store, rho), 0.8),
    }
    if not store.streams:  # there, no load runs alone
        wanted["load_bandwidth.alone"] = (BANDWIDTH, 0.9)
        wanted["hit_fixed.load"] = (FIXED, 0.9)
    found = {name: coverage(results, name, truth) for name, (truth, _) in wanted.items()}
    print({name: f"{share:.1%} of {some:.0%}" for name, (share, some) in found.items()})
    for name, (share, some) in found.items():
        assert share >= wanted[name][1], (name, found)
        assert some > 0.5, (name, found)
