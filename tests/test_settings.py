"""Settings: precedence, every error in one line, and no key that is silently ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from guard.addresses import is_loopback, peer_url, split_address
from guard.errors import SettingsError
from guard.settings import DEFAULT_CACHE, DEFAULT_ENGINE, describe_peers, known_keys, load

INVALID = Path(__file__).parent / "invalid_configs"
# File name without .yml, and what its one line must say.
SAYS = {
    "a_list": "it holds a list",
    "bool_for_number": "interval in",
    "engine_twice": "same engine is given twice",
    "holder": "a holder is 'kvguard:'",
    "just_words": "it holds a str",
    "key_outside_its_section": "'policy.trip_ratio'",
    "key_that_is_no_text": "must be text, not True",
    "listen_no_port": "no host:port",
    "nan": "finite",
    "no_section": "a section",
    "no_text": "is no YAML",
    "no_yaml": "is no YAML at line 2",
    "objective_median": "protects the tail only, not 'median' yet",
    "out_of_range": "greater than or equal to 0.2",
    "refers_to_itself": "policy.trip_ratio in",
    "renews_too_late": "at most half of lease_seconds",
    "shares_that_fall": "must rise and end with 1",
    "token_file_absent": "/nowhere/token cannot be read: No such file",
    "unknown_key": "unknown setting 'policy.trip_ration' in",
    "unknown_top_key": "the nearest known one is 'engine'",
    "url_credentials": "leave them out",
    "url_no_host": "no host",
    "url_port": "Port out of range",
    "url_scheme": "not 'ftp'",
    "wrong_order": "overload_return must not be above overload_trip",
    "wrong_type": "valid number",
    "wrong_word": "'observe' or 'enforce'",
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVGUARD_"):
            monkeypatch.delenv(name)


def test_every_invalid_file_has_its_words() -> None:
    assert {path.stem for path in INVALID.glob("*.yml")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_invalid_file_is_one_clear_line(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({"config": str(INVALID / f"{name}.yml")})
    message = str(caught.value)
    assert SAYS[name] in message
    assert "\n" not in message
    assert "secret" not in message
    if name != "engine_twice":
        assert f"{name}.yml" in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yml cannot be read: No such file"):
        load({"config": str(tmp_path / "nowhere.yml")})
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        load({"config": str(tmp_path)})


def test_defaults_and_who_named_them() -> None:
    settings = load()
    assert (settings.engine, settings.cache) == ([DEFAULT_ENGINE], DEFAULT_CACHE)
    assert settings.engine_is_default
    assert settings.cache_is_default
    assert all("default port" in line for line in describe_peers(settings))
    assert settings.mode == "observe"
    assert settings.holder.startswith("kvguard:")
    assert settings.policy.return_shares == (0.05, 0.25, 0.5, 1.0)
    named = load({"engine": ["http://e:1"]})
    assert (named.cache, named.engine_is_default) == (None, False)
    both = load({"cache": "http://c:1/"})
    assert (both.cache, both.cache_is_default) == ("http://c:1", False)
    assert both.engine_is_default


def test_flags_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvguard.yml"
    path.write_text(
        "interval: 5\nmode: enforce\nprefill_rate: 100\n"
        "policy: {trip_ratio: 0.5, min_loads: 9, dwell_seconds: 7}\n"
    )
    monkeypatch.setenv("KVGUARD_CONFIG", str(path))
    monkeypatch.setenv("KVGUARD_MODE", "observe")
    monkeypatch.setenv("KVGUARD_PREFILL_RATE", "200")
    monkeypatch.setenv("KVGUARD_POLICY__MIN_LOADS", "11")
    settings = load({"prefill_rate": 300.0, "policy": {"dwell_seconds": 8}})
    assert settings.interval == 5
    assert settings.mode == "observe"
    assert settings.prefill_rate == 300
    assert settings.policy.trip_ratio == 0.5
    assert settings.policy.min_loads == 11
    assert settings.policy.dwell_seconds == 8


def test_lists_and_sections_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGUARD_ENGINE", "http://a:1, http://b:2/")
    monkeypatch.setenv("KVGUARD_POLICY__RETURN_SHARES", "[0.1, 1]")
    monkeypatch.setenv("KVGUARD_GATE", '{"renew_seconds": 4}')
    monkeypatch.setenv("KVGUARD_RELEASE_ON_EXIT", "true")
    settings = load()
    assert settings.engine == ["http://a:1", "http://b:2"]
    assert settings.policy.return_shares == (0.1, 1.0)
    assert settings.gate.renew_seconds == 4
    assert settings.release_on_exit


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("KVGUARD_POLICY__TRIP_RATION", "1", "nearest known one is 'KVGUARD_POLICY__TRIP_RATIO'"),
        ("KVGUARD_MODUS", "enforce", "nearest known one is 'KVGUARD_MODE'"),
        ("KVGUARD_POLICY__TRIP_RATIO", "much", "environment variable KVGUARD_POLICY__TRIP_RATIO"),
        ("KVGUARD_POLICY", "fast", "environment variable KVGUARD_POLICY: a section"),
        ("KVGUARD_ENGINE", "localhost:8000", "write http://localhost:8000"),
    ],
)
def test_a_wrong_environment(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=r"^[^\n]*$") as caught:
        load()
    assert says in str(caught.value)


def test_what_kubernetes_puts_beside_us_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "KVGUARD_SERVICE_HOST",
        "KVGUARD_SERVICE_PORT",
        "KVGUARD_SERVICE_PORT_METRICS",
        "KVGUARD_PORT",
        "KVGUARD_PORT_9470_TCP",
        "KVGUARD_PORT_9470_TCP_ADDR",
    ):
        monkeypatch.setenv(name, "tcp://10.0.0.1:9470")
    monkeypatch.setenv("KVGUARD_CACHE", "")
    assert load().cache == DEFAULT_CACHE


def test_settings_do_not_change_and_keys_are_known() -> None:
    settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.mode = "enforce"
    assert {"engine", "policy", "policy.trip_ratio", "gate.lease_seconds"} <= set(known_keys())


@pytest.mark.parametrize(
    "text",
    ["", "x", "http://", "http://a b", "http://[::1", "http://1.2.3", "http://h:0", "http://h:",
     "http://h:x", "http://h/?q=1", "http://h/#f", "https://u@h", "file:///etc", "http://h\n",
     "http://ä", "http://-h"],
)  # fmt: skip
def test_no_url(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        peer_url(text)


@pytest.mark.parametrize(
    "text", ["http://h", "https://h.example:8443/base", "http://[::1]:8080", "http://10.0.0.1:1"]
)
def test_a_url(text: str) -> None:
    assert peer_url(text + "/") == text


def test_listen_addresses() -> None:
    assert split_address("127.0.0.1:9469") == ("127.0.0.1", 9469)
    assert split_address("[::1]:1") == ("::1", 1)
    assert split_address(":9470") == ("0.0.0.0", 9470)
    for text in ("9469", "h:65536", "h:", "[::1]", "::1:9", "1.2.3:80", "http://h:1"):
        with pytest.raises(ValueError, match="host"):
            split_address(text)
    assert [is_loopback(h) for h in ("localhost", "127.8.8.8", "::1", "0.0.0.0", "h")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, 2e9, float("nan"), float("inf"), True, "much"])
def test_a_known_figure_is_a_positive_number(value: object) -> None:
    for name in ("kv_bytes_per_token", "prefill_rate"):
        with pytest.raises(SettingsError, match=f"^--{name.replace('_', '-')}: "):
            load({name: value})
    assert load({"prefill_rate": 1.5}).prefill_rate == 1.5
