"""OpenAI's own types, taken strictly: their client does not check what it receives, so that tests must."""

from typing import TypeVar

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

_CHUNK = TypeAdapter(ChatCompletionChunk)
_WHOLE = TypeAdapter(ChatCompletion)

M = TypeVar("M", bound=BaseModel)


def chunk(event: str) -> ChatCompletionChunk:
    """The chunk in an event."""
    assert event.startswith("data: ")
    return _known_fields_only(_CHUNK.validate_json(event.removeprefix("data: "), strict=True))


def whole(body: bytes) -> ChatCompletion:
    """The chat completion in a body."""
    return _known_fields_only(_WHOLE.validate_json(body, strict=True))


def _known_fields_only(model: M) -> M:
    assert not model.model_extra, model.model_extra
    for name in type(model).model_fields:
        value = getattr(model, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, BaseModel):
                _known_fields_only(item)
    return model
