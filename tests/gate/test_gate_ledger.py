"""The ledger against a plain account of the same events, kept as a list of intervals."""

from __future__ import annotations

import threading
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.gate.ledger import VERSION, Ledger
from guard.gate.tally import ANSWERS, CHUNK_BUCKETS, Histogram


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Interval:
    start: float
    nbytes: int
    end: float | None = None
    ok_bytes: int = 0


def overlap(a: Interval, b: Interval, now: float) -> bool:
    """Touching ends do not overlap: one had ended when the other began."""
    a_end, b_end = (now if i.end is None else i.end for i in (a, b))
    return a.start < b_end and b.start < a_end


def union_seconds(intervals: list[Interval], now: float) -> float:
    total, reached = 0.0, float("-inf")
    for interval in sorted(intervals, key=lambda i: i.start):
        end = now if interval.end is None else interval.end
        total += max(0.0, end - max(interval.start, reached))
        reached = max(reached, end)
    return total


# Time only moves between events, by whole eighths of a second, so that floats are exact.
events = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "fail", "partial", "cancel"]),
        st.integers(1, 10**9),
        st.integers(1, 80),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(events)
def test_every_sum_equals_a_plain_account(events: list[tuple[str, int, int, int]]) -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    flying: list[tuple[int, Interval]] = []
    account: list[Interval] = []
    cancelled: list[Interval] = []
    for what, nbytes, eighths, which in events:
        clock.now += eighths / 8
        if what == "begin":
            token = ledger.begin_load(nbytes)
            assert token is not None
            interval = Interval(clock.now, nbytes)
            flying.append((token, interval))
            account.append(interval)
        elif flying:
            token, interval = flying.pop(which % len(flying))
            interval.end = clock.now
            if what == "cancel":
                ledger.cancel_load(token)
                cancelled.append(interval)
                continue
            interval.ok_bytes = {
                "end": interval.nbytes,
                "fail": 0,
                "partial": interval.nbytes // 2,
            }[what]
            ledger.end_load(token, interval.ok_bytes, 3)
        totals = ledger.totals()
        now = clock.now
        done = [i for i in account if i.end is not None and i.ok_bytes > 0]
        alone = [i for i in done if not any(overlap(i, j, now) for j in account if j is not i)]
        for kind, expected in (("all", done), ("alone", alone), ("probe", [])):
            sums = totals.sums[kind]
            seconds = [i.end - i.start for i in expected if i.end is not None]
            assert sums.loads == len(expected)
            assert sums.bytes == sum(i.ok_bytes for i in expected)
            assert sums.seconds == sum(seconds)
            assert sums.bytes_squared == sum(i.ok_bytes**2 for i in expected)
            assert sums.seconds_squared == sum(s * s for s in seconds)
            assert sums.bytes_seconds == pytest.approx(
                sum(i.ok_bytes * s for i, s in zip(expected, seconds, strict=True)), rel=1e-12
            )
        assert totals.busy_seconds == union_seconds(account, now)
        assert totals.submitted_bytes == sum(i.nbytes for i in account)
        assert totals.loads_in_flight == len(flying)
        assert totals.bytes_in_flight == sum(i.nbytes for _, i in flying)
        oldest = min((i.start for _, i in flying), default=None)
        assert totals.oldest_load_seconds == (None if oldest is None else now - oldest)
        completed = [i.end for i in done if i.end is not None]
        last = max(completed, default=None)
        assert totals.last_completion_age_seconds == (None if last is None else now - last)
        failed = [
            i for i in account if i.end is not None and i.ok_bytes < i.nbytes and i not in cancelled
        ]
        assert totals.load_failures == len(failed) + len(cancelled)
        assert totals.chunks == 3 * len(done)
        assert sum(totals.load_durations.counts) == len(done)


