"""A second engine of the same cache server that checks every byte of KV it gets back.

The engine itself cannot tell: with the lab's model of random weights not one
log-probability moves when the prefix is another one's. The witness stores random KV,
remembers its checksums, loads it again over the same path (server, gate, adapter, store)
and compares. Its prefixes hold different KV each, so one given for another shows.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from ..gate_host import Client
from ..processes import LabError
from ..stack import Stack

KNOWN = (1, 2, 3, 4, 5)  # their KV lies in blocks of their own
CHUNKS = 4
EVERY_SECONDS = 2.0
ANSWER_LIMIT_S = 5.0
STORED_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One request of the witness: chunks hit (None: no answer in time), and whether what
    came back is what was stored (None: nothing came back)."""

    at: float
    seq: int
    hit: int | None
    intact: bool | None
    retrieved: bool | None


class Witness:
    """One client process. Not for two threads at once."""

    def __init__(self, stack: Stack) -> None:
        self._client: Client = stack.client()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._new_seq = 1000
        self.said: list[Reply] = []
        self.broken: str | None = None

    def close(self) -> None:
        self._client.close()

    def wrong(self, begin: float, end: float) -> list[Reply]:
        """What came back other than it was stored."""
        return [each for each in list(self.said) if begin <= each.at < end and each.intact is False]

    def loads_right(self, limit_s: float) -> bool:
        """Every known prefix comes back whole from L2 within `limit_s`, storing it first
        where it is not there. False as soon as something wrong comes back."""
        deadline = time.monotonic() + limit_s
        for seq in KNOWN:
            while True:
                said = self.ask(seq)
                if said.intact is False:
                    return False
                if said.hit == CHUNKS and said.intact:
                    break
                if time.monotonic() > deadline:
                    return False
                time.sleep(STORED_LIMIT_S / 4)
        return True

    def ask(self, seq: int) -> Reply:
        """One whole request: what is hit is loaded and compared, the rest is stored."""
        at = time.monotonic()
        handle = self._client.begin(seq, CHUNKS)
        hit, _ = self._client.poll(handle, ANSWER_LIMIT_S)
        if hit is None:
            self._client.drop(handle)
            said = Reply(at, seq, None, None, None)
        else:
            done = self._client.finish(handle)
            said = Reply(at, seq, hit, done["intact"], done["retrieved"])
        self.said.append(said)
        return said

    def start(self) -> None:
        """Goes on asking in a thread until `stop()`: a known prefix and a new one in turn."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._go_on, name="witness", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _go_on(self) -> None:
        turn = 0
        while not self._ended.wait(EVERY_SECONDS):
            if turn % 2:
                self._new_seq += 1
                seq = self._new_seq
            else:
                seq = KNOWN[(turn // 2) % len(KNOWN)]
            turn += 1
            try:
                self.ask(seq)
            except (LabError, OSError) as error:
                self.broken = str(error)[:300]
                return
