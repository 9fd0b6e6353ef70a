"""The client of the HTTP benchmark: a process of its own that counts events and does nothing else with them.

    python -m scripts.benchmarks.http_load PORT CONNECTIONS TOKENS ROUNDS

Each round asks for one streamed answer on every connection at once. Prints one JSON document a round: events with content,
seconds from the first request to the last byte, and each connection's seconds to its first content.
"""

import asyncio
import json
import sys
import time

CONTENT = b'"delta":{"content":'
LAST = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class Answer(asyncio.Protocol):
    """Asks for one answer and counts its events."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.events = 0
        self.first = 0.0
        self._request = request
        self._done = done
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self) -> None:
        """Send the request."""
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count; what may be the beginning of a mark is looked at again with what follows it."""
        data = self._rest + data
        count = data.count(CONTENT)
        if count and not self.events:
            self.first = time.perf_counter()
        self.events += count
        if data.endswith(LAST):
            self._done.set_result(None)
            self._transport.close()
        kept = data[-max(len(CONTENT), len(LAST)) + 1 :]
        self._rest = kept[kept.rfind(CONTENT) + len(CONTENT) :] if CONTENT in kept else kept

    def connection_lost(self, exc: Exception | None) -> None:
        """An end before the end is a failure."""
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError("the stream broke off"))


async def measure_round(port: int, connections: int, tokens: int) -> dict[str, object]:
    """One answer on each of so many fresh connections, all at once."""
    loop = asyncio.get_running_loop()
    body = {"messages": [{"role": "user", "content": "Hello."}], "stream": True, "max_tokens": tokens}
    data = json.dumps(body).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(data) + data
    answers: list[Answer] = []
    ends: list[asyncio.Future[None]] = []
    for _ in range(connections):
        end = loop.create_future()
        _, answer = await loop.create_connection(lambda end=end: Answer(request, end), "127.0.0.1", port)  # type: ignore[misc]  # a default binds the loop variable
        answers.append(answer)
        ends.append(end)
    began = time.perf_counter()
    for answer in answers:
        answer.ask()
    await asyncio.gather(*ends)
    seconds = time.perf_counter() - began
    return {
        "events": sum(answer.events for answer in answers),
        "seconds": seconds,
        "first": [answer.first - began for answer in answers],
    }


async def main(port: int, connections: int, tokens: int, rounds: int) -> None:
    """All rounds."""
    for _ in range(rounds):
        print(json.dumps(await measure_round(port, connections, tokens)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*(int(argument) for argument in sys.argv[1:5])))
