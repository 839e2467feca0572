"""`kvguard run`: sockets, state, loop and listeners, put together and ended together."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guard.errors import SettingsError
from guard.journal.decisions import Journal
from guard.journal.state_directory import StateDirectory
from guard.service import listen
from guard.settings import Settings, describe_peers, load

if TYPE_CHECKING:
    from guard.loop import Loop

_LAST_TICK_SECONDS = 5.0
_RELEASE_SECONDS = 5.0
_ERRORS = frozenset({"reload_refused", "fault", "control_failed"})
_DEFAULT_HINT = "nobody named it: looked on the default port, and keeps looking"


def run(flags: Mapping[str, Any], log_json: bool = False) -> int:
    """Run the guard until SIGTERM or SIGINT.

    Raises SettingsError, ListenError and StateDirectoryError, all before any peer is
    called: sockets are bound first, so a second guard changes nothing.
    """
    settings = load(flags)
    listen.check_exposure(settings.listen, settings.token_file)
    _configure_log(log_json)
    switch = listen.bind(settings.listen, "--listen")
    try:
        metrics = listen.bind(settings.metrics_listen, "--metrics-listen")
        with metrics:
            directory = StateDirectory.choose(settings.state_dir)
            with directory.lock():
                asyncio.run(_serve(settings, flags, directory, switch, metrics))
    finally:
        switch.close()
    return 0


class ToldJournal(Journal):
    """A journal whose lines are also logged, so that `kubectl logs` tells the same story."""

    def __init__(self, path: Path, hints: Mapping[str, str] | None = None) -> None:
        super().__init__(path)
        self._hints = hints or {}

    def write(self, kind: str, **fields: Any) -> bool:
        """Append one line and log it; a line that could not be written is logged so."""
        done = super().write(kind, **fields)
        shown = {k: v for k, v in fields.items() if isinstance(v, (str, int, float, bool))}
        down = fields.get("up") is False
        if down and (hint := self._hints.get(str(fields.get("source")).partition("_")[0])):
            shown["hint"] = hint
        level = "error" if kind in _ERRORS else "warning" if down else "info"
        getattr(_log(), level)(kind, **shown)
        if not done:
            _log().error("journal", reason=self.error, lost=self.lost)
        return done


async def _serve(
    settings: Settings,
    flags: Mapping[str, Any],
    directory: StateDirectory,
    switch: socket.socket,
    metrics: socket.socket,
) -> None:
    from guard import assemble
    from guard.service import api
    from guard.service.metrics_app import MetricsApp

    version = installed_version("kvguard")
    hints = {}
    if settings.engine_is_default:
        hints["engine"] = _DEFAULT_HINT
    if settings.cache_is_default:
        hints["cache"] = _DEFAULT_HINT
    journal = ToldJournal(directory.journal_path, hints)
    _say_where(settings, directory, switch, metrics, version)
    journal.write("start", version=version, mode=settings.mode, holder=settings.holder)
    loop = assemble.build(settings, journal, directory)
    servers = (
        (listen.Server(api.build(loop, settings.interval, version)), switch),
        (listen.Server(MetricsApp(loop.view, settings.interval, version)), metrics),
    )
    stop = asyncio.Event()
    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, stop.set)
    running.add_signal_handler(signal.SIGHUP, reload, flags, settings, loop, journal)
    gc.collect()  # what start-up left behind
    ticking = asyncio.create_task(loop.run(stop), name="loop")
    serving = [asyncio.create_task(server.serve(sockets=[s])) for server, s in servers]
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({asked, ticking, *serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        # The loop first: a scrape or a probe of health during the last tick is answered.
        _, late = await asyncio.wait({ticking}, timeout=_LAST_TICK_SECONDS)
        for task in late:
            task.cancel()
        results = list(await asyncio.gather(ticking, asked, return_exceptions=True))
        released = await _release(loop) if settings.release_on_exit else False
        for server, _ in servers:
            server.stop()
        results += await asyncio.gather(*serving, return_exceptions=True)
        await loop.close()
    journal.write(
        "stop",
        reason="L2 given back" if released else "a lease, if any, runs out by itself",
    )
    for result in results:
        if isinstance(result, Exception):  # a cancelled last tick is none
            raise result


async def _release(loop: Loop) -> bool:
    try:
        return await asyncio.wait_for(loop.release(), _RELEASE_SECONDS)
    except TimeoutError:
        _log().error("release", reason=f"not released within {_RELEASE_SECONDS:g} s")
        return False


def reload(flags: Mapping[str, Any], running: Settings, loop: Loop, journal: Journal) -> None:
    """SIGHUP: take `policy.*` anew from flags, environment and file, and journal it. What
    cannot be used changes nothing; other settings that differ are named, not taken."""
    from guard.assemble import loop_settings

    try:
        settings = load(flags)
    except SettingsError as error:
        journal.write("reload_refused", reason=str(error))
        return
    loop.reload_policy(loop_settings(settings))
    ignored = [
        name
        for name in Settings.model_fields
        if name != "policy" and getattr(settings, name) != getattr(running, name)
    ]
    journal.write(
        "reload", reason="SIGHUP", policy=settings.policy.model_dump(), needs_restart=ignored
    )


def _say_where(
    settings: Settings,
    directory: StateDirectory,
    switch: socket.socket,
    metrics: socket.socket,
    version: str,
) -> None:
    lines = [
        f"kvguard {version}, mode {settings.mode}",
        *describe_peers(settings),
        f"page and API  {listen.url_of(switch)}",
        f"metrics       {listen.url_of(metrics)}/metrics (listening on {settings.metrics_listen})",
        f"state         {directory.path}",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _log() -> Any:
    import structlog

    return structlog.get_logger("kvguard")


def _configure_log(as_json: bool) -> None:
    import structlog

    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"])
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
