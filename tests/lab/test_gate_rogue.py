"""What anyone may send to the gate of a real `lmcache server`: nothing of it changes anything,
each gets its reason. ROGUES=10000 sends as many; the seed is fixed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from .gate_host import CacheServer
from .gate_stores import Redis, resp
from .processes import LabError, Run

ROGUES = int(os.environ.get("ROGUES") or 2000)
TOKEN = "correct horse battery staple"
LOOK_EVERY = 250
LONGEST_ANSWER = 2000
MEGABYTE = 1_000_000


class Rogue(NamedTuple):
    """One request: what it is called, where it goes, its body, and the statuses it may get."""

    kind: str
    operation: str
    body: bytes
    statuses: frozenset[int]


WRONG_VALUES: dict[str, list[Any]] = {
    "share": [float("nan"), float("inf"), -0.1, 1.1, True, None, "0", [], {}, 10**400],
    "min_chunks": [float("nan"), -1, 1.5, True, "3", 10**30, [1]],
    "writes": [0, 1, "true", None, float("nan")],
    "lookup_deadline_s": [0, -1, float("nan"), float("inf"), True, "1"],
    "load_deadline_s": [0, -5.0, float("-inf"), False, {}],
    "max_loads": [0, -1, 4097, 2.5, True, "5", None],
    "lease_s": [0, -1, 1e9, float("nan"), True, "30", None],
    "holder": ["", "me", "kvguard:", "person:", "person:\x07", 5, None, ["person:a"]],
    "reason": ["x" * 129, "line\nline", 7, None, {"a": 1}],
    "if_revision": [-1, 1.5, "7", True, None, float("nan")],
}
WRONG_TOKENS: list[Any] = ["", "wrong", TOKEN + "x", TOKEN[:-1], 5, None, True, [TOKEN], "\ud800"]
NO_JSON = [b"", b"not json", b'{"share": 0', b"[]", b"null", b'"bypass"', b"\xff\xfe", b"{" * 500]
BAD = frozenset({400})


def rogues(random: Random, revision: int) -> Iterator[Rogue]:
    """Without end; none is right for a gate at `revision` that wants TOKEN."""
    makers = (_wrong_value, _stale, _wrong_token, _no_json, _unknown_key, _elsewhere, _huge)
    # A megabyte a request is slow to send, so it is seldom.
    weights = (40, 15, 20, 8, 6, 10, 1)
    while True:
        (maker,) = random.choices(makers, weights)
        yield maker(random, revision)


def _right(random: Random) -> dict[str, Any]:
    return {"adapter_index": 0, "token": TOKEN, "share": random.random(), "holder": "person:eve"}


def _body(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _wrong_value(random: Random, _: int) -> Rogue:
    key = random.choice(list(WRONG_VALUES))
    fields = _right(random) | {key: random.choice(WRONG_VALUES[key])}
    return Rogue(f"wrong {key}", "admission", _body(fields), BAD)


def _stale(random: Random, revision: int) -> Rogue:
    other = random.choice([0, revision - 1, revision + 1, revision + 7, 2**63, 2**64, 10**400])
    fields = {**_right(random), "if_revision": other}
    operation = random.choice(["admission", "bypass", "restore", "abort", "rebuild"])
    if operation != "admission":
        del fields["share"]
    if operation in ("abort", "rebuild"):
        fields["reason"] = "rogue"
    return Rogue("stale", operation, _body(fields), frozenset({409}))


def _wrong_token(random: Random, _: int) -> Rogue:
    fields = _right(random)
    if random.random() < 0.3:
        del fields["token"]
    else:
        fields["token"] = random.choice(WRONG_TOKENS)
    operation = random.choice(["admission", "bypass", "restore", "probe", "abort", "rebuild"])
    return Rogue("wrong token", operation, _body(fields), frozenset({403}))


def _no_json(random: Random, _: int) -> Rogue:
    return Rogue("no JSON", "admission", random.choice(NO_JSON), frozenset({400, 403, 422}))


def _unknown_key(random: Random, _: int) -> Rogue:
    name = "".join(random.choices("abcdefgh_", k=random.randint(1, 200)))
    fields = {**_right(random), f"x{name}": random.choice([1, None, "a", [1], {}])}
    return Rogue("unknown key", "admission", _body(fields), BAD)


def _elsewhere(random: Random, _: int) -> Rogue:
    if random.random() < 0.5:
        index = random.choice([1, 7, -1, 10**6])
        return Rogue(
            "no such adapter",
            "admission",
            _body(_right(random) | {"adapter_index": index}),
            frozenset({400, 404, 422}),
        )
    fields = {"adapter_index": 0, "token": TOKEN}
    name = random.choice(["explode", "flush", "ADMISSION2", "close", "x" * 300])
    return Rogue("unknown operation", name, _body(fields), BAD)


def _huge(random: Random, _: int) -> Rogue:
    key = random.choice(["holder", "reason", "token", "share", "unknown"])
    fields = _right(random) | {key: "x" * MEGABYTE}
    statuses = frozenset({403}) if key == "token" else BAD
    return Rogue(f"a megabyte of {key}", "admission", _body(fields), statuses)


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    with Run() as run:
        yield Redis(run).start()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


def test_nothing_rogue_changes_anything_and_each_gets_its_reason(
    redis: Redis, token_file: Path
) -> None:
    params = {"admission_token_file": str(token_file)}
    with CacheServer(resp(redis.port), params=params) as server:
        before = server.gate("admission", share=0.75, holder="person:ana", token=TOKEN)
        kept = {key: before[key] for key in ("epoch", "revision", "admission", "default")}
        seen: Counter[tuple[str, int]] = Counter()
        requests = rogues(Random(4), before["revision"])
        for number in range(1, ROGUES + 1):
            rogue = next(requests)
            path = f"/reconfigure/plugin/l2/{rogue.operation}"
            code, answer = server.post(path, rogue.body)
            seen[rogue.kind, code] += 1
            assert code in rogue.statuses, (rogue.kind, rogue.body[:200], code, answer)
            assert isinstance(answer, dict), (rogue.kind, answer)
            assert answer.get("error") or answer.get("detail"), (rogue.kind, answer)
            if code != 409:  # it has the whole state
                assert len(str(answer)) < LONGEST_ANSWER, (rogue.kind, str(answer)[:300])
            if number % LOOK_EVERY == 0 or number == ROGUES:
                now = server.status()
                assert {key: now[key] for key in kept} == kept
                assert now["lease"]["holder"] == "person:ana"
        print("\n".join(f"{n:6} {kind}: {code}" for (kind, code), n in sorted(seen.items())))
        assert server.get("/healthcheck")[0] == 200
        assert server.metrics()["kvguard_gate_faults_total"] == 0
        after = server.gate("admission", share=1.0, if_revision=before["revision"], token=TOKEN)
        assert after["revision"] == before["revision"] + 1


def test_the_token_can_be_exchanged_and_without_it_nobody_is_let_in(
    redis: Redis, token_file: Path
) -> None:
    params = {"admission_token_file": str(token_file)}
    with CacheServer(resp(redis.port), params=params) as server:
        server.gate("bypass", token=TOKEN)
        token_file.write_text("another")
        code, answer = server.operate("restore", token=TOKEN)
        assert (code, answer["error"]) == (403, "the token is not the one that this gate wants")
        server.gate("restore", token="another")
        token_file.unlink()
        code, answer = server.operate("bypass", token="another")
        assert code == 403
        assert "cannot be read" in answer["error"]
        assert server.status()["admission"]["share"] == 1


def test_a_server_whose_token_file_is_not_there_does_not_start(
    redis: Redis, tmp_path: Path
) -> None:
    params = {"admission_token_file": str(tmp_path / "none")}
    with (
        pytest.raises(LabError, match=r"admission_token_file: .* cannot be read"),
        CacheServer(resp(redis.port), params=params),
    ):
        pass
