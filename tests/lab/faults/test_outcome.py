"""What the table and the checks make of what was seen."""

from __future__ import annotations

from typing import Any

from ..load import Load, Request
from ..watch import Look
from .judge import judge_requests, judge_told, told
from .kit import FAULTS, Fault, by_name
from .outcome import Outcome, as_markdown, deeds


class FixedLoad(Load):
    """A load that has had these requests."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__("http://127.0.0.1:1", "tiny")
        self._requests = requests


def request(start: float, ttft: float | None, error: str | None = None) -> Request:
    first = None if ttft is None else start + ttft
    return Request(0, 0, 100, start, first_token=first, end=first, error=error)


def look(healing: dict[str, Any] | None) -> Look:
    return Look(1.0, "bypassed", None, 0.0, {"healing": healing})


def failed(outcome: Outcome) -> list[str]:
    return [check.what for check in outcome.failures]


def outcome_of(name: str = "freeze") -> Outcome:
    return Outcome(by_name(name), 1, recompute_p50=2.0)


def test_a_request_without_an_answer_counts_with_what_it_waited() -> None:
    served, hung = outcome_of(), outcome_of()
    judge_requests(served, FixedLoad([request(t, 2.0) for t in range(0, 30, 2)]), 0.0, 40.0, 1.0)
    judge_requests(hung, FixedLoad([request(t, None) for t in (11.0, 12.0)]), 0.0, 40.0, 1.0)
    assert failed(served) == []
    assert served.ratio == 1.0
    assert hung.ratio == 14.25
    assert len(failed(hung)) == 1


def test_what_began_in_the_first_seconds_does_not_count_for_the_median_but_for_the_worst() -> None:
    outcome = outcome_of()
    load = FixedLoad([request(-1.0, 9.0), request(1.0, 20.0), request(12.0, 1.0)])
    judge_requests(outcome, load, 0.0, 30.0, 1.0)
    assert outcome.ratio == 0.5
    assert outcome.worst_s == 20.0


def test_no_request_at_all_is_no_service() -> None:
    outcome = outcome_of()
    judge_requests(outcome, FixedLoad([]), 0.0, 30.0, 1.0)
    assert len(failed(outcome)) == 1


def test_a_failed_request_fails_the_fault() -> None:
    outcome = outcome_of()
    judge_requests(
        outcome, FixedLoad([request(12.0, 1.0), request(13.0, 1.0, "gone")]), 0.0, 30.0, 1.0
    )
    assert failed(outcome) == ["no request failed"]


def test_back_in_time_or_a_page() -> None:
    incurable = look({"ailment": "load_hung", "words": "hm", "incurable": "restart it"})
    for back, looks, right in (
        (10.0, [], True),
        (61.0, [], False),
        (None, [look(None)], False),
        (None, [look({"ailment": "detached", "words": "tries", "incurable": None})], False),
        (None, [incurable], True),
    ):
        outcome = outcome_of()
        outcome.back_after_s = back
        judge_told(outcome, looks, 1.0)
        assert (failed(outcome) == []) is right, (back, looks)


def test_what_only_a_person_can_end_must_be_told() -> None:
    silent, loud = outcome_of("wrong_password"), outcome_of("wrong_password")
    for outcome, words in ((silent, "no connection"), (loud, "the store says NOAUTH")):
        outcome.back_after_s = 1.0
        judge_told(outcome, [look({"ailment": "store_refuses", "words": words})], 1.0)
    assert len(failed(silent)) == 1
    assert failed(loud) == []
    assert told({"healing": None}) == told({}) == ""


def test_the_journal_is_told_in_few_words() -> None:
    lines = [
        {"at": 9.0, "kind": "decision", "action": "bypass", "cause": "slow"},
        {"at": 11.5, "kind": "decision", "action": "bypass", "cause": "frozen"},
        {"at": 12.0, "kind": "decision", "action": "hold", "cause": "frozen"},
        {"at": 13.0, "kind": "source", "source": "engine", "up": False},
        {"at": 14.0, "kind": "healing", "ailment": "load_hung", "action": "rebuild"},
        {"at": 15.0, "kind": "healing", "ailment": "load_hung", "action": "rebuild"},
    ]
    assert deeds(lines, 10.0) == [
        (1.5, "bypass frozen"),
        (4.0, "healing load_hung rebuild ×2"),
    ]


def test_the_table_has_a_row_for_each_and_names_what_failed() -> None:
    good, bad = outcome_of(), outcome_of("drop")
    bad.check("KV is right", "WRONG", "right", False)
    text = as_markdown([good, bad], 1.0)
    assert "| freeze 1 |" in text
    assert "| drop 1 |" in text
    assert text.count("**FAILED**") == 1
    assert "**drop 1: KV is right**" in text


def test_every_fault_has_its_own_name_and_words() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(isinstance(fault, Fault) and fault.what for fault in FAULTS)
