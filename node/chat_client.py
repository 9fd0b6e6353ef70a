"""Talks to a node's chat completions."""

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

from node.api_client import BODY_BYTES_MAX, LINE_BYTES_MAX, ApiClient, document_or_none, error_sentence
from node.errors import CommandError

Message = dict[str, str]


@dataclass(frozen=True)
class ChatOptions:
    """What goes with every request of a session."""

    model: str | None = None  # None: the only one served
    parameters: dict[str, Any] = field(default_factory=dict)  # as in the request body


@dataclass(frozen=True)
class ChatClient:
    """Chat over one node's API."""

    api: ApiClient

    def complete(self, messages: list[Message], options: ChatOptions) -> dict[str, Any]:
        """The whole completion document.

        Raises: CommandError.
        """
        with self._asked(messages, options, stream=False) as response:
            document = document_or_none(response.read(BODY_BYTES_MAX))
        if document is None:
            raise CommandError(f"{self.api.url} answered with something that is no completion")
        return document

    def stream(self, messages: list[Message], options: ChatOptions) -> Generator[str, None, str | None]:
        """The answer's text in pieces, and the finish reason as the generator's value; closing it cancels the request.

        Raises: CommandError, also in the middle.
        """
        reason = None
        with self._asked(messages, options, stream=True) as response:
            while line := response.readline(LINE_BYTES_MAX):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return reason
                document = document_or_none(data)
                if document is None:
                    raise CommandError(f"{self.api.url} sent something that is no chat completion")
                if "error" in document:
                    raise CommandError(error_sentence(document))
                for choice in document.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                    if text := (choice.get("delta") or {}).get("content"):
                        yield text
        raise CommandError(f"the answer from {self.api.url} broke off")

    def _asked(self, messages: list[Message], options: ChatOptions, *, stream: bool) -> AbstractContextManager[HTTPResponse]:
        body = {"messages": messages, "stream": stream, **options.parameters}
        if options.model is not None:
            body["model"] = options.model
        return self.api.asked("POST", "/v1/chat/completions", body)
