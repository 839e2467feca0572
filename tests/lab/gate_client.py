"""An engine's side of LMCache's MP server, in a process of its own: LMCache's bench client.

    python gate_client.py FD RPC_URL TP_SIZE

Speaks JSON lines on the socket FD, one answer to each request:
    {"op": "begin", "seq": 7, "chunks": 4}    -> {"handle": 1}   a lookup is under way
    {"op": "poll", "handle": 1, "limit_s": 5} -> {"hit": 4, "waited_s": 0.01}, hit null: not yet
    {"op": "finish", "handle": 1}             -> retrieve what was hit, store the rest, end
    {"op": "drop", "handle": 1}               -> end it without moving anything
A process of its own since it must run with the server's LMCache, which may be another one
than that of the tests. Asks for results every 0.5 ms, where the bench command takes 50.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import socket
import sys
import time
from typing import Any

from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

# 2 layers of 8 heads of 64, two planes, 2 bytes: 4096 bytes a token, 1 MiB a chunk of 256.
SHAPE = "(2,512,16,8,64):float16:2"
POLL_SECONDS = 0.0005


class Engine:
    def __init__(self, rpc_url: str, tp_size: int) -> None:
        self._client = ServerBenchClient(
            BenchConfig(
                rpc_url=rpc_url,
                http_url="",
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=tp_size,
                use_mla=False,
                num_tokens=256,
                kvcache_shape_spec=SHAPE,
                num_blocks=512,
                block_size=16,
            ),
            lambda _: None,
        )
        self._client.start()
        self._open: dict[int, tuple[Any, int]] = {}
        # By prefix and chunk all digests that were stored: this client's KV is random, so
        # recomputing gives another one, where a real engine's is the same again.
        self._stored: dict[tuple[int, int], set[str]] = {}
        self._next = 0

    def begin(self, seq: int, chunks: int) -> dict[str, Any]:
        self._next += 1
        request = self._request(seq, chunks, f"{seq}-{chunks}-{self._next}")
        key = self._key(request)
        if not helpers._send_lookup(self._rpc, key, tp_size=len(self._client._workers)):
            raise TimeoutError("the server did not take a lookup")
        self._open[self._next] = (request, 0)
        return {"handle": self._next}

    def poll(self, handle: int, limit_s: float) -> dict[str, Any]:
        request, _ = self._open[handle]
        began = time.monotonic()
        while True:
            hit = helpers._wait_for_result(self._rpc.query_prefetch_status(request.request_id))
            waited = time.monotonic() - began
            if isinstance(hit, int):
                self._open[handle] = (request, hit)
                return {"hit": hit, "waited_s": waited}
            if waited > limit_s:
                return {"hit": None, "waited_s": waited}
            time.sleep(POLL_SECONDS)

    def finish(self, handle: int) -> dict[str, Any]:
        request, hit = self._open.pop(handle)
        client = self._client
        hit_tokens = hit * request.chunk_size
        rest = request.num_full_tokens - hit_tokens
        intact = retrieved = stored = None
        if hit_tokens:
            client.zero_destination(request, 0, hit_tokens)
            retrieved = client.retrieve(request, 0, hit_tokens).succeeded
            digests = self._checksums(request, 0, hit_tokens, "retrieve")
            intact = all(
                digest in self._stored.get((request.sequence_id, chunk), ())
                for chunk, digest in enumerate(digests)
            )
        if rest:
            digests = self._checksums(request, hit_tokens, rest, "store")
            for chunk, digest in enumerate(digests, start=hit):
                self._stored.setdefault((request.sequence_id, chunk), set()).add(digest)
            stored = client.store(request, hit_tokens, rest).succeeded
        self._end(request)
        return {"retrieved": retrieved, "stored": stored, "intact": intact}

    def drop(self, handle: int) -> dict[str, Any]:
        request, _ = self._open.pop(handle)
        self._end(request)
        return {}

    # What differs between the versions

    @property
    def _rpc(self) -> Any:
        return self._client._req_client

    def _request(self, seq: int, chunks: int, request_id: str) -> Any:
        client, tokens = self._client, chunks * self._client._chunk_size
        if "token_ids" in inspect.signature(client.create_request).parameters:
            ids = [seq, *range(1, tokens)]
            return client.create_request(seq, request_id, "lab", token_ids=ids)
        # 0.5.6 puts the sequence before num_tokens tokens of its own.
        client._config = dataclasses.replace(client._config, num_tokens=tokens - 1)
        return client.create_request(seq, request_id, "lab")

    def _key(self, request: Any) -> Any:
        workers, world = self._client._workers, self._client._kv_world_size
        readers = sum(worker.spec.retrieve_enabled for worker in workers) // world
        return helpers._make_key(
            request.token_ids,
            request.request_id,
            start=0,
            end=request.num_full_tokens,
            world_size=world,
            num_kv_readers=readers,
        )

    def _checksums(self, request: Any, start: int, count: int, operation: str) -> list[str]:
        compute = self._client.compute_checksums
        if "operation" in inspect.signature(compute).parameters:
            by_rank = compute(request, start, count, operation=operation)
            ranks = [by_rank[rank] for rank in sorted(by_rank)]
            return ["".join(parts) for parts in zip(*ranks, strict=True)]
        flat = compute(request, start, count)
        chunks = count // request.chunk_size
        ranks = [flat[at : at + chunks] for at in range(0, len(flat), chunks)]
        return ["".join(parts) for parts in zip(*ranks, strict=True)]

    def _end(self, request: Any) -> None:
        end = getattr(self._client, "release_request", None) or self._client.end_session
        end(request)

    def close(self) -> None:
        self._client.close()


def main(fd: int, rpc_url: str, tp_size: int) -> None:
    with socket.socket(fileno=fd) as channel, channel.makefile("rw") as lines:
        engine = Engine(rpc_url, tp_size)
        print(json.dumps({"ready": True}), file=lines, flush=True)
        for line in lines:
            request = json.loads(line)
            operation = request.pop("op")
            try:
                answer = getattr(engine, operation)(**request)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=lines, flush=True)
        engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
