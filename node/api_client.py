"""Talks to a node's HTTP API with the standard library alone: a command must start at once."""

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from node.config import Config
from node.data_dir import running_node
from node.errors import CommandError

CONNECT_SECONDS_MAX = 10.0
SILENCE_SECONDS_MAX = 120.0  # a node sends comments while it computes, but says nothing while a request waits for its model
LINE_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 64 << 20

Document = dict[str, Any]


@dataclass(frozen=True)
class ApiClient:
    """One node's API, at the URL that its ready line or a person gave."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    def document(self, path: str, *, bytes_max: int = BODY_BYTES_MAX) -> Document:
        """What GET answers with.

        Raises: CommandError.
        """
        return parse_document(self.body(path, bytes_max=bytes_max), self.url)

    def body(self, path: str, *, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """The same as bytes.

        Raises: CommandError.
        """
        with self.asked("GET", path) as response:
            body = response.read(bytes_max + 1)
        if len(body) > bytes_max:
            raise CommandError(f"{self.url} answered with more than {bytes_max >> 20} MiB")
        return body

    def events(self, path: str, *, bytes_max: int = BODY_BYTES_MAX) -> Generator[tuple[str, Document], None, None]:
        """Server-sent events with their names, for ever.

        Raises: CommandError, also where the stream ends.
        """
        name = ""
        with self.asked("GET", path) as response:
            while line := response.readline(bytes_max):
                label, _, value = line.partition(b":")
                if label == b"event":
                    name = value.strip().decode("utf-8", "replace")
                elif label == b"data":
                    document = parse_document(value, self.url)
                    if name == "error":
                        raise CommandError(error_sentence(document))
                    yield name, document
        raise CommandError(f"the events from {self.url} broke off")

    @contextmanager
    def asked(self, method: str, path: str, body: Document | None = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a request, once its status is known to be good.

        Raises: CommandError.
        """
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection, before = self._connection()
        try:
            connection.request(method, before + path, None if body is None else json.dumps(body).encode(), headers)
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


def client_of(url: str | None, config: Config) -> ApiClient:
    """The node that is meant: the one at `url`, else the one that runs on the data directory.

    Raises: CommandError where none runs there.
    """
    key = config.api_keys[0] if config.api_keys else None
    if url is not None:
        return ApiClient(url, key)
    node = running_node(config.data_dir)
    if node is None:
        raise CommandError(f"no node runs on {config.data_dir}: start one with `node start`, or name one with --api URL")
    if node.api is None:
        raise CommandError(f"the node on {config.data_dir} runs without HTTP (--api none)")
    return ApiClient(node.api, key)


def document_or_none(data: bytes) -> Document | None:
    """A JSON object, if that is what it is."""
    try:
        document = json.loads(data)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def parse_document(data: bytes, url: str) -> Document:
    """A JSON object.

    Raises: CommandError.
    """
    document = document_or_none(data)
    if document is None:
        raise CommandError(f"{url} answered with something that is no JSON document: is it a node's API?")
    return document


def error_sentence(document: Document) -> str:
    """What an error document says, on one line."""
    error = document.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or "the node reports an error without a reason").split())


def _refusal(response: http.client.HTTPResponse, url: str) -> str:
    document = document_or_none(response.read(LINE_BYTES_MAX))
    if document is None or "error" not in document:
        return f"{url} answered {response.status} {response.reason}"
    sentence = error_sentence(document)
    if response.status == http.client.UNAUTHORIZED:
        return f"{sentence.rstrip('.')}: give --api-key KEY"
    if retry_after := response.getheader("Retry-After"):
        return f"{sentence.rstrip('.')} (try again in {retry_after} s)"
    return sentence
