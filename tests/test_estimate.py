"""Estimates against a known truth: a store and an engine whose figures we chose."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.estimate.bandwidth import LoadSums, fit, in_flight_bound, path_bandwidth
from guard.estimate.estimator import Estimator
from guard.estimate.figures import Configured
from guard.estimate.windows import History, Window
from guard.policy.verdict import Limits, judge
from guard.readings import Figure, Missing, Reading, Snapshot
from guard.sources.lmcache_mp import CacheStatus
from guard.sources.samples import Sample

S = 24_576.0
CHUNK = 256
STATUS = CacheStatus(CHUNK, 8, 0, 0, 0, 0, True, None)


def sums(loads: list[tuple[float, float]]) -> LoadSums:
    return LoadSums(
        len(loads),
        math.fsum(b for b, _ in loads),
        math.fsum(d for _, d in loads),
        math.fsum(b * b for b, _ in loads),
        math.fsum(b * d for b, d in loads),
    )


# fits ---------------------------------------------------------------------------------


@given(
    st.floats(1e6, 1e10),
    st.floats(0, 2),
    st.lists(st.floats(1e6, 1e8), min_size=4, max_size=30),
)
def test_the_fit_gives_back_exactly_what_loads_alone_obey(
    bandwidth: float, fixed: float, sizes: list[float]
) -> None:
    sizes = [*sizes, min(sizes) / 2, max(sizes) * 2]
    found = fit(sums([(b, fixed + b / bandwidth) for b in sizes]))
    assert found is not None
    transfer = min(sizes) / bandwidth
    if transfer > 1e-3 * fixed:  # else the slope drowns in the sums' rounding
        assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
        assert found.fixed_seconds == pytest.approx(fixed, abs=1e-3 * (fixed + transfer))


def test_equal_sizes_leave_the_fixed_cost_unknown() -> None:
    found = fit(sums([(1e6, 0.2)] * 10))
    assert found is not None
    assert found.fixed_seconds is None
    assert found.bandwidth == pytest.approx(5e6)


def test_a_negative_intercept_is_clamped() -> None:
    # A published fit over 1 to 8 MiB gave T0 = -1.3 ms.
    found = fit(sums([(b, b / 1e9 - 0.0002) for b in (1e6, 2e6, 4e6, 8e6)]))
    assert found is not None
    assert found.fixed_seconds == 0.0
    assert found.bandwidth == pytest.approx(1e9, rel=0.1)


def test_no_load_is_no_bandwidth() -> None:
    assert fit(sums([])) is None


@pytest.mark.parametrize(
    ("oldest", "completion", "expected"),
    [
        (4.0, 2.0, 50e6),  # the last completion is what counts
        (4.0, None, 25e6),  # nothing ever completed
        (2.0, 300.0, 50e6),  # idle before: the wait began with the oldest load
        (4.0, 0.3, None),  # too young to say anything
    ],
)
def test_in_flight_bound(oldest: float, completion: float | None, expected: float | None) -> None:
    assert in_flight_bound(100e6, oldest, completion, 0.0, 1.0) == (
        None if expected is None else pytest.approx(expected)
    )


# windows ------------------------------------------------------------------------------


def sample(t: float, incarnation: str = "a", **values: float) -> Sample:
    return Sample(t, t, incarnation, values)


def test_a_window_never_spans_a_reset_or_another_process() -> None:
    history = History(frozenset({"n"}))
    for t in range(10):
        history.push(sample(t, n=100.0 + t))
    assert history.push(sample(10, n=3.0))
    assert history.window(60) is None
    history.push(sample(11, n=5.0))
    window = history.window(60)
    assert window is not None
    assert window.delta("n") == 2.0
    assert history.push(sample(12, "b", n=7.0))


def test_no_time_between_two_samples_is_no_window() -> None:
    history = History(frozenset({"n"}))
    history.push(sample(5.0, n=1.0))
    history.push(sample(5.0, n=2.0))
    assert history.window(60) is None
    history.push(sample(6.0, n=2.0))
    assert history.window(60) is not None


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60))
def test_the_age_of_growth_is_that_of_the_last_step_up(steps: list[int]) -> None:
    history = History(frozenset({"n"}))
    total = 0.0
    for t, grow in enumerate(steps):
        total += grow
        history.push(sample(float(t), n=total))
    window = history.window(100)
    assert window is not None
    grown = [t for t, grow in enumerate(steps) if grow and t > 0]
    expected = float(len(steps) - 1 - grown[-1]) if grown else None
    assert window.seconds_since_growth("n") == expected


def test_a_gauge_may_fall() -> None:
    history = History(frozenset({"n"}))
    history.push(sample(0, running=3.0))
    assert not history.push(sample(1, running=1.0))


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), min_size=2, max_size=60))
def test_deltas_are_never_negative_whatever_restarts(steps: list[tuple[float, bool]]) -> None:
    history = History(frozenset({"n"}))
    total = 0.0
    for t, (grow, restart) in enumerate(steps):
        total = 0.0 if restart else total + grow
        history.push(sample(float(t), n=total))
        window = history.window(30)
        if window is not None:
            assert (window.delta("n") or 0.0) >= 0.0
            assert window.seconds <= 30.1


def test_absent_at_one_end_is_no_delta() -> None:
    window = Window([sample(0), sample(1, n=5.0)])
    assert window.delta("n") is None


# a store with a known truth -----------------------------------------------------------


@dataclass
class Store:
    """One path of `rate` bytes per second, shared fairly by all loads in flight."""

    rate: float
    concurrency: int = 2
    sizes: tuple[int, ...] = (4, 6, 8, 8, 10, 12)
    now: float = 0.0
    busy: float = 0.0
    done: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {"all": [], "alone": []}
    )
    flying: list[list[float]] = field(default_factory=list)  # start, size, left, overlapped
    started: int = 0
    last_completion: float | None = None
    think: float = 0.0
    ready_at: list[float] = field(default_factory=list)

    def run(self, seconds: float, step: float = 0.01) -> None:
        end = self.now + seconds
        while self.now < end - step / 2:
            idle = self.concurrency - len(self.flying)
            self.ready_at = [t for t in self.ready_at if t > self.now]
            for _ in range(idle - len(self.ready_at)):
                chunks = self.sizes[self.started % len(self.sizes)]
                self.started += 1
                size = chunks * CHUNK * S
                self.flying.append([self.now, size, size, 0.0])
                if len(self.flying) > 1:
                    for load in self.flying:
                        load[3] = 1.0
            self.now += step
            if not self.flying:
                continue
            self.busy += step
            for load in self.flying:
                load[2] -= self.rate * step / len(self.flying)
            for load in [load for load in self.flying if load[2] <= 0]:
                self.flying.remove(load)
                self.last_completion = self.now
                if self.think:
                    self.ready_at.append(self.now + self.think)
                entry = (load[1], self.now - load[0])
                self.done["all"].append(entry)
                if not load[3]:
                    self.done["alone"].append(entry)

    def sample(self) -> Sample:
        values = {"gate.busy_seconds": self.busy, "queue.submission": 0.0, "queue.pending": 0.0}
        for kind, loads in self.done.items():
            total = sums(loads)
            values[f"gate.{kind}.loads"] = total.loads
            values[f"gate.{kind}.bytes"] = total.bytes
            values[f"gate.{kind}.seconds"] = total.seconds
            values[f"gate.{kind}.bytes_squared"] = total.bytes_squared
            values[f"gate.{kind}.bytes_seconds"] = total.bytes_seconds
        completed = len(self.done["all"])
        values |= {
            "gate.load_chunks": values["gate.all.bytes"] / (CHUNK * S),
            "gate.loads_in_flight": float(len(self.flying)),
            "gate.in_flight_bytes": math.fsum(load[1] for load in self.flying),
            "gate.submitted_bytes": values["gate.all.bytes"] + sum(f[1] for f in self.flying),
            "gate.lookups": float(self.started),
            "gate.lookups.hit": float(self.started),
            "gate.lookups.partial": 0.0,
            "gate.lookups.miss": 0.0,
            "gate.lookups.declined": 0.0,
            "gate.lookup_seconds": 0.005 * self.started,
            "gate.lookup_keys": 8.0 * self.started,
            "gate.denied_keys": 0.0,
            "hit_l2_tokens": 256.0 * completed,
        }
        if self.flying:
            values["gate.oldest_load_seconds"] = self.now - min(f[0] for f in self.flying)
        if self.last_completion is not None:
            values["gate.last_completion_age_seconds"] = self.now - self.last_completion
        return Sample(self.now, self.now, ("cache", 1.0, "epoch"), values)


def watch(
    store: Store, seconds: int, estimator: Estimator | None = None
) -> tuple[Estimator, dict[str, Figure]]:
    estimator = estimator or Estimator(Configured(prefill_rate=2000.0))
    figures: dict[str, Figure] = {}
    for _ in range(seconds):
        store.run(1.0)
        figures = estimator.update(None, store.sample(), STATUS, store.now, store.now)
    return estimator, figures


def value(figure: Figure) -> float:
    assert isinstance(figure, Reading), figure
    return figure.value


@pytest.mark.parametrize("rate", [12e6, 40e6, 100e6, 250e6])
@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_bytes_per_busy_second_is_the_path_whatever_is_in_flight(
    rate: float, concurrency: int
) -> None:
    _, figures = watch(Store(rate, concurrency), 40)
    assert value(figures["load_bandwidth.path"]) == pytest.approx(rate, rel=0.2)
    assert value(figures["kv_bytes_per_token"]) == pytest.approx(S)


def test_loads_alone_show_the_store_and_loads_together_their_share() -> None:
    _, one = watch(Store(100e6, 1), 30)
    assert value(one["load_bandwidth.alone"]) == pytest.approx(100e6, rel=0.05)
    assert value(one["load_wait"]) == pytest.approx(0.0, abs=0.05)
    _, four = watch(Store(100e6, 4), 30)
    assert four["load_bandwidth.alone"] == Missing("too_few_alone_loads")
    assert value(four["load_bandwidth.prompt"]) == pytest.approx(25e6, rel=0.15)


def test_a_drop_shows_in_what_is_in_flight_before_anything_completes() -> None:
    store = Store(250e6, 2, think=0.3)
    estimator, figures = watch(store, 30)
    needed = value(figures["break_even_bandwidth"])
    assert needed == pytest.approx(S * 2000)
    assert value(figures["load_bandwidth.recent"]) > 1.2 * needed
    store.rate = 0.0  # frozen
    _, figures = watch(store, 5, estimator)
    assert value(figures["in_flight_bandwidth_bound"]) < 0.9 * needed


@pytest.mark.parametrize("concurrency", [1, 2, 4])
@pytest.mark.parametrize(("ratio", "begun"), [(0.1, 6), (0.3, 10), (0.6, 14)])
def test_a_slow_store_shows_within_seconds_and_for_good_while_loads_still_complete(
    ratio: float, begun: int, concurrency: int
) -> None:
    """A completion now and then must not hide it: the decision needs a run of ticks."""
    needed = S * 2000
    store = Store(250e6, concurrency, think=0.3)
    estimator, _ = watch(store, 30)
    store.rate = ratio * needed
    slow_at: list[int] = []
    completed = len(store.done["all"])
    for second in range(1, 31):
        _, figures = watch(store, 1, estimator)
        if judge(Snapshot(store.now, store.now, figures), Limits()).kind == "slow":
            slow_at.append(second)
    assert len(store.done["all"]) > completed
    # The nearer to break-even, and the more in flight, the longer it takes to tell.
    assert slow_at[0] <= begun
    late = [second for second in range(begun + 4, 31) if second not in slow_at]
    assert len(late) <= 4, slow_at


@pytest.mark.parametrize("concurrency", [1, 2, 4])
@pytest.mark.parametrize("think", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rate", [12e6, 50e6, 250e6])
def test_what_is_in_flight_never_shows_less_than_the_path_carries(
    rate: float, think: float, concurrency: int
) -> None:
    store = Store(rate, concurrency, think=think)
    estimator = Estimator(Configured(prefill_rate=2000.0))
    for _ in range(60):
        _, figures = watch(store, 1, estimator)
        bound = figures["in_flight_bandwidth_bound"]
        if isinstance(bound, Reading):
            assert bound.value >= 0.98 * rate


@pytest.mark.parametrize("seconds", [35, 60, 125])
def test_idle_is_missing_and_not_slow(seconds: int) -> None:
    # However much a long window remembers: a store that died a minute ago helps nobody.
    store = Store(100e6, 2)
    estimator, _ = watch(store, 20)
    store.concurrency = 0
    store.run(5.0)
    _, figures = watch(store, seconds, estimator)
    for name in ("alone", "prompt", "recent", "path"):
        figure = figures[f"load_bandwidth.{name}"]
        assert isinstance(figure, Missing), name
        assert figure.reason == "idle"
    assert figures["in_flight_bandwidth_bound"] == Missing("nothing_in_flight")


def test_a_dead_cache_leaves_nothing_but_missing() -> None:
    store = Store(100e6, 2)
    estimator, _ = watch(store, 20)
    figures = estimator.update(None, None, None, store.now + 1, store.now + 1)
    for name, figure in figures.items():
        if name.startswith(("load_bandwidth", "load_utilization", "backlog", "hit.")):
            assert figure == Missing("cache_down"), name


def test_thin_traffic_is_still_measured() -> None:
    _, figures = watch(Store(100e6, 1, think=14.0), 100)
    assert value(figures["load_bandwidth.recent"]) == pytest.approx(100e6, rel=0.1)
    assert value(figures["load_bandwidth.alone"]) == pytest.approx(100e6, rel=0.1)


def test_stock_loads_of_long_ago_are_no_bandwidth() -> None:
    estimator = Estimator(Configured(prefill_rate=2000.0, kv_bytes_per_token=S))
    for t in range(60):
        loads = float(min(t, 20))
        values = {"load_rate_sum_gb_per_second": 0.5 * loads, "load_rate_count": loads}
        stock = Sample(float(t), float(t), ("cache", 1.0, None), values)
        figures = estimator.update(None, stock, STATUS, float(t), float(t))
    assert figures["load_bandwidth.prompt"] == Missing("idle", "the last load ended 39 s ago")


def test_stock_lmcache_is_approximate_and_says_so() -> None:
    estimator = Estimator(Configured(prefill_rate=2000.0, kv_bytes_per_token=S))
    for t in range(5):
        values = {"load_rate_sum_gb_per_second": 0.5 * t, "load_rate_count": 1.0 * t}
        stock = Sample(float(t), float(t), ("cache", 1.0, None), values)
        figures = estimator.update(None, stock, STATUS, float(t), float(t))
    assert figures["load_bandwidth.alone"] == Missing("no_gate")
    prompt = figures["load_bandwidth.prompt"]
    assert value(prompt) == pytest.approx(0.5e9)
    assert isinstance(prompt, Reading)
    assert "approximate" in prompt.source


# R ------------------------------------------------------------------------------------


def engine(t: float, requests: float, tokens: float, rate: float, external: float = 0.0) -> Sample:
    return Sample(
        t,
        t,
        "engine",
        {
            "finished_requests": requests,
            "finished_computed_tokens": requests * tokens,
            "prefill_seconds": requests * tokens / rate,
            "prompt_tokens": requests * (tokens + external),
            "external_tokens": requests * external,
            "computed_tokens": requests * tokens,
            "running": 1.0,
        },
    )


def prefill_of(samples: list[Sample]) -> Figure:
    estimator = Estimator(Configured())
    for one in samples:
        figures = estimator.update(one, None, None, one.at, one.monotonic)
    return figures["prefill"]


def test_clean_windows_give_the_prefill_rate() -> None:
    figure = prefill_of([engine(float(t), t * 1.0, 2048.0, 2255.0) for t in range(20)])
    assert value(figure) == pytest.approx(2255.0)


def test_windows_full_of_hits_are_not_believed() -> None:
    # In hit phases the ratio reads 2 to 10 times too low.
    samples = [engine(float(t), t * 1.0, 600.0, 356.0, external=6000.0) for t in range(20)]
    assert prefill_of(samples) == Missing(
        "too_many_external_hits", "no clean window yet; prefill_rate can be configured"
    )


def test_short_prompts_are_not_believed() -> None:
    figure = prefill_of([engine(float(t), t * 1.0, 60.0, 500.0) for t in range(20)])
    assert isinstance(figure, Missing)
    assert figure.reason == "prompts_too_short"


def test_too_few_loads_are_no_path_figure() -> None:
    store = Store(5e6, 1)
    store.run(8.0)
    first = store.sample()
    store.run(1.0)
    assert path_bandwidth(Window([first, store.sample()]), 3) is None
