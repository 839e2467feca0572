"""Both listeners over real HTTP: status, the switch, health, and who may not reach them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from guard.errors import ControlUnreachable, ListenError
from guard.policy.types import Healing
from guard.service import api, listen
from guard.service.metrics_app import MetricsApp
from guard.service.status import status
from tests.fakes import BYPASSED, NOW, FakeGuard, fresh_view, hurting_view, serving


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def guard() -> FakeGuard:
    return FakeGuard(hurting_view())


@pytest.fixture
def clock() -> Clock:
    return Clock(101.0)


@pytest.fixture
def client(guard: FakeGuard, clock: Clock) -> Iterator[httpx.Client]:
    app = api.build(guard, 1.0, "9.9", clock)
    with serving(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(client: httpx.Client) -> Post:
    return lambda **body: client.post("/api/v1/override", json=body)


def test_status_is_the_view_as_json(client: httpx.Client) -> None:
    answer = client.get("/api/v1/status")
    assert answer.status_code == 200
    document = answer.json()
    assert document == json.loads(json.dumps(status(hurting_view(), "9.9"), allow_nan=False))
    assert (document["schema"], document["state"], document["cause"]) == (1, "hurting", "slow")
    assert document["control"] == "observe only: no control available"
    readings = document["readings"]
    assert readings["load_bandwidth.alone"] == {
        "value": 1.2e7,
        "unit": "bytes_per_second",
        "at": NOW,
        "source": "20 loads alone",
    }
    assert readings["break_even_tokens"]["value"] is None
    assert readings["break_even_tokens"]["infinite"] is True
    assert readings["hit.l2"] == {"missing": "idle", "detail": "no tokens asked for"}
    assert readings["load_utilization.max"] == {"missing": "no_gate"}
    assert document["sources"][1]["error"] == "no answer"
    assert document["admission"] is None
    assert document["override"] is None


def test_status_of_a_bypass_and_of_a_guard_that_has_not_ticked() -> None:
    document = status(hurting_view(**BYPASSED), "1")
    assert document["admission"] == {"share": 0.0, "min_chunks": 0, "lease_expires_at": NOW + 20}
    assert document["override"]["who"] == "ann"
    assert document["override_revision"] == 4
    fresh = status(fresh_view(), "1")
    assert (fresh["state"], fresh["at"], fresh["readings"]) == ("unknown", None, {})


def test_status_says_what_ails_the_way_to_l2() -> None:
    assert status(hurting_view(), "1")["healing"] is None
    ill = Healing("detached", NOW, 1, NOW + 4, "no route", None, "began")
    assert status(hurting_view(healing=ill), "1")["healing"] == {
        "ailment": "detached",
        "since": NOW,
        "attempts": 1,
        "next_at": NOW + 4,
        "words": "no route",
        "incurable": None,
    }


def test_the_switch(client: httpx.Client, guard: FakeGuard, post: Post) -> None:
    assert client.get("/api/v1/override").json() == {
        "schema": 1,
        "override": None,
        "revision": 0,
        "mode": "observe",
        "control": "observe only: no control available",
    }
    answer = post(mode="bypass", reason="drill", who="ann", ttl_s=60, if_revision=0)
    assert answer.status_code == 200
    assert answer.json()["override"] == {
        "mode": "bypass",
        "who": "ann",
        "reason": "drill",
        "set_at": NOW,
        "expires_at": NOW + 60,
        "revision": 1,
    }
    stale = post(mode="admit", reason="no", if_revision=0)
    assert stale.status_code == 409
    assert stale.json()["state"]["override"]["who"] == "ann"
    assert post(mode="auto").json()["override"] is None
    assert [seen["ttl"] for seen in guard.seen] == [60.0, 1800.0, None]
    assert guard.seen[1]["who"] == "unnamed"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"mode": "off", "reason": "x"}, "mode"),
        ({"reason": "x"}, "mode: Field required"),
        ({"mode": "bypass"}, "a reason is needed to bypass"),
        ({"mode": "admit", "reason": "  "}, "a reason is needed to admit"),
        ({"mode": "bypass", "reason": "x", "ttl_s": True}, "ttl_s"),
        ({"mode": "bypass", "reason": "x", "ttl_s": "60"}, "ttl_s"),
        ({"mode": "bypass", "reason": "x", "ttl_s": 0}, "ttl_s"),
        ({"mode": "bypass", "reason": "x", "ttl_s": 86401}, "ttl_s"),
        ({"mode": "bypass", "reason": "x", "ttl": 60}, "ttl: Extra inputs"),
        ({"mode": "bypass", "reason": "x" * 129}, "reason"),
        ({"mode": "bypass", "reason": "a\nb"}, "reason"),
        ({"mode": "bypass", "reason": "a\u202eb"}, "printable"),
        ({"mode": "bypass", "reason": "x", "who": "a\x1b[2J"}, "who"),
        ({"mode": "bypass", "reason": "x", "if_revision": True}, "if_revision"),
        ({"mode": "bypass", "reason": "x", "if_revision": 1.5}, "if_revision"),
        ([1], "valid dictionary"),
    ],
)
def test_a_wrong_override_is_422_and_changes_nothing(
    client: httpx.Client, guard: FakeGuard, body: Any, says: str
) -> None:
    answer = client.post("/api/v1/override", json=body)
    assert answer.status_code == 422
    assert says in answer.json()["error"]
    assert guard.seen == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"mode":"bypass","reason":"x","ttl_s":NaN}', b"\xff"]
)
def test_what_is_no_json(client: httpx.Client, guard: FakeGuard, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/api/v1/override", content=body, headers=headers)
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]
    assert guard.seen == []


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:9469"}, 403),
        ({"host": "localhost@evil.example"}, 403),
        ({"host": "10.0.0.1:9469"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"host": "localhost:9469"}, 200),
        ({"host": "[::1]:9469"}, 200),
        ({"host": "localhost:9469", "origin": "http://localhost:9469"}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_who_may_use_the_switch(
    client: httpx.Client, guard: FakeGuard, headers: dict[str, str], code: int
) -> None:
    body = b'{"mode":"bypass","reason":"x"}'
    headers = {"content-type": "application/json"} | headers
    answer = client.post("/api/v1/override", content=body, headers=headers)
    assert answer.status_code == code
    assert len(guard.seen) == (code == 200)


def test_a_rebound_name_reads_nothing_and_a_large_body_is_refused(
    client: httpx.Client, guard: FakeGuard
) -> None:
    assert client.get("/api/v1/status", headers={"host": "evil.example"}).status_code == 403
    answer = client.post("/api/v1/override", json={"mode": "bypass", "reason": "x" * 20_000})
    assert answer.status_code == 413
    assert guard.seen == []


def test_a_control_error_is_told_with_the_state(guard: FakeGuard, post: Post) -> None:
    guard.fails = ControlUnreachable("the gate does not answer")
    answer = post(mode="bypass", reason="x")
    assert (answer.status_code, answer.json()["error"]) == (502, "the gate does not answer")


def test_health_and_readiness(client: httpx.Client, guard: FakeGuard, clock: Clock) -> None:
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 200
    clock.now = 109.9
    assert client.get("/healthz").status_code == 200
    clock.now = 110.0
    stale = client.get("/healthz")
    assert (stale.status_code, "no tick for 10.0 s" in stale.text) == (503, True)
    assert client.get("/readyz").status_code == 200
    guard.current = fresh_view()  # the application began at 101
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
    clock.now = 111.0
    assert client.get("/healthz").status_code == 503


def test_other_paths_and_methods(client: httpx.Client) -> None:
    page = client.get("/")
    assert "hurting" in page.text
    assert "12 MB/s &lt; 0.9" in page.text
    assert "kvguard_state" in client.get("/metrics").text
    assert client.get("/nowhere").json() == {"error": "Not Found"}
    assert client.get("/docs").status_code == 404
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/api/v1/status", "/api/v1/override"} <= set(paths)


def test_the_metrics_listener_has_no_switch(guard: FakeGuard, clock: Clock) -> None:
    app = MetricsApp(guard.view, 1.0, "9.9", clock)
    with serving(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        assert "kvguard_state" in client.get("/metrics", headers={"host": "10.1.2.3"}).text
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        assert client.get("/metrics", headers=accept).text.endswith("# EOF\n")
        assert client.get("/healthz").text == "ok\n"
        assert client.get("/readyz").status_code == 200
        assert client.head("/metrics").content == b""
        for path in ("/", "/api/v1/status", "/api/v1/override", "/openapi.json"):
            assert client.get(path).status_code == 404
        assert client.post("/api/v1/override", json={"mode": "auto"}).status_code == 405


def test_listeners() -> None:
    first = listen.bind("127.0.0.1:0", "--listen")
    with first:
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ListenError, match=f"--metrics-listen {host}:{port}: the port is"):
                listen.bind(f"{host}:{port}", "--metrics-listen")
    with pytest.raises(ListenError, match="no interface"):
        listen.bind("192.0.2.1:0", "--listen")
    with pytest.raises(ListenError, match="loopback only"):
        listen.check_exposure("0.0.0.0:9469", None)
    listen.check_exposure("[::1]:9469", None)
