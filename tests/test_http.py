"""The HTTP client against real sockets: one behaviour of a peer a test."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.errors import KvguardError, SourceRefused, SourceTooLarge, SourceUnreachable
from guard.sources.http import HttpClient

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Peer:
    """Answers the n-th request with the n-th of `answers` (the last for all further ones),
    closes after it where `hang_up` says so, and keeps what it was asked."""

    def __init__(self, *answers: bytes, hang_up: bool = False) -> None:
        self.answers = list(answers)
        self.hang_up = hang_up
        self.requests: list[bytes] = []
        self.connections = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""
        self.tasks: list[asyncio.Task[object]] = []
        self.asked = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                self.requests.append(head + await reader.readexactly(length))
                async with self.asked:
                    self.asked.notify_all()
                await self.gate.wait()
                writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
                await writer.drain()
                if self.hang_up:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def served(peer: Peer) -> AsyncIterator[tuple[Peer, HttpClient]]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = HttpClient(body_limit_bytes=1000)
    try:
        yield peer, client
    finally:
        await client.close()
        server.close()
        await asyncio.wait_for(asyncio.gather(*peer.tasks), 5)


Check = Callable[[Peer, HttpClient], Awaitable[None]]


def against(check: Check, *answers: bytes, hang_up: bool = False) -> None:
    async def main() -> None:
        async with served(Peer(*answers, hang_up=hang_up)) as (peer, client):
            await check(peer, client)

    asyncio.run(main())


def test_a_connection_is_used_again() -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        for _ in range(5):
            assert await client.get(peer.url + "/metrics?a=1", 2) == b"hello"
        assert peer.connections == 1
        assert peer.requests[0].startswith(b"GET /metrics?a=1 HTTP/1.1\r\n")
        assert b"host: " + peer.url[7:].encode() in peer.requests[0].lower()

    against(check, OK)


def test_several_calls_at_once_have_a_connection_each() -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        for _ in range(2):
            peer.gate.clear()
            calls = [asyncio.create_task(client.get(peer.url, 2)) for _ in range(6)]
            async with peer.asked:
                await peer.asked.wait_for(lambda: len(peer.requests) == 6)
            peer.gate.set()
            assert await asyncio.gather(*calls) == [b"hello"] * 6
            peer.requests.clear()
        assert peer.connections == 8, "four of six are kept"

    against(check, OK)


def test_chunks_a_body_without_length_and_hints_before_the_answer() -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        assert await client.get(peer.url, 2) == b"hello"
        assert await client.get(peer.url, 2) == b"hello"
        assert await client.get(peer.url, 2) == b"to the end"

    async def end(peer: Peer, client: HttpClient) -> None:
        assert await client.get(peer.url, 2) == b"to the end"

    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    )
    hinted = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK
    sized = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nto the end"
    against(check, chunked, hinted, sized)
    against(end, b"HTTP/1.1 200 OK\r\n\r\nto the end", hang_up=True)


def test_a_peer_that_closes_after_each_answer_is_asked_anew() -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        for _ in range(4):
            assert await client.get(peer.url, 2) == b"hello"
        assert peer.connections == 4

    against(check, OK, hang_up=True)


def test_a_connection_closed_while_the_request_is_on_its_way() -> None:
    """The peer's timer and our request may cross: a GET is sent again, a POST is not."""

    async def check(peer: Peer, client: HttpClient) -> None:
        async def lost(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readuntil(b"\r\n\r\n")  # takes the second and hangs up on it
            writer.close()

        connections = 0
        async with await asyncio.start_server(lost, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            assert await client.get(url, 2) == b"hello"
            assert await client.get(url, 2) == b"hello"
            assert connections == 2
            await client.close()
            assert await client.get(url, 2) == b"hello"
            with pytest.raises(SourceUnreachable, match="closed the connection"):
                await client.post(url, {}, 2)
            assert connections == 3
            await client.close()

    against(check, OK)


def test_bytes_beyond_the_answer_are_not_taken_for_the_next_one() -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        assert await client.get(peer.url, 2) == b"hello"
        assert await client.get(peer.url, 2) == b"right"

    more = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    against(check, OK + more + b"wrong", more + b"right")


def test_a_post_carries_json_and_its_status_is_the_callers() -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        status, body = await client.post(peer.url + "/do", {"a": [1, "ü"]}, 2)
        assert (status, body) == (409, b"no")
        head, _, sent = peer.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /do HTTP/1.1")
        assert b"content-type: application/json" in head.lower()
        assert json.loads(sent) == {"a": [1, "ü"]}

    against(check, b"HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\nno")


def test_redirects_within_a_peer_are_followed_and_no_others() -> None:
    def redirect(where: str) -> bytes:
        return f"HTTP/1.1 302 F\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()

    async def within(peer: Peer, client: HttpClient) -> None:
        assert await client.get(peer.url, 2) == b"hello"
        assert peer.requests[1].startswith(b"GET /metrics/ ")

    async def away(peer: Peer, client: HttpClient) -> None:
        with pytest.raises(SourceRefused, match="redirects to another host"):
            await client.get(peer.url, 2)

    async def endless(peer: Peer, client: HttpClient) -> None:
        with pytest.raises(SourceRefused, match="more than 2 times"):
            await client.get(peer.url, 2)

    against(within, redirect("/metrics/"), OK)
    against(away, redirect("http://elsewhere.example/metrics"))
    against(away, redirect("http://127.0.0.1:99999/metrics"))
    against(endless, redirect("/again"))


def test_what_is_not_200_says_so_with_the_peers_words() -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        with pytest.raises(SourceRefused, match="answered HTTP 404: no such page"):
            await client.get(peer.url, 2)

    against(check, b"HTTP/1.1 404 N\r\nContent-Length: 14\r\n\r\nno  such page\n")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001 + b"\r\n",
    ],
    ids=["told", "seen"],
)
def test_a_body_over_the_limit_is_not_read(answer: bytes) -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        with pytest.raises(SourceTooLarge):
            await client.get(peer.url, 2)

    against(check, answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        OK[:-2],
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"SSH-2\r\n\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "no length", "not http"],
)
def test_no_whole_answer_is_unreachable(answer: bytes) -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        with pytest.raises(SourceUnreachable, match=peer.url):
            await client.get(peer.url, 2)

    against(check, answer, hang_up=True)


def test_the_deadline_holds_for_the_whole_answer() -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        with pytest.raises(SourceUnreachable, match=r"no whole answer within 0\.05 s"):
            await client.get(peer.url, 0.05)

    against(check, OK[:-1])


def test_nobody_there() -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            with pytest.raises(SourceUnreachable, match="does not answer"):
                await HttpClient().get(url, 2)
        for odd in ("ftp://127.0.0.1/", "http://127.0.0.1:99999/", "http://127.0.0.1/a b"):
            with pytest.raises(SourceUnreachable):
                await HttpClient().get(odd, 2)

    asyncio.run(main())


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_whatever_is_answered_is_a_body_or_a_typed_error(noise: bytes, framed: bool) -> None:
    async def check(peer: Peer, client: HttpClient) -> None:
        outcome: bytes | KvguardError
        try:
            outcome = await client.get(peer.url, 2)
        except KvguardError as error:
            outcome = error
        assert isinstance(outcome, bytes) or peer.url in str(outcome)

    against(check, (b"HTTP/1.1 200 OK\r\n" if framed else b"") + noise, hang_up=True)
