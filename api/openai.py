"""What OpenAI's clients send, checked and turned into the project's own request. Pure.

The rule is *reject or honour, never ignore*. A value of the wrong type or out of range is refused with the parameter's name;
null is the same as absent; a known parameter that can't be honoured is refused by name (`api.unsupported`); any other key is
accepted and means nothing.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeAlias

import pydantic
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import ErrorDetails

from api.errors import ApiError, invalid, unsupported
from api.unsupported import IN_BODY, IN_MESSAGE, IN_STREAM_OPTIONS, refuse_known
from inference.requests import (
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    TOP_LOGPROBS_MAX,
    ChatPrompt,
    Json,
    Request,
    Sampling,
)

MESSAGES_MAX = 10_000
LOGIT_BIASES_MAX = 1024
VALUE_SHOWN_CHARACTERS = 40
SEED_MASK = (1 << 63) - 1  # OpenAI's seeds are signed, ours are not: all 2^63 non-negative ones stay what they are

# A nucleus always holds the most likely token, so that "none of the mass" and "next to none" are the same nucleus.
TOP_P_MIN = 1e-6


class _Shape(BaseModel):
    """Types are taken as they are (strict), JSON's non-numbers are none, other keys are kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class Part(_Shape):
    """A piece of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _content_kind(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


Content: TypeAlias = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Tag("<parts>"), Field(min_length=1)],
    Discriminator(
        _content_kind, custom_error_type="content_type", custom_error_message="Input should be text or a list of parts"
    ),
]


class Message(_Shape):
    """One message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None


class StreamOptions(_Shape):
    """How a stream is to look."""

    include_usage: bool | None = None


class ResponseFormat(_Shape):
    """What the answer is to be."""

    type: str


StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=STOP_STRING_CHARACTERS_MAX)]
TokenCount: TypeAlias = Annotated[int, Field(ge=1, lt=1 << 53)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]


def _stop_kind(value: object) -> str | None:
    return "<one>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


Stop: TypeAlias = Annotated[
    Annotated[StopString, Tag("<one>")] | Annotated[list[StopString], Tag("<list>"), Field(max_length=STOP_STRINGS_MAX)],
    Discriminator(_stop_kind, "stop_type", "Input should be text or a list of texts"),
]


