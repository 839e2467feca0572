"""The load generator, against a small server of our own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from .load import Load, Prompts, Request, quantile, summarize
from .model import KV_BYTES_PER_TOKEN


class Engine(BaseHTTPRequestHandler):
    """Streams as vLLM does: tokens, usage, [DONE]. `behaviour` may spoil an answer."""

    first_token_s: ClassVar[float] = 0.1
    behaviour: ClassVar[str] = "fine"
    prompts: ClassVar[list[list[int]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).prompts.append(body["prompt"])
        if self.behaviour == "refuse":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        time.sleep(self.first_token_s)
        if self.behaviour == "error":
            self._event({"error": {"message": "the engine is dead"}})
            return
        if self.behaviour == "break":
            return
        self._event({"choices": [{"text": "", "finish_reason": None}]})
        time.sleep(0.05)
        finish = "abort" if self.behaviour == "abort" else "length"
        self._event({"choices": [{"text": "a", "finish_reason": finish}]})
        usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 256}}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def engine() -> Iterator[str]:
    Engine.behaviour, Engine.prompts = "fine", []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_ttft_is_the_time_to_the_first_token(engine: str) -> None:
    request = Load(engine, "tiny", prefixes=[256], tail_tokens=8).send(0)
    assert request.error is None
    assert request.ttft is not None
    assert 0.1 <= request.ttft < 0.15 <= (request.end or 0) - request.start
    assert request.cached_tokens == 256
    assert request.prompt_tokens == 264


def test_clients_run_until_the_count(engine: str) -> None:
    load = Load(engine, "tiny", prefixes=[8, 16, 24], clients=3, max_requests=12)
    load.start()
    load.stop_when_done(20)
    requests = load.requests
    assert len(requests) == 12
    assert all(request.end and not request.error for request in requests)
    # Every prefix as often as any other, in every round of three.
    assert [sorted(r.prefix for r in requests[i : i + 3]) for i in (0, 3, 6, 9)] == [[0, 1, 2]] * 4
    assert len(load.in_flight(requests[0].start + 0.01)) == 3


def test_clients_stop_at_the_time_and_finish_what_they_began(engine: str) -> None:
    load = Load(engine, "tiny", prefixes=[8], clients=2, max_seconds=0.5)
    begin = time.monotonic()
    load.start()
    load.stop_when_done(20)
    assert 0.5 <= time.monotonic() - begin < 2
    assert all(request.end for request in load.requests)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("refuse", "HTTP 503"),
        ("error", "the engine is dead"),
        ("break", "broke off"),
        ("abort", "finished with 'abort'"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(engine: str, behaviour: str, words: str) -> None:
    Engine.behaviour = behaviour
    request = Load(engine, "tiny", prefixes=[8]).send(0)
    assert request.error is not None
    assert words in request.error
    assert request.end is not None


def test_no_engine_is_an_error_of_the_request() -> None:
    request = Load("http://127.0.0.1:9", "tiny", prefixes=[8]).send(0)
    assert "ConnectionRefusedError" in (request.error or "")


def test_too_late_is_an_error(engine: str) -> None:
    request = Load(engine, "tiny", prefixes=[8], request_limit_s=0.05).send(0)
    assert "TimeoutError" in (request.error or "")


def test_the_same_seed_gives_the_same_prompts() -> None:
    first, again, other = (Prompts([4, 8], 2, seed) for seed in (1, 1, 2))
    sequence = [first.next() for _ in range(10)]
    assert sequence == [again.next() for _ in range(10)]
    assert sequence != [other.next() for _ in range(10)]
    tails = [tuple(prompt[-2:]) for _, prompt in sequence]
    assert len(set(tails)) == len(tails)


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.99) == 3
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile(map(float, range(101)), 0.99) == 99


def test_a_summary_counts_what_failed() -> None:
    good = Request(0, 0, 8, start=1.0, first_token=3.0, end=3.5)
    bad = Request(1, 0, 8, start=1.0, end=2.0, error="HTTP 500")
    summary = summarize([good, bad])
    assert (summary.answered, summary.failed, summary.p50) == (1, 1, 2.0)


def test_the_model_takes_as_many_bytes_as_the_facts_say() -> None:
    assert KV_BYTES_PER_TOKEN == 24_576
