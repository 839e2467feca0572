"""A real `lmcache server` with the gate, and an engine's side of it, for the gate's tests.

with CacheServer(resp(port), lmcache=None) as server:
    server.client.request(seq=1, chunks=4)
    server.gate("bypass", holder="person:ana")
    server.status()["admission"]["share"]
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from .processes import HOST, LabError, Run, free_ports

CHECKOUT = Path(__file__).resolve().parents[2]
NEWEST = CHECKOUT / ".lab-pre"
CHUNK_BYTES = 1024 * 1024

_ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
}


def environment(lmcache: Path | None) -> dict[str, str]:
    """Ours, and a folder with another LMCache than the interpreter's own before it."""
    search = [str(path) for path in (lmcache, CHECKOUT) if path is not None]
    return {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(search)}


class CacheServer:
    """Starts on entering, and its client; ends both and their shared memory on leaving."""

    def __init__(
        self,
        inner: dict[str, Any],
        *,
        lmcache: Path | None = None,
        params: dict[str, Any] | None = None,
        tp_size: int = 1,
        outer: dict[str, Any] | None = None,
        policies: tuple[str, str] = ("skip_l1", "default"),
    ) -> None:
        self._run = Run()
        self._lmcache = lmcache
        self._tp_size = tp_size
        self._rpc, http = free_ports(2)
        self.url = f"http://{HOST}:{http}"
        adapter = {
            "type": "plugin",
            "module_path": "guard.gate.lmcache",
            "class_name": "GatedL2Adapter",
            "adapter_params": {"inner": inner, **(params or {})},
            **(outer or {}),
        }
        store_policy, prefetch_policy = policies
        self._child = self._run.child(
            "lmcache",
            [
                *(sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"),
                *("--host", HOST, "--port", str(self._rpc)),
                *("--http-host", HOST, "--http-port", str(http)),
                *("--l1-size-gb", "0.25", "--chunk-size", "256", "--eviction-policy", "LRU"),
                *("--shm-name", f"{self._run.name}-l1", "--supported-transfer-mode", "auto"),
                *("--l2-store-policy", store_policy),
                *("--l2-prefetch-policy", prefetch_policy),
                *("--l2-adapter", json.dumps(adapter)),
            ],
            env=environment(lmcache),
            log=self._run.directory / "lmcache.log",
        )
        self._client: Client | None = None

    def __enter__(self) -> CacheServer:
        try:
            self._child.start()
            self._child.wait_ready(lambda: self.get("/healthcheck")[0] == 200, 90)
            rpc = f"tcp://{HOST}:{self._rpc}"
            self._client = Client(self._run, rpc, self._tp_size, self._lmcache)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._client is not None:
                self._client.close()
        finally:
            self._run.close()

    @property
    def client(self) -> Client:
        """The engine's side."""
        assert self._client is not None
        return self._client

    @property
    def installed(self) -> bool:
        """Whether it runs the interpreter's own LMCache."""
        return self._lmcache is None

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._child.pid

    def log(self) -> str:
        return self._child.log.read_text(errors="replace")

    # HTTP

    def get(self, path: str) -> tuple[int, Any]:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, data, headers))

    def _ask(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                code, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                code, body = error.code, error.read()
        try:
            return code, json.loads(body)
        except ValueError:
            return code, body.decode(errors="replace")

    def operate(self, operation: str, **body: Any) -> tuple[int, Any]:
        """The HTTP status and the answer of one operation on the gate."""
        return self.post(f"/reconfigure/plugin/l2/{operation}", {"adapter_index": 0, **body})

    def gate(self, operation: str, **body: Any) -> dict[str, Any]:
        """The answer of an operation that must succeed."""
        code, answer = self.operate(operation, **body)
        assert code == 200, (code, answer)
        result: dict[str, Any] = answer
        return result

    def status(self) -> dict[str, Any]:
        """The gate's status."""
        code, answer = self.get("/reconfigure/plugin/l2/status")
        assert code == 200, (code, answer)
        (adapter,) = answer["adapters"]
        status: dict[str, Any] = adapter["status"]
        return status

    def prefetching(self) -> dict[str, Any]:
        """What LMCache says of its own prefetch controller."""
        found: dict[str, Any] = self.get("/status")[1]["storage_manager"]["prefetch_controller"]
        return found

    def clear_l1(self) -> None:
        assert self.post("/cache/clear", {"tier": "l1"})[0] == 200

    def metrics(self) -> dict[str, float]:
        """The gate's series, by name and labels without `l2`."""
        code, text = self.get("/metrics")
        assert code == 200
        return {
            sample.name
            + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items()) if k != "l2"): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("kvguard_gate_")
        }


class Client:
    """The engine's side; see gate_client.py."""

    def __init__(self, run: Run, rpc_url: str, tp_size: int, lmcache: Path | None) -> None:
        ours, theirs = socket.socketpair()
        self._log = run.directory / "client.log"
        with self._log.open("ab") as log, theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, str(Path(__file__).with_name("gate_client.py"))),
                    *(str(theirs.fileno()), rpc_url, str(tp_size)),
                ],
                env={**os.environ, "TMPDIR": str(run.directory), **environment(lmcache)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = process
        session = run.started(process)
        self._socket = ours
        self._lines = ours.makefile("rw")
        ours.settimeout(90)
        self._answer()
        run.settled(session)

    def close(self) -> None:
        """Ends it; the run does so too, whatever happens."""
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()
        self._process.kill()
        self._process.wait(timeout=10)

    def _answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            process_ended = self._log.read_text()[-4000:]
            raise LabError(f"the client ended\n{process_ended}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer

    def _ask(self, operation: str, **request: Any) -> dict[str, Any]:
        print(json.dumps({"op": operation, **request}), file=self._lines, flush=True)
        return self._answer()

    def begin(self, seq: int, chunks: int) -> int:
        """A lookup, not waited for; returns its handle."""
        return int(self._ask("begin", seq=seq, chunks=chunks)["handle"])

    def poll(self, handle: int, limit_s: float) -> tuple[int | None, float]:
        """Chunks hit (None: no answer within `limit_s`) and seconds waited."""
        answer = self._ask("poll", handle=handle, limit_s=limit_s)
        return answer["hit"], answer["waited_s"]

    def finish(self, handle: int) -> dict[str, Any]:
        return self._ask("finish", handle=handle)

    def drop(self, handle: int) -> None:
        self._ask("drop", handle=handle)

    def request(self, seq: int, chunks: int, limit_s: float = 20.0) -> int:
        """One whole request: look up, retrieve what was hit and check it, store the rest.
        Returns the chunks hit."""
        handle = self.begin(seq, chunks)
        hit, _ = self.poll(handle, limit_s)
        assert hit is not None, "no answer to a lookup"
        done = self.finish(handle)
        assert False not in done.values(), done
        return hit
