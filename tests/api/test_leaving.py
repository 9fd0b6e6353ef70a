"""Clients that leave, stall or dawdle: their own task ends, everything else goes on (59)."""

import socket
from typing import Any

import pytest
import trio

from inference.runner.fake_engine import FakeSettings
from tests.api.http_client import CHAT, HI, Connection, serving
from tests.api.memory_service import MemoryService

ENDLESS = FakeSettings(stop_one_in=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_task_runs(stream: bool) -> None:
    service = MemoryService(ENDLESS)
    service.pace.hold()
    async with serving(service) as client:
        async with client.stream(stream=stream) as connection:
            await service.wait_until(lambda s: s.running == 1)
            if stream:
                service.pace.allow(3)
                await connection.read_head()
        await service.wait_until(lambda s: s.running == 0)

    assert len(service.left_early) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_waits(stream: bool) -> None:
    service = MemoryService(FakeSettings(running_max=1))
    service.pace.hold()
    async with serving(service) as client, client.stream(max_tokens=1) as first:
        await service.wait_until(lambda s: s.running == 1)
        async with client.stream(stream=stream):
            await service.wait_until(lambda s: s.waiting == 1)
        await service.wait_until(lambda s: s.waiting == 0)
        service.pace.release()
        status, _ = await first.read_head()

    assert status == 200
    assert len(service.requests) == 2
    assert service.left_early == []


async def test_a_client_that_only_closes_its_sending_side_has_left() -> None:
    service = MemoryService(ENDLESS)
    service.pace.hold()
    async with serving(service) as client, client.stream() as connection:
        await service.wait_until(lambda s: s.running == 1)
        await connection.stream.send_eof()
        await service.wait_until(lambda s: s.running == 0)

    assert len(service.left_early) == 1


async def test_a_client_that_stops_reading_loses_its_own_task_only() -> None:
    service = MemoryService(ENDLESS)
    service.pace.hold()
    body: dict[str, Any] = {"max_tokens": 8000, "logprobs": True, "top_logprobs": 20}
    other: list[object] = []
    async with serving(service, pulse_seconds=0.02, stalled_seconds=0.2) as client, client.stream(**body) as stalled:
        stalled.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await service.wait_until(lambda s: s.running == 1)
        async with trio.open_nursery() as nursery:

            async def read_other() -> None:
                other.extend(await client.streamed(max_tokens=100))

            nursery.start_soon(read_other)
            await service.wait_until(lambda s: s.running == 2)
            service.pace.allow(7000)  # more than the system buffers, less than the answer
        await service.wait_until(lambda s: s.running == 0)

    assert len(service.left_early) == 1
    assert len(other) == 103


async def send_until_cut(connection: Connection) -> None:
    """The only sign of the cut for one that does not read."""
    while True:
        await connection.send(b"\r\n")


async def test_a_client_that_takes_nothing_of_a_whole_answer_is_cut_off() -> None:
    service = MemoryService(ENDLESS)
    body: dict[str, Any] = {"max_tokens": 6000, "logprobs": True, "top_logprobs": 20, "stream": False}
    async with serving(service, stalled_seconds=0.1) as client, client.stream(**body) as stalled:
        stalled.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await service.wait_until(lambda s: bool(s.requests) and s.running == 0)
        with pytest.raises(trio.BrokenResourceError):
            await send_until_cut(stalled)


async def test_half_a_request_is_no_task_and_its_connection_ends_with_it() -> None:
    service = MemoryService()
    async with serving(service) as client:
        async with client.connect() as connection:
            await connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        async with client.connect() as connection:
            await connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        assert (await client.chat(max_tokens=1)).status == 200

    assert len(service.requests) == 1


async def test_a_body_that_dawdles_is_given_up() -> None:
    service = MemoryService()
    async with serving(service, body_seconds=0.05) as client, client.connect() as connection:
        await connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        reply = await connection.read_reply()

    assert (reply.status, reply.error()["code"]) == (408, "timed_out")
    assert reply.headers["connection"] == "close"
    assert service.requests == []


async def test_requests_sent_ahead_are_answered_in_turn() -> None:
    async with serving(MemoryService(ENDLESS)) as client, client.connect() as connection:
        for count in (1, 2, 3):
            await connection.ask("POST", CHAT, {"messages": HI, "max_tokens": count})
        replies = [await connection.read_reply() for _ in range(3)]

    assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [1, 2, 3]


async def test_many_that_come_and_go_leave_nothing_behind() -> None:
    service = MemoryService(ENDLESS, waiting_max=100)

    async def come_and_go(reads: int) -> None:
        async with client.stream() as connection:
            for _ in range(reads):
                await connection.stream.receive_some(1000)

    async with serving(service) as client:
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(come_and_go, number % 4)
        await service.wait_until(lambda s: (s.running, s.waiting) == (0, 0))
        assert (await client.chat(max_tokens=1)).status == 200
