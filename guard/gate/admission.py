"""Who may use L2 now: share, minimum length, limits, and the lease under which they hold.

Knows no host. Times are seconds of one injected monotonic clock. What is in force is always
either the configured default or what somebody wrote under a lease; when the lease runs out
the default is in force again, and the revision says so, without any call having to come.

The errors are not of the tree in guard/errors.py, since this module runs in another
program's process; each has the HTTP `status` that a host answers with.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from guard.gate.validate import InvalidWrite, boolean, integer, no_other_keys, number, shown, text

GUARD = "kvguard:"
PERSON = "person:"
UNNAMED = PERSON + "unnamed"
GUARD_LEASE_S = 30.0
PERSON_LEASE_S = 4 * 3600.0
MAX_LEASE_S = 24 * 3600.0
MAX_CHUNKS = 1_048_576
MAX_LOADS = 4096
MAX_DEADLINE_S = 24 * 3600.0
DEFAULT_MAX_LOADS = 5


class StaleRevision(Exception):
    """Somebody else wrote since the revision that the writer had read. HTTP status 409."""

    status = 409


@dataclass(frozen=True, slots=True)
class Settings:
    """What is admitted to L2.

    `share` of lookups let through (0 is the bypass); `min_chunks`, the fewest chunks a
    lookup must ask for and find; `writes` to L2; seconds after which a lookup is answered
    as a miss, and after which a load is given up (None: never); `max_loads` in flight.
    """

    share: float = 1.0
    min_chunks: int = 0
    writes: bool = True
    lookup_deadline_s: float | None = None
    load_deadline_s: float | None = None
    max_loads: int = DEFAULT_MAX_LOADS

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """These with `values` of some fields, checked. Raises InvalidWrite."""
        no_other_keys(values, _CHECKS)
        return replace(self, **{key: _CHECKS[key](key, value) for key, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds the admission, why, for how many seconds, and until when on the clock."""

    holder: str
    reason: str
    seconds: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """One consistent reading. `expires_in_s` is None without a lease."""

    epoch: str
    revision: int
    settings: Settings
    default: Settings
    lease: Lease | None
    expires_in_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """The part of the gate's status that is about admission."""
        lease = self.lease and {
            "holder": self.lease.holder,
            "reason": self.lease.reason,
            "lease_s": self.lease.seconds,
            "expires_in_s": self.expires_in_s,
        }
        return {
            "epoch": self.epoch,
            "revision": self.revision,
            "admission": self.settings.as_dict(),
            "default": self.default.as_dict(),
            "lease": lease,
        }


class Admission:
    """Decides on each lookup; changed by writes under a lease. Thread-safe.

    `epoch` names this life of the gate; it is random unless given. The revision grows by
    one with every write and every lease that runs out.
    """

    def __init__(
        self,
        default: Settings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        epoch: str | None = None,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._default = default or Settings()
        self._settings = self._default
        self._lease: Lease | None = None
        self._epoch = epoch or os.urandom(8).hex()
        self._revision = 1
        self._credit = 0.0

    @property
    def settings(self) -> Settings:
        """What is in force now."""
        # The lock is needed only where there is a lease that may have run out.
        if self._lease is None:
            return self._settings
        with self._lock:
            self._expire()
            return self._settings

    def deny(self, chunks: int) -> str | None:
        """Why a lookup of `chunks` chunks is denied, None when it may ask L2.

        The words are answers of the ledger: `bypassed`, `short`, `shed`. A share is dealt
        out by error diffusion: of any n lookups in a row, n · share ± 1 are let through.
        """
        settings = self.settings
        if settings.share <= 0:
            return "bypassed"
        if chunks < settings.min_chunks:
            return "short"
        if settings.share >= 1:
            return None
        with self._lock:
            self._credit += settings.share
            if self._credit < 1 - 1e-9:
                return "shed"
            self._credit -= 1
            return None

    def expires_at(self) -> float | None:
        """When the lease runs out, on the clock; None without one."""
        lease = self._lease
        return None if lease is None else lease.expires_at

    def state(self) -> AdmissionState:
        """Everything at this moment."""
        with self._lock:
            now = self._expire()
            lease = self._lease
            return AdmissionState(
                epoch=self._epoch,
                revision=self._revision,
                settings=self._settings,
                default=self._default,
                lease=lease,
                expires_in_s=None if lease is None else lease.expires_at - now,
            )

    def write(self, payload: Mapping[str, Any]) -> None:
        """Set what `payload` names, under a lease; keys left out keep their value.

        Raises InvalidWrite and StaleRevision; nothing has changed then.
        """
        no_other_keys(payload, {*_CHECKS, *_LEASE_KEYS})
        self._commit({key: payload[key] for key in _CHECKS if key in payload}, payload)

    def bypass(self, payload: Mapping[str, Any]) -> None:
        """Let no lookup through to L2. Raises as `write`."""
        no_other_keys(payload, _LEASE_KEYS)
        self._commit({"share": 0.0}, payload)

    def restore(self, payload: Mapping[str, Any]) -> None:
        """Let every lookup through, of any length, and writes too. Raises as `write`."""
        no_other_keys(payload, _LEASE_KEYS)
        self._commit({"share": 1.0, "min_chunks": 0, "writes": True}, payload)

    def _commit(self, changes: Mapping[str, Any], payload: Mapping[str, Any]) -> None:
        Settings().changed(changes)
        holder = _holder(payload.get("holder", UNNAMED))
        reason = text("reason", payload.get("reason", ""))
        usual = GUARD_LEASE_S if holder.startswith(GUARD) else PERSON_LEASE_S
        seconds = number("lease_s", payload.get("lease_s", usual), 0, MAX_LEASE_S, over=True)
        expected = None
        if "if_revision" in payload:
            expected = integer("if_revision", payload["if_revision"], 0)
        with self._lock:
            now = self._expire()
            if expected is not None and expected != self._revision:
                raise StaleRevision(
                    f"if_revision is {shown(expected)}, the gate is at {self._revision}"
                )
            self._set(
                self._settings.changed(changes), Lease(holder, reason, seconds, now + seconds)
            )

    def _expire(self) -> float:
        now = self._clock()
        if self._lease is not None and now >= self._lease.expires_at:
            self._set(self._default, None)
        return now

    def _set(self, settings: Settings, lease: Lease | None) -> None:
        if settings.share != self._settings.share:
            self._credit = 0.0
        self._settings = settings
        self._lease = lease
        self._revision += 1


def _holder(value: Any) -> str:
    holder = text("holder", value)
    if not any(holder.startswith(kind) and len(holder) > len(kind) for kind in (GUARD, PERSON)):
        raise InvalidWrite(f"holder must be '{GUARD}NAME' or '{PERSON}NAME', not {shown(value)}")
    return holder


def _deadline(key: str, value: Any) -> float | None:
    return None if value is None else number(key, value, 0, MAX_DEADLINE_S, over=True)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "share": lambda key, value: number(key, value, 0, 1),
    "min_chunks": lambda key, value: integer(key, value, 0, MAX_CHUNKS),
    "writes": boolean,
    "lookup_deadline_s": _deadline,
    "load_deadline_s": _deadline,
    "max_loads": lambda key, value: integer(key, value, 1, MAX_LOADS),
}
_LEASE_KEYS = frozenset({"lease_s", "holder", "reason", "if_revision"})
