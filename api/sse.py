r"""One answer as server-sent events in OpenAI's shape. Pure, and cheap: it is on the path of every token.

    data: {... "delta":{"role":"assistant","content":""} ...}      before all else
    data: {... "delta":{"content":"Par"} ...}                      one for each Tokens event
    data: {... "delta":{}, ... "finish_reason":"stop" ...}         once
    data: {... "choices":[],"usage":{...}}                         where it was asked for
    data: [DONE]

`: ...` comments may stand anywhere between them. What goes wrong on the way is `data: {"error":{...}}` in place of the finish.
Every byte string returned ends with the empty line that ends an event, so that any number of them makes one write.
"""

from collections.abc import Iterable

import msgspec

from api.completion import Document, Identity, finish_reason, logprob_documents, usage_document
from api.errors import ApiError, of_failure
from inference.requests import Event, Failed, Finished, Tokens

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # else nginx gathers tokens by the kilobyte
}
COMMENT = b": still here\n\n"
DONE = b"data: [DONE]\n\n"

_END = b"\n\n"
_PREFIX = b"data: "
_json = msgspec.json.Encoder().encode


def error_event(error: ApiError) -> bytes:
    """What a stream that was begun ends with instead of a finish reason."""
    return _PREFIX + error.body() + _END + DONE


class ChunkEncoder:
    """The events of one answer, one after another. `ended` once the last was encoded."""

    def __init__(self, identity: Identity, *, include_usage: bool, logprobs: bool) -> None:
        self.ended = False
        self._include_usage = include_usage
        self._logprobs = logprobs
        head = _json(
            {
                "id": identity.completion_id,
                "object": "chat.completion.chunk",
                "created": identity.created,
                "model": identity.model,
                "system_fingerprint": identity.fingerprint,
            }
        )
        self._head = _PREFIX + head[:-1] + b","  # open, for the fields that differ
        usage = b',"usage":null' if include_usage else b""
        self._content_head = self._head + b'"choices":[{"index":0,"delta":{"content":'
        self._content_tail = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}" + _END
        self._usage_tail = usage + b"}" + _END

    def opening(self) -> bytes:
        """The first event, which alone names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None, None)

    def encode(self, events: Iterable[Event]) -> bytes:
        """The bytes of the next events, in order; none for those that clients do not see."""
        return b"".join([self._tokens(event) if type(event) is Tokens else self._other(event) for event in events])

    def broken(self, error: ApiError) -> bytes:
        """The end of an answer that will not be complete."""
        self.ended = True
        return error_event(error)

    def _tokens(self, event: Tokens) -> bytes:
        if self._logprobs:
            logprobs: Document = {"content": logprob_documents(event.logprobs), "refusal": None}
            return self._chunk({"content": event.text}, logprobs, None)
        return self._content_head + _json(event.text) + self._content_tail

    def _other(self, event: Event) -> bytes:
        if not isinstance(event, Finished | Failed):
            return b""
        assert not self.ended
        if isinstance(event, Failed):
            return self.broken(of_failure(event))
        try:
            reason = finish_reason(event)
        except ApiError as error:
            return self.broken(error)
        self.ended = True
        usage = b""
        if self._include_usage:
            usage = self._head + b'"choices":[],"usage":' + _json(usage_document(event.usage)) + b"}" + _END
        return self._chunk({}, None, reason) + usage + DONE

    def _chunk(self, delta: Document, logprobs: Document | None, reason: str | None) -> bytes:
        choice: Document = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head + b'"choices":' + _json([choice]) + self._usage_tail
