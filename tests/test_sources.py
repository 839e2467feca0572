"""Sources on what the real programs answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from guard.errors import SourceUnreadable
from guard.estimate.adapter import adapter_figures
from guard.readings import Missing, Reading
from guard.sources import gate, lmcache_mp, vllm
from guard.sources.samples import Sample, combine

CAPTURES = Path(__file__).parent / "captures"
ENGINE = "http://127.0.0.1:8000/metrics"
CACHE = "http://127.0.0.1:8080/metrics"


def capture(pattern: str) -> bytes:
    (path,) = CAPTURES.glob(pattern)
    return path.read_bytes()


def test_vllm_after_l2_hits() -> None:
    body = capture("vllm-lmcache-l2/v032-lmcmp-vllm-l2warm-end__*.prom")
    sample = vllm.parse(ENGINE, body, 1.0, 2.0)
    assert sample.values["prompt_tokens"] == 98784
    assert sample.values["computed_tokens"] == 33248
    assert sample.values["external_tokens"] == 65536
    assert sample.values["finished_computed_tokens"] == 33248
    assert sample.values["finished_requests"] == 48
    assert sample.values["prefill_seconds"] == pytest.approx(11.365917867)
    assert sample.values["waiting_deferred"] == 0
    assert sample.values["kv_bytes_per_token_one_rank"] == 2048
    assert sample.incarnation == (ENGINE, 1795972393.0)


def test_every_vllm_name_is_in_the_capture() -> None:
    body = capture("vllm-lmcache-l2/v032-lmcmp-vllm-l2warm-end__*.prom")
    assert {w.name for w in vllm.WANTS} <= set(vllm.parse(ENGINE, body, 1.0, 2.0).values)


def test_data_parallel_engines_are_added_up_not_read_last() -> None:
    body = "".join(
        f'vllm:prompt_tokens_total{{engine="{engine}",model_name="m"}} {tokens}\n'
        for engine, tokens in ((0, 100.0), (1, 30.0))
    ).encode()
    assert vllm.parse(ENGINE, body, 0.0, 0.0).values == {"prompt_tokens": 130.0}


def test_nan_is_not_a_number_and_absent_is_not_zero() -> None:
    sample = vllm.parse(ENGINE, b"vllm:num_requests_running NaN\n", 0.0, 0.0)
    assert sample.values == {}
    assert sample.not_a_number == {"running"}


def test_lmcache_idle_has_no_series_yet() -> None:
    sample = lmcache_mp.parse_metrics(CACHE, capture("lmcache-0.5.6/idle_fs.prom"), 0.0, 0.0)
    assert not lmcache_mp.has_gate(sample)
    assert "hit_l2_tokens" not in sample.values
    assert "requested_tokens" not in sample.values


def test_lmcache_stock_after_l2_loads() -> None:
    body = capture("vllm-lmcache-l2/v032-lmcmp-lmcache-l2warm-end__*.prom")
    sample = lmcache_mp.parse_metrics(CACHE, body, 0.0, 0.0)
    assert not lmcache_mp.has_gate(sample)
    assert sample.values["requested_tokens"] == 98304
    assert sample.values["hit_l1_tokens"] == 32768
    assert sample.values["hit_l2_tokens"] == 32768
    assert sample.values["load_rate_count"] == 16
    assert sample.values["load_rate_sum_gb_per_second"] == pytest.approx(11.5345757)


def test_status_of_lmcache() -> None:
    status = lmcache_mp.parse_status(CACHE, capture("lmcache-0.5.6/status_fs.json"))
    assert (status.chunk_size_tokens, status.max_in_flight) == (256, 8)
    assert (status.submission_queue_size, status.pending_queue_size) == (0, 0)
    assert status.is_healthy is True
    assert status.bytes_per_object == 201326592 / 24


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"status":"ok"}'])
def test_what_is_no_status_is_an_error(body: bytes) -> None:
    with pytest.raises(SourceUnreadable, match=r"127\.0\.0\.1:8080"):
        lmcache_mp.parse_status(CACHE, body)


STATUS = {
    "schema": 1,
    "version": "0.1.0",
    "l2": "resp",
    "inner": "resp",
    "epoch": "00ff00ff00ff00ff",
    "revision": 3,
    "admission": {"share": 0.0, "min_chunks": 0, "writes": True, "max_loads": 5},
    "default": {"share": 1.0, "min_chunks": 0, "writes": True, "max_loads": 5},
    "lease": {"holder": "kvguard:a", "reason": "slow", "lease_s": 30.0, "expires_in_s": 12.0},
    "can": {"probe": True, "abort": False},
    "known_keys": 12,
    "probe": {
        "running": False,
        "last": {
            "id": 2,
            "outcome": "done",
            "error": None,
            "age_s": 0.5,
            "samples": [
                {"chunks": 4, "bytes": 4000, "lookup_s": 0.01, "load_s": 0.2, "overlapped": False}
            ],
        },
    },
}


def answer(status: dict) -> bytes:
    adapters = [{"backend": "plugin", "adapter_index": 1, "status": status}]
    return json.dumps({"enabled": True, "adapters": adapters}).encode()


def test_gate_status() -> None:
    status = gate.parse_status(CACHE, answer(STATUS))
    assert status is not None
    assert (status.adapter_index, status.revision, status.share) == (1, 3, 0.0)
    assert (status.holder, status.lease_expires_in_seconds) == ("kvguard:a", 12.0)
    assert status.probe is not None
    assert status.probe.samples[0].load_seconds == 0.2


def test_a_gate_of_an_older_version_gives_none_of_the_adapters_state() -> None:
    status = gate.parse_status(CACHE, answer(STATUS))
    assert status is not None
    assert (status.can_abort, status.can_rebuild, status.generation) == (False, None, None)
    assert (status.abandoned_lookups, status.rebuild, status.store_problem) == (None, None, None)
    assert status.rebuild_running is False


def test_gate_status_of_the_adapter() -> None:
    last = {
        "id": 3,
        "operation": "rebuild",
        "cause": "connection_lost",
        "outcome": "failed",
        "error": "refused\x1b[2J",
        "age_s": 1.2,
        "seconds": 0.02,
        "ended_loads": 8,
        "ended_lookups": 3,
        "ended_stores": 0,
        "parked": False,
    }
    more = {
        "can": {"probe": True, "abort": False, "rebuild": True, "why_not": {"abort": "fs"}},
        "adapter": {"generation": 2, "attached": True, "store_problem": "NOAUTH\n"},
        "in_flight": {"abandoned_lookups": 4},
        "rebuild": {"running": True, "last": last},
    }
    status = gate.parse_status(CACHE, answer({**STATUS, **more}))
    assert status is not None
    assert (status.can_abort, status.can_rebuild, status.why_not) == (False, True, {"abort": "fs"})
    assert (status.generation, status.abandoned_lookups, status.rebuild_running) == (2, 4, True)
    assert status.store_problem == "NOAUTH "
    assert status.rebuild is not None
    assert (status.rebuild.outcome, status.rebuild.ended_loads) == ("failed", 8)
    assert status.rebuild.error == "refused [2J"


NEW_GAUGES = """\
kvguard_gate_info{epoch="aa",l2="resp"} 1
kvguard_gate_loads_in_flight 2
kvguard_gate_in_flight_bytes 100
kvguard_gate_oldest_lookup_seconds 3
kvguard_gate_adapter_attached 1
kvguard_gate_adapter_answered 0
kvguard_gate_adapter_age_seconds 9
kvguard_gate_lost_lookups 4
kvguard_gate_failed_stores 0
kvguard_gate_releasing_loads NaN
"""


def test_figures_of_the_adapter_are_missing_rather_than_nothing() -> None:
    def read(body: str) -> dict[str, float | str]:
        sample = lmcache_mp.parse_metrics(CACHE, body.encode(), 0.0, 0.0)
        figures = adapter_figures(sample, 0.0, None)
        return {n: f.value if isinstance(f, Reading) else f.reason for n, f in figures.items()}

    assert read(NEW_GAUGES) == {
        "in_flight": 100,
        "oldest_lookup": 3,
        "last_completion_age": "nothing_completed_yet",
        "last_answer_age": "nothing_answered_yet",
        "lost_lookups": 4,
        "failed_stores": 0,
        "adapter_attached": 1,
        "adapter_answered": 0,
        "adapter_age": 9,
        "releasing_loads": "not_a_number",
        "mean_load": "no_load_yet",
    }
    older = "".join(line for line in NEW_GAUGES.splitlines(True)[:4])
    figures = read(older)
    assert figures["oldest_lookup"] == 3
    assert {figures[n] for n in ("last_answer_age", "lost_lookups", "adapter_attached")} == {
        "not_given"
    }
    assert set(read("x 1\n").values()) == {"no_gate"}
    assert {f.reason for f in adapter_figures(None, 0.0, 1.0).values() if isinstance(f, Missing)}


def test_no_gate_is_none_not_an_error() -> None:
    stock = b'{"enabled":false,"backend":"fs","num_adapters":0,"adapters":[]}'
    assert gate.parse_status(CACHE, stock) is None
    foreign = answer({"reads": True, "writes": True})
    assert gate.parse_status(CACHE, foreign) is None


def test_a_newer_schema_says_upgrade() -> None:
    with pytest.raises(SourceUnreadable, match="upgrade kvguard"):
        gate.parse_status(CACHE, answer({**STATUS, "schema": 2}))


@pytest.mark.parametrize("lacking", ["revision", "admission", "default"])
def test_a_status_without_its_parts_is_an_error_or_no_gate(lacking: str) -> None:
    status = {key: value for key, value in STATUS.items() if key != lacking}
    try:
        parsed = gate.parse_status(CACHE, answer(status))
    except SourceUnreadable as error:
        assert lacking in str(error)  # noqa: PT017
    else:
        assert parsed is None


def test_combine_adds_what_every_engine_gave() -> None:
    one = Sample(1.0, 1.0, "a", {"x": 1.0, "y": 2.0})
    two = Sample(2.0, 2.0, "b", {"x": 10.0})
    both = combine([one, two])
    assert both is not None
    assert both.values == {"x": 11.0}
    assert both.incarnation == ("a", "b")
    assert combine([]) is None
    assert combine([one]) is one


def test_slots_are_a_setting_up_to_0_5_6_and_a_part_of_l1_from_then_on() -> None:
    setting = {"max_in_flight": 8}
    share = {"inflight_watermark": 0.5}
    level_one = {"_default": {"memory_total_bytes": 800_000_000}}

    def slots(prefetch: dict[str, object], size: float | None) -> tuple[float, bool] | None:
        manager = {"prefetch_controller": prefetch, "l1_managers": level_one}
        body = json.dumps({"storage_manager": manager}).encode()
        found = lmcache_mp.parse_status(CACHE, body).prefetch_slots(size)
        return None if found is None else (found.count, found.exact)

    assert slots(setting, 50e6) == (8.0, True)
    assert slots(setting, None) == (8.0, True)
    assert slots(share, 50e6) == (8.0, False)
    assert slots(share, 4e9) == (1.0, False)
    assert slots(share, None) is None
    assert slots({}, 50e6) is None
    assert slots({"inflight_watermark": True}, 50e6) is None
