"""A request's events as OpenAI's chat completion: the parts that whole and streamed answers share, and the whole one. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from api.errors import cancelled, incomplete, of_failure
from inference.requests import Event, Failed, Finished, TokenLogprob, Tokens, Usage

# JSON knows no infinity; OpenAI gives this for a token that is (next to) impossible.
LOGPROB_MIN = -9999.0

Document = dict[str, object]
OpenAIFinishReason = Literal["stop", "length"]


class Identity(Struct, frozen=True, kw_only=True):
    """What is the same in all parts of one answer."""

    completion_id: str  # "chatcmpl-..."
    created: int  # Unix seconds
    model: str
    fingerprint: str | None  # of the model's weights: same fingerprint, seed and request, same answer


def usage_document(usage: Usage) -> Document:
    """OpenAI's usage; `cached_tokens` are prompt tokens that did not have to be evaluated again."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def logprob_documents(logprobs: Sequence[TokenLogprob]) -> list[Document]:
    """OpenAI's description of each token."""
    return [
        {**_logprob(item.text, item.logprob), "top_logprobs": [_logprob(text, logprob) for _, text, logprob in item.top]}
        for item in logprobs
    ]


def _logprob(text: str, logprob: float) -> Document:
    # A token that is part of a character reads as U+FFFD; its bytes can't be told from that.
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    value = max(LOGPROB_MIN, logprob)  # in this order NaN becomes the minimum too
    return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


def finish_reason(finished: Finished) -> OpenAIFinishReason:
    """The same word as ours, where there is one.

    Raises: ApiError where the request was cancelled, for which OpenAI has no word.
    """
    if finished.reason == "cancelled":
        raise cancelled()
    return finished.reason


class WholeAnswer:
    """Gathers one request's events into one chat completion."""

    def __init__(self, logprobs: bool) -> None:
        self._texts: list[str] = []
        self._logprobs: list[Document] | None = [] if logprobs else None
        self._end: Finished | Failed | None = None

    def add(self, event: Event) -> None:
        """Take the next event, in order."""
        assert self._end is None, f"{event} came after {self._end}"
        match event:
            case Tokens():
                self._texts.append(event.text)
                if self._logprobs is not None:
                    self._logprobs += logprob_documents(event.logprobs)
            case Finished() | Failed():
                self._end = event
            case _:  # how far it is shows in streams only
                pass

    def body(self, identity: Identity) -> bytes:
        """The JSON document, once all events were added.

        Raises: ApiError where the request failed or was cancelled.
        """
        match self._end:
            case Finished() as finished:
                return msgspec.json.encode(self._document(identity, finish_reason(finished), finished.usage))
            case Failed() as failed:
                raise of_failure(failed)
            case None:
                raise incomplete()

    def _document(self, identity: Identity, reason: OpenAIFinishReason, usage: Usage) -> Document:
        choice: Document = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(self._texts), "refusal": None},
            "logprobs": None if self._logprobs is None else {"content": self._logprobs, "refusal": None},
            "finish_reason": reason,
        }
        return {
            "id": identity.completion_id,
            "object": "chat.completion",
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.fingerprint,
            "choices": [choice],
            "usage": usage_document(usage),
        }
