"""Faults are counted and never raised, bells ring their own descriptor only, the keeper
comes when it is called."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from guard.gate.ledger import Ledger
from guard.gate.probe_state import ProbeRefused, ProbeRequest, ProbeSample, ProbeState
from guard.gate.safety import Bell, Faults, Keeper
from guard.gate.validate import InvalidWrite


def eventfd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class TestBell:
    def test_it_rings_the_descriptor_that_it_was_made_of(self) -> None:
        fd = eventfd()
        bell = Bell(fd)
        assert bell.fileno() not in (fd, -1)
        bell.ring()
        bell.ring()
        assert os.eventfd_read(fd) == 2
        os.close(fd)
        bell.ring()  # the host still polls ours
        assert os.eventfd_read(bell.fileno()) == 1
        bell.close()

    def test_a_closed_bell_touches_nobodys_descriptor(self) -> None:
        fd = eventfd()
        bell = Bell(fd)
        number = bell.fileno()
        bell.close()
        bell.close()
        taken = os.dup2(fd, number)
        bell.ring()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
        assert bell.fileno() == -1
        os.close(taken)
        os.close(fd)

    def test_what_is_no_eventfd_is_refused(self) -> None:
        read, write = os.pipe()
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(ValueError, match="eventfd"):
            Bell(read)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        os.close(read)
        os.close(write)


class TestFaults:
    def test_each_is_counted_and_the_first_of_each_place_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        ledger = Ledger()
        faults = Faults(ledger)
        with caplog.at_level(logging.ERROR, logger="kvguard.gate"):
            for place in ("looking up", "looking up", "loading"):
                try:
                    raise RuntimeError("inside")
                except RuntimeError:
                    faults.caught(place)
        assert ledger.totals().faults == 3
        assert [record.args for record in caplog.records] == [("looking up",), ("loading",)]
        assert "inside" in caplog.text

    def test_it_never_raises(self) -> None:
        ledger = Ledger()
        ledger.fault = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        Faults(ledger).caught("anything")


class TestKeeper:
    def test_it_ticks_when_woken_and_when_due(self) -> None:
        ticks: list[int] = []
        thrice = threading.Event()

        def tick() -> float | None:
            ticks.append(1)
            if len(ticks) == 3:
                thrice.set()
            return 0.001 if len(ticks) < 3 else None

        keeper = Keeper(tick, Faults(Ledger()), "test-keeper")
        keeper.start()
        keeper.wake()
        assert thrice.wait(10)
        keeper.stop()
        assert not keeper._thread.is_alive()
        assert len(ticks) == 3

    def test_a_fault_in_a_tick_does_not_end_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ledger = Ledger()
        monkeypatch.setattr(Keeper, "RETRY_SECONDS", 0.001)
        again = threading.Event()
        ticks: list[int] = []

        def tick() -> float | None:
            ticks.append(1)
            if len(ticks) == 1:
                raise RuntimeError("once")
            again.set()
            return None

        keeper = Keeper(tick, Faults(ledger), "test-keeper")
        keeper.start()
        keeper.wake()
        assert again.wait(10)
        keeper.stop()
        assert ledger.totals().faults == 1

    def test_it_can_be_stopped_before_it_was_ever_woken(self) -> None:
        keeper = Keeper(lambda: None, Faults(Ledger()), "test-keeper")
        keeper.stop()
        keeper.start()
        keeper._thread.join(10)
        assert not keeper._thread.is_alive()


class TestProbeState:
    def test_one_at_a_time_and_the_last_result(self) -> None:
        now = [5.0]
        state = ProbeState(clock=lambda: now[0])
        assert state.as_dict() == {"running": False, "last": None}
        assert state.begin("lost") == 1
        with pytest.raises(ProbeRefused) as caught:
            state.begin("known")
        assert caught.value.status == 409
        assert state.as_dict() == {"running": True, "last": None}
        state.end("done", None, [ProbeSample(2, 100, 0.1, 0.2, False)])
        now[0] = 8.0
        assert state.as_dict() == {
            "running": False,
            "last": {
                "id": 1,
                "of": "lost",
                "outcome": "done",
                "error": None,
                "age_s": 3.0,
                "samples": [
                    {
                        "chunks": 2,
                        "bytes": 100,
                        "lookup_s": 0.1,
                        "load_s": 0.2,
                        "overlapped": False,
                    }
                ],
            },
        }
        assert state.begin("known") == 2

    @pytest.mark.parametrize(
        ("payload", "key"),
        [
            ({"chunks": 0}, "chunks"),
            ({"chunks": True}, "chunks"),
            ({"of": "all"}, "of"),
            ({"count": 65}, "count"),
            ({"max_bytes": 0}, "max_bytes"),
            ({"max_bytes": 5e6}, "max_bytes"),
            ({"deadline_s": 0}, "deadline_s"),
            ({"deadline_s": float("nan")}, "deadline_s"),
            ({"keys": 3}, "unknown key 'keys'"),
        ],
    )
    def test_wrong_requests_are_refused_by_name(self, payload: dict, key: str) -> None:
        with pytest.raises(InvalidWrite, match=f"^{key}"):
            ProbeRequest.parse(payload)

    def test_a_request_has_sound_defaults(self) -> None:
        assert ProbeRequest.parse({}) == ProbeRequest(4, 1, 256 * 1024**2, 30.0)
        assert ProbeRequest.parse({"deadline_s": 3}).deadline_s == 3.0
