"""The head of the relay's benchmark, in a process of its own: a real `Head` over an instance that only keeps time.

    python -m scripts.benchmarks.peers_relay_head step | token

What it makes tells when it was made: a token's id is its number and its text the time (`time.monotonic`, one clock for a
machine). The prompt says how: PACED, all rows in one step, as an engine does, or FLAT_OUT, each as fast as it is taken. With
`token` each event goes in a frame of its own, to see what a frame for each step is worth.
"""

import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import trio

from inference.requests import Accepted, Event, Finished, Load, Request, TextPrompt, Tokens, Usage
from node.task_head import Head
from node.task_protocol import SUBMIT, TASKS_AT_HEAD, Batch, TaskMessage
from p2p.libp2p_transport import open_transport
from p2p.stream import Stream
from scripts.benchmarks.transport_peer import CLUSTER, new_identity

SLOTS = 64
TOKENS_PER_SECOND = 125  # of each slot
INSTANCE = 7
MODEL_HASH = "aa" * 32
EPOCH = 1
PACED, FLAT_OUT = "paced", "flat out"


class Clockwork:
    """An instance whose engine computes nothing; `node.head_task.LocalExecutor`."""

    model_hash = MODEL_HASH
    epoch = EPOCH
    load = Load(0, SLOTS, 0, 1)

    def __init__(self) -> None:
        self._made: list[float] = []  # when each step was
        self._rows = 0
        self._stepped = trio.lowlevel.ParkingLot()
        self._wanted = trio.Event()

    def instance(self, instance_id: int) -> "Clockwork | None":
        """The only one."""
        return self if instance_id == INSTANCE else None

    async def run(self) -> None:
        """Step while there are rows; a step that comes late is not left out."""
        while True:
            await self._wanted.wait()
            start, count = trio.current_time(), 0
            while self._rows:
                await trio.sleep_until(start + count / TOKENS_PER_SECOND)
                self._made.append(time.monotonic())
                self._stepped.unpark_all()
                count += 1
            self._wanted = trio.Event()

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[AsyncIterator[Event]]:
        """One row."""
        assert isinstance(request.prompt, TextPrompt)
        async with aclosing(self._row(request, paced=request.prompt.text == PACED)) as events:
            yield events

    async def _row(self, request: Request, *, paced: bool) -> AsyncGenerator[Event, None]:
        count = request.max_tokens or 0
        yield Accepted(request.request_id, (1,))
        self._rows += paced
        try:
            if paced:
                self._wanted.set()
            first = len(self._made)
            for number in range(count):
                if not paced:
                    await trio.lowlevel.checkpoint()
                while paced and len(self._made) <= first + number:
                    await self._stepped.park()
                made = self._made[first + number] if paced else time.monotonic()
                yield Tokens(request.request_id, (number,), repr(made))
        finally:
            self._rows -= paced
        yield Finished(request.request_id, "length", Usage(1, count, 0))


class OneByOne(Stream[TaskMessage]):
    """A home's stream on which each event travels by itself."""

    async def send(self, message: TaskMessage) -> None:
        """A batch of many as many batches."""
        if isinstance(message, Batch):
            for event in message.events[:-1]:
                await super().send(Batch((event,)))
            message = Batch(message.events[-1:], message.gone, message.pulls)
        await super().send(message)


async def main(frame: str) -> None:
    """Print the address, and serve until stdin ends."""
    boot = time.time_ns().to_bytes(8, "big")
    async with open_transport(new_identity(), ["127.0.0.1:0"], CLUSTER, boot=boot) as transport, trio.open_nursery() as nursery:
        clockwork = Clockwork()
        head = Head(clockwork, nursery, report=lambda *_: None)

        async def serve_one_by_one(stream: Stream[TaskMessage]) -> None:
            stream.__class__ = OneByOne  # the transport made it, and goes on holding it
            await head.serve(stream)

        transport.serve(TASKS_AT_HEAD, head.serve if frame == "step" else serve_one_by_one)
        transport.serve(SUBMIT, head.serve_submit)
        nursery.start_soon(clockwork.run)
        print("address", transport.addresses[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
