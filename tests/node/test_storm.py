"""Many requests at a node while clients leave and runners die: whatever the order, nothing is lost, doubled or left behind."""

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from inference.requests import Accepted, Failed, Finished, Tokens
from inference.runner.fake_engine import FakeSettings
from node.service import GenerateError, NoRoute, QueueFull
from tests.node.memory_runner import Bench, MemoryDevice, chat, open_bench

TIMEOUT = 40.0
SEATS = 3

seconds = st.integers(0, 120).map(lambda quarter: quarter / 4)
arrivals = st.tuples(seconds, st.integers(1, 12), st.one_of(st.none(), seconds))  # when, how many tokens, when it leaves
deaths = st.lists(seconds, max_size=3)


class Sender:
    """A client, and what it has seen."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.error: GenerateError | None = None
        self.left = False
        self.ended = False

    async def run(self, bench: Bench, when: float, tokens: int, patience: float | None) -> None:
        await trio.sleep(when)
        scope = trio.CancelScope() if patience is None else trio.move_on_after(patience)
        with scope:
            try:
                async with bench.node.generate(None, chat(max_tokens=tokens)) as answer:
                    async for event in answer.events:
                        self.events.append(event)
                self.ended = True
            except GenerateError as error:
                self.error = error
        self.left = scope.cancelled_caught

    def check(self, tokens: int) -> None:
        """Exactly one end, and everything in its place before that."""
        assert self.left + self.ended + (self.error is not None) == 1
        if self.error is not None:
            assert isinstance(self.error, QueueFull | NoRoute)
            assert self.events == []
        ends = [event for event in self.events if isinstance(event, Finished | Failed)]
        assert len(ends) == self.ended
        if self.ended:
            assert self.events[-1] is ends[0]
        accepted = [number for number, event in enumerate(self.events) if isinstance(event, Accepted)]
        assert accepted in ([], [0])
        count = sum(len(event.token_ids) for event in self.events if isinstance(event, Tokens))
        assert count <= tokens
        if self.ended and isinstance(ends[0], Finished):
            assert count == tokens == ends[0].usage.completion_tokens
        elif self.ended:
            assert isinstance(ends[0], Failed)
            assert ends[0].code in {"runner_crashed", "timed_out"}


async def storm(requests: list[tuple[float, int, float | None]], death_times: list[float]) -> None:
    device = MemoryDevice(settings=FakeSettings(answer_tokens=None, stop_one_in=0, running_max=2))
    device.may_resolve.set()
    device.may_load.set()
    senders = [Sender() for _ in requests]
    async with open_bench(device, waiting_max=SEATS, task_seconds=TIMEOUT) as bench:
        bench.node.run_model("m")
        async with trio.open_nursery() as nursery:
            for sender, (when, tokens, patience) in zip(senders, requests, strict=True):
                nursery.start_soon(sender.run, bench, when, tokens, patience)
            for when in death_times:
                nursery.start_soon(die, bench, when)
        assert bench.node.in_flight == 0
        await trio.sleep(60)  # past every restart
        runner = bench.runner()
        assert bench.node.not_ready() is None
        assert runner.core is not None
        assert runner.core.idle
        last = Sender()
        await last.run(bench, 0.0, 1, None)
        assert isinstance(last.events[-1], Finished)
    for sender, (_, tokens, _patience) in zip(senders, requests, strict=True):
        sender.check(tokens)


async def die(bench: Bench, when: float) -> None:
    await trio.sleep(when)
    if bench.device.runners:
        bench.runner().die(-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=10), deaths)
def test_whatever_happens_every_request_ends_once_and_nothing_is_left(
    requests: list[tuple[float, int, float | None]], death_times: list[float]
) -> None:
    trio.run(storm, requests, death_times, clock=MockClock(autojump_threshold=0))
