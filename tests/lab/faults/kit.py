"""Every fault of the kit, as one table: how it begins, how it ends, what to expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..stack import Stack
from . import store_faults

LATE_LOOKUP_SECONDS = 1.5
LATE_LOAD_SECONDS = 2.5


def nothing(stack: Stack) -> None:
    """What begins and never ends, or ends by itself."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`what` is for a reader who has seen it in production.

    One that does not last is over as soon as it has begun: what comes after is the cure's
    time. `again` is done every few seconds while the fault lasts. `store` is the adapter
    that it needs. `only_in_full`: told apart from others by little, not for every day.
    `tells` is a word that the guard's status must show while the fault lasts, for
    what only a person can end; None when nothing of the kind is asked.
    """

    name: str
    what: str
    begin: Callable[[Stack], object]
    end: Callable[[Stack], object] = nothing
    again: Callable[[Stack], object] = nothing
    lasts: bool = True
    store: str = "resp"
    only_in_full: bool = False
    tells: str | None = None


def _half_open(stack: Stack) -> None:
    stack.link.stall()


def _partition(stack: Stack) -> None:
    stack.link.black_hole()
    stack.link.stall()


def _partition_ends(stack: Stack) -> None:
    """The old connections are gone for good, as after any address translation that has
    forgotten them: a reset is the answer to whatever is sent."""
    stack.link.drop()
    stack.link.open_port()


def _cut_and_black_hole(stack: Stack) -> None:
    stack.link.black_hole()
    stack.link.drop()


FAULTS = (
    Fault(
        "freeze",
        "the store hangs, its connections stay; then it goes on",
        lambda stack: stack.link.freeze(),
        lambda stack: stack.link.thaw(),
    ),
    Fault(
        "drop",
        "every connection is reset once; the store is fine",
        lambda stack: stack.link.drop(),
        lasts=False,
    ),
    Fault(
        "half_open",
        "every connection looks established and is dead; new ones work",
        _half_open,
        lasts=False,
    ),
    Fault(
        "black_hole",
        "the network swallows everything: old connections silent, new ones never answered",
        _partition,
        _partition_ends,
    ),
    Fault(
        "cut_and_black_hole",
        "old connections are reset, new ones never answered",
        _cut_and_black_hole,
        lambda stack: stack.link.open_port(),
        only_in_full=True,
    ),
    Fault(
        "port_closed",
        "old connections are reset, new ones refused",
        lambda stack: stack.link.close_port(),
        lambda stack: stack.link.open_port(),
    ),
    Fault(
        "flushall",
        "FLUSHALL while loads are in flight",
        store_faults.flush_in_mid_load,
        lasts=False,
    ),
    Fault(
        "restarted_empty",
        "the store is killed behind its load balancer and comes back with nothing",
        store_faults.kill_store,
        store_faults.start_empty_store,
    ),
    Fault(
        "slow_lookups",
        "'is it there?' takes long, loads are fast",
        lambda stack: stack.link.set_command_delays({"EXISTS": LATE_LOOKUP_SECONDS}),
        lambda stack: stack.link.set_command_delays({}),
    ),
    Fault(
        "slow_loads",
        "'is it there?' is fast, loads take long",
        lambda stack: stack.link.set_command_delays({"GET": LATE_LOAD_SECONDS}),
        lambda stack: stack.link.set_command_delays({}),
    ),
    Fault(
        "worker_stuck",
        "one of the adapter's eight connections hangs with a load, the others work",
        lambda stack: stack.link.stall_next("GET"),
        lambda stack: stack.link.resume(),
    ),
    Fault(
        "sizes_changed",
        "another engine with the same model name writes values of half the size",
        store_faults.halve_values,
        again=store_faults.halve_values,
    ),
    Fault(
        "wrong_password",
        "the store's password was changed, and nobody told the cache",
        store_faults.change_password,
        store_faults.change_password_back,
        tells="password|NOAUTH|WRONGPASS|authenticat",
    ),
    Fault(
        "disk_full",
        "the disk under fs is full",
        store_faults.fill_disk,
        store_faults.empty_disk,
        store="fs",
    ),
)


def by_name(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def end_everything(stack: Stack) -> None:
    """Whatever fault was left: a fast link, an open port and a store without a password."""
    link = stack.link
    link.set_rate(None)
    link.set_delay(0.0)
    link.set_command_delays({})
    link.thaw()
    link.resume()
    link.open_port()
    if not stack.store.running:
        stack.start_store()
    if stack.disk_bytes is not None:
        store_faults.empty_disk(stack)
