"""What a plain connection tells of a store, against servers that behave in every way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from guard.gate.store_link import StoreLink

Answer = Callable[[socket.socket], None]


@pytest.fixture
def serving() -> Iterator[Callable[[Answer], int]]:
    """A server on a port; each connection is handled by the function given."""
    servers: list[socket.socket] = []

    def serve(answer: Answer) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    answer(connection)

        threading.Thread(target=run, daemon=True).start()
        return int(server.getsockname()[1])

    yield serve
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def says(*lines: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        for line in lines:
            connection.sendall(line + b"\r\n")

    return answer


def link(port: int, **more: object) -> StoreLink:
    return StoreLink.of("resp", {"host": "127.0.0.1", "port": port, **more})


def test_a_server_that_answers_is_no_problem(serving: Callable[[Answer], int]) -> None:
    store = link(serving(says(b"+PONG")))
    assert store.problem() is store.last_problem is None
    assert store.refusal() is None


@pytest.mark.parametrize("username", ["", "guard"])
def test_the_login_comes_before_the_ping(serving: Callable[[Answer], int], username: str) -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        heard.append(connection.recv(4096))
        connection.sendall(b"+OK\r\n+PONG\r\n")

    store = link(serving(answer), password="päss word\r\n", username=username)
    assert store.problem() is None
    name = b"$5\r\nguard\r\n" if username else b""
    login = b"*%d\r\n$4\r\nAUTH\r\n%s$12\r\np\xc3\xa4ss word\r\n\r\n" % (2 + bool(name), name)
    assert heard == [login + b"*1\r\n$4\r\nPING\r\n"]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([b"-WRONGPASS invalid username-password pair", b"-NOAUTH required"], "refuses the login"),
        ([b"-ERR AUTH called without any password configured", b"+PONG"], "refuses the login"),
        ([b"HTTP/1.1 400 Bad Request"], "is no RESP server"),
        ([], "hung up"),
    ],
)
def test_what_it_says_against_it(
    serving: Callable[[Answer], int], answers: list[bytes], words: str
) -> None:
    store = link(serving(says(*answers)), password="secret")
    problem = store.problem()
    assert problem is not None
    assert words in problem
    assert store.last_problem == problem
    assert "secret" not in problem + repr(store)


def test_an_error_to_a_ping_is_an_answer_too(serving: Callable[[Answer], int]) -> None:
    assert link(serving(says(b"-LOADING Redis is loading the dataset"))).problem() is None


def test_one_that_wants_a_password_it_was_not_given(serving: Callable[[Answer], int]) -> None:
    problem = link(serving(says(b"-NOAUTH Authentication required."))).problem()
    assert problem is not None
    assert "refuses the login: NOAUTH" in problem


def test_a_frozen_server_takes_connections_and_answers_nothing(
    serving: Callable[[Answer], int],
) -> None:
    over = threading.Event()
    store = link(serving(lambda connection: over.wait(10) and None))
    try:
        assert store.refusal() is None
        began = time.monotonic()
        problem = store.problem()
        assert time.monotonic() - began < 3
        assert problem is not None
        assert "did not answer a ping within 1 s" in problem
    finally:
        over.set()


def test_a_closed_port_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = link(port)
    for problem in (store.problem(), store.refusal()):
        assert problem is not None
        assert "Connection refused" in problem
    assert not store.connecting()


def test_a_connect_that_hangs_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        store = link(port)
        assert not store.connecting()
        hanging = [socket.socket() for _ in range(4)]
        try:
            for one in hanging:
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            time.sleep(0.05)
            assert store.connecting()
        finally:
            for one in hanging:
                one.close()


def test_of_another_kind_of_store_nothing_is_known() -> None:
    store = StoreLink.of("fs", {"base_path": "/tmp", "host": "127.0.0.1", "port": 1})
    assert store.problem() is store.refusal() is None
    assert not store.connecting()


def test_the_environment_fills_in_as_it_does_for_the_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in {"HOST": "valkey", "PORT": "6380", "PASSWORD": "p", "USERNAME": "u"}.items():
        monkeypatch.setenv(f"LMCACHE_RESP_{key}", value)
    assert StoreLink.of("resp", {}) == StoreLink("valkey", 6380, "u", "p")
    assert StoreLink.of("resp", {"host": "a", "port": 1}) == StoreLink("a", 1, "u", "p")
