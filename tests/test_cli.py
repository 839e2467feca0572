"""The command line as a process: exit codes, one clear line, and a whole `run`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from guard.commands.client import seconds
from guard.commands.words import status_text, value_text
from guard.errors import SettingsError
from guard.policy.types import STATES, Decision
from guard.service import api
from guard.service.status import status
from tests.fakes import BYPASSED, NOW, FakeGuard, free_port, fresh_view, hurting_view, serving

LIMIT_SECONDS = 60


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith("KVGUARD_")}
    return kept | more


def kvguard(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "guard", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        env=environment(**(env or {})),
    )
    return done.returncode, done.stdout, done.stderr


def one_line(stderr: str) -> str:
    assert stderr.startswith("kvguard: ")
    assert stderr.count("\n") == 1, stderr
    return stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--engine", "localhost:8000"], "--engine: 'localhost:8000' has no scheme"),
        (["run", "--cache", "http://h:99999"], "--cache: 'http://h:99999' is no URL"),
        (["run", "--mode", "enforced"], "'observe' or 'enforce'"),
        (["run", "--interval", "soon"], "--interval"),
        (["run", "--listen", "9469"], "no host:port"),
        (["run", "--modus", "enforce"], "--modus"),
        (["start"], "'start'"),
        (["run", "--config", "tests/invalid_configs/unknown_key.yml"], "'policy.trip_ratio'"),
        (["run", "--config", "tests/invalid_configs/no_yaml.yml"], "is no YAML at line 2"),
        (["run", "--config", "nowhere.yml"], "nowhere.yml cannot be read"),
        (["status", "--guard", "127.0.0.1:9469"], "write http://127.0.0.1:9469"),
        (["bypass", "--ttl", "5 parsecs"], "--ttl"),
        (["kv-bytes", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_input_is_one_line_and_2(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    code, out, err = kvguard(*arguments)
    assert (code, out) == (2, "")
    assert says in one_line(err)


def test_an_unknown_variable_is_2() -> None:
    code, _, err = kvguard("run", env={"KVGUARD_MODUS": "enforce"})
    assert code == 2
    assert "'KVGUARD_MODE'" in one_line(err)


def test_help_version_and_nothing() -> None:
    code, out, _ = kvguard("--version")
    assert (code, out.startswith("kvguard 0.")) == (0, True)
    code, _, err = kvguard()
    assert (code, "Usage:" in err) == (2, True)
    code, out, _ = kvguard("status", "--help")
    assert code == 0
    for number in ("10 hurting", "11 unknown", "12 no guard", "2 usage"):
        assert number in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments", [["status"], ["status", "--json"], ["bypass"], ["admit"], ["auto"]]
)
def test_without_a_guard_it_is_12(arguments: list[str]) -> None:
    code, out, err = kvguard(*arguments, "--guard", f"http://127.0.0.1:{free_port()}")
    assert (code, out) == (12, "")
    assert "no guard answers" in one_line(err)


def test_what_is_no_guard_is_12() -> None:
    async def other(scope: object, receive: object, send: Callable[..., object]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[misc]
        await send({"type": "http.response.body", "body": b"hello"})  # type: ignore[misc]

    with serving(other) as url:
        code, _, err = kvguard("status", "--guard", url)
    assert (code, "is no kvguard" in one_line(err)) == (12, True)


@pytest.fixture(scope="module")
def shown() -> Iterator[tuple[FakeGuard, str]]:
    guard = FakeGuard(hurting_view())
    with serving(api.build(guard, 1.0, "9.9")) as url:
        yield guard, url


@pytest.mark.parametrize("state", STATES)
def test_status_ends_with_the_verdict(shown: tuple[FakeGuard, str], state: str) -> None:
    guard, url = shown
    decision = Decision(state, None, None, None, "x", "because")  # type: ignore[arg-type]
    guard.current = hurting_view(decision=decision)
    code, out, _ = kvguard("status", "--guard", url)
    assert code == {"idle": 0, "helping": 0, "unknown": 11}.get(state, 10)
    assert out.startswith(f"{state.upper()}: because\n")


def test_status_for_a_person(shown: tuple[FakeGuard, str]) -> None:
    guard, url = shown
    guard.current = hurting_view()
    code, out, err = kvguard("status", "--guard", url)
    assert (code, err) == (10, "")
    for words in (
        "HURTING (slow): 12 MB/s < 0.9 of 100 MB/s",
        "mode observe, control: observe only: no control available",
        "12 MB/s  [20 loads alone]",
        "100 MB/s  [s·R]",
        "180 ms  [lookup + load]",
        "infinite: no length pays",
        "missing: no gate",
        "missing: idle (no tokens asked for)",
        "down: cache_metrics http://c/metrics: no answer",
    ):
        assert words in out
    guard.current = hurting_view(**BYPASSED)
    _, out, _ = kvguard("status", "--guard", url)
    assert "override: bypass by ann until 20" in out
    assert "in force: 0% of lookups" in out
    guard.current = fresh_view()
    code, out, _ = kvguard("status", "--guard", url)
    assert (code, out.startswith("UNKNOWN: no tick yet")) == (11, True)


def test_an_old_verdict_is_called_old() -> None:
    document = status(hurting_view(), "1")
    assert status_text(document, NOW + 60).startswith("HURTING")
    assert status_text(document, NOW + 100).startswith("OLD: the guard's last tick was at 20")


def test_a_guard_that_refuses_is_12(shown: tuple[FakeGuard, str]) -> None:
    name = socket.gethostname()
    code, _, err = kvguard("status", "--guard", f"http://{name}:1", env={"HTTP_PROXY": shown[1]})
    assert (code, "no guard answers" in one_line(err)) == (12, True)
    code, out, err = kvguard("status", "--guard", f"{shown[1]}/nowhere")
    assert (code, out, "404" in one_line(err)) == (12, "", True)


def test_status_json_is_what_the_api_answers(shown: tuple[FakeGuard, str]) -> None:
    guard, url = shown
    guard.current = hurting_view()
    code, out, _ = kvguard("status", "--json", "--guard", url)
    assert code == 10
    assert out == httpx.get(f"{url}/api/v1/status", trust_env=False).text + "\n"
    assert json.loads(out) == status(hurting_view(), "9.9")


def test_the_switch(shown: tuple[FakeGuard, str]) -> None:
    guard, url = shown
    guard.current = replace(hurting_view(), control="gate")
    code, out, err = kvguard(
        "bypass", "--ttl", "1h30m", "--reason", "drill", "--who", "ann", "--guard", url
    )
    assert (code, err) == (0, "")
    assert out.startswith("bypass: set by ann until 2096-")
    assert guard.seen[-1] == {"mode": "bypass", "who": "ann", "reason": "drill", "ttl": 5400.0}
    assert kvguard("admit", "--guard", url)[0] == 0
    assert guard.seen[-1]["ttl"] == 1800
    code, out, err = kvguard("auto", "--guard", url)
    assert (code, out, err) == (0, "auto: the policy decides again\n", "")


def test_a_switch_without_effect_does_not_pretend(shown: tuple[FakeGuard, str]) -> None:
    guard, url = shown
    guard.current = hurting_view()
    code, _, err = kvguard("bypass", "--guard", url)
    assert code == 1
    assert "not in force: observe only: no control available" in one_line(err)
    code, _, err = kvguard("bypass", "--reason", "a\tb", "--guard", url)
    assert (code, "422" in one_line(err)) == (1, True)


@dataclass
class Running:
    process: subprocess.Popen[str]
    state_dir: Path
    page: str
    metrics: str
    said: list[str]

    def journal(self) -> list[dict[str, object]]:
        path = self.state_dir / "decisions.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def until(true: Callable[[], bool], what: str) -> None:
    """Poll for something another process does; fail loudly when it never comes."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not true():
        assert time.monotonic() < limit, f"never came: {what}"
        time.sleep(0.02)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "kvguard.yml").write_text("policy: {trip_ratio: 0.8}\n")
    nobody = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "guard", "run", "--listen", "127.0.0.1:0"),
            *("--metrics-listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")),
            *("--engine", nobody, "--cache", nobody, "--config", str(tmp_path / "kvguard.yml")),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stderr is not None
        said: list[str] = []
        while not said or not said[-1].startswith("state "):
            line = process.stderr.readline()
            assert line, f"ended early: {said}"
            said.append(line)
        text = "".join(said)
        page = re.search(r"page and API +(\S+)", text)
        metrics = re.search(r"metrics +(\S+)/metrics", text)
        assert page
        assert metrics
        yield Running(process, tmp_path / "state", page[1], metrics[1], said)
    finally:
        process.kill()
        process.communicate()


