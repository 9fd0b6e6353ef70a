"""Chat completions over real sockets. Numbers are those of public reports."""

import json

import pytest
import trio

from api.settings import Draws
from inference.runner.fake_engine import FakeSettings
from node.service import ServedModel
from tests.api import strict_openai
from tests.api.chat_contract import CHECKS, Check
from tests.api.http_client import CHAT, HI, Client, documents, serving, text_of
from tests.api.memory_service import MODEL, NODE_ID, MemoryService


@pytest.mark.parametrize("check", CHECKS)
async def test_the_contract(check: Check) -> None:
    async with serving(MemoryService(FakeSettings(stop_one_in=0))) as client:
        await check(client)


async def test_ids_seeds_and_times_are_drawn_from_outside() -> None:
    drawn: list[int] = []

    def bits(count: int) -> int:
        drawn.append(count)
        return len(drawn)

    async with serving(service := MemoryService(), Draws(random_bits=bits, now=lambda: 1234.5)) as client:
        answer = (await client.chat(max_tokens=1)).json()

    assert answer["created"] == 1234
    assert answer["id"] == f"chatcmpl-{service.requests[0].request_id}"
    assert service.requests[0].sampling.seed == drawn.index(63) + 1


async def test_a_request_that_the_engine_refuses_is_the_clients_fault_34_46() -> None:
    async with serving(MemoryService()) as client:
        long = [{"role": "user", "content": "x" * 20_000}]
        for stream in (False, True):
            reply = await client.chat(messages=long, stream=stream)
            error = reply.error()

            assert (reply.status, error["code"]) == (400, "context_length_exceeded")
            assert "8192" in error["message"]
            assert reply.headers["x-shoal-task"]
    async with serving(MemoryService(FakeSettings(template_error="System role not supported."))) as client:
        for stream in (False, True):
            reply = await client.chat(stream=stream)

            assert (reply.status, reply.error()["code"]) == (400, "template_error")
            assert "System role" in reply.error()["message"]


async def test_unknown_models_53_54() -> None:
    second = ServedModel(name="other:1", model_hash="cd" * 32, created=1, context=100)
    async with serving(MemoryService()) as client:
        for stream in (False, True):
            reply = await client.chat(model="gpt-4o", stream=stream)
            assert (reply.status, reply.error()["code"], reply.error()["param"]) == (404, "model_not_found", "model")
            assert "fake:1" in reply.error()["message"]
        sole = await client.chat(model="", max_tokens=1)
        assert sole.json()["model"] == "fake:1"
    async with serving(MemoryService(models=(MODEL, second))) as client:
        reply = await client.chat(max_tokens=1)
        assert (reply.status, reply.error()["param"]) == (400, "model")
        assert "'other:1'" in reply.error()["message"]


async def test_no_route_58() -> None:
    service = MemoryService()
    service.no_route = "fake:1 is still loading."
    async with serving(service) as client:
        for stream in (False, True):
            reply = await client.chat(stream=stream)

            assert (reply.status, reply.error()["code"]) == (503, "no_route")
            assert reply.error()["message"] == "fake:1 is still loading."
            assert 1 <= int(reply.headers["retry-after"]) <= 60


