"""From settings, journal and state directory to a loop: the only place that knows all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from guard.chronicle import JournalLike
from guard.errors import StateDirectoryError
from guard.estimate.figures import Configured
from guard.journal.state_directory import StateDirectory
from guard.loop import Loop, LoopSettings
from guard.policy.state import PolicySettings as BreakerSettings
from guard.policy.verdict import Limits
from guard.settings import PolicySettings, Settings


def build(settings: Settings, journal: JournalLike, directory: StateDirectory) -> Loop:
    """A loop for these settings. State of a newer kvguard than this one is left alone, and
    the guard then only observes, whatever the mode says."""
    state, note = directory.load()
    wanted = loop_settings(settings)
    if note is not None:
        journal.write("state", reason=note)
        if "newer" in note:
            wanted = replace(wanted, mode="observe")
    return Loop(wanted, journal, _Store(directory, state, note is not None, journal))


def loop_settings(settings: Settings) -> LoopSettings:
    """The loop's part of the settings."""
    return LoopSettings(
        engines=tuple(settings.engine),
        cache=settings.cache,
        mode=settings.mode,
        interval_seconds=settings.interval,
        holder=settings.holder,
        estimate=Configured(
            kv_bytes_per_token=settings.kv_bytes_per_token,
            prefill_rate=settings.prefill_rate,
            min_loads=settings.policy.min_loads,
            window_seconds=settings.policy.window_seconds,
        ),
        policy=breaker_settings(settings.policy),
        lease_seconds=settings.gate.lease_seconds,
        renew_seconds=settings.gate.renew_seconds,
        status_seconds=settings.gate.status_seconds,
        gate_token_file=settings.gate.token_file,
        blind_after_seconds=settings.policy.blind_after_seconds,
        stop_renewing_after_seconds=settings.policy.stop_renewing_after_seconds,
    )


def breaker_settings(policy: PolicySettings) -> BreakerSettings:
    """The breaker's constants as the policy's own type, free of pydantic."""
    return BreakerSettings(
        limits=Limits(
            trip_ratio=policy.trip_ratio,
            return_ratio=policy.return_ratio,
            overload_trip=policy.overload_trip,
            overload_return=policy.overload_return,
        ),
        confirm_seconds=policy.confirm_seconds,
        dwell_seconds=policy.dwell_seconds,
        dwell_max_seconds=policy.dwell_max_seconds,
        probe_interval_seconds=policy.probe_interval_seconds,
        probe_interval_max_seconds=policy.probe_interval_max_seconds,
        probes_to_win=policy.probes_to_win,
        return_shares=policy.return_shares,
        return_step_seconds=policy.return_step_seconds,
    )


class _Store:
    """The state file for a loop: trouble with the disk is journalled, never raised."""

    def __init__(
        self,
        directory: StateDirectory,
        state: Mapping[str, Any] | None,
        unusable: bool,
        journal: JournalLike,
    ) -> None:
        self._directory = directory
        self._state = state
        self._unusable = unusable
        self._journal = journal
        self._failed = False

    def load(self) -> Mapping[str, Any] | None:
        return self._state

    def save(self, document: Mapping[str, Any]) -> None:
        if self._unusable:
            return  # what a newer guard wrote is its own; ours would overwrite it
        try:
            self._directory.save(document)
            self._failed = False
        except StateDirectoryError as error:
            if not self._failed:
                self._journal.write("state", reason=str(error))
            self._failed = True