class ChatCompletionRequest(_Shape):
    """The body of `POST /v1/chat/completions`; ranges are OpenAI's."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # 0 and -1: no limit
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=LOGIT_BIASES_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    response_format: ResponseFormat | None = None


class ChatCall(Struct, frozen=True, kw_only=True):
    """A checked chat completion call: what to generate, for which model, and how to answer."""

    model: str | None  # None: the only one served
    request: Request
    stream: bool
    include_usage: bool
    logprobs: bool


def parse_chat(body: bytes | bytearray, request_id: str, draw_seed: Callable[[], int]) -> ChatCall:
    """The call in a request's body. `draw_seed` gives a request without a seed its own, 0..2^63-1.

    Raises: ApiError (400), with the name of the parameter that is at fault.
    """
    try:
        parsed = ChatCompletionRequest.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _of_validation(error) from None
    _refuse_what_cannot_be_honoured(parsed)
    return ChatCall(
        model=parsed.model or None,
        request=_request(parsed, request_id, draw_seed),
        stream=bool(parsed.stream),
        include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
        logprobs=bool(parsed.logprobs),
    )


def _refuse_what_cannot_be_honoured(parsed: ChatCompletionRequest) -> None:
    if parsed.n is not None and parsed.n > 1:
        raise unsupported("n", "one answer a request is given")
    if parsed.response_format is not None and parsed.response_format.type != "text":
        raise unsupported("response_format", "answers are plain text")
    extra = parsed.model_extra or {}
    if extra.get("tool_choice") == "required" and not extra.get("tools"):
        raise invalid("'tool_choice' can't be 'required' where no tools are given.", "tool_choice")
    refuse_known(extra, IN_BODY)
    if parsed.stream_options is not None:
        refuse_known(parsed.stream_options.model_extra, IN_STREAM_OPTIONS, "stream_options.")


def _request(parsed: ChatCompletionRequest, request_id: str, draw_seed: Callable[[], int]) -> Request:
    stop = parsed.stop or ()
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    return Request(
        request_id=request_id,
        prompt=ChatPrompt(tuple(_message(message, f"messages[{at}]") for at, message in enumerate(parsed.messages))),
        sampling=_sampling(parsed, draw_seed),
        max_tokens=parsed.max_tokens if parsed.max_completion_tokens is None else parsed.max_completion_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        top_logprobs=(parsed.top_logprobs or 0) if parsed.logprobs else None,
    )


def _sampling(parsed: ChatCompletionRequest, draw_seed: Callable[[], int]) -> Sampling:
    def value(given: float | None, default: float) -> float:
        return default if given is None else given

    return Sampling(
        seed=draw_seed() if parsed.seed is None else parsed.seed & SEED_MASK,
        temperature=value(parsed.temperature, 1.0),
        top_p=max(value(parsed.top_p, 1.0), TOP_P_MIN),
        top_k=max(parsed.top_k or 0, 0),
        min_p=value(parsed.min_p, 0.0),
        repetition_penalty=value(parsed.repetition_penalty, 1.0),
        presence_penalty=value(parsed.presence_penalty, 0.0),
        frequency_penalty=value(parsed.frequency_penalty, 0.0),
        logit_bias=tuple((_token_id(key), bias) for key, bias in (parsed.logit_bias or {}).items()),
    )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 1 << 31):
        raise invalid(
            f"'logit_bias' maps token ids to numbers, and {key[:VALUE_SHOWN_CHARACTERS]!r} is no token id.", "logit_bias"
        )
    return int(key)


def _message(message: Message, at: str) -> dict[str, Json]:
    """The message as chat templates know it: content as one text, role `developer` as `system`."""
    refuse_known(message.model_extra, IN_MESSAGE, f"{at}.")
    if message.role in {"tool", "function"}:
        raise unsupported(f"{at}.role", "answers of tools can't be used")
    content = message.refusal if message.content is None and message.role == "assistant" else message.content
    if content is None:
        raise invalid(f"'{at}.content' is required.", f"{at}.content", "missing_required_parameter")
    result: dict[str, Json] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content if isinstance(content, str) else _text(content, f"{at}.content"),
    }
    if message.name is not None:
        result["name"] = message.name
    return result


def _text(parts: Sequence[Part], at: str) -> str:
    return "".join(_part_text(part, f"{at}[{index}]") for index, part in enumerate(parts))


def _part_text(part: Part, at: str) -> str:
    if part.type not in {"text", "refusal"}:
        raise ApiError(
            400,
            "unsupported_content",
            f"Content of type {part.type[:VALUE_SHOWN_CHARACTERS]!r} is not supported, only text.",
            at,
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid(f"'{at}.{part.type}' is required.", f"{at}.{part.type}", "missing_required_parameter")
    return text


def _of_validation(error: pydantic.ValidationError) -> ApiError:
    """The first fault that was found, as one sentence and with OpenAI's way of naming parameters."""
    fault: ErrorDetails = error.errors(include_url=False)[0]
    kind, param = fault["type"], _param(fault["loc"])
    if kind == "json_invalid":
        return invalid(f"The body is not valid JSON: {fault['ctx']['error']}.", None, "invalid_json")
    if param is None:
        return invalid("The body must be a JSON object.", None, "invalid_json")
    if kind == "missing" or fault["input"] is None:
        return invalid(f"'{param}' is required.", param, "missing_required_parameter")
    text = f"'{param}' is not valid: {fault['msg'][:1].lower()}{fault['msg'][1:]}{_but_was(fault['input'])}."
    return invalid(text, param, "invalid_type" if kind.endswith("_type") else "invalid_value")


def _but_was(value: Json) -> str:
    if isinstance(value, (dict, list)):
        return ""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f", not {shown[:VALUE_SHOWN_CHARACTERS]}"


def _param(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].content` for where pydantic saw the fault; the names of a union's sides are left out."""
    name = ""
    for step in location:
        if isinstance(step, int):
            name += f"[{step}]"
        elif name == "logit_bias":  # below it the names are the sender's, of any length
            break
        elif not step.startswith("<"):
            name += f".{step}" if name else step
    return name or None