async def test_a_full_queue_is_429_and_those_who_wait_are_served() -> None:
    service = MemoryService(FakeSettings(running_max=1), waiting_max=1)
    service.pace.hold()
    statuses: list[int] = []

    async def ask(client: Client) -> None:
        statuses.append((await client.chat(max_tokens=2)).status)

    async with serving(service) as client, trio.open_nursery() as nursery:
        for running, waiting in ((1, 0), (1, 1)):
            nursery.start_soon(ask, client)
            await service.wait_until(lambda s, r=running, w=waiting: (s.running, s.waiting) == (r, w))  # type: ignore[misc]  # a default binds the loop variable
        refused = await client.chat(max_tokens=2)
        service.pace.release()

    assert (refused.status, refused.error()["code"]) == (429, "queue_full")
    assert refused.error()["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert statuses == [200, 200]


async def test_a_runner_that_ends_under_a_stream_gives_an_error_event_23() -> None:
    service = MemoryService(FakeSettings(stop_one_in=0))
    service.pace.hold()
    async with serving(service) as client, client.stream() as connection:
        await service.wait_until(lambda s: s.running == 1)
        service.pace.allow(4)
        status, _ = await connection.read_head()
        events = connection.events()
        begun = [await anext(events) for _ in range(4)]
        service.crash()
        rest = [event async for event in events]

    assert status == 200
    chunks = [*begun, *rest[:-2]]
    assert [strict_openai.chunk(event).choices[0].finish_reason for event in chunks] == [None] * len(chunks)
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"], error["param"]) == ("runner_crashed", "server_error", None)
    assert rest[-1] == "data: [DONE]"


async def test_a_runner_that_ends_before_the_first_byte_gives_a_status() -> None:
    service = MemoryService()
    service.pace.hold()
    async with serving(service) as client, client.connect() as connection:
        for stream in (False, True):
            await connection.ask("POST", CHAT, {"messages": HI, "stream": stream})
            await service.wait_until(lambda s: s.running == 1)
            service.crash()
            reply = await connection.read_reply()
            await service.wait_until(lambda s: s.running == 0)

            assert (reply.status, reply.error()["code"]) == (500, "runner_crashed")
            assert reply.headers["x-shoal-executed-by"] == NODE_ID


async def test_comments_keep_a_waiting_stream_alive_20() -> None:
    service = MemoryService()
    service.pace.hold()
    async with serving(service, pulse_seconds=0.02) as client, client.stream(max_tokens=1) as connection:
        _, headers = await connection.read_head()
        events = connection.events()
        first = await anext(events)
        comments = [await anext(events) for _ in range(3)]
        service.pace.release()
        rest = [event async for event in events]

    assert headers["content-type"].startswith("text/event-stream")
    assert strict_openai.chunk(first).choices[0].delta.role == "assistant"
    assert all(comment.startswith(":") and "\n" not in comment for comment in comments)
    assert text_of(documents([first, *rest]))


async def test_nothing_is_sent_while_a_request_waits_for_its_place_21() -> None:
    service = MemoryService(FakeSettings(running_max=1))
    service.pace.hold()
    async with serving(service, pulse_seconds=0.01) as client, client.stream(max_tokens=1) as first:
        await service.wait_until(lambda s: s.running == 1)
        async with client.stream(max_tokens=1) as second:
            await service.wait_until(lambda s: s.waiting == 1)
            await first.read_head()
            comments = first.events()
            for _ in range(5):  # some pulses later
                await anext(comments)
            with trio.move_on_after(0) as scope:
                await second.stream.receive_some(1)
            service.pace.release()
            assert [event async for event in comments][-1] == "data: [DONE]"
            status, _ = await second.read_head()

    assert scope.cancelled_caught
    assert status == 200


async def test_tokens_that_are_ready_at_once_are_separate_events() -> None:
    service = MemoryService(FakeSettings(stop_one_in=0))
    service.pace.hold()
    async with serving(service) as client, client.stream(max_tokens=50) as connection:
        await service.wait_until(lambda s: s.running == 1)
        service.pace.release()
        await connection.read_head()
        events = [event async for event in connection.events()]

    assert len(events) == 1 + 50 + 1 + 1
    assert len(documents(events)) == len(events) - 1


@pytest.mark.parametrize("stream", [False, True])
async def test_serving_that_ends_tells_open_answers_so(stream: bool) -> None:
    service = MemoryService(FakeSettings(stop_one_in=0))
    service.pace.hold()
    replies: list[object] = []

    async def ask(client: Client, read: trio.Event) -> None:
        async with client.stream(stream=stream) as connection:
            if not stream:
                read.set()
                reply = await connection.read_reply()
                replies.append((reply.status, reply.error()["code"]))
            else:
                await connection.read_head()
                events = connection.events()
                await anext(events)
                read.set()
                replies.append([event async for event in events][-2:])

    read = trio.Event()
    async with trio.open_nursery() as nursery, serving(service) as client:
        nursery.start_soon(ask, client, read)
        await service.wait_until(lambda s: s.running == 1)
        service.pace.allow(3)
        await read.wait()

    if stream:
        (events,) = replies
        assert isinstance(events, list)
        assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == "node_stopping"
        assert events[1] == "data: [DONE]"
    else:
        assert replies == [(503, "node_stopping")]
    assert service.running == 0
