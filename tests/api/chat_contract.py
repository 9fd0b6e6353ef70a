"""What every server of chat completions must do, whatever stands behind it; its engine is the fake one, which never stops.

Numbers are those of public reports.
"""

from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import trio

from tests.api import strict_openai
from tests.api.http_client import Client, documents, text_of

Check = Callable[[Client], Awaitable[None]]


async def model_of(client: Client) -> str:
    """The name of the only model."""
    (model,) = (await client.ask("GET", "/v1/models")).json()["data"]
    return str(model["id"])


async def whole_answers_are_openais_26_27_37(client: Client) -> None:
    model = await model_of(client)
    reply = await client.chat(model=model, max_tokens=6, seed=1, logprobs=True, top_logprobs=2)

    assert reply.status == 200
    answer = strict_openai.whole(reply.body)
    assert answer.model == model
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.choices[0].logprobs is not None
    assert [len(item.top_logprobs) for item in answer.choices[0].logprobs.content or []] == [2] * 6
    assert reply.headers["x-shoal-accepted-by"] == reply.headers["x-shoal-executed-by"]
    assert reply.headers["x-shoal-task"]
    assert reply.headers["x-request-id"]


async def streams_equal_whole_answers_1_2_3_6_7_8_22_25(client: Client) -> None:
    body: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
    whole = strict_openai.whole((await client.chat(**body)).body)
    async with client.connect() as connection:
        await client.streamed_with(connection, **body)
        headers, events = await client.streamed_with(connection, **body)  # it is good for another request

    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["transfer-encoding"] == "chunked"
    assert "content-encoding" not in headers
    assert headers["x-shoal-executed-by"]
    chunks = [strict_openai.chunk(event) for event in events[:-1]]
    assert {len(chunk.choices) for chunk in chunks} == {1}
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert text_of(documents(events)) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), whole.choices[0].finish_reason]


async def logprobs_are_streamed_37(client: Client) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = (await client.chat(**body)).json()["choices"][0]["logprobs"]["content"]
    chunks = documents(await client.streamed(**body))

    choices = [chunk["choices"][0] for chunk in chunks]
    assert [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]] == whole
    assert set(whole[0]) == {"token", "logprob", "bytes", "top_logprobs"}


async def usage_comes_when_asked_for_and_only_then_10_11_12_13_30(client: Client) -> None:
    plain = documents(await client.streamed(max_tokens=3, stream_options={}))
    asked = documents(await client.streamed(max_tokens=3, stream_options={"include_usage": True}))
    whole = (await client.chat(max_tokens=3, stream_options={"include_usage": True})).json()

    assert all(chunk["choices"] for chunk in plain)
    assert all("usage" not in chunk for chunk in plain)
    *chunks, last = asked
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    for usage in (last["usage"], whole["usage"]):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["completion_tokens"] == 3
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


async def ids_are_unique_and_the_same_within_an_answer(client: Client) -> None:
    answers = [documents(await client.streamed(max_tokens=2)) for _ in range(3)]

    ids = [{chunk["id"] for chunk in answer} for answer in answers]
    assert all(len(each) == 1 for each in ids)
    assert len(set.union(*ids)) == 3
    assert all(one["created"] == other["created"] for one, other in pairwise(answers[0]))


async def stop_strings_are_no_part_of_the_text_16_19(client: Client) -> None:
    plain = strict_openai.whole((await client.chat(temperature=0, max_tokens=40)).body)
    text = plain.choices[0].message.content or ""
    stop = text[15:18]  # over token borders, wherever they are
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "stop": [stop]}
    stopped = strict_openai.whole((await client.chat(**body)).body)
    chunks = documents(await client.streamed(**body))

    assert stopped.choices[0].message.content == text[: text.index(stop)] == text_of(chunks)
    assert stopped.choices[0].finish_reason == chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def text_held_back_for_a_stop_string_comes_when_none_follows_17(client: Client) -> None:
    text = text_of(documents(await client.streamed(temperature=0, max_tokens=20)))
    held = documents(await client.streamed(temperature=0, max_tokens=20, stop=[text[-2:] + "\0"]))

    assert text_of(held) == text


