"""The gate in a real `lmcache server`, driven by LMCache's own client.

On the LMCache of the lab and on the newest pre-release unpacked beside it, over `resp` and
over `fs`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .gate_host import CHECKOUT, CHUNK_BYTES, NEWEST, CacheServer, environment
from .gate_stores import Redis, Throttled, resp
from .processes import LabError, Run

VERSIONS: dict[str, Path | None] = {"installed": None, "newest": NEWEST}
RANKS = {"resp": 1, "fs": 2}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with Run() as made:
        yield made


@pytest.fixture(scope="module")
def redis(run: Run) -> Redis:
    return Redis(run).start()


@pytest.fixture(
    scope="module",
    params=[(version, store) for version in VERSIONS for store in ("resp", "fs")],
    ids=lambda param: "-".join(param),
)
def server(
    request: pytest.FixtureRequest, redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CacheServer]:
    version, store = request.param
    redis.says(b"FLUSHALL")
    folder = tmp_path_factory.mktemp("l2")
    inner = resp(redis.port) if store == "resp" else {"type": "fs", "base_path": str(folder)}
    with CacheServer(inner, lmcache=available(version), tp_size=RANKS[store]) as made:
        yield made


def available(version: str) -> Path | None:
    path = VERSIONS[version]
    if path is not None and not path.is_dir():
        pytest.skip(f"no LMCache pre-release is unpacked in {path}")
    return path


def eventually(condition: Callable[[], Any], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def warm(server: CacheServer, seq: int, chunks: int) -> None:
    """The prefix is in L2 and the gate knows it."""
    known = server.status()["known_keys"]
    assert server.client.request(seq, chunks) == 0
    ranks = RANKS[server.status()["inner"]]
    eventually(lambda: server.status()["known_keys"] >= known + chunks * ranks)


def test_hit_bypass_miss_restore_hit(server: CacheServer) -> None:
    warm(server, seq=1, chunks=4)
    assert server.client.request(1, 4) == 4
    answer = server.gate("bypass", holder="person:ana", reason="trying")
    assert answer["admission"]["share"] == 0
    assert answer["adapter_index"] == 0
    assert server.client.request(1, 4) == 0
    assert server.status()["lease"]["holder"] == "person:ana"
    assert server.gate("restore")["admission"]["share"] == 1
    assert server.client.request(1, 4) == 4


def test_the_ledger_equals_the_clients_own_account(server: CacheServer) -> None:
    lengths = [1, 2, 3, 5, 8]
    for seq, chunks in enumerate(lengths, start=100):
        warm(server, seq, chunks)
    before = server.metrics()
    for _ in range(3):
        for seq, chunks in enumerate(lengths, start=100):
            assert server.client.request(seq, chunks) == chunks
    assert server.client.request(seq=100, chunks=2) == 1  # one chunk more than is stored
    after = server.metrics()

    def grown(name: str) -> float:
        name = "kvguard_gate_" + name
        return after[name] - before[name]

    ranks = RANKS[server.status()["inner"]]
    loads = [*(chunks for chunks in lengths for _ in range(3)), 1]
    sizes = [chunks * ranks * CHUNK_BYTES for chunks in loads]
    for kind in ("all", "alone"):
        assert grown(f"loads_total,kind={kind}") == len(loads)
        assert grown(f"load_bytes_total,kind={kind}") == sum(sizes)
        assert grown(f"load_bytes_squared_total,kind={kind}") == sum(b * b for b in sizes)
    assert grown("load_chunks_total") == sum(loads)
    assert grown("load_submitted_bytes_total") == sum(sizes)
    assert grown("load_failures_total") == 0
    assert grown("load_busy_seconds_total") == pytest.approx(
        grown("load_seconds_total,kind=all"), rel=1e-6
    )
    assert grown("lookups_total,answer=hit") == 15
    assert grown("lookups_total,answer=partial") == 1
    assert grown("lookup_keys_total") == (sum(loads) + 1) * ranks
    by_rank = [n for name, n in after.items() if "rank_load_bytes_total" in name]
    assert len(by_rank) == ranks
    assert sum(by_rank) == after["kvguard_gate_load_bytes_total,kind=all"]
    recent = server.status()["recent_loads"]
    assert [load["bytes"] for load in recent[-len(loads) :]] == [
        *(chunks * ranks * CHUNK_BYTES for _ in range(3) for chunks in lengths),
        ranks * CHUNK_BYTES,
    ]
    assert after["kvguard_gate_faults_total"] == 0


def test_what_l2_holds_is_not_written_again_while_bypassed(server: CacheServer) -> None:
    warm(server, seq=200, chunks=4)
    before = server.metrics()
    server.gate("bypass")
    for _ in range(3):
        assert server.client.request(200, 4) == 0
    eventually(
        lambda: (
            server.metrics()["kvguard_gate_stores_skipped_total"]
            - before["kvguard_gate_stores_skipped_total"]
            >= 3
        )
    )
    after = server.metrics()
    assert after["kvguard_gate_store_bytes_total"] == before["kvguard_gate_store_bytes_total"]
    # Meanwhile demand stays known, from lookups that nobody waits for.
    eventually(
        lambda: (
            server.metrics()["kvguard_gate_shadow_found_bytes_total"]
            > before["kvguard_gate_shadow_found_bytes_total"]
        )
    )
    server.gate("restore")
    assert server.client.request(200, 4) == 4


def test_writes_off_and_minimum_length(server: CacheServer) -> None:
    server.gate("admission", writes=False)
    assert server.client.request(300, 4) == 0
    eventually(lambda: server.metrics()["kvguard_gate_store_failures_total"] > 0)
    server.gate("restore")
    server.clear_l1()  # where LMCache kept what it could not store
    warm(server, seq=300, chunks=4)
    server.gate("admission", min_chunks=5)
    assert server.client.request(300, 4) == 0
    server.gate("admission", min_chunks=4)
    assert server.client.request(300, 4) == 4
    server.gate("restore")


def test_compare_and_set_over_the_route(server: CacheServer) -> None:
    state = server.status()
    code, answer = server.operate(
        "admission", share=0.5, if_revision=state["revision"], holder="kvguard:one"
    )
    assert code == 200
    assert answer["revision"] == state["revision"] + 1
    code, answer = server.operate(
        "admission", share=0.0, if_revision=state["revision"], holder="kvguard:two"
    )
    assert code == 409
    assert "if_revision" in answer["error"]
    assert answer["state"]["admission"]["share"] == 0.5
    assert answer["state"]["lease"]["holder"] == "kvguard:one"
    assert answer["state"]["epoch"] == state["epoch"]
    server.gate("restore")


def test_wrong_input_over_the_route(server: CacheServer) -> None:
    before = server.status()["revision"]
    for operation, body, expected, says in (
        ("admission", b'{"share": NaN}', 400, "share must be a number from 0 to 1"),
        ("admission", b'{"share": true}', 400, "share must be"),
        ("admission", b'{"nonsense": 1}', 400, "unknown key 'nonsense'"),
        ("admission", b'{"holder": "' + b"x" * 1_000_000 + b'"}', 400, "holder must be"),
        ("admission", b'{"lease_s": 1e9}', 400, "lease_s must be"),
        ("probe", b'{"chunks": "many"}', 400, "chunks must be"),
        ("abort", b'{"release_within_s": -1}', 400, "release_within_s must be"),
        ("rebuild", b'{"cause": "boredom"}', 400, "cause must be one of"),
        ("explode", b"{}", 400, "unknown operation"),
        ("admission", b'{"adapter_index": 7}', 404, "not found"),
        ("admission", b"not json", 422, ""),
    ):
        code, answer = server.post(f"/reconfigure/plugin/l2/{operation}", body)
        assert code == expected, (body[:60], answer)
        assert says in str(answer)
        assert len(str(answer)) < 2000
    assert server.status()["revision"] == before


def test_only_types_whose_close_is_proved_are_exchanged(server: CacheServer) -> None:
    state = server.status()
    assert state["can"]["rebuild"] is state["can"]["abort"] is (state["inner"] == "resp")
    code, answer = server.operate("rebuild", holder="person:ana", reason="trying")
    if state["inner"] != "resp":
        assert code == 409
        assert "is not proved to end its writers" in answer["error"]
        return
    assert (code, answer["started"]) == (200, True)
    eventually(lambda: not server.status()["rebuild"]["running"])
    assert server.status()["rebuild"]["last"]["outcome"] == "done"
    warm(server, seq=350, chunks=2)
    assert server.client.request(350, 2) == 2


def test_a_lease_ends_by_itself(server: CacheServer) -> None:
    warm(server, seq=400, chunks=2)
    revision = server.gate("bypass", holder="kvguard:gone", lease_s=0.7)["revision"]
    assert server.client.request(400, 2) == 0
    assert server.metrics()["kvguard_gate_lease_expires_seconds"] > 0
    eventually(lambda: server.metrics()["kvguard_gate_admission_share"] == 1, 3)
    assert server.client.request(400, 2) == 2
    state = server.status()
    assert (state["lease"], state["revision"]) == (None, revision + 1)
    assert "kvguard_gate_lease_expires_seconds" not in server.metrics()


def test_a_probe_re_reads_what_is_there(server: CacheServer) -> None:
    warm(server, seq=500, chunks=4)
    started = server.gate("probe", chunks=3, count=2)
    assert started["started"] is True
    eventually(lambda: not server.status()["probe"]["running"])
    last = server.status()["probe"]["last"]
    assert (last["id"], last["outcome"], last["error"]) == (started["id"], "done", None)
    assert [sample["bytes"] for sample in last["samples"]] == [3 * CHUNK_BYTES] * 2
    assert server.metrics()["kvguard_gate_loads_total,kind=probe"] >= 2
    assert server.client.request(500, 4) == 4


def test_metrics_are_a_sound_exposition_with_every_name(server: CacheServer) -> None:
    code, text = server.get("/metrics")
    assert code == 200
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    ours = {name.removeprefix("kvguard_gate_") for name in names if "kvguard_gate_" in name}
    assert ours == {
        *("loads", "load_bytes", "load_seconds", "load_bytes_squared"),
        *("load_seconds_squared", "load_bytes_seconds", "load_busy_seconds", "load_chunks"),
        *("load_submitted_bytes", "load_failures", "rank_load_bytes", "loads_in_flight"),
        *("in_flight_bytes", "oldest_load_seconds", "oldest_lookup_seconds"),
        *("last_completion_age_seconds", "lookups", "lookup_seconds", "lookup_keys"),
        *("denied_keys", "asked_chunks", "lookup_duration_seconds", "load_duration_seconds"),
        *("shadow_lookups", "shadow_found_bytes", "store_bytes", "store_seconds"),
        *("store_failures", "stores_skipped", "rebuilds", "admission_share"),
        *("admission_min_chunks", "lease_expires_seconds", "revision", "info", "faults"),
        *("adapter_generation", "adapter_attached", "adapter_answered", "adapter_age_seconds"),
        *("last_answer_age_seconds", "lost_lookups", "failed_stores", "releasing_loads"),
        "parked_adapters",
    }
    assert any(name.startswith("lmcache_mp_") for name in names), "LMCache's own are there too"
    assert server.get("/status")[1]["is_healthy"] is True


def test_nothing_went_wrong_in_the_server(server: CacheServer) -> None:
    """The last of this server's tests: no fault of the gate's, no exception of LMCache's."""
    assert server.metrics()["kvguard_gate_faults_total"] == 0
    log = server.log()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
    prefetching = server.prefetching()
    assert prefetching["in_flight_request_count"] == 0


