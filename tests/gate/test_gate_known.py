"""Known keys: what is learnt, forgotten, and how many are kept."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from guard.gate.known import BACKLOG, MAX_BACKLOG, MAX_LOST, KnownKeys


def known_keys(capacity: int = 1000) -> KnownKeys[str]:
    return KnownKeys(capacity=capacity)


def test_a_key_is_known_until_it_is_found_absent() -> None:
    known = known_keys()
    known.learn(["a", "b"], [10, 20])
    assert known.knows_all(["a", "b"])
    assert not known.knows_all(["a", "c"])
    assert not known.knows_all([])
    known.forget(["b", "x"])
    assert known.knows_all(["a"])
    assert not known.knows_all(["b"])
    assert known.sizes(["a", "b"]) == [10, None]
    assert len(known) == 1


def test_notes_are_settled_in_their_order() -> None:
    known = known_keys()
    known.learn(["a"], [1])
    known.forget(["a"])
    assert not known.knows_all(["a"])
    known.forget(["a"])
    known.learn(["a"], [2])
    assert known.sizes(["a"]) == [2]


class TestLost:
    """Lookup after lookup without any of what is known to be there."""

    def test_only_lookups_that_find_nothing_of_what_was_known_count(self) -> None:
        known = known_keys()
        known.learn(["a", "b", "c"], [1, 2, 3])
        known.found_none(["cold", "colder"])
        assert known.lost_lookups == 0
        known.found_none(["a", "new"])
        known.found_none(["b"])
        assert known.lost_lookups == 2
        assert not known.knows_all(["a"])

    def test_one_that_finds_anything_ends_the_row(self) -> None:
        known = known_keys()
        known.learn(["a", "b"], [1, 2])
        known.found_none(["a"])
        known.found()
        assert known.lost_lookups == 0
        assert known.sample(4, 100, random.Random(1), lost=True) == []

    def test_what_was_lost_can_be_looked_for(self) -> None:
        known = known_keys()
        known.learn(["a", "b"], [7, 7])
        known.found_none(["a"])
        assert known.sample(4, 100, random.Random(1), lost=True) == [("a", 7)]
        assert known.sample(4, 100, random.Random(1)) == [("b", 7)]

    def test_what_is_deleted_is_not_lost(self) -> None:
        known = known_keys()
        known.learn(["a"], [1])
        known.forget(["a"])
        known.found_none(["a"])
        assert known.lost_lookups == 0

    def test_no_more_are_kept_than_a_probe_could_want(self) -> None:
        known = known_keys()
        for n in range(3 * MAX_LOST):
            known.learn([f"k{n}"], [1])
            known.found_none([f"k{n}"])
        assert len(known.sample(1000, 10**6, random.Random(1), lost=True)) == MAX_LOST


class TestDoubt:
    """Another adapter serves: the store may be another one too."""

    def test_no_store_is_spared_but_a_probe_can_look_and_sizes_are_kept(self) -> None:
        known = known_keys()
        known.learn(["a", "b"], [7, 7])
        known.doubt()
        assert not known.knows_all(["a"])
        assert len(known) == 0
        assert known.sizes(["a", "c"]) == [7, None]
        assert sorted(known.sample(4, 100, random.Random(1))) == [("a", 7), ("b", 7)]

    def test_what_is_seen_again_is_known_again_and_what_is_missed_is_not_lost(self) -> None:
        known = known_keys()
        known.learn(["a", "b"], [7, 7])
        known.doubt()
        known.learn(["a"], [8])
        known.found_none(["b"])
        assert known.knows_all(["a"])
        assert known.lost_lookups == 0
        assert known.sizes(["a", "b"]) == [8, None]

    def test_it_ends_the_row_and_stays_bounded(self) -> None:
        known = known_keys(capacity=20)
        known.learn(["x"], [1])
        known.found_none(["x"])
        for round in range(5):
            known.learn([f"k{round}-{n}" for n in range(10)], [1] * 10)
            known.doubt()
        assert known.lost_lookups == 0
        assert len(known._doubted) <= 20
        assert known.sizes(["k4-0", "k0-0"]) == [1, None]


def test_the_longest_unseen_go_first() -> None:
    known = known_keys(capacity=20)
    for n in range(10):
        known.learn([f"old{n}"], [1])
    for n in range(40):
        known.learn(["old0"], [1])
        known.learn([f"new{n}"], [1])
    assert known.knows_all(["old0", "new39"])
    assert not known.knows_all(["old1"])
    assert len(known) <= 20


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 60), max_size=30, unique=True)),
        max_size=60,
    )
)
def test_never_more_than_the_capacity_and_never_what_was_forgotten(
    steps: list[tuple[bool, list[int]]],
) -> None:
    known: KnownKeys[int] = KnownKeys(capacity=16)
    model: dict[int, int] = {}
    for step, (learn, keys) in enumerate(steps):
        if learn:
            known.learn(keys, [step] * len(keys))
            model.update(dict.fromkeys(keys, step))
        else:
            known.forget(keys)
            for key in keys:
                model.pop(key, None)
        assert len(known) <= 16
        for key in range(61):
            size = known.sizes([key])[0]
            assert size is None or model.get(key) == size
            assert known.knows_all([key]) == (size is not None)


def test_somebody_is_told_of_a_backlog_and_none_grows_without_bound() -> None:
    told: list[int] = []
    known: KnownKeys[int] = KnownKeys(on_backlog=lambda: told.append(1))
    for n in range(BACKLOG - 1):
        known.learn([n], [1])
    assert not told
    known.learn([99], [1])
    assert told
    for n in range(3 * MAX_BACKLOG):
        known.learn([n], [1])
        assert len(known._notes) <= MAX_BACKLOG
    known.settle()
    assert not known._notes


def test_keys_are_found_by_their_identity() -> None:
    class Odd:
        def __init__(self, name: str) -> None:
            self.name = name

    def names(keys: Sequence[Odd]) -> list[str]:
        return [key.name for key in keys]

    known: KnownKeys[Odd] = KnownKeys(names)
    first = Odd("a")
    known.learn([first], [5])
    assert known.knows_all([Odd("a")])
    assert known.sample(1, 100, random.Random(1)) == [(first, 5)]


class TestSample:
    def test_all_of_the_size_that_holds_most(self) -> None:
        known = known_keys()
        known.learn(["x"], [7])
        known.learn(list("abcdef"), [10] * 6)
        picked = known.sample(4, 1000, random.Random(1))
        assert len(picked) == 4
        assert {size for _, size in picked} == {10}
        assert len({key for key, _ in picked}) == 4

    def test_many_small_ones_do_not_outvote_what_holds_most_bytes(self) -> None:
        known = known_keys()
        known.learn(list("abcdefgh"), [1] * 8)
        known.learn(["x", "y"], [6, 6])
        assert {size for _, size in known.sample(4, 1000, random.Random(1))} == {6}
        assert {size for _, size in known.sample(4, 5, random.Random(1))} == {1}

    def test_within_the_budget(self) -> None:
        known = known_keys()
        known.learn(list("abcdef"), [10] * 6)
        assert len(known.sample(6, 35, random.Random(1))) == 3
        assert known.sample(6, 9, random.Random(1)) == []

    def test_no_more_than_there_are(self) -> None:
        known = known_keys()
        assert known.sample(4, 100, random.Random(1)) == []
        known.learn(["a"], [1])
        assert len(known.sample(4, 100, random.Random(1))) == 1

    def test_over_both_generations(self) -> None:
        known: KnownKeys[int] = KnownKeys(capacity=40)
        for n in range(40):
            known.learn([n], [1])
        kept = len(known)
        assert len(known.sample(40, 1000, random.Random(1))) == kept > 20 - 1
