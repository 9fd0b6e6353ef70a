"""What `node chat` makes of a node's answers, good and bad, from a server that says what it is told to."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from node.api_client import ApiClient
from node.chat_client import ChatClient, ChatOptions
from node.errors import CommandError

MESSAGES = [{"role": "user", "content": "hi"}]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "%s"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


class Server:
    """Answers one request with these bytes and closes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.request = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as received:
            length = 0
            while (line := received.readline()) not in {b"\r\n", b""}:
                self.request += line
                if line.lower().startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            self.request += received.read(length)
            connection.sendall(self._answer)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@contextmanager
def server(answer: bytes) -> Iterator[Server]:
    made = Server(answer)
    try:
        yield made
    finally:
        made.close()


def response(status: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status.encode(), b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def drained(answer: bytes) -> tuple[list[str], str | None]:
    """The pieces of a stream, and its finish reason."""
    pieces: list[str] = []
    with server(answer) as remote:
        stream = ChatClient(ApiClient(remote.url)).stream(MESSAGES, ChatOptions())
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                return pieces, end.value


def test_a_stream_in_pieces() -> None:
    comment = b": still here\n\n"

    assert drained(STREAM + comment + PIECE % b"Hel" + comment + PIECE % b"lo" + END) == (["Hel", "lo"], "length")


def test_what_is_asked() -> None:
    with server(response("200 OK", b'{"object": "chat.completion"}')) as remote:
        options = ChatOptions("m", {"max_tokens": 3})
        document = ChatClient(ApiClient(remote.url + "/v1/", "sk-1")).complete(MESSAGES, options)

    assert document == {"object": "chat.completion"}
    assert remote.request.startswith(b"POST /v1/chat/completions ")
    assert b"Authorization: Bearer sk-1\r\n" in remote.request
    assert remote.request.endswith(
        b'{"messages": [{"role": "user", "content": "hi"}], "stream": false, "max_tokens": 3, "model": "m"}'
    )


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (STREAM + PIECE % b"Hel", "the answer from URL broke off"),
        (
            STREAM + PIECE % b"Hel" + b'data: {"error": {"message": "The runner\\ndied."}}\n\ndata: [DONE]\n\n',
            "The runner died.",
        ),
        (STREAM + b"data: nonsense\n\n", "URL sent something that is no chat completion"),
        (STREAM + b"data: []\n\n", "URL sent something that is no chat completion"),
        (response("502 Bad Gateway", b"<html>"), "URL answered 502 Bad Gateway"),
        (response("404 Not Found", b'{"error": {"message": "No such model."}}'), "No such model."),
        (response("401 Unauthorized", b'{"error": {"message": "A key is needed."}}'), "A key is needed: give --api-key KEY"),
        (response("429 Busy", b'{"error": {"message": "Full."}}', b"Retry-After: 7"), "Full (try again in 7 s)"),
        (response("500 Oh", b'{"error": "text"}'), "text"),
        (b"SSH-2.0-OpenSSH\r\n", "URL can't be talked to: SSH-2.0-OpenSSH"),
        (b"", "URL can't be talked to: Remote end closed connection without response"),
    ],
)
def test_what_goes_wrong_is_one_sentence(answer: bytes, sentence: str) -> None:
    with server(answer) as remote, pytest.raises(CommandError) as caught:
        list(ChatClient(ApiClient(remote.url)).stream(MESSAGES, ChatOptions()))

    assert str(caught.value).strip() == sentence.replace("URL", remote.url)


def test_a_document_that_is_none() -> None:
    with server(response("200 OK", b"hello")) as remote, pytest.raises(CommandError, match="no completion"):
        ChatClient(ApiClient(remote.url)).complete(MESSAGES, ChatOptions())


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "127.0.0.1:x"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(CommandError, match="is no URL such as"):
        ChatClient(ApiClient(url)).complete(MESSAGES, ChatOptions())