@pytest.fixture(scope="module", params=list(VERSIONS))
def keeping(
    request: pytest.FixtureRequest, run: Run, redis: Redis
) -> Iterator[tuple[CacheServer, Redis, Throttled]]:
    """A server that keeps L1 (what is loaded and stored stays), its store behind a proxy."""
    redis.says(b"FLUSHALL")
    proxy = Throttled(run, redis.port).start()
    with CacheServer(
        resp(proxy.port, num_workers=8),
        lmcache=available(request.param),
        policies=("default", "retain"),
    ) as server:
        yield server, redis, proxy


def answered(
    server: CacheServer, seq: int, chunks: int, limit_s: float
) -> tuple[int | None, float]:
    handle = server.client.begin(seq, chunks)
    hit, waited = server.client.poll(handle, limit_s)
    if hit is not None:
        server.client.finish(handle)
    return hit, waited


def test_a_stuck_lookup_is_answered_by_the_bypass(
    keeping: tuple[CacheServer, Redis, Throttled],
) -> None:
    server, redis, _ = keeping
    client = server.client
    warm(server, seq=1, chunks=4)
    with redis.frozen():
        handle = client.begin(1, 4)
        assert client.poll(handle, 1.5)[0] is None  # an L1 hit, and yet it waits for L2
        assert server.status()["in_flight"]["lookups"] == 1
        began = time.monotonic()
        server.gate("bypass")
        hit, _ = client.poll(handle, 5)
        assert time.monotonic() - began < 1
        assert hit == 4
        assert False not in client.finish(handle).values()
        for _ in range(5):
            hit, waited = answered(server, 1, 4, 5)
            assert hit == 4
            assert waited < 1
        hit, waited = answered(server, 2, 4, 5)
        assert (hit, waited < 1) == (0, True)
        assert server.status()["in_flight"]["abandoned_lookups"] == 1
    eventually(lambda: server.status()["in_flight"]["abandoned_lookups"] == 0)
    server.gate("restore")
    server.clear_l1()
    assert client.request(1, 4) == 4
    assert server.metrics()["kvguard_gate_faults_total"] == 0


