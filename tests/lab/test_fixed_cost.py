"""The fixed cost of a hit against a truth of our own: a delay in the store's answers.

One load in flight, and no more chunks than the adapter has workers, since it asks in rounds
of so many.
"""

from __future__ import annotations

import os
import time

import pytest

from .gate_host import CacheServer
from .gate_stores import Redis, Throttled, resp
from .guard_handle import Guard
from .processes import HOST, Run, free_ports

DELAY_SECONDS = 0.05
# The proxy passes smaller pieces as soon as there is any delay, which costs time too.
NO_DELAY_SECONDS = 1e-6
TOLERANCE = 0.25
CHUNKS = (1, 2, 4, 6, 8)
# The longest window must hold nothing of the time before.
MEASURED_SECONDS = 25.0
LENIENT = 1.0 if os.environ.get("STRICT") == "1" else 1.5


def test_a_delay_shows_in_the_lookup_part_and_in_the_load_part() -> None:
    with Run() as run:
        proxy = Throttled(run, Redis(run).start().port).start()
        with CacheServer(resp(proxy.port, num_workers=8)) as server:
            for chunks in CHUNKS:
                assert server.client.request(seq=chunks, chunks=chunks) == 0
            proxy.link.set_delay(NO_DELAY_SECONDS)
            near = fixed_cost(run, server, "near")
            proxy.link.set_delay(DELAY_SECONDS)
            far = fixed_cost(run, server, "far")
    added = {part: far[part] - near[part] for part in near}
    print(
        "\n"
        + "; ".join(
            f"{part} {near[part] * 1e3:.1f} ms, {far[part] * 1e3:.1f} ms with 50 ms of delay"
            for part in near
        )
    )
    for part, seconds in added.items():
        assert seconds == pytest.approx(DELAY_SECONDS, rel=TOLERANCE * LENIENT), part


def fixed_cost(run: Run, server: CacheServer, name: str) -> dict[str, float]:
    """What a guard of its own reads after hits of all sizes, one after the other."""
    guard = Guard(
        run,
        engine=f"http://{HOST}:{free_ports(1)[0]}",  # nobody: hits are what is measured
        cache=server.url,
        mode="observe",
        state_directory=run.directory / f"state-{name}",
        log=run.directory / f"{name}.log",
    )
    guard.start()
    try:
        until = time.monotonic() + MEASURED_SECONDS
        while time.monotonic() < until:
            for chunks in CHUNKS:
                assert server.client.request(seq=chunks, chunks=chunks) == chunks
        status = guard.status()
    finally:
        guard.close()
    parts = {}
    for part in ("lookup", "load"):
        reading = status["readings"][f"hit_fixed.{part}"]
        assert "value" in reading, (part, reading)
        parts[part] = float(reading["value"])
    return parts
