"""What is asked of an abort or a rebuild, and what is told of the last one."""

from __future__ import annotations

import pytest

from guard.gate.rebuild_state import (
    ASKED_CAUSES,
    CAUSES,
    Ended,
    RebuildRefused,
    RebuildRequest,
    RebuildState,
)
from guard.gate.validate import InvalidWrite


def test_an_abort_has_a_pace_and_a_rebuild_a_cause() -> None:
    abort = RebuildRequest.parse(
        "abort",
        {
            "holder": "kvguard:a",
            "reason": "frozen",
            "if_revision": 3,
            "release_bytes_per_s": 4e7,
            "release_within_s": 5,
        },
    )
    assert abort == RebuildRequest("abort", "abort", "kvguard:a", "frozen", 4e7, 5.0, 3)
    assert RebuildRequest.parse("abort", {}).release_bytes_per_s is None
    assert RebuildRequest.parse("rebuild", {}).cause == "manual"
    for cause in ASKED_CAUSES:
        assert RebuildRequest.parse("rebuild", {"cause": cause}).cause == cause


@pytest.mark.parametrize(
    ("operation", "payload", "key"),
    [
        ("abort", {"release_bytes_per_s": 0}, "release_bytes_per_s"),
        ("abort", {"release_bytes_per_s": float("nan")}, "release_bytes_per_s"),
        ("abort", {"release_bytes_per_s": True}, "release_bytes_per_s"),
        ("abort", {"release_within_s": -1}, "release_within_s"),
        ("abort", {"release_within_s": None}, "release_within_s"),
        ("abort", {"cause": "abort"}, "cause"),
        ("rebuild", {"cause": "reattach"}, "cause"),
        ("rebuild", {"cause": ["manual"]}, "cause"),
        ("rebuild", {"release_within_s": 1}, "release_within_s"),
        ("rebuild", {"reason": "a\nb"}, "reason"),
        ("rebuild", {"if_revision": -1}, "if_revision"),
    ],
)
def test_wrong_input_names_the_key(operation: str, payload: dict[str, object], key: str) -> None:
    with pytest.raises(InvalidWrite) as caught:
        RebuildRequest.parse(operation, payload)
    assert key in str(caught.value)


def test_one_at_a_time_the_last_result_and_the_counts() -> None:
    now = [10.0]
    state = RebuildState(clock=lambda: now[0])
    request = RebuildRequest("abort", "abort")
    assert state.as_dict() == {"running": False, "last": None}
    assert state.begin() == 1
    assert state.running
    with pytest.raises(RebuildRefused):
        state.begin()
    now[0] = 10.5
    state.end(request, Ended("done", None, 8, 3, 1, False))
    now[0] = 12.0
    assert state.as_dict() == {
        "running": False,
        "last": {
            "id": 1,
            "operation": "abort",
            "cause": "abort",
            "outcome": "done",
            "error": None,
            "ended_loads": 8,
            "ended_lookups": 3,
            "ended_stores": 1,
            "parked": False,
            "seconds": 0.5,
            "age_s": 1.5,
        },
    }
    assert state.counts() == {"abort": 1}


def test_what_changed_nothing_is_not_counted() -> None:
    state = RebuildState(clock=lambda: 0.0)
    for outcome in ("failed", "detached", "done"):
        state.begin()
        state.end(RebuildRequest("rebuild", "manual"), Ended(outcome))
    assert state.counts() == {"manual": 2}
    assert set(ASKED_CAUSES) < set(CAUSES)
