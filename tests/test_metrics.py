"""The metrics page: nothing missing has a sample, nothing known is dropped, all of it parses."""

from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from guard.estimate.estimator import Estimator
from guard.estimate.figures import Configured
from guard.policy.types import AILMENTS, CAUSES, STATES, Healing
from guard.readings import Missing, Reading, Snapshot
from guard.service.figure_metrics import METRICS, unlisted
from guard.service.metrics import MetricsPage
from guard.sources import lmcache_mp, vllm
from guard.view import View
from tests.fakes import BYPASSED, NOW, fresh_view, hurting_view

CAPTURES = Path(__file__).parent / "captures"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def page(view: View) -> Series:
    body, content_type = MetricsPage(lambda: view, "9.9").render(None)
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_figures_have_samples_and_missing_ones_have_none() -> None:
    series = page(hurting_view())
    assert series[key("kvguard_load_bandwidth_bytes_per_second", view="alone")] == 1.2e7
    assert series[key("kvguard_break_even_bandwidth_bytes_per_second")] == 1e8
    assert series[key("kvguard_break_even_tokens")] == math.inf
    assert series[key("kvguard_hit_fixed_seconds", part="total")] == 0.18
    assert series[key("kvguard_prefill_tokens_per_second")] == 4000
    names = {name for name, _ in series}
    assert "kvguard_load_utilization_ratio" not in names
    assert "kvguard_hit_ratio" not in names
    assert series[key("kvguard_missing", reading="hit.l2", reason="idle")] == 1
    assert series[key("kvguard_missing", reading="load_utilization.max", reason="no_gate")] == 1
    assert "kvguard_admission_share" not in names
    assert "kvguard_override_expires_timestamp_seconds" not in names
    assert series[key("kvguard_unlisted_figures")] == 0


def test_state_cause_sources_and_counters() -> None:
    series = page(hurting_view())
    states = {s: series[key("kvguard_state", state=s)] for s in STATES}
    assert states == {s: float(s == "hurting") for s in STATES}
    assert all(series[key("kvguard_bypass_active", cause=c)] == 0 for c in CAUSES)
    assert series[key("kvguard_source_up", source="engine")] == 1
    assert series[key("kvguard_source_up", source="cache_metrics")] == 0
    assert series[key("kvguard_source_scrape_seconds", source="engine")] == 0.002
    assert key("kvguard_source_scrape_seconds", source="cache_metrics") not in series
    decisions = key("kvguard_decisions_total", action="would_bypass", reason="slow")
    assert series[decisions] == 2
    assert series[key("kvguard_control_requests_total", outcome="ok")] == 3
    assert series[key("kvguard_prefill_seconds_saved_total")] == 1.5
    assert series[key("kvguard_build_info", version="9.9")] == 1
    assert series[key("kvguard_ticks_total")] == 7
    assert any(name == "process_resident_memory_bytes" for name, _ in series)


def test_a_bypass_shows_its_cause_share_and_end() -> None:
    series = page(hurting_view(**BYPASSED))
    active = {c: series[key("kvguard_bypass_active", cause=c)] for c in CAUSES}
    assert active == {c: float(c == "manual") for c in CAUSES}
    assert series[key("kvguard_admission_share")] == 0
    assert series[key("kvguard_admission_min_tokens")] == 0
    assert series[key("kvguard_override_expires_timestamp_seconds")] == NOW + 1800


def test_an_ailment_its_attempts_and_what_pages() -> None:
    healthy = page(hurting_view())
    assert all(healthy[key("kvguard_ailment", kind=k)] == 0 for k in AILMENTS)
    assert all(healthy[key("kvguard_incurable", kind=k)] == 0 for k in AILMENTS)
    ill = Healing("load_hung", NOW, 2, None, "a load hangs", "look at the store")
    series = page(hurting_view(healing=ill, healing_attempts_total={("load_hung", "done"): 2}))
    shown = {k for k in AILMENTS if series[key("kvguard_ailment", kind=k)] == 1}
    paged = {k for k in AILMENTS if series[key("kvguard_incurable", kind=k)] == 1}
    assert shown == paged == {"load_hung"}
    attempts = key("kvguard_healing_attempts_total", cause="load_hung", outcome="done")
    assert series[attempts] == 2
    curable = page(hurting_view(healing=replace(ill, incurable=None)))
    assert curable[key("kvguard_incurable", kind="load_hung")] == 0


def test_before_the_first_tick_nothing_is_pretended() -> None:
    series = page(fresh_view())
    assert series[key("kvguard_state", state="unknown")] == 1
    figures = {row.metric for row in METRICS}
    assert not figures & {name for name, _ in series}
    assert "kvguard_prefill_seconds_saved_total" not in {name for name, _ in series}


def test_a_figure_without_a_metric_is_counted_not_dropped() -> None:
    snapshot = Snapshot(NOW, 1.0, {"news": Reading(1.0, "ratio", NOW, "x")})
    assert unlisted(snapshot) == ["news"]
    assert page(hurting_view(snapshot=snapshot))[key("kvguard_unlisted_figures")] == 1


@pytest.mark.parametrize("gated", [True, False])
def test_every_figure_the_estimator_makes_is_in_the_table(gated: bool) -> None:
    names: set[str] = set()
    estimator = Estimator(Configured(kv_bytes_per_token=2048, prefill_rate=1000))
    names |= set(estimator.update(None, None, None, 0.0, 0.0))
    engine = next(CAPTURES.glob("vllm-lmcache-l2/v032-lmcmp-vllm-l2warm-end__*.prom"))
    capture = "gate_resp_after.prom" if gated else "after_l2load_fs.prom"
    cache = CAPTURES / "lmcache-0.5.6" / capture
    for second in range(0, 30, 5):
        at = float(second)
        figures = estimator.update(
            vllm.parse("http://e/metrics", engine.read_bytes(), at, at),
            lmcache_mp.parse_metrics("http://c/metrics", cache.read_bytes(), at, at),
            None,
            at,
            at,
        )
        names |= set(figures)
    snapshot = Snapshot(NOW, 1.0, {name: Missing("x") for name in names})
    assert unlisted(snapshot) == []


def test_the_table_is_consistent() -> None:
    assert len({row.figure for row in METRICS}) == len(METRICS)
    for row in METRICS:
        base, _, value = row.figure.partition(".")
        assert row.metric.startswith(f"kvguard_{base}"), row
        assert (row.label is not None) == bool(value), row
        assert row.label is None or row.label[1] == value
        assert row.help.endswith(".")
        assert not row.metric.endswith("_total")
    units = {
        metric: {(row.unit, row.label and row.label[0]) for row in METRICS if row.metric == metric}
        for metric in {row.metric for row in METRICS}
    }
    assert all(len(kinds) == 1 for kinds in units.values())


def everything() -> View:
    figures = {row.figure: Reading(1.0, row.unit, NOW, "test") for row in METRICS}
    lacking = {"lacking": Missing("not_measured")}
    return hurting_view(**BYPASSED, snapshot=Snapshot(NOW, 1.0, figures | lacking))


def test_openmetrics_parses_too() -> None:
    rendered = MetricsPage(everything, "1").render("application/openmetrics-text; version=1.0.0")
    families = list(parse_openmetrics(rendered[0].decode()))
    assert rendered[1].startswith("application/openmetrics-text")
    assert {row.metric for row in METRICS} <= {family.name for family in families}


@pytest.mark.parametrize("view", [everything(), hurting_view(), fresh_view()])
def test_promtool_has_nothing_to_say(view: View) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install prometheus"
    body, _ = MetricsPage(lambda: view, "1").render(None)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=body, capture_output=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
