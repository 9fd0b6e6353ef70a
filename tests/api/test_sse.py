"""Streamed and whole answers made of the same events: OpenAI's exact shapes, and each equal to the other."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.completion import Identity, WholeAnswer
from api.errors import ApiError, stopping
from api.sse import COMMENT, ChunkEncoder
from inference.requests import (
    Accepted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    TokenLogprob,
    Tokens,
    Usage,
)
from tests.api import strict_openai

IDENTITY = Identity(completion_id="chatcmpl-1", created=1_700_000_000, model='a "model"', fingerprint="fp_1")
USAGE = Usage(5, 2, 3)

texts = st.text(max_size=6)
# Whatever an engine may put out: impossible tokens, and parts of characters.
logprobs = st.floats(max_value=0) | st.sampled_from([-math.inf, math.nan, 0.0])
token_logprobs = st.builds(
    TokenLogprob,
    st.integers(0, 9),
    texts | st.just("\N{REPLACEMENT CHARACTER}"),
    logprobs,
    st.lists(st.tuples(st.integers(0, 9), texts, logprobs), max_size=3).map(tuple),
)
token_events = st.builds(
    Tokens, st.just("r"), st.lists(st.integers(0, 9)).map(tuple), texts, st.lists(token_logprobs, max_size=2).map(tuple)
)
reasons = st.sampled_from(["stop", "length"])


def answer(tokens: list[Tokens], end: Event) -> list[Event]:
    return [Accepted("r", (1, 2)), Prefilled("r", 1, 2), *tokens, end]


def encoder(*, include_usage: bool = False, logprobs: bool = False) -> ChunkEncoder:
    return ChunkEncoder(IDENTITY, include_usage=include_usage, logprobs=logprobs)


def stream(events: list[Event], *, include_usage: bool = False, logprobs: bool = False, size: int = 1) -> list[str]:
    """The events of a stream that took `size` events of the answer at a time."""
    encode = encoder(include_usage=include_usage, logprobs=logprobs)
    data = encode.opening()
    for at in range(0, len(events), size):
        data += encode.encode(events[at : at + size])
    assert encode.ended
    *shown, rest = data.decode().split("\n\n")
    assert rest == ""
    return shown


@settings(deadline=None)
@given(st.lists(token_events, max_size=4), reasons, st.booleans(), st.booleans(), st.integers(1, 4))
def test_every_stream_is_openais_and_equals_the_whole_answer(
    tokens: list[Tokens], reason: FinishReason, include_usage: bool, with_logprobs: bool, size: int
) -> None:
    events = answer(tokens, Finished("r", reason, USAGE))
    shown = stream(events, include_usage=include_usage, logprobs=with_logprobs, size=size)
    gathered = WholeAnswer(with_logprobs)
    for event in events:
        gathered.add(event)
    whole = strict_openai.whole(gathered.body(IDENTITY))

    assert shown[-1] == "data: [DONE]"  # 1
    chunks = [strict_openai.chunk(event) for event in shown[:-1]]
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (IDENTITY.completion_id, IDENTITY.created, IDENTITY.model, "chat.completion.chunk")  # 6
    }
    if include_usage:  # 11
        usage = chunks.pop()
        assert usage.choices == []
        assert usage.usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks)  # 10
    _, *contents, last = chunks
    assert json.loads(shown[0].removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}  # 7
    assert len(contents) == len(tokens)  # one for each
    for chunk in contents:
        assert chunk.choices[0].delta.model_fields_set == {"content"}  # 3, 7
        assert chunk.choices[0].finish_reason is None
    assert last.choices[0].delta.model_fields_set == set()  # 8
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason == reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in contents) == whole.choices[0].message.content
    described = [chunk.choices[0].logprobs for chunk in contents]
    if with_logprobs:  # 37
        assert whole.choices[0].logprobs is not None
        assert [item for each in described if each for item in each.content or []] == whole.choices[0].logprobs.content
    else:
        assert set(described) <= {None}


def test_usage_adds_up_30() -> None:
    gathered = WholeAnswer(logprobs=False)
    gathered.add(Finished("r", "stop", USAGE))
    usage = strict_openai.whole(gathered.body(IDENTITY)).usage

    assert usage is not None
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens == 7
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_logprobs_as_openai_has_them_37() -> None:
    tokens = Tokens("r", (1, 2), "é?", (TokenLogprob(1, "é", -0.5, ((1, "é", -0.5),)), TokenLogprob(2, "\ufffd", -math.inf)))
    shown = stream(answer([tokens], Finished("r", "stop", USAGE)), logprobs=True)

    assert json.loads(shown[1].removeprefix("data: "))["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [0xC3, 0xA9],
                "top_logprobs": [{"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}],
            },
            {"token": "\ufffd", "logprob": -9999.0, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }


FAILURES: dict[str, tuple[Event, int, str]] = {
    "23: the runner ended": (Failed("r", "runner_crashed", "It ended."), 500, "runner_crashed"),
    "the runner was stopped": (Failed("r", "runner_stopped", "It was stopped."), 503, "runner_stopped"),
    "it took too long": (Failed("r", "timed_out", "Too long."), 504, "timed_out"),
    "34: too long a prompt": (Failed("r", "context_length_exceeded", "8192, 9000."), 400, "context_length_exceeded"),
    "46: the template raised": (Failed("r", "template_error", "No system role."), 400, "template_error"),
    "cancelled by somebody else": (Finished("r", "cancelled", USAGE), 410, "cancelled"),
}


@pytest.mark.parametrize(("end", "status", "code"), FAILURES.values(), ids=FAILURES)
def test_what_goes_wrong_is_an_error_event_in_a_stream_and_a_status_otherwise(end: Event, status: int, code: str) -> None:
    tokens = Tokens("r", (1,), "a")
    shown = stream(answer([tokens], end))
    gathered = WholeAnswer(logprobs=False)
    for event in answer([tokens], end):
        gathered.add(event)
    with pytest.raises(ApiError) as caught:
        gathered.body(IDENTITY)

    assert shown[-1] == "data: [DONE]"
    error = json.loads(shown[-2].removeprefix("data: "))["error"]
    assert (error["code"], caught.value.status, caught.value.code) == (code, status, code)
    assert error == json.loads(caught.value.body())["error"]
    assert not any('"finish_reason":"' in event for event in shown)


def test_an_answer_without_an_end_is_no_success() -> None:
    gathered = WholeAnswer(logprobs=False)
    gathered.add(Tokens("r", (1,), "a"))
    with pytest.raises(ApiError) as caught:
        gathered.body(IDENTITY)

    assert caught.value.status == 500


def test_a_broken_stream_ends_with_an_error_and_done() -> None:
    encode = encoder()

    assert encode.broken(stopping()) == b"data: " + stopping().body() + b"\n\ndata: [DONE]\n\n"
    assert encode.ended


def test_comments_are_comments_20() -> None:
    assert COMMENT.startswith(b":")
    assert COMMENT.endswith(b"\n\n")
    assert COMMENT.count(b"\n") == 2