def test_recent_loads_are_the_last_64_with_their_overlap() -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    for n in range(70):
        token = ledger.begin_load(n + 1)
        assert token is not None
        clock.now += 1
        ledger.end_load(token, n + 1, 1)
    recent = ledger.recent_loads()
    assert [load.bytes for load in recent] == list(range(7, 71))
    assert all(load.alone and load.end - load.start == 1 for load in recent)


def test_a_token_ends_once() -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    token = ledger.begin_load(10)
    assert token is not None
    ledger.end_load(token, 10, 1)
    ledger.end_load(token, 10, 1)
    ledger.cancel_load(token)
    totals = ledger.totals()
    assert (totals.sums["all"].loads, totals.load_failures, totals.loads_in_flight) == (1, 0, 0)


class TestProbe:
    def test_a_probe_counts_apart_and_never_as_busy(self) -> None:
        clock = Clock()
        ledger = Ledger(clock=clock)
        mark = ledger.begin_probe()
        clock.now += 2
        assert ledger.end_probe(mark, 500, 2.0) is False
        totals = ledger.totals()
        assert (totals.sums["probe"].loads, totals.sums["probe"].bytes) == (1, 500)
        assert totals.sums["all"].loads == 0
        assert totals.busy_seconds == 0

    def test_a_load_that_began_before_spoils_the_probe_and_is_not_alone(self) -> None:
        clock = Clock()
        ledger = Ledger(clock=clock)
        token = ledger.begin_load(10)
        assert token is not None
        mark = ledger.begin_probe()
        ledger.end_load(token, 10, 1)
        assert ledger.end_probe(mark, 500, 1.0) is True
        assert ledger.totals().sums["probe"].loads == 0
        assert ledger.totals().sums["alone"].loads == 0

    def test_a_load_within_spoils_the_probe_and_is_not_alone(self) -> None:
        clock = Clock()
        ledger = Ledger(clock=clock)
        mark = ledger.begin_probe()
        token = ledger.begin_load(10)
        assert token is not None
        ledger.end_load(token, 10, 1)
        assert ledger.end_probe(mark, 500, 1.0) is True
        totals = ledger.totals()
        assert (totals.sums["all"].loads, totals.sums["alone"].loads) == (1, 0)

    def test_after_it_loads_are_alone_again(self) -> None:
        ledger = Ledger(clock=Clock())
        assert ledger.end_probe(ledger.begin_probe(), 0, 1.0) is False
        assert ledger.totals().sums["probe"].loads == 0
        token = ledger.begin_load(10)
        assert token is not None
        ledger.end_load(token, 10, 1)
        assert ledger.totals().sums["alone"].loads == 1


