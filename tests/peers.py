"""A pretend engine and gated cache for tests of the loop: real HTTP, scripted figures.

The real ones run in tests/lab; here the loop's order, its patience with dead peers and
its dealings with the gate are tested on a clock of the test's own.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from guard.sources.gate import INFO


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Peers:
    """One HTTP server that answers for engine, cache and gate."""

    clock: Clock
    gated: bool = True
    epoch: str = "00000000000000aa"
    revision: int = 1
    share: float = 1.0
    max_loads: int = 5
    holder: str | None = None
    reason: str = ""
    lease_until: float | None = None
    lease_given: float | None = None
    bandwidth: float = 250e6
    prefetch: dict[str, Any] = field(default_factory=lambda: {"max_in_flight": 8})
    l1_bytes: float = 1e9
    loads: int = 0
    moved: float = 0.0
    seconds: float = 0.0
    requests: int = 0
    prefill: float = 0.0
    submitted: float = 0.0
    engine_up: bool = True
    cache_up: bool = True
    probe_id: int = 0
    posts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    answer_with: bytes | None = None
    refuse: bool = False
    port: int = 0
    server: asyncio.Server | None = None
    handlers: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    S = 24_576.0
    RATE = 2000.0

    async def __aenter__(self) -> Peers:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.close()
        for writer in list(self.handlers.values()):
            writer.close()
        await asyncio.gather(*list(self.handlers))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def traffic(self) -> None:
        """One second: one prompt of 2 048 tokens, loaded where admitted, else computed."""
        if self.lease_until is not None and self.clock.now >= self.lease_until:
            self.share, self.holder, self.lease_until = 1.0, None, None
            self.revision += 1
        if self.share > 0:
            self.loads += 1
            self.moved += 2048 * self.S
            self.submitted += 2048 * self.S
            self.seconds += 2048 * self.S / self.bandwidth
        else:
            self.requests += 1
            self.prefill += 2048 / self.RATE

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.handlers[task] = writer
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    if name.lower() == "content-length":
                        length = int(value)
                body = await reader.readexactly(length)
                alive = self.engine_up if path.startswith("/engine") else self.cache_up
                if not alive:
                    break
                code, answer = self._answer(method, path, body)
                writer.write(
                    f"HTTP/1.1 {code} X\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer
                )
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            del self.handlers[task]

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if method == "POST":
            payload = json.loads(body)
            if self.refuse:
                return 500, b'{"error":"the plugin broke"}'
            self.posts.append((path, payload))
            return self._post(path, payload)
        if self.answer_with is not None:
            return 200, self.answer_with
        if path == "/engine/metrics":
            return 200, self._engine().encode()
        if path == "/metrics":
            return 200, self._cache().encode()
        if path == "/status":
            prefetch = {
                **self.prefetch,
                "submission_queue_size": 0,
                "pending_queue_size": 0,
                "in_flight_request_count": 0,
                "load_phase_count": 0,
            }
            manager = {
                "prefetch_controller": prefetch,
                "l1_managers": {"_default": {"memory_total_bytes": self.l1_bytes}},
            }
            document = {"is_healthy": True, "chunk_size": 256, "storage_manager": manager}
            return 200, json.dumps(document).encode()
        if path == "/reconfigure/plugin/l2/status":
            adapters = [{"adapter_index": 0, "status": self.state()}] if self.gated else []
            return 200, json.dumps({"adapters": adapters}).encode()
        return 404, b'{"error":"no such path"}'

    def _post(self, path: str, payload: dict[str, Any]) -> tuple[int, bytes]:
        if path.endswith("/probe"):
            self.probe_id += 1
            return 200, json.dumps({"id": self.probe_id, "started": True}).encode()
        if payload["if_revision"] != self.revision:
            refusal = {"error": "stale if_revision", "state": self.state()}
            return 409, json.dumps(refusal).encode()
        self.revision += 1
        self.share, self.holder = payload["share"], payload["holder"]
        self.max_loads = payload.get("max_loads", self.max_loads)
        self.reason = payload["reason"]
        self.lease_given = payload["lease_s"]
        self.lease_until = self.clock.now + payload["lease_s"]
        return 200, json.dumps(self.state()).encode()

    def state(self) -> dict[str, Any]:
        admission = {"share": self.share, "min_chunks": 0, "max_loads": self.max_loads}
        lease = None
        if self.holder is not None and self.lease_until is not None:
            left = self.lease_until - self.clock.now
            lease = {"holder": self.holder, "reason": self.reason, "expires_in_s": left}
        size = 4 * 256 * self.S
        took = {"lookup_s": 0.005, "load_s": size / self.bandwidth}
        sample = {"chunks": 4, "bytes": size, "overlapped": False, **took}
        last = {"id": self.probe_id, "outcome": "done", "error": None, "age_s": 0.0}
        return {
            "schema": 1,
            "l2": "resp",
            "epoch": self.epoch,
            "revision": self.revision,
            "admission": admission,
            "default": {"share": 1.0},
            "lease": lease,
            "can": {"probe": True},
            "known_keys": 40,
            "probe": {
                "running": False,
                "last": {**last, "samples": [sample]} if self.probe_id else None,
            },
        }

    def _engine(self) -> str:
        tokens = self.requests * 2048
        external = self.loads * 2048
        rows = {
            "vllm:prompt_tokens_total": tokens + external,
            'vllm:prompt_tokens_by_source_total{source="local_compute"}': tokens,
            'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': external,
            "vllm:request_prefill_time_seconds_sum": self.prefill,
            "vllm:request_prefill_time_seconds_count": self.requests,
            "vllm:request_prefill_kv_computed_tokens_sum": tokens,
            "vllm:request_prefill_kv_computed_tokens_count": self.requests,
            "vllm:num_requests_running": 1,
            "vllm:num_requests_waiting": 0,
            "process_start_time_seconds": 1,
        }
        return "".join(f"{name} {value}\n" for name, value in rows.items())

    def _cache(self) -> str:
        rows: dict[str, float] = {"process_start_time_seconds": 2}
        if self.gated:
            size = 2048 * self.S
            rows[f'{INFO}{{epoch="{self.epoch}",l2="resp"}}'] = 1
            for kind in ("all", "alone"):
                label = f'{{kind="{kind}"}}'
                rows[f"kvguard_gate_loads_total{label}"] = self.loads
                rows[f"kvguard_gate_load_bytes_total{label}"] = self.moved
                rows[f"kvguard_gate_load_seconds_total{label}"] = self.seconds
                rows[f"kvguard_gate_load_bytes_squared_total{label}"] = self.loads * size**2
                rows[f"kvguard_gate_load_seconds_squared_total{label}"] = self.seconds
                rows[f"kvguard_gate_load_bytes_seconds_total{label}"] = size * self.seconds
            rows["kvguard_gate_load_busy_seconds_total"] = self.seconds
            rows["kvguard_gate_load_chunks_total"] = self.loads * 8
            rows["kvguard_gate_load_submitted_bytes_total"] = self.submitted
            rows["kvguard_gate_lookup_seconds_total"] = 0.005 * self.loads
            rows["kvguard_gate_lookup_keys_total"] = 8 * (self.loads + self.requests)
            rows["kvguard_gate_denied_keys_total"] = 8 * self.requests
            for answer in ("hit", "partial", "miss", "bypassed", "declined"):
                count = {"hit": self.loads, "bypassed": self.requests}.get(answer, 0)
                rows[f'kvguard_gate_lookups_total{{answer="{answer}"}}'] = count
            rows["kvguard_gate_loads_in_flight"] = 0
            rows["kvguard_gate_in_flight_bytes"] = 0
            rows["kvguard_gate_admission_share"] = self.share
            rows["kvguard_gate_revision"] = self.revision
        return "".join(f"{name} {value}\n" for name, value in rows.items())
