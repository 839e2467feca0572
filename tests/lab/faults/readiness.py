"""Brings a stack to where a fault can begin: L2 warm, served and admitted, KV right."""

from __future__ import annotations

import time

import httpx

from ..load import Load
from ..processes import LabError
from ..stack import MODEL_NAME, Stack
from .judge import KV_SECONDS
from .kit import end_everything
from .witness import Witness

LOAD_SEED = 31  # the same prefixes for every load, so that L2 stays warm from one to the next
REQUEST_LIMIT_S = 75.0
QUICK_LIMIT_S = 15.0
CURED_SECONDS = 3.0
PASSES = 3


def load_of(stack: Stack, request_limit_s: float = REQUEST_LIMIT_S) -> Load:
    return Load(stack.engine_url, MODEL_NAME, seed=LOAD_SEED, request_limit_s=request_limit_s)


def make_ready(stack: Stack) -> str | None:
    """What had to be done beyond warming up: None, or words about what the last fault left.

    Raises LabError when not even new processes serve from L2.
    """
    end_everything(stack)
    if _warm(stack):
        return None
    try:
        stack.gate_operation("rebuild", holder="person:lab", reason="left", cause="manual")
        time.sleep(CURED_SECONDS)
        if _warm(stack):
            return "before it L2 was dead and was rebuilt by hand"
    except httpx.HTTPError:
        pass  # a gate that cannot, or a server that does not answer
    stack.cache.kill()
    stack.engine.kill()
    stack.start_cache()
    stack.start_engine()
    if _warm(stack):
        return "before it L2 was dead and cache server and engine were started again"
    raise LabError("L2 does not serve, even with a new cache server\n" + stack.cache.log_tail())


def _warm(stack: Stack) -> bool:
    """Whether every prefix comes from L2 in the end, stored first where it was not there."""
    if not (stack.cache.running and stack.engine.running):
        return False
    load = load_of(stack, QUICK_LIMIT_S)
    try:
        stack.gate_operation("restore", holder="person:lab", reason="before a fault", lease_s=1)
        for _ in range(PASSES):
            # What L2 did not take stays in the server's own memory, and would hit too.
            stack.clear_l1()
            requests = []
            for prefix in range(len(load.prompts.prefixes)):
                requests.append(load.send(prefix))
                if requests[-1].error is not None:
                    return False
            if all(request.cached_tokens for request in requests):
                return True
            stack.wait_stores_quiet()
    except (httpx.HTTPError, LabError):
        pass
    return False


def witness_of(stack: Stack, before: Witness | None) -> Witness:
    """The witness, another one where the last one broke off or its server is gone."""
    if before is not None:
        try:
            if before.broken is None and before.loads_right(KV_SECONDS):
                return before
        except (LabError, OSError):
            pass
        before.close()
    return Witness(stack)
