"""A running `kvguard run` and its surfaces, as a client from outside sees them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from .processes import HOST, LabError, Run, free_ports

CHECKOUT = Path(__file__).resolve().parents[2]


def kvguard_program() -> str:
    """KVGUARD_BIN, else the command in the checkout's own environment."""
    return os.environ.get("KVGUARD_BIN") or str(CHECKOUT / ".venv" / "bin" / "kvguard")


class Guard:
    """Started, killed and started again with the same arguments and state directory."""

    def __init__(
        self,
        run: Run,
        *,
        engine: str,
        cache: str,
        mode: str,
        state_directory: Path,
        log: Path,
        interval_s: float = 1.0,
        args: Sequence[str] = (),
    ) -> None:
        listen, metrics = free_ports(2)
        self.url = f"http://{HOST}:{listen}"
        self.metrics_url = f"http://{HOST}:{metrics}"
        self.state_directory = state_directory
        state_directory.mkdir(parents=True, exist_ok=True)
        self._http = httpx.Client(timeout=5.0, trust_env=False)
        self.process = run.child(
            "guard",
            [
                *(kvguard_program(), "run", "--engine", engine, "--cache", cache),
                *("--mode", mode, "--state-dir", str(state_directory)),
                *("--interval", f"{interval_s:g}"),
                *("--listen", f"{HOST}:{listen}", "--metrics-listen", f"{HOST}:{metrics}"),
                *args,
            ],
            # The lab's own KVGUARD_BIN is no setting, and a developer's settings are not ours.
            env_without=[name for name in os.environ if name.startswith("KVGUARD_")],
            log=log,
        )

    def start(self, limit_s: float = 30.0) -> None:
        self.process.start()
        self.process.wait_ready(self._ready, limit_s)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def close(self) -> None:
        """Kills it and gives up the client's connections."""
        self.kill()
        self._http.close()

    def status(self) -> dict[str, Any]:
        """GET /api/v1/status; raises httpx.HTTPError."""
        return self._get("/api/v1/status")

    def reading(self, name: str) -> float | None:
        """A reading's value in the status now; None when the guard says it is missing."""
        return reading(self.status(), name)

    def override(
        self, mode: str, *, ttl_s: float | None = None, reason: str = "the lab's run"
    ) -> dict[str, Any]:
        """POST /api/v1/override as a person named 'lab'; raises LabError when refused."""
        body: dict[str, Any] = {"mode": mode, "reason": reason, "who": "lab"}
        if ttl_s is not None:
            body["ttl_s"] = ttl_s
        answer = self._http.post(f"{self.url}/api/v1/override", json=body)
        if answer.status_code != 200:
            raise LabError(f"override {mode} was refused: {answer.status_code} {answer.text}")
        result: dict[str, Any] = answer.json()
        return result

    def metrics(self) -> str:
        """The text of GET /metrics on the metrics listener."""
        return self._http.get(f"{self.metrics_url}/metrics").raise_for_status().text

    def journal(self) -> list[dict[str, Any]]:
        """All lines of decisions.jsonl so far."""
        path = self.state_directory / "decisions.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line]

    def wait_for(
        self, wanted: Callable[[dict[str, Any]], bool], limit_s: float, what: str
    ) -> tuple[float, dict[str, Any]]:
        """Seconds until a status is as `wanted`, and that status; asked every 0.25 s.

        Raises LabError with the last status when `limit_s` passes first.
        """
        begin = time.monotonic()
        last: dict[str, Any] = {}
        while True:
            try:
                last = self.status()
                if wanted(last):
                    return time.monotonic() - begin, last
            except httpx.HTTPError as error:
                last = {"unreachable": str(error)}
            if time.monotonic() - begin > limit_s:
                raise LabError(
                    f"{what}: not within {limit_s:.0f} s; the last status was "
                    f"{json.dumps(last)[:3000]}\n{self.process.log_tail()}"
                )
            time.sleep(0.25)

    def _ready(self) -> bool:
        try:
            return self._http.get(f"{self.url}/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def _get(self, path: str) -> dict[str, Any]:
        answer = self._http.get(self.url + path).raise_for_status()
        result: dict[str, Any] = answer.json()
        return result


def reading(status: dict[str, Any], name: str) -> float | None:
    """The value of a reading in a status; None when it is missing."""
    entry = status.get("readings", {}).get(name)
    if not isinstance(entry, dict) or "value" not in entry:
        return None
    return float(entry["value"])
