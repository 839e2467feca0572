"""Admission: shares, leases, compare-and-set, and what input is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.gate.admission import (
    GUARD_LEASE_S,
    PERSON_LEASE_S,
    Admission,
    Settings,
    StaleRevision,
)
from guard.gate.validate import InvalidWrite


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def make(default: Settings | None = None) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(default, clock=clock), clock


class TestDenying:
    def test_all_is_let_in_unless_somebody_wrote(self) -> None:
        admission, _ = make()
        assert admission.deny(1) is None
        assert admission.state().lease is None
        assert admission.expires_at() is None

    def test_a_bypass_denies_everything(self) -> None:
        admission, _ = make()
        admission.bypass({})
        assert admission.deny(1) == admission.deny(1024) == "bypassed"

    def test_a_minimum_denies_what_is_shorter(self) -> None:
        admission, _ = make()
        admission.write({"min_chunks": 8})
        assert admission.deny(7) == "short"
        assert admission.deny(8) is None

    @given(st.floats(0.001, 0.999), st.integers(1, 500))
    def test_a_share_of_any_n_in_a_row_is_exact_to_one(self, share: float, n: int) -> None:
        admission, _ = make()
        admission.write({"share": share})
        denied = [admission.deny(4) for _ in range(n)]
        assert set(denied) <= {None, "shed"}
        let_in = [answer is None for answer in denied]
        for begin in (0, n // 3, n // 2):
            count = sum(let_in[begin:])
            assert abs(count - share * (n - begin)) <= 1 + 1e-6

    def test_a_share_does_not_depend_on_the_length_asked(self) -> None:
        admission, _ = make()
        admission.write({"share": 0.5, "min_chunks": 4})
        # Short ones are denied for what they are and take no part in the share.
        answers = [admission.deny(chunks) for chunks in (1, 8, 1, 8, 1, 8, 1, 8)]
        assert answers.count("short") == 4
        assert answers.count(None) == 2


class TestLease:
    @pytest.mark.parametrize(
        ("payload", "seconds"),
        [
            ({"holder": "kvguard:a"}, GUARD_LEASE_S),
            ({"holder": "person:ana"}, PERSON_LEASE_S),
            ({}, PERSON_LEASE_S),
            ({"holder": "kvguard:a", "lease_s": 7}, 7),
        ],
    )
    def test_its_length(self, payload: dict[str, Any], seconds: float) -> None:
        admission, clock = make()
        admission.write({"share": 0.0, **payload})
        state = admission.state()
        assert state.lease is not None
        assert state.lease.seconds == state.expires_in_s == seconds
        clock.now += seconds - 0.001
        assert admission.deny(1) == "bypassed"
        clock.now += 0.001
        assert admission.deny(1) is None

    def test_at_its_end_the_configured_default_holds_and_the_revision_says_so(self) -> None:
        default = Settings(share=0.5, min_chunks=2, writes=False, max_loads=3)
        admission, clock = make(default)
        admission.write({"share": 0.0, "max_loads": 9, "writes": True, "lease_s": 10})
        revision = admission.state().revision
        clock.now += 10
        state = admission.state()
        assert state.settings == default
        assert (state.lease, state.expires_in_s, state.revision) == (None, None, revision + 1)
        clock.now += 1000
        assert admission.state().revision == revision + 1

    def test_reading_the_settings_is_enough_to_end_it(self) -> None:
        admission, clock = make()
        admission.write({"max_loads": 1, "lease_s": 5})
        assert admission.settings.max_loads == 1
        clock.now += 5
        assert admission.settings.max_loads == 5
        assert admission.expires_at() is None

    def test_a_renewal_extends_it_and_is_a_revision(self) -> None:
        admission, clock = make()
        admission.write({"share": 0.0, "holder": "kvguard:a"})
        revision = admission.state().revision
        clock.now += 20
        admission.write({"holder": "kvguard:a"})
        clock.now += 20
        state = admission.state()
        assert state.settings.share == 0
        assert state.expires_in_s == 10
        assert state.revision == revision + 1

    def test_a_write_after_its_end_starts_from_the_default(self) -> None:
        admission, clock = make()
        admission.write({"share": 0.0, "min_chunks": 9, "lease_s": 5})
        clock.now += 6
        admission.write({"max_loads": 7})
        settings = admission.settings
        assert (settings.share, settings.min_chunks, settings.max_loads) == (1.0, 0, 7)


class TestWriting:
    def test_keys_left_out_keep_their_value(self) -> None:
        admission, _ = make()
        admission.write({"share": 0.25, "lookup_deadline_s": 2})
        admission.write({"min_chunks": 4, "lookup_deadline_s": None})
        settings = admission.settings
        assert (settings.share, settings.min_chunks) == (0.25, 4)
        assert settings.lookup_deadline_s is None

    def test_bypass_and_restore_are_a_persons_short_forms(self) -> None:
        admission, _ = make()
        admission.write({"share": 0.3, "min_chunks": 8, "writes": False, "max_loads": 2})
        admission.bypass({"holder": "person:ana", "reason": "too slow"})
        state = admission.state()
        assert state.settings == Settings(share=0, min_chunks=8, writes=False, max_loads=2)
        assert state.lease is not None
        assert (state.lease.holder, state.lease.reason) == ("person:ana", "too slow")
        admission.restore({})
        state = admission.state()
        assert state.settings == Settings(max_loads=2)
        assert state.lease is not None
        assert state.lease.holder == "person:unnamed"

    def test_a_stale_revision_changes_nothing(self) -> None:
        admission, clock = make()
        before = admission.state()
        for revision in (before.revision - 1, before.revision + 1, 10**40):
            with pytest.raises(StaleRevision, match="if_revision"):
                admission.write({"share": 0.0, "if_revision": revision})
        assert admission.state() == before
        admission.write({"share": 0.0, "if_revision": before.revision, "lease_s": 5})
        current = admission.state().revision
        clock.now += 5
        with pytest.raises(StaleRevision):  # the lease's end came in between
            admission.bypass({"if_revision": current})

    def test_epochs_differ(self) -> None:
        epochs = {make()[0].state().epoch for _ in range(20)}
        assert len(epochs) == 20
        assert all(len(epoch) == 16 and int(epoch, 16) >= 0 for epoch in epochs)

    def test_the_state_as_json_has_it(self) -> None:
        clock = Clock()
        admission = Admission(clock=clock, epoch="00000000000000ff")
        admission.write({"share": 0.5, "holder": "kvguard:g", "reason": "ρ 1.2"})
        clock.now += 10
        settings = {
            "share": 1.0,
            "min_chunks": 0,
            "writes": True,
            "lookup_deadline_s": None,
            "load_deadline_s": None,
            "max_loads": 5,
        }
        assert admission.state().as_dict() == {
            "epoch": "00000000000000ff",
            "revision": 2,
            "admission": {**settings, "share": 0.5},
            "default": settings,
            "lease": {
                "holder": "kvguard:g",
                "reason": "ρ 1.2",
                "lease_s": 30.0,
                "expires_in_s": 20.0,
            },
        }


NUMBERS = {
    "share": (0, 1),
    "min_chunks": (0, 1_048_576),
    "max_loads": (1, 4096),
    "lookup_deadline_s": (0, 86_400),
    "load_deadline_s": (0, 86_400),
    "lease_s": (0, 86_400),
}
odd = st.one_of(
    st.booleans(),
    st.text(max_size=300),
    st.just(float("nan")),
    st.just(float("inf")),
    st.just(-float("inf")),
    st.just(10**400),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.binary(max_size=4),
)


class TestInput:
    @given(st.sampled_from(sorted(NUMBERS)), odd)
    def test_what_is_no_number_in_range_is_refused_by_name(self, key: str, value: Any) -> None:
        admission, _ = make()
        before = admission.state()
        with pytest.raises(InvalidWrite, match=rf"^{key} must be") as caught:
            admission.write({key: value})
        low, high = NUMBERS[key]
        assert str(low) in str(caught.value)
        assert f"{high:g}" in str(caught.value) or str(high) in str(caught.value)
        assert len(str(caught.value)) < 250
        assert admission.state() == before

    @given(st.sampled_from(sorted(NUMBERS)), st.floats(allow_nan=False, allow_infinity=False))
    def test_numbers_are_taken_exactly_in_their_range(self, key: str, value: float) -> None:
        low, high = NUMBERS[key]
        whole = key in ("min_chunks", "max_loads")
        sent: float = int(value) if whole else value
        over = key.endswith("_s")
        good = (low < sent <= high) if over else (low <= sent <= high)
        admission, _ = make()
        if good:
            admission.write({key: sent})
        else:
            with pytest.raises(InvalidWrite):
                admission.write({key: sent})

    @pytest.mark.parametrize("key", ["min_chunks", "max_loads", "if_revision"])
    def test_a_whole_number_is_no_float(self, key: str) -> None:
        with pytest.raises(InvalidWrite, match=f"^{key} must be a whole number"):
            make()[0].write({key: 4.0})

    @pytest.mark.parametrize(
        ("payload", "says"),
        [
            ({"writes": 0}, "^writes must be true or false"),
            ({"writes": "false"}, "^writes must be true or false"),
            ({"share": None}, "^share must be a number"),
            ({"lease_s": None}, "^lease_s must be a number"),
            ({"if_revision": None}, "^if_revision must be"),
            ({"if_revision": -1}, "^if_revision must be"),
            ({"holder": ""}, "^holder must be"),
            ({"holder": "kvguard:"}, "^holder must be"),
            ({"holder": "root"}, "^holder must be"),
            ({"holder": None}, "^holder must be"),
            ({"holder": "person:" + "x" * 122}, "^holder must be"),
            ({"holder": "person:a\x00"}, "^holder must be"),
            ({"reason": "a\nb"}, "^reason must be"),
            ({"reason": "x" * 129}, "^reason must be"),
            ({"reason": 5}, "^reason must be"),
            ({"adapter": 0}, "^unknown key 'adapter'; known are .*share"),
            ({"Share": 0}, "^unknown key 'Share'"),
            ({"x" * 1_000_000: 0}, "^unknown key 'x+'… .1000000 characters."),
        ],
    )
    def test_refusals_name_key_and_range(self, payload: dict[str, Any], says: str) -> None:
        admission, _ = make()
        before = admission.state()
        with pytest.raises(InvalidWrite, match=says) as caught:
            admission.write(payload)
        assert caught.value.status == 400
        assert len(str(caught.value)) < 300
        assert admission.state() == before

    @pytest.mark.parametrize("operation", ["bypass", "restore"])
    def test_the_short_forms_take_no_admission(self, operation: str) -> None:
        admission, _ = make()
        with pytest.raises(InvalidWrite, match=r"^unknown key 'share'"):
            getattr(admission, operation)({"share": 0.5})

    def test_128_printable_characters_are_enough(self) -> None:
        admission, _ = make()
        admission.write({"holder": "person:" + "ü" * 121, "reason": "→" * 128})
        lease = admission.state().lease
        assert lease is not None
        assert (len(lease.holder), len(lease.reason)) == (128, 128)

    @given(
        st.dictionaries(
            st.sampled_from(
                [*NUMBERS, "writes", "holder", "reason", "if_revision", "token", "inner"]
            ),
            st.one_of(odd, st.integers(), st.floats(), st.none()),
        )
    )
    def test_whatever_is_sent_is_taken_whole_or_not_at_all(self, payload: dict[str, Any]) -> None:
        admission, _ = make()
        before = admission.state()
        try:
            admission.write(payload)
        except (InvalidWrite, StaleRevision):
            assert admission.state() == before
            return
        state = admission.state()
        assert state.revision == before.revision + 1
        assert 0 <= state.settings.share <= 1
        assert 1 <= state.settings.max_loads <= 4096
        assert state.lease is not None
        assert 0 < state.lease.seconds <= 86_400
        assert math.isfinite(state.expires_in_s or 0)
