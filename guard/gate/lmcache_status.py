"""What the gate says of itself on LMCache's control route, beside its metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guard.gate.admission import Admission
from guard.gate.ledger import VERSION, Ledger
from guard.gate.lmcache_parts import Parts
from guard.gate.lmcache_probe import Prober
from guard.gate.lmcache_rebuild import Rebuilder
from guard.gate.lmcache_transfers import Loads, Stores
from guard.gate.metrics import AdapterState
from guard.gate.store_link import StoreLink

SCHEMA = 1


def adapter_state(parts: Parts, loads: Loads, stores: Stores, rebuilder: Rebuilder) -> AdapterState:
    """How the adapter behind the gate is, at this moment."""
    now, current = parts.clock(), parts.inner.current
    heard = parts.inner.last_answer_at
    return AdapterState(
        generation=current.number,
        attached=current.serves,
        answered=current.answered,
        age_seconds=now - current.built_at,
        last_answer_age_seconds=None if heard is None else now - heard,
        lost_lookups=parts.known.lost_lookups,
        failed_stores=stores.failed_in_a_row,
        releasing_loads=loads.releasing,
        parked=rebuilder.parked,
        rebuilds=rebuilder.counts(),
    )


def status(
    l2: str,
    inner_type: str,
    admission: Admission,
    ledger: Ledger,
    known_keys: int,
    abandoned: int,
    adapter: AdapterState,
    link: StoreLink,
    prober: Prober,
    rebuilder: Rebuilder,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """The whole of it, schema 1."""
    totals = ledger.totals()
    now = clock()
    no_exchange = rebuilder.why_not()
    reasons = {"probe": prober.why_not(), "abort": no_exchange, "rebuild": no_exchange}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "l2": l2,
        "inner": inner_type,
        **admission.state().as_dict(),
        "in_flight": {
            "loads": totals.loads_in_flight,
            "bytes": totals.bytes_in_flight,
            "oldest_load_s": totals.oldest_load_seconds,
            "lookups": totals.lookups_in_flight,
            "oldest_lookup_s": totals.oldest_lookup_seconds,
            "abandoned_lookups": abandoned,
        },
        "can": {
            **{operation: reason is None for operation, reason in reasons.items()},
            "why_not": {op: reason for op, reason in reasons.items() if reason is not None},
        },
        "adapter": {
            "generation": adapter.generation,
            "attached": adapter.attached,
            "answered": adapter.answered,
            "age_s": adapter.age_seconds,
            "last_answer_age_s": adapter.last_answer_age_seconds,
            "lost_lookups": adapter.lost_lookups,
            "failed_stores": adapter.failed_stores,
            "parked": adapter.parked,
            "releasing": adapter.releasing_loads,
            "store_problem": link.last_problem,
        },
        "known_keys": known_keys,
        "probe": prober.as_dict(),
        "rebuild": rebuilder.as_dict(),
        "recent_loads": [
            {
                "start_ago_s": now - load.start,
                "end_ago_s": now - load.end,
                "bytes": load.bytes,
                "alone": load.alone,
            }
            for load in ledger.recent_loads()
        ],
    }
