"""Requests and events: one vocabulary from the engine to the HTTP stream.

A request says what to generate; each request gets one stream of events, in this order:

    Accepted  Prefilled*  Tokens*  (Finished | Failed)
    Refused                                               no room now; nothing was started
    Failed                                                never started: the request itself is at fault

The same values cross the runner's pipe and, later, the streams between nodes; msgspec checks types and ranges on arrival.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

# A JSON value as it arrived: whoever looks into it checks what it finds.
Json = object

STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 256
TOP_LOGPROBS_MAX = 20


class Sampling(Struct, frozen=True, kw_only=True):
    """How the next token is chosen. The n-th generated token is drawn with a key made of (seed, n) and nothing else."""

    seed: Seed
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: no limit
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0  # over prompt and generated tokens
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # over generated tokens
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # over generated tokens
    logit_bias: tuple[tuple[TokenId, Annotated[float, Meta(ge=-100, le=100)]], ...] = ()


class ChatPrompt(Struct, frozen=True, tag="chat"):
    """Messages (OpenAI's shape, content as text) for the model's chat template."""

    messages: Annotated[tuple[dict[str, Json], ...], Meta(min_length=1)]
    tools: tuple[dict[str, Json], ...] = ()
    template_options: dict[str, Json] = {}


class TextPrompt(Struct, frozen=True, tag="text"):
    """Text that is tokenized as it is, with no template."""

    text: str


class TokenPrompt(Struct, frozen=True, tag="tokens"):
    """Token ids as `Accepted` gave them out: a continuation never renders the template again."""

    ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Request(Struct, frozen=True, kw_only=True):
    """One generation. With `generated` it continues an earlier attempt after those tokens, of which the client has already
    been given the first `given_characters` characters of text; tokens, text and usage go on from there.
    """

    request_id: RequestId
    prompt: Prompt
    sampling: Sampling
    max_tokens: Annotated[int, Meta(ge=1)] | None = None  # counts `generated` too; None: what the context leaves
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=STOP_STRINGS_MAX)] = ()
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None  # None: no logprobs at all
    generated: tuple[TokenId, ...] = ()
    given_characters: Count = 0


class Load(Struct, frozen=True, array_like=True):
    """What a runner has taken on, against what it can take on at once."""

    running: Count
    running_max: Count
    kv_bytes: Count
    kv_bytes_max: Count


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of a whole request, continuations included; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token with its natural-log probability, before temperature and filters; `text` may be part of a character."""

    token_id: TokenId
    text: str
    logprob: float
    top: tuple[tuple[TokenId, str, float], ...] = ()  # most likely first


class Accepted(Struct, frozen=True, array_like=True, tag="accepted"):
    """Admitted: KV room is reserved and nothing but an error or a cancel can end it early."""

    request_id: RequestId
    prompt_ids: tuple[TokenId, ...]
    cached_tokens: Count = 0


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """Not admitted for want of room; it would need `kv_bytes` of the budget."""

    request_id: RequestId
    kv_bytes: Count
    load: Load


class Prefilled(Struct, frozen=True, array_like=True, tag="prefilled"):
    """`done` of `total` prompt tokens have been evaluated."""

    request_id: RequestId
    done: Count
    total: Count


class Tokens(Struct, frozen=True, array_like=True, tag="tokens"):
    """Generated tokens and the text that became certain with them.

    Text is held back while it may still be half a character or the beginning of a stop string, so either part may be empty;
    the text of all events together is the answer. Stop tokens appear in neither part.
    """

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token where the request asked for them


FinishReason = Literal["stop", "length", "cancelled"]


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """The regular end of a request."""

    request_id: RequestId
    reason: FinishReason
    usage: Usage


ErrorCode = Literal[
    "context_length_exceeded",  # prompt, or prompt and max_tokens, above the context
    "template_error",  # the chat template raised or the model has none
    "invalid_parameter",  # a parameter this model or engine can't honour
    "engine_error",  # the engine raised while it worked on this request
    "runner_crashed",  # the process ended under it
    "runner_stopped",  # the runner was told to stop
    "timed_out",
]


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """The end of a request that went wrong; `message` is one sentence for the person who sent it."""

    request_id: RequestId
    code: ErrorCode
    message: str
    param: str | None = None


Event = Accepted | Refused | Prefilled | Tokens | Finished | Failed
EndEvent = Refused | Finished | Failed
END_EVENTS = (Refused, Finished, Failed)
