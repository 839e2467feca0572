"""The real stack: redis-server <- throttling proxy <- LMCache server <- vLLM, and a guard.

    with Stack() as stack:                 # gated; Stack(gated=False) for stock LMCache
        stack.link.set_rate(12e6)          # the proxy's control
        guard = stack.start_guard()        # `kvguard run`, from the guard's own environment
        guard.override("bypass", ttl_s=600, reason="recompute phase")

Everything listens on 127.0.0.1 and on free ports, and every part can be killed and
started again by itself (`stack.cache.kill()`, `stack.cache.start()`). Logs stay in
`.lab-run/logs` of the checkout; all the rest is gone when the stack is closed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from .gate_host import Client
from .guard_handle import Guard
from .model import ELEMENT_TYPE, write_model
from .processes import HOST, Child, LabError, Run, free_ports
from .proxy import ProxyControl

CHECKOUT = Path(__file__).resolve().parents[2]
LAB_RUN = CHECKOUT / ".lab-run"
CHUNK_TOKENS = 256
MODEL_NAME = "tiny"
GATE_MODULE = "guard.gate.lmcache"
GATE_CLASS = "GatedL2Adapter"

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "NO_COLOR": "1",
}


class Stack:
    """Starts on entering, ends everything on leaving (or when the test process dies).

    `gated` wraps the store's adapter in the checkout's gate. `lmcache` puts a folder with
    another LMCache first on the cache server's path (not the engine's).
    `engine_connector=False` serves without a cache: what recomputing alone gives.
    `store_args` go to redis-server. `inner_params` go into the adapter's configuration.
    `disk_bytes` makes L2 the `fs` adapter on a disk of its own of that size (`disk`), in
    a mount namespace of the cache server's; redis-server and proxy then stand by idle.
    """

    def __init__(
        self,
        *,
        gated: bool = True,
        lmcache: Path | None = None,
        engine_connector: bool = True,
        gate_params: Mapping[str, Any] | None = None,
        store_args: Sequence[str] = (),
        inner_params: Mapping[str, Any] | None = None,
        disk_bytes: int | None = None,
        logs: Path | None = None,
    ) -> None:
        self.gated = gated
        self.disk_bytes = disk_bytes
        self.start_seconds: dict[str, float] = {}
        self._logs = logs or LAB_RUN / "logs"
        self._guards: list[Guard] = []
        self._run = Run()
        self._mount_point = self._run.directory / "disk"
        inner = {"type": "fs", "base_path": str(self._mount_point)} if disk_bytes else None
        try:
            self._lay_out(
                lmcache, engine_connector, gate_params or {}, store_args, inner, inner_params or {}
            )
        except BaseException:
            self._run.close()
            raise

    def _lay_out(
        self,
        lmcache: Path | None,
        engine_connector: bool,
        gate_params: Mapping[str, Any],
        store_args: Sequence[str],
        inner: Mapping[str, Any] | None,
        inner_params: Mapping[str, Any],
    ) -> None:
        ports = free_ports(6)
        store, proxy, control, cache, cache_http, engine = ports
        self.store_port, self.proxy_port, self.engine_port = store, proxy, engine
        self.cache_port, self.cache_http_port = cache, cache_http
        self.cache_url = f"http://{HOST}:{cache_http}"
        self.engine_url = f"http://{HOST}:{engine}"
        self.link = ProxyControl(control)
        self.http = httpx.Client(timeout=10.0, trust_env=False)
        self.model = write_model(self._run.directory / "model")

        self.store = self._child(
            "redis",
            *("redis-server", "--bind", HOST, "--port", store, "--dir", self._run.directory),
            *("--save", "", "--appendonly", "no"),
            *("--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru"),
            *store_args,
        )
        inner = inner or {"type": "resp", "host": HOST, "port": proxy, "num_workers": 8}
        adapter = _adapter({**inner, **inner_params}, self.gated, gate_params)
        # The cache server takes the gate from this checkout, wherever the lab was built.
        search = [str(path) for path in (lmcache, CHECKOUT) if path is not None]
        self.proxy = self._child(
            "proxy",
            *(sys.executable, "-I", Path(__file__).with_name("proxy.py"), proxy, store, control),
        )
        self.cache = self._child(
            "lmcache",
            *self._disk_before(),
            *(_program("lmcache"), "server", "--host", HOST, "--port", cache),
            *("--http-host", HOST, "--http-port", cache_http),
            *("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--chunk-size", CHUNK_TOKENS),
            *("--supported-transfer-mode", "auto", "--shm-name", f"{self._run.name}-l1"),
            *("--eviction-policy", "LRU", "--l2-store-policy", "skip_l1"),
            *("--l2-prefetch-policy", "default", "--l2-prefetch-max-in-flight", "8"),
            *("--l2-adapter", json.dumps(adapter)),
            env={"PYTHONPATH": os.pathsep.join(search)},
        )
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": cache,
            },
        }
        self.engine = self._child(
            "vllm",
            *(_program("vllm"), "serve", self.model, "--host", HOST, "--port", engine),
            *("--load-format", "dummy", "--dtype", ELEMENT_TYPE, "--enforce-eager"),
            *("--max-model-len", "8192"),
            *("--served-model-name", MODEL_NAME, "--no-enable-prefix-caching"),
            "--enable-prompt-tokens-details",
            *(("--kv-transfer-config", json.dumps(connector)) if engine_connector else ()),
        )

    def _disk_before(self) -> tuple[object, ...]:
        """What gives the cache server a disk of its own, which ends with it."""
        if self.disk_bytes is None:
            return ()
        self._mount_point.mkdir()
        unshare = ("unshare", "--mount", *(("--map-root-user",) if os.geteuid() else ()))
        mount = f'mount -t tmpfs -o size={self.disk_bytes} lab "$0" && exec "$@"'
        return (*unshare, "sh", "-c", mount, self._mount_point)

    @property
    def disk(self) -> Path:
        """The cache server's own disk, as seen from outside its mount namespace."""
        return Path(f"/proc/{self.cache.pid}/root{self._mount_point}")

    def client(self) -> Client:
        """Another engine of the cache server, which checks every byte it gets back."""
        return Client(self._run, f"tcp://{HOST}:{self.cache_port}", 1, None)

    def _child(self, name: str, *argv: object, env: Mapping[str, str] | None = None) -> Child:
        log = self._logs / f"{name}.log"
        log.unlink(missing_ok=True)
        return self._run.child(
            name, [str(part) for part in argv], env={**_ENVIRONMENT, **(env or {})}, log=log
        )

    def __enter__(self) -> Stack:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts every part; raises LabError with a log's tail when one does not come up."""
        self.start_store()
        self.start_proxy()
        self.start_cache()
        self.start_engine()

    def start_store(self) -> None:
        self._start(self.store, self._store_answers, 10)

    def start_proxy(self) -> None:
        self._start(self.proxy, lambda: bool(self.link.counters()), 10)

    def start_cache(self) -> None:
        self._start(self.cache, lambda: self._healthy(f"{self.cache_url}/healthcheck"), 60)

    def start_engine(self) -> None:
        self._start(self.engine, lambda: self._healthy(f"{self.engine_url}/health"), 180)

    def _start(self, part: Child, ready: Any, limit_s: float) -> None:
        part.start()
        self.start_seconds[part.name] = part.wait_ready(ready, limit_s)

    @property
    def sessions(self) -> list[tuple[int, int]]:
        """(pid, start time) of the leaders of all sessions this stack has started."""
        return self._run.sessions

    def start_guard(
        self, *, mode: str = "enforce", state: str = "guard", args: Sequence[str] = ()
    ) -> Guard:
        """A guard of this stack that has ticked at least once.

        Guards with the same `state` share a state directory, as one does that is started
        again; raises LabError when it does not come up.
        """
        guard = Guard(
            self._run,
            engine=self.engine_url,
            cache=self.cache_url,
            mode=mode,
            args=args,
            state_directory=self._run.directory / f"state-{state}",
            log=self._logs / f"{state}.log",
        )
        self._guards.append(guard)
        guard.start()
        return guard

    def clear_store(self) -> None:
        """FLUSHALL."""
        if not self._store_says(b"FLUSHALL\r\n").startswith(b"+OK"):
            raise LabError("redis-server did not flush")

    def clear_l1(self) -> None:
        """Empties the cache server's memory; what L2 holds stays."""
        answer = self.http.post(f"{self.cache_url}/cache/clear", json={"tier": "l1"})
        answer.raise_for_status()

    def cache_status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.http.get(f"{self.cache_url}/status").raise_for_status().json()
        return status

    def gate_status(self) -> dict[str, Any]:
        """The gate's own status object; raises httpx.HTTPError when there is no gate."""
        answer = self.http.get(f"{self.cache_url}/reconfigure/plugin/l2/status")
        adapters = answer.raise_for_status().json()["adapters"]
        status: dict[str, Any] = adapters[0]["status"]
        return status

    def gate_operation(self, operation: str, **body: Any) -> dict[str, Any]:
        """What a person does with curl; raises httpx.HTTPError when it is refused."""
        answer = self.http.post(
            f"{self.cache_url}/reconfigure/plugin/l2/{operation}",
            json={"adapter_index": 0, **body},
        )
        result: dict[str, Any] = answer.raise_for_status().json()
        return result

    def exposition(self, url: str) -> dict[str, float]:
        """Series of a `/metrics` page: the text before the value, and the value."""
        series = {}
        for line in self.http.get(f"{url}/metrics").raise_for_status().text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                series[name] = float(value)
        return series

    def wait_stores_quiet(self, limit_s: float = 30.0) -> None:
        """Returns once the cache server has nothing left to write to L2.

        Raises LabError after `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        quiet = 0
        while quiet < 3:
            if time.monotonic() > deadline:
                raise LabError(f"stores to L2 did not end within {limit_s:.0f} s")
            controllers = self.cache_status()["storage_manager"]["store_controllers"].values()
            busy = any(c["pending_keys_count"] or c["in_flight_task_count"] for c in controllers)
            quiet = 0 if busy else quiet + 1
            time.sleep(0.2)

    @property
    def parts(self) -> tuple[Child, ...]:
        return (self.store, self.proxy, self.cache, self.engine)

    def log_tails(self) -> list[str]:
        """The ends of all parts' logs, and which part does not run."""
        return [
            f"{part.name} {'runs' if part.running else 'ended'}\n{part.log_tail()}"
            for part in self.parts
        ]

    def close(self) -> None:
        self.http.close()
        try:
            for guard in self._guards:
                guard.close()
        finally:
            self._run.close()

    def _store_answers(self) -> bool:
        return self._store_says(b"PING\r\n").startswith(b"+PONG")

    def _store_says(self, command: bytes) -> bytes:
        with socket.create_connection((HOST, self.store_port), timeout=5) as connection:
            connection.sendall(command)
            return connection.recv(64)

    def _healthy(self, url: str) -> bool:
        try:
            return self.http.get(url, timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False


def _adapter(inner: dict[str, Any], gated: bool, params: Mapping[str, Any]) -> dict[str, Any]:
    if not gated:
        return inner
    return {
        "type": "plugin",
        "module_path": GATE_MODULE,
        "class_name": GATE_CLASS,
        "adapter_params": {"inner": inner, **params},
    }


def _program(name: str) -> str:
    """A console script of the interpreter that runs the lab."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise LabError(
            f"no {name} beside {sys.executable}: build the lab with tests/lab/build_env.sh"
        )
    return found
