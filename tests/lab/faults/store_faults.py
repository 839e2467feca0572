"""Faults of the store: it loses what it held, holds something else, or refuses."""

from __future__ import annotations

import time

from ..gate_host import CHUNK_BYTES
from ..model import KV_BYTES_PER_TOKEN
from ..stack import CHUNK_TOKENS, Stack
from .redis_client import RedisClient

PASSWORD = "another"
IN_FLIGHT_LIMIT_S = 10.0
FLUSH_BYTES_PER_SECOND = 30e6
LEFT_ON_DISK_BYTES = 1 << 20
WHOLE_BYTES = (CHUNK_TOKENS * KV_BYTES_PER_TOKEN, CHUNK_BYTES)  # the engine's, the witness's

# The first half of every value, under the same name, as an engine with half the heads
# and the same model name would have written it.
_HALVE = """
local changed = 0
for _, key in ipairs(redis.call('KEYS', '*')) do
  local size = redis.call('STRLEN', key)
  for _, whole in ipairs(ARGV) do
    if size == tonumber(whole) then
      redis.call('SET', key, redis.call('GETRANGE', key, 0, size / 2 - 1))
      changed = changed + 1
    end
  end
end
return changed
"""


def flush_in_mid_load(stack: Stack) -> None:
    """FLUSHALL while loads are in flight, most of whose chunks were not asked for yet."""
    stack.link.set_rate(FLUSH_BYTES_PER_SECOND)
    try:
        wait_for_load(stack)
        stack.clear_store()
    finally:
        stack.link.set_rate(None)


def wait_for_load(stack: Stack, limit_s: float = IN_FLIGHT_LIMIT_S) -> bool:
    """True once a load is in flight; False when none was within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if stack.cache_status()["storage_manager"]["prefetch_controller"]["load_phase_count"]:
            return True
        time.sleep(0.01)
    return False


def kill_store(stack: Stack) -> None:
    """The proxy before it still takes connections and resets them, as a load balancer
    with nothing behind it does."""
    stack.store.kill()


def start_empty_store(stack: Stack) -> None:
    stack.start_store()


def halve_values(stack: Stack) -> int:
    """How many values of the right size were cut to their first half."""
    with RedisClient(stack.store_port) as store:
        changed = store.do("EVAL", _HALVE, 0, *WHOLE_BYTES)
    assert isinstance(changed, int)
    return changed


def change_password(stack: Stack) -> None:
    """The store wants a password nobody was told; connections made before are cut, or
    they would stay authenticated."""
    with RedisClient(stack.store_port) as store:
        store.do("CONFIG", "SET", "requirepass", PASSWORD)
        store.do("AUTH", PASSWORD)
        store.do("CLIENT", "KILL", "TYPE", "normal")


def change_password_back(stack: Stack) -> None:
    with RedisClient(stack.store_port, password=PASSWORD) as store:
        store.do("CONFIG", "SET", "requirepass", "")


def fill_disk(stack: Stack) -> None:
    """Leaves 1 MiB: not enough for a chunk, enough for the file's name."""
    ballast = stack.disk / "ballast"
    with ballast.open("wb") as file:
        block = bytes(1 << 20)
        try:
            while True:
                file.write(block)
                file.flush()
        except OSError:
            pass
    size = ballast.stat().st_size
    with ballast.open("r+b") as file:
        file.truncate(max(0, size - LEFT_ON_DISK_BYTES))


def empty_disk(stack: Stack) -> None:
    (stack.disk / "ballast").unlink(missing_ok=True)
