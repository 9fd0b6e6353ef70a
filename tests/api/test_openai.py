"""Bodies of chat completion calls, turned into requests or refused. Numbers in ids are those of public reports."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.errors import ApiError
from api.openai import ChatCall, ChatCompletionRequest, parse_chat
from api.unsupported import IN_BODY
from inference.requests import ChatPrompt, Request, Sampling

HI = [{"role": "user", "content": "hi"}]
DRAWN_SEED = 1234567


def parse(**body: object) -> ChatCall:
    return parse_bytes(json.dumps({"messages": HI, **body}).encode())


def parse_bytes(body: bytes) -> ChatCall:
    return parse_chat(body, "id", lambda: DRAWN_SEED)


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_bytes(body)
    return caught.value


def outcome_of(body: bytes) -> ChatCall | ApiError:
    try:
        return parse_bytes(body)
    except ApiError as error:
        return error


def test_a_plain_call_asks_for_openais_defaults() -> None:
    call = parse()

    assert call == ChatCall(
        model=None,
        request=Request(
            request_id="id",
            prompt=ChatPrompt(({"role": "user", "content": "hi"},)),
            sampling=Sampling(seed=DRAWN_SEED),
        ),
        stream=False,
        include_usage=False,
        logprobs=False,
    )


def test_every_parameter_arrives() -> None:
    call = parse(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=7,
        stop=["a", "b"],
        seed=42,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={"5": -100, "7": 1.5},
        logprobs=True,
        top_logprobs=4,
    )

    assert (call.model, call.stream, call.include_usage, call.logprobs) == ("m", True, True, True)
    assert call.request == Request(
        request_id="id",
        prompt=ChatPrompt(({"role": "user", "content": "hi"},)),
        sampling=Sampling(
            seed=42,
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=1,
            logit_bias=((5, -100), (7, 1.5)),
        ),
        max_tokens=7,
        stop=("a", "b"),
        top_logprobs=4,
    )


ACCEPTED = {
    "12: empty stream_options": {"stream": True, "stream_options": {}},
    "12: null stream_options": {"stream": True, "stream_options": None},
    "13: stream_options without stream": {"stream_options": {"include_usage": True}},
    "41: no tools at all": {"tools": []},
    "41: no tools, and none to be chosen": {"tools": [], "tool_choice": "auto"},
    "42: unknown keys": {"foo": 1, "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "user": "u"},
    "42: parallel_tool_calls": {"parallel_tool_calls": True},
    "one answer": {"n": 1},
    "plain text": {"response_format": {"type": "text"}, "modalities": ["text"]},
    "null is absent": dict.fromkeys(
        ["model", "stream", "max_tokens", "n", "stop", "seed", "temperature", "top_p", "logit_bias", "logprobs", "tools"]
    ),
    "what happens anyway": {"ignore_eos": False, "best_of": 1, "skip_special_tokens": True, "echo": False},
    "the ends of the ranges": {"temperature": 2, "top_p": 0, "presence_penalty": -2, "frequency_penalty": 2, "min_p": 1},
}


@pytest.mark.parametrize("body", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(body: dict[str, object]) -> None:
    parse(**body)


REFUSED: dict[str, tuple[dict[str, object], str, str]] = {
    "32: max_tokens 0": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "32: max_tokens negative": ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    "32: max_tokens a fraction": ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    "32: max_tokens a string": ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    "32: max_tokens a bool": ({"max_tokens": True}, "max_tokens", "invalid_type"),
    "32: max_tokens beyond all sense": ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    "31: max_completion_tokens 0": ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens", "invalid_value"),
    "35: no messages": ({"messages": []}, "messages", "invalid_value"),
    "35: messages a string": ({"messages": "hi"}, "messages", "invalid_type"),
    "35: messages null": ({"messages": None}, "messages", "missing_required_parameter"),
    "37: top_logprobs alone": ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    "37: top_logprobs beside false": ({"top_logprobs": 5, "logprobs": False}, "top_logprobs", "invalid_value"),
    "37: too many": ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "invalid_value"),
    "38: two answers": ({"n": 2}, "n", "unsupported_parameter"),
    "38: no answer": ({"n": 0}, "n", "invalid_value"),
    "39: json_schema": ({"response_format": {"type": "json_schema"}}, "response_format", "unsupported_parameter"),
    "39: json_object": ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    "39: no type": ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    "41: a tool must be called, but there is none": ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    "a named tool": ({"tool_choice": {"type": "function"}}, "tool_choice", "unsupported_parameter"),
    "reasoning effort": ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    "sound": ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    "true is not 1": ({"best_of": True}, "best_of", "unsupported_parameter"),
    "obfuscation": (
        {"stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    "stream a string": ({"stream": "true"}, "stream", "invalid_type"),
    "stream a number": ({"stream": 1}, "stream", "invalid_type"),
    "temperature high": ({"temperature": 2.1}, "temperature", "invalid_value"),
    "temperature a string": ({"temperature": "1"}, "temperature", "invalid_type"),
    "temperature a bool": ({"temperature": True}, "temperature", "invalid_type"),
    "temperature no number": ({"temperature": float("nan")}, "temperature", "invalid_value"),
    "top_p negative": ({"top_p": -0.1}, "top_p", "invalid_value"),
    "top_k negative": ({"top_k": -2}, "top_k", "invalid_value"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    "stop empty": ({"stop": ""}, "stop", "invalid_value"),
    "stop with an empty one": ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    "stop a number": ({"stop": 5}, "stop", "invalid_type"),
    "stop too many": ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    "stop too long": ({"stop": "x" * 257}, "stop", "invalid_value"),
    "seed a fraction": ({"seed": 0.5}, "seed", "invalid_type"),
    "seed too large": ({"seed": 1 << 63}, "seed", "invalid_value"),
    "logit_bias no token": ({"logit_bias": {"the": 1}}, "logit_bias", "invalid_value"),
    "logit_bias in other digits": ({"logit_bias": {"\u0661": 1}}, "logit_bias", "invalid_value"),
    "logit_bias high": ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    "logit_bias a list": ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    "model a number": ({"model": 5}, "model", "invalid_type"),
}


@pytest.mark.parametrize(("body", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_refused(body: dict[str, object], param: str, code: str) -> None:
    error = refused(json.dumps({"messages": HI, **body}).encode())

    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert param.partition(".")[0].partition("[")[0] in str(error)


@pytest.mark.parametrize("name", IN_BODY)
def test_known_but_unsupported_parameters_are_refused_by_name_and_null_is_absent(name: str) -> None:
    error = refused(json.dumps({"messages": HI, name: {"some": "value"}}).encode())
    parse(**{name: None})
    for neutral in IN_BODY[name]:
        parse(**{name: neutral})

    assert (error.code, error.param) == ("unsupported_parameter", name)


NOT_JSON = {
    "47: empty": b"",
    "47: invalid": b"{",
    "47: a list": b"[]",
    "47: null": b"null",
    "47: no UTF-8": b'{"messages":[{"role":"user","content":"\xff"}]}',
    "47: half a surrogate pair": rb'{"messages":[{"role":"user","content":"\ud83d"}]}',
    "47: nested without end": b'{"messages":' + b"[" * 100_000,
    "47: a form": b"messages=hi",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
def test_no_json_object(body: bytes) -> None:
    error = refused(body)

    assert (error.status, error.code, error.param) == (400, "invalid_json", None)


def test_missing_messages_are_named() -> None:
    error = refused(b"{}")

    assert (error.param, error.code) == ("messages", "missing_required_parameter")


MESSAGES: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "43: parts": (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "ab"},
    ),
    "45: developer": ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
    "empty text": ({"role": "user", "content": ""}, {"role": "user", "content": ""}),
    "a name": ({"role": "user", "content": "x", "name": "bob"}, {"role": "user", "content": "x", "name": "bob"}),
    "a refusal": ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
    "an answer of openai-python": (
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "tool_calls": None},
        {"role": "assistant", "content": "x"},
    ),
}


@pytest.mark.parametrize(("message", "seen"), MESSAGES.values(), ids=MESSAGES)
def test_messages_as_templates_see_them(message: dict[str, Any], seen: dict[str, object]) -> None:
    call = parse(messages=[message])

    assert call.request.prompt == ChatPrompt((seen,))


REFUSED_MESSAGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "43: image": (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        "messages[0].content[1]",
        "unsupported_content",
    ),
    "45: banana": ({"role": "banana", "content": "x"}, "messages[0].role", "invalid_value"),
    "no role": ({"content": "x"}, "messages[0].role", "missing_required_parameter"),
    "no content": ({"role": "user"}, "messages[0].content", "missing_required_parameter"),
    "null content": ({"role": "user", "content": None}, "messages[0].content", "missing_required_parameter"),
    "content a number": ({"role": "user", "content": 5}, "messages[0].content", "invalid_type"),
    "no parts": ({"role": "user", "content": []}, "messages[0].content", "invalid_value"),
    "a part without text": (
        {"role": "user", "content": [{"type": "text"}]},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    "a part's text a number": (
        {"role": "user", "content": [{"type": "text", "text": 1}]},
        "messages[0].content[0].text",
        "invalid_type",
    ),
    "a tool's answer": ({"role": "tool", "content": "x"}, "messages[0].role", "unsupported_parameter"),
    "a tool's call": (
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        "messages[0].tool_calls",
        "unsupported_parameter",
    ),
}


@pytest.mark.parametrize(("message", "param", "code"), REFUSED_MESSAGES.values(), ids=REFUSED_MESSAGES)
def test_refused_messages(message: dict[str, Any], param: str, code: str) -> None:
    error = refused(json.dumps({"messages": [message]}).encode())

    assert (error.status, error.param, error.code) == (400, param, code)


def test_max_completion_tokens_wins_31() -> None:
    assert parse(max_completion_tokens=5, max_tokens=9).request.max_tokens == 5
    assert parse(max_completion_tokens=5).request.max_tokens == 5


def test_an_empty_model_name_is_none_54() -> None:
    assert parse(model="").model is None


def test_signed_seeds_are_taken_each_as_another() -> None:
    seeds = [parse(seed=seed).request.sampling.seed for seed in (0, 42, (1 << 63) - 1, -1, -2, -(1 << 63))]

    assert seeds[:3] == [0, 42, (1 << 63) - 1]
    assert all(0 <= seed < 1 << 63 for seed in seeds)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text", "1"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1"]), inner)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(ChatCompletionRequest.model_fields)), json_values, max_size=5), st.booleans())
def test_any_document_is_refused_as_the_clients_fault_or_gives_a_request_that_the_wire_takes(
    body: dict[str, object], with_messages: bool
) -> None:
    document = {**({"messages": HI} if with_messages else {}), **body}
    outcome = outcome_of(json.dumps(document).encode())

    if isinstance(outcome, ApiError):
        assert outcome.status == 400
        assert msgspec.json.decode(outcome.body())["error"]["message"]
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome.request), type=Request) == outcome.request


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_refused_as_the_clients_fault(body: bytes) -> None:
    assert refused(body).status == 400
