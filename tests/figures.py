"""Snapshots by hand: the figures a policy's test needs, all others Missing as in life."""

from __future__ import annotations

from guard.readings import Figure, Missing, Reading, Snapshot

B_STAR = 50e6
_ABSENT = {
    "load_bandwidth.alone": "too_few_alone_loads",
    "load_bandwidth.recent": "idle",
    "in_flight_bandwidth_bound": "nothing_in_flight",
    "oldest_load": "nothing_in_flight",
    "oldest_lookup": "nothing_in_flight",
    "last_answer_age": "nothing_answered_yet",
    "last_completion_age": "nothing_completed_yet",
    "mean_load": "no_load_yet",
}
_WELL = {
    "break_even_bandwidth": B_STAR,
    "loads_in_flight": 0.0,
    "in_flight": 0.0,
    "lost_lookups": 0.0,
    "failed_stores": 0.0,
    "adapter_attached": 1.0,
    "adapter_answered": 1.0,
    "adapter_age": 900.0,
    "releasing_loads": 0.0,
}


def figures(**given: float | str | None) -> dict[str, Figure]:
    """The figures of an idle, healthy L2 with these changed. `bandwidth_alone` is
    `load_bandwidth.alone`, and so on; a str is the reason of a Missing, `bound` the bound
    of what is in flight."""
    named: dict[str, Figure] = {name: Missing(reason) for name, reason in _ABSENT.items()}
    named |= {name: Reading(value, "test", 0.0, "test") for name, value in _WELL.items()}
    for key, value in given.items():
        name = {"bound": "in_flight_bandwidth_bound"}.get(key, key)
        name = name.replace("bandwidth_", "load_bandwidth.", 1) if key[:9] == "bandwidth" else name
        named[name] = (
            Reading(value, "test", 0.0, "test")
            if isinstance(value, float | int)
            else Missing(value or "not_given")
        )
    return named


def snapshot(at: float = 1000.0, **given: float | str | None) -> Snapshot:
    """One snapshot of `figures`."""
    return Snapshot(at, at, figures(**given))


def hanging_lookup(age: float, **given: float | str | None) -> dict[str, float | str | None]:
    """A lookup that has waited for `age` seconds on an L2 that answered all before it."""
    return {"oldest_lookup": age, "last_answer_age": age + 0.2, "mean_load": 50e6, **given}


def hanging_loads(
    age: float, loads: int = 2, size: float = 50e6, **given: float | str | None
) -> dict[str, float | str | None]:
    """Loads that have hung for `age` seconds, and nothing was answered since."""
    return {
        "loads_in_flight": float(loads),
        "in_flight": loads * size,
        "oldest_load": age,
        "bound": loads * size / age if age >= 1 else "in_flight_too_young",
        "last_answer_age": age + 0.1,
        "last_completion_age": age + 0.1,
        "mean_load": size,
        **given,
    }