async def a_seed_gives_the_same_answer_and_no_seed_another_40(client: Client) -> None:
    seeded = [(await client.chat(seed=42, temperature=1, max_tokens=16)).json() for _ in range(3)]
    unseeded = [(await client.chat(temperature=1, max_tokens=16)).json() for _ in range(3)]

    texts = [answer["choices"][0]["message"]["content"] for answer in seeded]
    assert texts[0] == texts[1] == texts[2]
    assert len({answer["choices"][0]["message"]["content"] for answer in unseeded}) == 3


async def the_newer_name_of_max_tokens_wins_31(client: Client) -> None:
    answer = (await client.chat(max_completion_tokens=4, max_tokens=9)).json()

    assert answer["usage"]["completion_tokens"] == 4


async def bad_requests_are_refused_before_a_stream_begins_21_32_34_35_38_47_53(client: Client) -> None:
    long = [{"role": "user", "content": "x" * 40_000}]
    for param, value, status, code in (
        ("max_tokens", 0, 400, "invalid_value"),
        ("n", 2, 400, "unsupported_parameter"),
        ("messages", [], 400, "invalid_value"),
        ("messages", long, 400, "context_length_exceeded"),
        ("model", "gpt-4o", 404, "model_not_found"),
    ):
        for stream in (False, True):
            reply = await client.chat(**{param: value}, stream=stream)
            error = reply.error()
            assert (reply.status, error["code"], error["param"]) == (status, code, param)
    assert (await client.ask("POST", "/v1/chat/completions", b"{")).error()["code"] == "invalid_json"


async def streams_do_not_mix(client: Client) -> None:
    answers: dict[int, tuple[str, str]] = {}

    async def ask(number: int) -> None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": str(number)}], "max_tokens": 30, "temperature": 0}
        streamed = text_of(documents(await client.streamed(**body)))
        answers[number] = streamed, (await client.chat(**body)).json()["choices"][0]["message"]["content"]

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(ask, number)

    assert all(streamed == whole for streamed, whole in answers.values())
    assert len({streamed for streamed, _ in answers.values()}) == 20


async def long_streams_are_in_order(client: Client) -> None:
    whole = (await client.chat(seed=3, max_tokens=400)).json()["choices"][0]["message"]["content"]
    chunks = documents(await client.streamed(seed=3, max_tokens=400))

    assert text_of(chunks) == whole


async def the_model_is_listed_and_the_server_healthy(client: Client) -> None:
    model = await model_of(client)
    one = (await client.ask("GET", f"/v1/models/{model}")).json()

    assert {"id": model, "object": "model", "owned_by": "shoal"}.items() <= one.items()
    assert isinstance(one["created"], int)
    assert (await client.ask("GET", "/healthz")).status == 200
    assert (await client.ask("GET", "/readyz")).status == 200
    assert (await client.ask("GET", "/v1/models", host="evil.example")).status == 403
    assert (await client.ask("GET", "/nope")).error()["code"] == "not_found"


CHECKS: list[Check] = [
    whole_answers_are_openais_26_27_37,
    streams_equal_whole_answers_1_2_3_6_7_8_22_25,
    logprobs_are_streamed_37,
    usage_comes_when_asked_for_and_only_then_10_11_12_13_30,
    ids_are_unique_and_the_same_within_an_answer,
    stop_strings_are_no_part_of_the_text_16_19,
    text_held_back_for_a_stop_string_comes_when_none_follows_17,
    a_seed_gives_the_same_answer_and_no_seed_another_40,
    the_newer_name_of_max_tokens_wins_31,
    bad_requests_are_refused_before_a_stream_begins_21_32_34_35_38_47_53,
    streams_do_not_mix,
    long_streams_are_in_order,
    the_model_is_listed_and_the_server_healthy,
]
