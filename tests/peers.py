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
    token: str | None = None
    old_gate: bool = False
    can_abort: bool = True
    can_rebuild: bool = True
    frozen: bool = False
    hung_loads: int = 0
    hung_since: float = 0.0
    lookup_since: float | None = None
    abandoned: int = 0
    answered_at: float | None = None
    completed_at: float | None = None
    built_at: float = 1_000_000.0
    generation: int = 0
    answered: bool = True
    attached: bool = True
    lost_lookups: int = 0
    failed_stores: int = 0
    store_problem: str | None = None
    connection_lost: bool = False
    lost_outcome: str = "done"
    probe_of: str = "known"
    rebuild_helps: bool = True
    refuse_operations: bool = False
    rebuild_last: dict[str, Any] | None = None
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
        if self.share == 0 and self.lookup_since is not None:
            self.lookup_since, self.abandoned = None, 1  # a bypass answers what is stuck
        if self.connection_lost and self.share > 0:
            self.lost_lookups += 1
        if self.frozen:
            if self.share > 0 and self.lookup_since is None:
                self.lookup_since = self.clock.now
        else:
            self.answered_at, self.lookup_since, self.abandoned = self.clock.now, None, 0
        if self.share > 0 and not self.frozen and not self.connection_lost:
            self.completed_at = self.clock.now
            self.loads += 1
            self.moved += 2048 * self.S
            self.submitted += 2048 * self.S
            self.seconds += 2048 * self.S / self.bandwidth
        elif not self.frozen or self.share == 0:
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
        if self.token is not None and payload.get("token") != self.token:
            return 403, b'{"error": "the token is not the one that this gate wants"}'
        if path.endswith("/probe"):
            self.probe_id += 1
            self.probe_of = payload.get("of", "known")
            return 200, json.dumps({"id": self.probe_id, "started": True}).encode()
        operation = path.rpartition("/")[2]
        if operation in ("abort", "rebuild"):
            return self._operate(operation, payload)
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

    def _operate(self, operation: str, payload: dict[str, Any]) -> tuple[int, bytes]:
        allowed = self.can_abort if operation == "abort" else self.can_rebuild
        if self.refuse_operations or not allowed or payload["if_revision"] != self.revision:
            refusal = {"error": "not now", "state": self.state()}
            return 409, json.dumps(refusal).encode()
        outcome = "done"
        if self.store_problem is not None:
            outcome = "detached" if operation == "abort" else "failed"
        number = self.rebuild_last["id"] + 1 if self.rebuild_last else 1
        self.rebuild_last = {
            "id": number,
            "operation": operation,
            "cause": payload.get("cause", "abort"),
            "outcome": outcome,
            "error": self.store_problem,
            "age_s": 0.0,
            "seconds": 0.02,
            "ended_loads": self.hung_loads,
            "ended_lookups": 0,
            "ended_stores": 0,
            "parked": False,
        }
        if outcome != "failed":
            self.hung_loads = 0
            self.attached = outcome == "done"
            self.generation, self.built_at = self.generation + 1, self.clock.now
            self.abandoned = self.lost_lookups = self.failed_stores = 0
            self.connection_lost = self.connection_lost and not self.rebuild_helps
            self.answered = False if not self.rebuild_helps else self.answered
        return 200, json.dumps({"id": number, "started": True}).encode()

    def state(self) -> dict[str, Any]:
        admission = {"share": self.share, "min_chunks": 0, "max_loads": self.max_loads}
        lease = None
        if self.holder is not None and self.lease_until is not None:
            left = self.lease_until - self.clock.now
            lease = {"holder": self.holder, "reason": self.reason, "expires_in_s": left}
        size = 4 * 256 * self.S
        took = {"lookup_s": 0.005, "load_s": size / self.bandwidth}
        sample = {"chunks": 4, "bytes": size, "overlapped": False, **took}
        outcome = self.lost_outcome if self.probe_of == "lost" else "done"
        if self.store_problem is not None or self.frozen:
            outcome = "failed"
        last = {
            "id": self.probe_id,
            "of": self.probe_of,
            "outcome": outcome,
            "error": self.store_problem,
            "age_s": 0.0,
        }
        state = self._admission(admission, lease, last, sample)
        return state if self.old_gate else {**state, **self._adapter()}

    def _adapter(self) -> dict[str, Any]:
        why_not = {"abort": "it cannot be closed", "rebuild": "it cannot be closed"}
        return {
            "can": {
                "probe": True,
                "abort": self.can_abort,
                "rebuild": self.can_rebuild,
                "why_not": {
                    op: why
                    for op, why in why_not.items()
                    if not (self.can_abort if op == "abort" else self.can_rebuild)
                },
            },
            "adapter": {
                "generation": self.generation,
                "attached": self.attached,
                "answered": self.answered,
                "age_s": self.clock.now - self.built_at,
                "last_answer_age_s": None,
                "lost_lookups": self.lost_lookups,
                "failed_stores": self.failed_stores,
                "parked": 0,
                "releasing": 0,
                "store_problem": self.store_problem,
            },
            "in_flight": {"abandoned_lookups": self.abandoned},
            "rebuild": {"running": False, "last": self.rebuild_last},
        }

    def _admission(
        self, admission: dict[str, Any], lease: Any, last: dict[str, Any], sample: dict[str, Any]
    ) -> dict[str, Any]:
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
                "last": {**last, "samples": [sample] if last["outcome"] == "done" else []}
                if self.probe_id
                else None,
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
        return "".join(f"{name} {float(value)}\n" for name, value in rows.items())

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
            rows["kvguard_gate_loads_in_flight"] = self.hung_loads
            rows["kvguard_gate_in_flight_bytes"] = self.hung_loads * size
            ages = {
                "oldest_load_seconds": self.hung_since if self.hung_loads else None,
                "oldest_lookup_seconds": self.lookup_since,
                "last_completion_age_seconds": self.completed_at,
            }
            if not self.old_gate:
                ages["last_answer_age_seconds"] = self.answered_at
                ages["adapter_age_seconds"] = self.built_at
                rows["kvguard_gate_adapter_attached"] = self.attached
                rows["kvguard_gate_adapter_answered"] = self.answered
                rows["kvguard_gate_lost_lookups"] = self.lost_lookups
                rows["kvguard_gate_failed_stores"] = self.failed_stores
                rows["kvguard_gate_releasing_loads"] = 0
            for name, began in ages.items():
                if began is not None:
                    rows[f"kvguard_gate_{name}"] = self.clock.now - began
            rows["kvguard_gate_admission_share"] = self.share
            rows["kvguard_gate_revision"] = self.revision
        return "".join(f"{name} {float(value)}\n" for name, value in rows.items())