class TestLookups:
    def test_seconds_count_only_where_l2_answered(self) -> None:
        clock = Clock()
        ledger = Ledger(clock=clock)
        answered, flushed = ledger.begin_lookup(8), ledger.begin_lookup(16)
        clock.now += 3
        totals = ledger.totals()
        assert (totals.lookups_in_flight, totals.oldest_lookup_seconds) == (2, 3)
        ledger.end_lookup(answered, "hit", 8, by_l2=True)
        clock.now += 60
        ledger.end_lookup(flushed, "bypassed", 16, by_l2=False, denied_keys=16)
        ledger.end_lookup(flushed, "bypassed", 16, by_l2=False, denied_keys=16)
        ledger.deny_lookup("shed", 4, 4)
        totals = ledger.totals()
        assert totals.lookup_seconds == 3
        assert totals.lookup_keys == 8 + 16 + 4
        assert totals.denied_keys == 16 + 4
        counted = {a: sum(h.counts) for a, h in totals.asked_chunks.items()}
        assert {a: n for a, n in counted.items() if n} == {"hit": 1, "bypassed": 1, "shed": 1}
        assert totals.oldest_lookup_seconds is None

    def test_a_refused_lookup_is_in_flight_no_longer(self) -> None:
        ledger = Ledger(clock=Clock())
        ledger.cancel_lookup(ledger.begin_lookup(8))
        totals = ledger.totals()
        assert totals.lookups_in_flight == 0
        assert all(sum(h.counts) == 0 for h in totals.asked_chunks.values())

    def test_an_answer_that_changes_moves_and_no_counter_is_seen_to_fall(self) -> None:
        ledger = Ledger(clock=Clock())
        first, second = ledger.begin_lookup(8), ledger.begin_lookup(8)
        ledger.end_lookup(first, "hit", 8, by_l2=True)

        def count(answer: str, *, published: bool) -> int:
            return sum(ledger.totals(published=published).asked_chunks[answer].counts)

        assert count("hit", published=True) == 1
        ledger.change_answer("hit", "declined", 8)
        assert count("hit", published=False) == 0
        assert count("hit", published=True) == 1  # seen once, it stays
        assert count("declined", published=True) == 1
        ledger.end_lookup(second, "hit", 8, by_l2=True)
        assert count("hit", published=True) == count("hit", published=False) == 1

    def test_a_change_between_two_readings_leaves_no_trace(self) -> None:
        ledger = Ledger(clock=Clock())
        ledger.end_lookup(ledger.begin_lookup(8), "partial", 8, by_l2=True)
        ledger.change_answer("partial", "declined", 8)
        totals = ledger.totals(published=True)
        assert sum(totals.asked_chunks["partial"].counts) == 0
        assert totals.asked_chunks["partial"].total == 0

    def test_shadows_count_apart(self) -> None:
        ledger = Ledger(clock=Clock())
        ledger.end_shadow("partial", 300)
        totals = ledger.totals()
        assert totals.shadow_lookups == {"hit": 0, "partial": 1, "miss": 0}
        assert totals.shadow_found_bytes == 300
        assert totals.lookup_keys == 0


def test_stores_and_faults() -> None:
    ledger = Ledger(clock=Clock())
    ledger.end_store(100, 0.5, ok=True)
    ledger.end_store(100, 9.0, ok=False)
    ledger.skip_store()
    ledger.fault()
    totals = ledger.totals()
    assert (totals.store_bytes, totals.store_seconds) == (100, 0.5)
    assert (totals.store_failures, totals.stores_skipped, totals.faults) == (1, 1, 1)


def test_ranks_beyond_the_limit_are_other() -> None:
    ledger = Ledger(clock=Clock())
    for n in range(100):
        token = ledger.begin_load(10)
        assert token is not None
        ledger.end_load(token, 10, 1, {f"{n:08x}": 10})
    ranks = ledger.totals().rank_bytes
    assert len(ranks) == 64
    assert ranks["other"] == 37 * 10
    assert sum(ranks.values()) == 1000


@given(st.lists(st.integers(1, 5000), max_size=50))
def test_a_histogram_counts_each_value_once_in_its_bucket(values: list[int]) -> None:
    histogram = Histogram(CHUNK_BUCKETS)
    for value in values:
        histogram.add(value)
    for at, bound in enumerate(CHUNK_BUCKETS):
        assert sum(histogram.counts[: at + 1]) == sum(v <= bound for v in values)
    assert sum(histogram.counts) == len(values)
    assert histogram.total == sum(values)


def test_threads_lose_nothing() -> None:
    ledger = Ledger()

    def work() -> None:
        for _ in range(500):
            token = ledger.begin_load(7)
            assert token is not None
            ledger.deny_lookup("shed", 2, 2)
            ledger.end_load(token, 7, 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = ledger.totals()
    assert totals.sums["all"].bytes == totals.submitted_bytes == 4 * 500 * 7
    assert totals.lookup_keys == totals.denied_keys == 4 * 500 * 2
    assert totals.loads_in_flight == totals.bytes_in_flight == 0
    assert totals.busy_seconds <= totals.sums["all"].seconds + 1e-6


def test_the_answers_are_those_of_the_contract() -> None:
    assert (
        *("hit", "partial", "miss", "bypassed", "shed", "short"),
        *("expired", "declined", "aborted"),
    ) == ANSWERS


def test_the_gates_version_is_the_distributions() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["version"] == VERSION
