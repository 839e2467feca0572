"""Numbers of descriptors: high ones for adapters, and low ones free when they are closed."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from guard.gate import descriptors
from guard.gate.descriptors import above_floor, closing, floor, free_below_floor
from guard.gate.store_link import StoreLink


def test_what_is_opened_inside_is_above_and_what_follows_below_again() -> None:
    free = free_below_floor()
    with above_floor(StoreLink(), 0):
        inside = os.dup(0)
    after = os.dup(0)
    try:
        assert inside >= floor()
        assert after < floor()
    finally:
        os.close(inside)
        os.close(after)
    assert free_below_floor() == free


def test_a_number_that_is_given_up_above_is_not_the_next_to_be_given_out() -> None:
    with above_floor(StoreLink(), 0):
        high = os.dup(0)
    os.close(high)
    others = [os.dup(0) for _ in range(descriptors.LEAST_FREE)]
    for other in others:
        os.close(other)
    assert high not in others


def test_it_waits_for_sockets_that_threads_open_in_their_own_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = StoreLink("127.0.0.1", server.getsockname()[1])
        opened: list[socket.socket] = []

        def worker() -> None:
            time.sleep(0.05)
            opened.append(socket.create_connection((link.host, link.port)))

        workers = [threading.Thread(target=worker) for _ in range(3)]
        with above_floor(link, 3):
            for thread in workers:
                thread.start()
        for thread in workers:
            thread.join()
        assert [one.fileno() >= floor() for one in opened] == [True] * 3
        for one in opened:
            one.close()


def test_it_does_not_wait_for_ever() -> None:
    began = time.monotonic()
    with above_floor(StoreLink("127.0.0.1", 9), 1):
        pass
    assert 0.4 < time.monotonic() - began < 3


def test_closing_is_refused_where_low_numbers_are_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing() as allowed:
        assert allowed
    monkeypatch.setattr(descriptors, "free_below_floor", lambda: descriptors.LEAST_FREE - 1)
    with closing() as allowed:
        assert not allowed


def test_nobody_closes_while_another_builds() -> None:
    order: list[str] = []
    building = threading.Event()

    def build() -> None:
        with above_floor(StoreLink(), 0):
            building.set()
            time.sleep(0.1)
            order.append("built")

    thread = threading.Thread(target=build)
    thread.start()
    building.wait(5)
    with closing() as allowed:
        order.append("closed")
    thread.join()
    assert (order, allowed) == (["built", "closed"], True)


def test_nothing_stays_taken_when_building_fails() -> None:
    free = free_below_floor()
    with pytest.raises(ValueError, match="refused"), above_floor(StoreLink(), 0):
        raise ValueError("refused")
    assert free_below_floor() == free
    with closing() as allowed:
        assert allowed
