"""Talks to a node's chat completions over HTTP, with the standard library alone: a command must start at once."""

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from node.errors import CommandError

CONNECT_SECONDS_MAX = 10.0
SILENCE_SECONDS_MAX = 120.0  # a node sends comments while it computes, but says nothing while a request waits for its model
LINE_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 64 << 20

Message = dict[str, str]


@dataclass(frozen=True)
class ChatOptions:
    """What goes with every request of a session."""

    model: str | None = None  # None: the only one served
    parameters: dict[str, Any] = field(default_factory=dict)  # as in the request body


@dataclass(frozen=True)
class ChatClient:
    """One node's API, at the URL that its ready line or a person gave."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    def complete(self, messages: list[Message], options: ChatOptions) -> dict[str, Any]:
        """The whole completion document.

        Raises: CommandError.
        """
        with self._asked(messages, options, stream=False) as response:
            document = _document(response.read(BODY_BYTES_MAX))
        if document is None:
            raise CommandError(f"{self.url} answered with something that is no completion")
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
                document = _document(data)
                if document is None:
                    raise CommandError(f"{self.url} sent something that is no chat completion")
                if "error" in document:
                    raise CommandError(_error_sentence(document))
                for choice in document.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                    if text := (choice.get("delta") or {}).get("content"):
                        yield text
        raise CommandError(f"the answer from {self.url} broke off")

    @contextmanager
    def _asked(self, messages: list[Message], options: ChatOptions, *, stream: bool) -> Iterator[http.client.HTTPResponse]:
        """The response to a request, once its status is known to be good.

        Raises: CommandError.
        """
        body = {"messages": messages, "stream": stream, **options.parameters}
        if options.model is not None:
            body["model"] = options.model
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection, path = self._connection()
        try:
            connection.request("POST", f"{path}/v1/chat/completions", json.dumps(body).encode(), headers)
            if connection.sock is not None:
                connection.sock.settimeout(SILENCE_SECONDS_MAX)
            with connection.getresponse() as response:  # it may have taken the socket over: both are closed
                if response.status != http.client.OK:
                    raise CommandError(_refusal(response, self.url))
                yield response
        except TimeoutError:
            raise CommandError(f"{self.url} has not answered for {SILENCE_SECONDS_MAX:g} seconds") from None
        except ConnectionRefusedError:
            raise CommandError(f"no node answers at {self.url}: start one with `node start`") from None
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"{self.url} can't be talked to: {str(error) or type(error).__name__}") from None
        finally:
            connection.close()

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        """A connection that is not open yet, and the path before the API's own (of a proxy, say)."""
        try:
            parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise CommandError(f"{self.url} is no URL such as http://127.0.0.1:52416") from None
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if host is None or parts.scheme not in kinds:
            raise CommandError(f"{self.url} is no URL such as http://127.0.0.1:52416")
        return kinds[parts.scheme](host, port, timeout=CONNECT_SECONDS_MAX), parts.path.rstrip("/").removesuffix("/v1")


def _document(data: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(data)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _error_sentence(document: dict[str, Any]) -> str:
    error = document.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or "the node reports an error without a reason").split())


def _refusal(response: http.client.HTTPResponse, url: str) -> str:
    document = _document(response.read(LINE_BYTES_MAX))
    if document is None or "error" not in document:
        return f"{url} answered {response.status} {response.reason}"
    sentence = _error_sentence(document)
    if response.status == http.client.UNAUTHORIZED:
        return f"{sentence.rstrip('.')}: give --api-key KEY"
    if retry_after := response.getheader("Retry-After"):
        return f"{sentence.rstrip('.')} (try again in {retry_after} s)"
    return sentence
