"""What the table and the checks make of what was seen."""

from __future__ import annotations

from typing import Any

from ..load import Load, Request
from ..watch import Look
from .judge import judge_failed, judge_kv, judge_service, judge_told, told
from .kit import FAULTS, Fault, by_name
from .lookout import GateLook, Lookout
from .outcome import Outcome, as_markdown, as_page, deeds
from .witness import Reply, Witness


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


def judge(outcome: Outcome, requests: list[Request], over: float = 40.0) -> None:
    judge_service(outcome, FixedLoad(requests), 0.0, (10.0, over), over, 1.0)


def failed(outcome: Outcome) -> list[str]:
    return [check.what for check in outcome.failures]


def outcome_of(name: str = "freeze") -> Outcome:
    return Outcome(by_name(name), 1, recompute_p50=2.0)


def test_a_request_without_an_answer_counts_with_what_it_waited() -> None:
    served, hung = outcome_of(), outcome_of()
    judge(served, [request(t, 2.0) for t in range(0, 30, 2)])
    judge(hung, [request(t, None) for t in (11.0, 12.0)])
    assert failed(served) == []
    assert served.ratio == 1.0
    assert hung.ratio == 14.25
    assert len(failed(hung)) == 1


def test_what_began_in_the_first_seconds_does_not_count_for_the_median_but_for_the_worst() -> None:
    outcome = outcome_of()
    judge(outcome, [request(-1.0, 9.0), request(1.0, 20.0), request(12.0, 1.0)])
    assert outcome.ratio == 0.5
    assert outcome.worst_s == 20.0


def test_no_request_at_all_is_no_service() -> None:
    outcome = outcome_of()
    judge(outcome, [])
    assert len(failed(outcome)) == 1


def test_a_failed_request_fails_the_fault() -> None:
    outcome = outcome_of()
    judge_failed(outcome, FixedLoad([request(12.0, 1.0), request(13.0, 1.0, "gone")]))
    assert failed(outcome) == ["no request failed"]


class FixedWitness(Witness):
    """A witness that has said this."""

    def __init__(self, *intact: bool | None) -> None:
        self.said = [Reply(1.0, 1, 4, each, True) for each in intact]
        self.broken = None


def test_wrong_kv_and_kv_that_nobody_saw_fail() -> None:
    for before, said, after, right in (
        ("right", (True, None), "right", True),
        ("right", (), "not asked", True),
        ("right", (True, False), "right", False),
        ("right", (True,), "not loaded", False),
        ("WRONG", (True,), "right", False),
    ):
        outcome = outcome_of()
        judge_kv(outcome, FixedWitness(*said), before, after, 0.0)
        assert (failed(outcome) == []) is right, (before, said, after)


def test_the_gates_shares_over_time() -> None:
    lookout = Lookout.__new__(Lookout)
    shares = (1, 1, 0, 0, 0.5, 1, 1)
    lookout.gate = [
        GateLook(float(at), {"admission": {"share": share}}) for at, share in enumerate(shares)
    ]
    assert lookout.first_share(0, 9, lambda share: share == 0) == 2
    assert lookout.whole_again(0, 9) == 5
    assert lookout.whole_again(0, 1.5) is None
    assert lookout.whole_again(0, 4.5) is None
    assert lookout.share_at(1.5) == 0
    assert lookout.share_at(5.5) == 1
    assert lookout.share_at(6.5) is None


def test_a_load_is_told_by_its_bytes_and_its_time() -> None:
    lookout = Lookout.__new__(Lookout)
    lookout.gate = [
        GateLook(20.0, {"recent_loads": [{"end_ago_s": 5.0, "bytes": 100}]}),
        GateLook(21.0, {"recent_loads": [{"end_ago_s": 6.0, "bytes": 100}]}),
    ]
    assert lookout.loaded(14.0, 16.0, 100)
    assert not lookout.loaded(14.0, 16.0, 101)
    assert not lookout.loaded(10.0, 14.0, 100)
    assert not lookout.loaded(16.0, 30.0, 100)


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
    assert as_page([good, bad], 1.0).endswith(text)
    assert "| freeze 1 |" in text
    assert "| drop 1 |" in text
    assert text.count("**FAILED**") == 1
    assert "**drop 1: KV is right**" in text


def test_every_fault_has_its_own_name_and_words() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(isinstance(fault, Fault) and fault.what for fault in FAULTS)
