"""The gate inside LMCache's MP server: an L2 adapter of type `plugin` around the real one.

    --l2-adapter '{"type":"plugin","module_path":"guard.gate.lmcache",
                   "class_name":"GatedL2Adapter",
                   "adapter_params":{"inner":{"type":"resp","host":"valkey","port":6379}}}'

Written by `POST /reconfigure/plugin/l2/{admission,bypass,restore,probe,abort,rebuild}`,
read by `GET /reconfigure/plugin/l2/status` and on the server's own `/metrics`.

Whatever LMCache calls here answers without raising a fault of the gate's own and without
waiting for anything but the inner adapter. Besides the standard library and
prometheus_client this imports LMCache and the rest of `guard.gate`, nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.l2_adapters.reconfiguration import L2ReconfigureError

from guard.gate.admission import Admission, StaleRevision
from guard.gate.known import KnownKeys
from guard.gate.ledger import VERSION, Ledger
from guard.gate.lmcache_config import GateConfig, builder
from guard.gate.lmcache_forward import ForwardingAdapter
from guard.gate.lmcache_generation import Wrapped
from guard.gate.lmcache_keys import identities
from guard.gate.lmcache_lookups import Lookups
from guard.gate.lmcache_parts import Parts
from guard.gate.lmcache_probe import Prober
from guard.gate.lmcache_rebuild import Rebuilder, admit_revision
from guard.gate.lmcache_status import adapter_state, status
from guard.gate.lmcache_transfers import Loads, Stores
from guard.gate.metrics import AdapterState, collector
from guard.gate.probe_state import ProbeRefused
from guard.gate.rebuild_state import RebuildRefused, RebuildRequest
from guard.gate.safety import Bell, Faults, Keeper, bells, logger
from guard.gate.store_link import StoreLink
from guard.gate.token import WrongToken
from guard.gate.validate import InvalidWrite

OPERATIONS = ("admission", "bypass", "restore", "probe", "abort", "rebuild")
SHADOWED_TYPES = frozenset({"resp", "fs"})
"""Adapters whose submitting of a lookup never blocks."""


class GatedL2Adapter(ForwardingAdapter):  # type: ignore[misc]
    """An L2 adapter that counts exactly what passes to the inner one, and lets it pass or
    not. Raises ValueError on construction for a wrong configuration, and what building the
    inner adapter raises."""

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__(max_capacity_bytes=0)
        config = GateConfig.parse(adapter_params)
        clock = time.monotonic
        build = builder(config, l1_memory_desc)
        self._clock = clock
        self._inner_type = config.inner_type
        self._token = config.token
        self._closed = False
        self._ledger = Ledger(clock=clock)
        self._admission = Admission(config.default, clock=clock)
        self._faults = Faults(self._ledger)
        self._keeper = Keeper(self._keep, self._faults, f"kvguard-gate-{config.name}"[:15])
        self._known: KnownKeys[Any] = KnownKeys(identities, on_backlog=self._keeper.wake)
        self._bells: tuple[Bell, ...] = ()
        self._wrapped = Wrapped(build, clock)
        try:
            self._bells = bells(self._inner)
            self._connect(config)
        except BaseException:
            self._inner.close()
            for bell in self._bells:
                bell.close()
            raise
        self._keeper.start()
        logger.info("kvguard gate %s around %s as %s", VERSION, config.inner_type, self._shown.l2)

    @property
    def _inner(self) -> Any:
        """The adapter in use, to which all that is not the gate's matter is forwarded."""
        return self._wrapped.current.adapter

    def _connect(self, config: GateConfig) -> None:
        store_bell, lookup_bell, load_bell = self._bells
        link = self._link = StoreLink.of(config.inner_type, config.inner)
        parts = self._parts = Parts(
            inner=self._wrapped,
            admission=self._admission,
            ledger=self._ledger,
            known=self._known,
            faults=self._faults,
            clock=self._clock,
            wake=self._keeper.wake,
        )
        may_shadow = config.inner_type in SHADOWED_TYPES
        self._lookups = Lookups(parts, lookup_bell, may_shadow=may_shadow)
        self._loads = Loads(parts, load_bell, self._lookups)
        self._stores = Stores(parts, store_bell)
        self._prober = Prober(
            config.inner_type,
            link,
            self._wrapped.build,
            self._known,
            self._ledger,
            self._faults,
            clock=self._clock,
        )
        self._rebuilder = Rebuilder(
            config.inner_type,
            link,
            parts,
            self._bells,
            self._lookups,
            self._loads,
            self._stores,
        )
        self._shown = collector().add(
            config.name, config.inner_type, self._ledger, self._admission, self._adapter_state
        )

    def _adapter_state(self) -> AdapterState:
        return adapter_state(self._parts, self._loads, self._stores, self._rebuilder)

    # Event fds

    def get_store_event_fd(self) -> int:
        """Rings when stores completed."""
        return self._bells[0].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Rings when lookups completed."""
        return self._bells[1].fileno()

    def get_load_event_fd(self) -> int:
        """Rings when loads completed."""
        return self._bells[2].fileno()

    # Stores, lookups, loads

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store, unless writes are off (fails at once) or L2 has the keys (done at once)."""
        return self._stores.submit(keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Results of the stores that completed since the last call."""
        return self._stores.pop_completed()

    def submit_lookup_and_lock_task(
        self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look up and lock, or be a miss at once where the admission denies it."""
        return self._lookups.submit(keys, group_layout_descs)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """The lookup's bitmap, once; a miss in L2's place after a bypass or a deadline."""
        return self._lookups.query(task_id)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Load, or be not loaded at once where `max_loads` are in flight."""
        return self._loads.submit(keys, objects)

    def query_load_result(self, task_id: int) -> Any:
        """The load's bitmap, once."""
        return self._loads.query(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Delete from L2; the keys count as known no longer."""
        self._forget(keys)
        current = self._wrapped.current
        if current.serves:
            current.adapter.delete(keys)
        # A store may have completed meanwhile.
        self._forget(keys)

    def _forget(self, keys: list[Any]) -> None:
        try:
            self._known.forget(list(keys))
        except Exception:
            self._faults.caught("forgetting deleted keys")

    def set_backend_identity(self, *args: Any, **kwargs: Any) -> None:
        """Told to the adapter in use, and to all that are built after it."""
        self._wrapped.set_identity(args, kwargs)

    def register_listener(self, listener: Any) -> None:
        """Registered with the adapter in use, and with all that take its place."""
        self._wrapped.listen(listener)

    # Control

    def report_status(self) -> dict[str, Any]:
        """The inner adapter's status, with a few words about the gate."""
        status: dict[str, Any] = dict(self._inner.report_status())
        try:
            state = self._admission.state()
            status["kvguard"] = {
                "l2": self._shown.l2,
                "epoch": state.epoch,
                "revision": state.revision,
                "share": state.settings.share,
            }
        except Exception:
            self._faults.caught("reporting status")
        return status

    def reconfigure_status(self) -> dict[str, Any]:
        """LMCache's envelope around the gate's status; `status` is empty after a fault."""
        shown: dict[str, Any] = {}
        try:
            shown = self._status()
        except Exception:
            self._faults.caught("reporting the gate's status")
        return {
            "backend": "plugin",
            "supported_operations": list(OPERATIONS),
            "status": shown,
        }

    def reconfigure(
        self,
        operation: str,
        payload: Mapping[str, Any],
        *,
        device_owners: Callable[..., list[str]] | None = None,
    ) -> dict[str, Any]:
        """One operation; answers the status after it, or the id of what it started, whose
        result comes with the status.

        Raises only L2ReconfigureError, which LMCache answers with: 400 wrong input, 403 no
        token or a wrong one where one is wanted, 409 a stale revision, or what cannot be
        started now (with the status), 500 a fault of the gate's own.
        """
        try:
            payload = self._token.admit(payload)
            if operation == "probe":
                return {"id": self._prober.start(payload), "started": True}
            if operation in ("abort", "rebuild"):
                request = RebuildRequest.parse(operation, payload)
                admit_revision(request, self._admission.state().revision)
                return {"id": self._rebuilder.start(request), "started": True}
            self._write(operation, payload)
            return self._status()
        except (InvalidWrite, WrongToken) as error:
            raise L2ReconfigureError(error.status, str(error)) from error
        except (StaleRevision, ProbeRefused, RebuildRefused) as error:
            body = {"error": str(error), "state": self.reconfigure_status()["status"]}
            raise L2ReconfigureError(409, str(error), payload=body) from error
        except Exception as error:
            self._faults.caught("reconfiguring")
            raise L2ReconfigureError(500, f"fault of the gate: {error!r}"[:200]) from error

    def _write(self, operation: str, payload: Mapping[str, Any]) -> None:
        before = self._admission.state()
        if operation == "admission":
            self._admission.write(payload)
        elif operation == "bypass":
            self._admission.bypass(payload)
        elif operation == "restore":
            self._admission.restore(payload)
        else:
            raise InvalidWrite(
                f"unknown operation {operation[:40]!r}; known are {', '.join(OPERATIONS)}"
            )
        # Lookups already stuck get their answer when LMCache asks for it again.
        self._bells[1].ring()
        self._keeper.wake()
        after = self._admission.state()
        if after.settings != before.settings and after.lease is not None:
            lease = after.lease
            logger.warning(
                "admission is %s, by %s for %g s: %s",
                *(after.settings.as_dict(), lease.holder, lease.seconds, lease.reason or "-"),
            )

    def _keep(self) -> float | None:
        """What no call of the host's would do in time: stuck lookups, leases running out."""
        leased = self._admission.expires_at() is not None
        state = self._admission.state()
        if leased and state.lease is None:
            logger.warning("the lease ran out, admission is %s", state.settings.as_dict())
        self._known.settle()
        times = [
            self._loads.sweep(),
            self._lookups.sweep(),
            self._rebuilder.tick(state.settings.load_deadline_s),
            None if state.expires_in_s is None else state.expires_in_s + 0.001,
        ]
        return min((due for due in times if due is not None), default=None)

    def _status(self) -> dict[str, Any]:
        return status(
            self._shown.l2,
            self._inner_type,
            self._admission,
            self._ledger,
            len(self._known),
            self._lookups.abandoned,
            self._adapter_state(),
            self._link,
            self._prober,
            self._rebuilder,
            self._clock,
        )

    def close(self) -> None:
        """Close the inner adapter, once; what is in flight gets no more answers."""
        if self._closed:
            return
        self._closed = True
        for step in (
            self._rebuilder.stop,
            self._keeper.stop,
            self._prober.cancel,
            lambda: collector().remove(self._shown),
        ):
            try:
                step()
            except Exception:
                self._faults.caught("closing")
        try:
            if self._wrapped.current.phase != "closed":
                self._inner.close()
        finally:
            for bell in self._bells:
                bell.close()
