"""A home that passes on what 64 rows of a head elsewhere make: real `Heads` and `Head` in two processes over libp2p."""

import contextlib
import itertools
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psutil
import structlog
import trio
from msgspec import Struct

from inference.requests import Finished, Request, Sampling, TextPrompt, Tokens
from node.records import TaskId
from node.task_protocol import Submit, request_id
from node.task_stream import Heads
from p2p.ids import NodeId
from p2p.libp2p_transport import open_transport
from p2p.stream import Peer
from scripts.benchmarks.figures import PAIRS_MIN, median, p99, report
from scripts.benchmarks.peers_relay_head import EPOCH, FLAT_OUT, INSTANCE, MODEL_HASH, PACED, SLOTS, TOKENS_PER_SECOND
from scripts.benchmarks.transport_peer import CLUSTER, new_identity

PACED_SECONDS = 20
FLAT_OUT_TOKENS = 500  # of each row
P99_MILLISECONDS = 50.0
HEAD = [sys.executable, "-m", "scripts.benchmarks.peers_relay_head"]


class Relayed(Struct):
    """One run: seconds from first to last, how late each token was in milliseconds, and the CPU time of both ends."""

    seconds: float
    late: list[float]
    home_cpu: float
    head_cpu: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return len(self.late) / self.seconds

    @property
    def cost(self) -> str:
        """CPU of both ends, as shares of a core."""
        return f"home {self.home_cpu / self.seconds:.0%}, head {self.head_cpu / self.seconds:.0%} of a core"


class Home(Struct):
    """The asking end: its heads, and the one that it asks."""

    heads: Heads
    boot: int
    head: NodeId
    process: psutil.Process  # the head's
    numbers: Iterator[int]

    async def run(self, how: str, tokens: int) -> Relayed:
        """Have so many tokens made by each row, all rows at once; all must come, each once and in order."""
        late: list[float] = []
        before = self._cpu()
        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            for _ in range(SLOTS):
                nursery.start_soon(self._take, how, tokens, late)
        seconds = time.monotonic() - began
        home, head = (after - earlier for after, earlier in zip(self._cpu(), before, strict=True))
        return Relayed(seconds, late, home, head)

    async def _take(self, how: str, tokens: int, late: list[float]) -> None:
        expected, ended = 0, False
        async with self.heads.submit(self.head, self._submit(how, tokens)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    late.append((time.monotonic() - float(event.text)) * 1e3)
                    if event.token_ids != (expected,):
                        raise RuntimeError(f"token {event.token_ids} came where {expected} should")
                    expected += 1
                ended = isinstance(event, Finished)
        if expected != tokens or not ended:
            raise RuntimeError(f"{expected} of {tokens} tokens came")

    def _submit(self, how: str, tokens: int) -> Submit:
        number = next(self.numbers)
        request = Request(
            request_id=request_id(TaskId(self.boot, number), 1),
            prompt=TextPrompt(how),
            sampling=Sampling(seed=1),
            max_tokens=tokens,
        )
        return Submit(
            number=number,
            attempt=1,
            instance_id=INSTANCE,
            model_hash=MODEL_HASH,
            epoch=EPOCH,
            request=request,
            seconds_left=600.0,
            version=1,
        )

    def _cpu(self) -> tuple[float, float]:
        times = self.process.cpu_times()
        return time.process_time(), times.user + times.system


@contextlib.contextmanager
def running_head(frame: str) -> Iterator[tuple[str, int]]:
    """The other process: its address and its number."""
    with subprocess.Popen([*HEAD, frame], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            lines = (line.split() for line in process.stdout)
            yield next(words[1] for words in lines if words[:1] == ["address"]), process.pid
            process.stdin.close()
            process.wait(10)
        finally:
            process.kill()  # nothing where it has ended


@asynccontextmanager
async def open_home(address: str, pid: int) -> AsyncIterator[Home]:
    """A home that is connected to the head."""
    boot = time.time_ns()
    opening = open_transport(new_identity(), ["127.0.0.1:0"], CLUSTER, boot=boot.to_bytes(8, "big"))
    async with opening as transport, trio.open_nursery() as nursery:
        peer = await transport.dial(address)
        if not isinstance(peer, Peer):
            raise TypeError(str(peer))
        heads = Heads(transport, boot, nursery)
        yield Home(heads, boot, peer.node_id, psutil.Process(pid), itertools.count())
        nursery.cancel_scope.cancel()


async def measure(address: str, pid: int) -> tuple[Relayed, list[Relayed]]:
    """One long paced run, and several as fast as it goes."""
    async with open_home(address, pid) as home:
        await home.run(PACED, TOKENS_PER_SECOND)
        paced = await home.run(PACED, TOKENS_PER_SECOND * PACED_SECONDS)
        return paced, [await home.run(FLAT_OUT, FLAT_OUT_TOKENS) for _ in range(PAIRS_MIN)]


def main() -> None:
    """Print both ways of framing."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    for frame in ("step", "token"):
        with running_head(frame) as (address, pid):
            paced, flat_out = trio.run(measure, address, pid)
        late, text = p99(paced.late, "ms")
        made = f"{SLOTS} streams at {TOKENS_PER_SECOND} tokens/s each, one frame a {frame}"
        measured = f"{paced.rate:.0f} tokens/s, all of them in order, {text}; {paced.cost}"
        if frame == "step":
            wanted = f"whole, at most {P99_MILLISECONDS:.0f} ms from engine to home p99"
            report(f"relay of {made}", measured, wanted, reached=late <= P99_MILLISECONDS)
        else:
            print(f"     {made}: {measured}", flush=True)
        ceiling = median([run.rate for run in flat_out], "tokens/s")
        middle = statistics.median((run.home_cpu + run.head_cpu) / len(run.late) for run in flat_out) * 1e6
        print(f"     ceiling at one frame a {frame}: {ceiling}; {middle:.0f} us of CPU a token, both ends", flush=True)


if __name__ == "__main__":
    main()
