"""A closed-loop load generator that measures time to first token itself.

N clients share one sequence of prompts: each prompt is one of a few fixed prefixes and a
tail of its own, as token ids. The sequence goes through all prefixes in a shuffled order,
then again in another, so that every stretch of time sees the same mix. The same seed
gives the same prompts.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .model import FIRST_PLAIN_TOKEN

ACCEPTANCE_PREFIXES = (1024, 1536, 2048, 2048, 2560, 3072)
TAIL_TOKENS = 60
PLAIN_TOKENS = (FIRST_PLAIN_TOKEN, 1900)


@dataclass(slots=True)
class Request:
    """One request; times are monotonic seconds, None until they happened."""

    index: int
    prefix: int
    prompt_tokens: int
    start: float
    first_token: float | None = None
    end: float | None = None
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.start


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the requests that began in a window: how many got a token, and when."""

    answered: int
    failed: int
    p50: float | None
    p99: float | None


def quantile(values: Iterable[float], q: float) -> float | None:
    """Linear between the order statistics; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(requests: Iterable[Request]) -> Summary:
    chosen = list(requests)
    times = [request.ttft for request in chosen if request.ttft is not None]
    return Summary(
        answered=len(times),
        failed=sum(request.error is not None for request in chosen),
        p50=quantile(times, 0.5),
        p99=quantile(times, 0.99),
    )


class Prompts:
    """The deterministic sequence of prompts."""

    def __init__(self, prefixes: Sequence[int], tail_tokens: int, seed: int) -> None:
        self._choose = random.Random(seed)
        self.prefixes = [self._tokens(length) for length in prefixes]
        self._tail_tokens = tail_tokens
        self._order: list[int] = []

    def next(self) -> tuple[int, list[int]]:
        """The index of the prefix, and the prompt."""
        if not self._order:
            self._order = list(range(len(self.prefixes)))
            self._choose.shuffle(self._order)
        index = self._order.pop()
        return index, self.with_tail(index)

    def with_tail(self, prefix: int, tail_tokens: int | None = None) -> list[int]:
        """A prompt over that prefix with a tail nobody else has."""
        count = self._tail_tokens if tail_tokens is None else tail_tokens
        return self.prefixes[prefix] + self._tokens(count)

    def _tokens(self, count: int) -> list[int]:
        return [self._choose.randint(*PLAIN_TOKENS) for _ in range(count)]


class Load:
    """Runs clients in threads until `stop()`, the count or the time is reached.

    Requests in flight at the end are waited for, each up to `request_limit_s`; one that
    takes longer is an error, like any answer that is not a stream of tokens to its end.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        prefixes: Sequence[int] = ACCEPTANCE_PREFIXES,
        tail_tokens: int = TAIL_TOKENS,
        clients: int = 2,
        max_tokens: int = 2,
        seed: int = 1,
        max_requests: int = 10_000,
        max_seconds: float = 1200.0,
        request_limit_s: float = 120.0,
    ) -> None:
        self._server = urlsplit(url)
        self._model = model
        self._clients = clients
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._max_seconds = max_seconds
        self._request_limit_s = request_limit_s
        self.prompts = Prompts(prefixes, tail_tokens, seed)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._requests: list[Request] = []
        self._threads: list[threading.Thread] = []
        self._deadline = 0.0

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._deadline = time.monotonic() + self._max_seconds
        for number in range(self._clients):
            thread = threading.Thread(
                target=self._client, name=f"load-client-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """No new requests; returns when those in flight have ended."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def stop_when_done(self, limit_s: float) -> None:
        """Returns when the count or the time was reached, or after `limit_s`."""
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.stop()

    def send(self, prefix: int, *, tail_tokens: int | None = None) -> Request:
        """One request by itself, over a prefix of this load."""
        with self._lock:
            prompt = self.prompts.with_tail(prefix, tail_tokens)
        request = Request(-1, prefix, len(prompt), time.monotonic())
        self._ask(request, prompt)
        return request

    def warm(self) -> list[Request]:
        """Every prefix once, one after the other."""
        return [self.send(index) for index in range(len(self.prompts.prefixes))]

    @property
    def requests(self) -> list[Request]:
        """All requests so far, those in flight included."""
        with self._lock:
            return list(self._requests)

    def began(self, begin: float, end: float) -> list[Request]:
        """Requests that began in [begin, end) of monotonic time."""
        return [request for request in self.requests if begin <= request.start < end]

    def in_flight(self, at: float) -> list[Request]:
        """Requests that had begun but got no token by then."""
        return [
            request
            for request in self.requests
            if request.start <= at and (request.first_token is None or request.first_token > at)
        ]

    def _client(self) -> None:
        while not self._stopped.is_set() and time.monotonic() < self._deadline:
            with self._lock:
                if len(self._requests) >= self._max_requests:
                    return
                prefix, prompt = self.prompts.next()
                request = Request(len(self._requests), prefix, len(prompt), time.monotonic())
                self._requests.append(request)
            self._ask(request, prompt)
            if request.error is not None:
                self._stopped.wait(0.2)  # an engine that is down is not hammered

    def _ask(self, request: Request, prompt: list[int]) -> None:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": self._max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        connection = http.client.HTTPConnection(
            self._server.hostname or "", self._server.port, timeout=self._request_limit_s
        )
        try:
            request.start = time.monotonic()
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                request.error = f"HTTP {answer.status}: {answer.read(300)!r}"
            else:
                request.error = _read_stream(answer, request)
        except (OSError, http.client.HTTPException) as error:
            request.error = f"{type(error).__name__}: {error}"
        finally:
            request.end = time.monotonic()
            connection.close()


def _read_stream(lines: Iterable[bytes], request: Request) -> str | None:
    """Fills in the request; returns what was wrong with the stream, if anything."""
    finish: str | None = None
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            if request.first_token is None:
                return "the stream ended without a token"
            return None if finish in ("length", "stop") else f"finished with {finish!r}"
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            return f"error in the stream: {event['error']}"
        for choice in event.get("choices", ()):
            if request.first_token is None:
                request.first_token = time.monotonic()
            finish = choice.get("finish_reason") or finish
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            request.cached_tokens = details.get("cached_tokens", 0)
    return "the stream broke off"
