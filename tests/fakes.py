"""A guard without a loop, for the service's tests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from guard.errors import ControlConflict
from guard.policy.types import Admission, Decision, Override, OverrideMode
from guard.readings import Missing, Reading, Snapshot
from guard.service import listen
from guard.view import SourceView, View

NOW = 4_000_000_000.0  # far ahead, so that no view of a test grows old


def fresh_view() -> View:
    """A guard that has not ticked."""
    return View(
        started_at=NOW,
        ticks=0,
        last_tick_monotonic=None,
        mode="observe",
        control="not seen yet",
        holder=None,
        admission=None,
        lease_expires_at=None,
        override=None,
        override_revision=0,
        snapshot=None,
        decision=None,
    )


def hurting_view(**changes: Any) -> View:
    """One tick of a guard whose L2 is too slow, seen without control."""
    figures = {
        "load_bandwidth.alone": Reading(1.2e7, "bytes_per_second", NOW, "20 loads alone"),
        "break_even_bandwidth": Reading(1.0e8, "bytes_per_second", NOW, "s·R"),
        "break_even_tokens": Reading(float("inf"), "tokens", NOW, "T0/(1/R − s/B)"),
        "hit_fixed.total": Reading(0.18, "seconds", NOW, "lookup + load"),
        "load_utilization.max": Missing("no_gate"),
        "hit.l2": Missing("idle", "no tokens asked for"),
        "prefill": Reading(4000.0, "tokens_per_second", NOW, "configured"),
    }
    view = replace(
        fresh_view(),
        ticks=7,
        last_tick_monotonic=100.0,
        control="observe only: no control available",
        snapshot=Snapshot(NOW, 100.0, figures),
        decision=Decision(
            "hurting", "slow", None, "would_bypass", "slow", "12 MB/s < 0.9 of 100 MB/s", {"b": 1.0}
        ),
        sources=(
            SourceView("engine", "http://e/metrics", True, None, 0.002, NOW),
            SourceView("cache_metrics", "http://c/metrics", False, "no answer", None, None),
        ),
        decisions_total={("would_bypass", "slow"): 2},
        control_requests_total={"ok": 3},
        prefill_seconds_saved_total=1.5,
    )
    return replace(view, **changes)


BYPASSED = {
    "control": "gate",
    "mode": "enforce",
    "holder": "kvguard:a",
    "admission": Admission(0.0, 0),
    "lease_expires_at": NOW + 20,
    "override": Override("bypass", "ann", "drill", NOW, NOW + 1800, 4),
    "override_revision": 4,
    "decision": Decision("bypassed", "manual", Admission(0.0, 0), None, "manual", "by ann"),
}


class FakeGuard:
    """Keeps overrides as the loop does; `seen` is what it was asked."""

    def __init__(self, view: View) -> None:
        self.current = view
        self.seen: list[dict[str, Any]] = []
        self.fails: Exception | None = None

    def view(self) -> View:
        return self.current

    async def set_override(
        self,
        mode: OverrideMode,
        *,
        who: str,
        reason: str,
        ttl_seconds: float | None,
        if_revision: int | None,
    ) -> View:
        self.seen.append({"mode": mode, "who": who, "reason": reason, "ttl": ttl_seconds})
        if self.fails is not None:
            raise self.fails
        if if_revision is not None and if_revision != self.current.override_revision:
            raise ControlConflict(f"revision is {self.current.override_revision}")
        revision = self.current.override_revision + 1
        override = (
            None
            if mode == "auto" or ttl_seconds is None
            else Override(mode, who, reason, NOW, NOW + ttl_seconds, revision)
        )
        self.current = replace(self.current, override=override, override_revision=revision)
        return self.current


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """The application on a free port, by the real server; yields its URL."""
    listener = listen.bind("127.0.0.1:0", "--listen")
    server = listen.Server(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield listen.url_of(listener)
    finally:
        server.stop()
        thread.join(timeout=20)
        listener.close()
        assert not thread.is_alive()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