def test_only_max_loads_hang(keeping: tuple[CacheServer, Redis, Throttled]) -> None:
    server, _, proxy = keeping
    client = server.client
    cold = range(10, 18)
    for seq in (50, *cold):
        warm(server, seq, chunks=2)
    server.clear_l1()
    assert client.request(50, 2) == 2  # and now it is in L1 again
    before = server.metrics()
    proxy.link.set_rate(150_000)  # lookups pass, a load takes a quarter of a minute
    try:
        handles = [client.begin(seq, 2) for seq in cold]
        eventually(
            lambda: (
                server.metrics()["kvguard_gate_lookups_total,answer=declined"]
                - before["kvguard_gate_lookups_total,answer=declined"]
                == 3
            )
        )
        assert server.status()["in_flight"]["loads"] == 5
        proxy.link.freeze()
        server.gate("bypass", holder="kvguard:lab", reason="frozen")
        answers = [client.poll(handle, 0.5)[0] for handle in handles]
        assert sorted(answers, key=str) == [0, 0, 0, None, None, None, None, None]
        for _ in range(3):
            hit, waited = answered(server, 50, 2, 5)
            assert (hit, waited < 1) == (2, True)
            hit, waited = answered(server, 90, 2, 5)
            assert (hit in (0, 2), waited < 1) == (True, True)
        assert server.status()["in_flight"]["loads"] == 5
        assert server.metrics()["kvguard_gate_oldest_load_seconds"] > 0.5
    finally:
        proxy.link.set_rate(None)
        proxy.link.thaw()
    hits = [
        hit if hit is not None else client.poll(handle, 20)[0]
        for handle, hit in zip(handles, answers, strict=True)
    ]
    assert sorted(hits) == [0, 0, 0, 2, 2, 2, 2, 2]
    for handle in handles:
        assert False not in client.finish(handle).values()
    after = server.metrics()
    assert after["kvguard_gate_loads_in_flight"] == 0

    def grown(name: str) -> float:
        return after["kvguard_gate_" + name] - before["kvguard_gate_" + name]

    assert grown("lookups_total,answer=hit") == 5  # the declined ones are no hits
    assert grown("loads_total,kind=all") == 5
    assert grown("loads_total,kind=alone") == 0
    assert grown("load_submitted_bytes_total") == 8 * 2 * CHUNK_BYTES
    server.gate("restore")
    server.clear_l1()
    assert [client.request(seq, 2) for seq in cold] == [2] * 8
    assert server.metrics()["kvguard_gate_faults_total"] == 0


def test_the_interface_tests_pass_with_the_newest_too() -> None:
    path = available("newest")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            str(Path(__file__).with_name("test_gate_adapter.py")),
        ],
        cwd=CHECKOUT,
        env={**os.environ, **environment(path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]


def test_a_server_with_a_wrong_gate_does_not_start(redis: Redis) -> None:
    with (
        pytest.raises(LabError, match="unknown key 'max_load'"),
        CacheServer(resp(redis.port), params={"max_load": 3}),
    ):
        pass