def ready(running: Running) -> None:
    def answers() -> bool:
        return httpx.get(f"{running.metrics}/readyz", trust_env=False).status_code == 200

    until(answers, "the first tick")


def test_run_watches_dead_peers_and_ends_when_told(running: Running) -> None:
    assert "mode observe" in running.said[0]
    ready(running)
    code, out, _ = kvguard("status", "--guard", running.page)
    assert code == 11
    assert out.startswith("UNKNOWN: ")
    assert "down: engine http://" in out
    assert httpx.get(f"{running.metrics}/healthz", trust_env=False).status_code == 200
    page = httpx.get(f"{running.metrics}/metrics", trust_env=False).text
    assert "kvguard_unlisted_figures 0.0" in page
    assert 'kvguard_source_up{source="engine"} 0.0' in page
    running.process.send_signal(signal.SIGTERM)
    _, told = running.process.communicate(timeout=LIMIT_SECONDS)
    assert running.process.returncode == 0
    assert "Traceback" not in told
    assert "event='source'" in told
    kinds = [line["kind"] for line in running.journal()]
    assert (kinds[0], kinds[-1]) == ("start", "stop")
    assert "source" in kinds


def test_a_second_guard_changes_nothing(running: Running, tmp_path: Path) -> None:
    ready(running)
    taken = running.page.removeprefix("http://")
    other = ("--metrics-listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "other"))
    code, _, err = kvguard("run", "--listen", taken, *other)
    assert (code, f"--listen {taken}: the port is taken" in one_line(err)) == (3, True)
    assert not (tmp_path / "other").exists()
    own = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    code, _, err = kvguard("run", *own, "--state-dir", str(running.state_dir))
    assert (code, "in use by another kvguard" in one_line(err)) == (4, True)


def test_sighup_takes_the_policy_anew(running: Running, tmp_path: Path) -> None:
    ready(running)

    def last(kind: str) -> list[dict[str, object]]:
        return [line for line in running.journal() if line["kind"] == kind]

    (tmp_path / "kvguard.yml").write_text("policy: {trip_ration: 0.7}\n")
    running.process.send_signal(signal.SIGHUP)
    until(lambda: bool(last("reload_refused")), "the refusal in the journal")
    assert "'policy.trip_ratio'" in str(last("reload_refused")[0]["reason"])
    (tmp_path / "kvguard.yml").write_text("policy: {trip_ratio: 0.7}\ninterval: 3\n")
    running.process.send_signal(signal.SIGHUP)
    until(lambda: bool(last("reload")), "the reload in the journal")
    (line,) = last("reload")
    assert line["policy"]["trip_ratio"] == 0.7  # type: ignore[index]
    assert line["needs_restart"] == ["interval"]


def test_listeners_and_state_that_cannot_be(tmp_path: Path) -> None:
    code, _, err = kvguard("run", "--listen", "0.0.0.0:0")
    assert (code, "loopback only" in one_line(err)) == (3, True)
    code, _, err = kvguard("run", "--token-file", "token")
    assert (code, "no tokens yet" in one_line(err)) == (3, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = kvguard(
            "run", "--listen", "127.0.0.1:0", "--metrics-listen", f"0.0.0.0:{port}"
        )
        assert (code, "--metrics-listen" in one_line(err)) == (3, True)
    (tmp_path / "file").touch()
    code, _, err = kvguard(
        *("run", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
        *("--state-dir", str(tmp_path / "file")),
    )
    assert (code, "--state-dir" in one_line(err)) == (4, True)


def test_durations() -> None:
    assert [seconds(t) for t in ("1800", "30m", "1h30m", "90s", "1d", "0.5h")] == [
        1800, 1800, 5400, 90, 86400, 1800,
    ]  # fmt: skip
    for text in ("", "m", "1x", "1h30", "0", "2d", "-5", "1e3", "1 h"):
        with pytest.raises(SettingsError, match="--ttl"):
            seconds(text)


def test_values_read_well() -> None:
    assert value_text(1.25e9, "bytes_per_second") == "1.25 GB/s"
    assert value_text(2048, "bytes_per_token") == "2.05 kB/token"
    assert value_text(0.0042, "seconds") == "4.2 ms"
    assert value_text(12.34, "seconds") == "12.3 s"
    assert value_text(4123.4, "tokens_per_second") == "4123 tokens/s"
    assert value_text(0.93, "ratio") == "0.93"
    assert value_text(3, "requests") == "3"


def test_kv_bytes_of_a_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = kvguard("kv-bytes", str(tmp_path / "config.json"), "--json")
    assert (code, json.loads(out)["kv_bytes_per_token"]) == (0, 131072)
    code, out, _ = kvguard("kv-bytes", str(tmp_path / "config.json"), "--cache-dtype", "fp8")
    assert (code, out.startswith("65536 bytes per token")) == (0, True)
