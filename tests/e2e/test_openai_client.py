"""OpenAI's own client, and the whole contract of chat completions, against a real node over the fake engine."""

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.api.chat_contract import CHECKS, Check
from tests.api.http_client import CHAT, HI, Client
from tests.e2e.node_process import NodeProcess, node
from tests.fake_model import make_fake

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
MODEL = "endless"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node whose answers go on until they are stopped."""
    directory = tmp_path_factory.mktemp("node")
    with node(directory, "--model", str(make_fake(directory / MODEL, stop_one_in=0))) as process:
        assert process.chat(max_tokens=1)[0] == 200  # it waits for the model
        yield process


@pytest.fixture
def openai(server: NodeProcess) -> Iterator[OpenAI]:
    """The synchronous client."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("check", CHECKS)
async def test_the_contract(server: NodeProcess, check: Check) -> None:
    await check(Client(server.url))


def test_models(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL]
    assert openai.models.retrieve(MODEL).owned_by == "shoal"
    with pytest.raises(NotFoundError):
        openai.models.retrieve("gpt-4o")


def test_whole_and_streamed_answers_are_equal(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0)
    stream = openai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    assert whole.choices[0].message.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 30


def test_the_helper_for_streams_puts_the_answer_together(openai: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    text = openai.chat.completions.create(**ask).choices[0].message.content
    ask |= {"stop": text[20:22], "logprobs": True, "top_logprobs": 1}  # it takes an answer that was cut off for a failure
    whole = openai.chat.completions.create(**ask)
    with openai.chat.completions.stream(**ask) as stream:
        contents = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()

    choice = final.choices[0]
    assert "".join(contents) == choice.message.content == whole.choices[0].message.content
    assert choice.finish_reason == whole.choices[0].finish_reason == "stop"
    assert choice.logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert choice.logprobs.content == whole.choices[0].logprobs.content


def test_errors_have_their_types(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError) as bad:
        openai.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
    with pytest.raises(NotFoundError) as missing:
        openai.chat.completions.create(model="gpt-4o", messages=MESSAGES, stream=True)

    assert (bad.value.param, bad.value.code) == ("n", "unsupported_parameter")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    assert missing.value.request_id


def test_the_asynchronous_client(server: NodeProcess) -> None:
    async def ask() -> tuple[str | None, str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai:
            create = openai.chat.completions.create
            whole = await create(model=MODEL, max_tokens=30, seed=1, messages=MESSAGES)
            stream = await create(model=MODEL, max_tokens=30, seed=1, messages=MESSAGES, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            with pytest.raises(APIStatusError):
                await create(model=MODEL, messages=[])
            return whole.choices[0].message.content, text

    whole, streamed = asyncio.run(ask())

    assert whole == streamed


def test_a_stream_that_is_closed_early_frees_its_place(tmp_path: Path) -> None:
    model = make_fake(tmp_path / "slow", stop_one_in=0, step_seconds=0.01)
    with node(tmp_path, "--model", str(model), "--max-running", "1", "--max-waiting", "1") as process:
        with OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=60) as openai:
            for _ in range(3):
                stream = openai.chat.completions.create(model="slow", messages=MESSAGES, stream=True)
                next(iter(stream))
                stream.close()
            whole = openai.chat.completions.create(model="slow", messages=MESSAGES, max_tokens=2)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 2


async def test_clients_that_leave_in_the_line_or_at_work_free_their_places(tmp_path: Path) -> None:
    model = make_fake(tmp_path / "slow", stop_one_in=0, step_seconds=0.01)
    options = ["--model", str(model), "--max-running", "1", "--max-waiting", "2"]

    async def leave(client: Client, stream: bool) -> None:
        with trio.move_on_after(0.3):
            await client.chat(stream=stream)

    with node(tmp_path, *options) as process:
        client = Client(process.url)
        assert (await client.chat(max_tokens=1)).status == 200
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for stream in (True, False, True):  # one at work, two in the line
                    nursery.start_soon(functools.partial(leave, client, stream))
        with trio.fail_after(5):  # each could have gone on for minutes
            while (last := await client.chat(max_tokens=2)).status == 429:  # the node hears of their leaving by and by
                pass
        assert last.json()["usage"]["completion_tokens"] == 2


def test_a_wrong_key(tmp_path: Path) -> None:
    with node(tmp_path, "--model", "none", "--api-key", "right") as process:
        body = {"messages": HI}
        assert httpx.post(process.url + CHAT, json=body, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert httpx.post(process.url + CHAT, json=body, headers={"Authorization": "Bearer right"}).status_code == 503
        assert httpx.get(process.url + "/readyz").status_code == 503
        assert httpx.get(process.url + "/healthz").status_code == 200
