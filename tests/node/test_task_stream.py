"""Tasks between real homes and heads: whatever befalls the streams, an attempt runs once and its client misses nothing."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from inference.requests import Accepted, ChatPrompt, Event, Failed, Refused, Tokens
from node.home_link import CANCEL_SECONDS_MAX, RESTARTED, RUDE, UNKNOWN, UNREACHABLE
from node.records import RankPhase
from node.task_credit import Sent
from node.task_protocol import (
    GRACE_SECONDS,
    GRACE_SECONDS_HEAD,
    HOME_FRAME_BYTES_MAX,
    TASKS_AT_HEAD,
    Batch,
    Resume,
    Submit,
    TaskMessage,
    Try,
    frame_bytes,
)
from node.task_stream import HeadLost
from p2p.memory_transport import PORT, MemoryNetwork, MemoryTransport, open_network
from p2p.stream import Stream
from tests.inference.supervised import running
from tests.node.memory_runner import MemoryDevice
from tests.node.task_bench import HeadNode, HomeNode, Reader, endless_device, open_head, open_home, run_head, run_home
from tests.p2p.transport_lab import CLUSTER, connect, new_identity, open_lab, until_gone

STEADY = 10.0  # a connection that lasted so long is dialled again at once when it is lost


@dataclass
class Pair:
    """A home, a head, and the network between them."""

    network: MemoryNetwork
    head: HeadNode
    home: HomeNode

    def sever(self) -> None:
        self.network.sever(self.home.node_id, self.head.node_id)

    def cut(self) -> None:
        self.network.partition({self.home.node_id}, {self.head.node_id})

    async def settle(self, seconds: float = 20.0) -> None:
        """Wait until nothing is left at either end."""
        with trio.fail_after(seconds):
            while not (self.head.idle and self.home.quiet):  # noqa: ASYNC110 - none of it has an event of its own
                await trio.sleep(0.01)


@asynccontextmanager
async def open_pair(device: MemoryDevice | None = None, *, seed: int = 0) -> AsyncIterator[Pair]:
    async with (
        open_network(seed) as network,
        open_head(network, device or endless_device()) as head,
        open_home(network, head) as home,
    ):
        network.set_latency(0.001)
        await trio.sleep(STEADY)
        yield Pair(network, head, home)
        assert head.transport.counters.failures == home.transport.counters.failures == 0
        assert head.transport.counters.violations == home.transport.counters.violations == 0


async def test_an_answer_from_beginning_to_end(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        reader, submit = Reader(), pair.home.make(max_tokens=10)
        await reader.read(pair.home, pair.head.node_id, submit)
        assert reader.whole(submit)
        await pair.settle()
        assert pair.home.heads.counters.lost == 0


async def test_many_at_once(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        submits = [pair.home.make(str(number), max_tokens=20 + number) for number in range(64)]
        readers = [Reader() for _ in submits]
        async with trio.open_nursery() as nursery:
            for reader, submit in zip(readers, submits, strict=True):
                nursery.start_soon(reader.read, pair.home, pair.head.node_id, submit)
        assert all(reader.whole(submit) for reader, submit in zip(readers, submits, strict=True))
        await pair.settle()


async def test_a_refusal_is_the_only_event(autojump_clock: MockClock) -> None:
    async with open_pair(endless_device(running_max=1)) as pair, trio.open_nursery() as nursery:
        first, second = Reader(), Reader()
        nursery.start_soon(first.read, pair.home, pair.head.node_id, pair.home.make(max_tokens=20))
        await first.reach(1)
        await second.read(pair.home, pair.head.node_id, pair.home.make())
        (refused,) = second.events
        assert isinstance(refused, Refused)
        assert (refused.load.running, refused.load.running_max) == (1, 1)


async def test_what_no_head_would_take_fails_by_itself(autojump_clock: MockClock) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        good, bad = Reader(), Reader()
        submit = pair.home.make(max_tokens=20)
        nursery.start_soon(good.read, pair.home, pair.head.node_id, submit)
        await good.reach(1)
        template = pair.home.make()
        prompt = ChatPrompt(messages=({"role": "user", "content": "\ud800"},))
        broken = msgspec.structs.replace(template, request=msgspec.structs.replace(template.request, prompt=prompt))
        await bad.read(pair.home, pair.head.node_id, broken)
        (failed,) = bad.events
        assert isinstance(failed, Failed)
        assert (failed.code, failed.request_id) == ("invalid_parameter", broken.request.request_id)
        await good.reach(22)
        nursery.start_soon(pair.settle)
    assert good.whole(submit)


async def test_a_large_prompt_goes_on_a_stream_of_its_own(autojump_clock: MockClock) -> None:
    device = endless_device()
    device.settings = msgspec.structs.replace(device.settings, prefill_tokens=1 << 20)
    async with open_pair(device) as pair, trio.open_nursery() as nursery:
        running, large, largest = Reader(), Reader(), Reader()
        submits = [
            pair.home.make(max_tokens=30),
            pair.home.make("y" * (300 << 10), max_tokens=3),
            pair.home.make("z" * (5 << 20), max_tokens=3),
        ]
        for reader, submit in zip((running, large, largest), submits, strict=True):
            nursery.start_soon(reader.read, pair.home, pair.head.node_id, submit)
        assert all(frame_bytes(submit) > HOME_FRAME_BYTES_MAX for submit in submits[1:])
        await largest.reach(1)
        failed = largest.events[0]
        assert isinstance(failed, Failed)  # the context is smaller, and it was the runner that said so
        assert failed.code == "context_length_exceeded"
        await running.reach(32)
        assert running.whole(submits[0])
        assert large.whole(submits[1])
        await pair.settle()


def heavy(submit: Submit) -> Submit:
    """One that is too large for a frame of the task stream, and whose prompt is short."""
    prompt = ChatPrompt(messages=({"role": "user", "content": "hello", "note": "x" * (1 << 20)},))
    return msgspec.structs.replace(submit, request=msgspec.structs.replace(submit.request, prompt=prompt))


async def test_over_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes and sockets: answers whole, a large prompt, a place given back, a break without a second run."""
    # In real time, on a machine that may be busy: what the break needs is not to decide.
    monkeypatch.setattr("node.home_link.GRACE_SECONDS", 30.0)
    monkeypatch.setattr("node.head_task.GRACE_SECONDS_HEAD", 30.0)
    boot = 1 << 40
    async with (
        running(tmp_path, answer_tokens=None, stop_one_in=0, step_seconds=0.002) as supervisor,
        open_lab("libp2p") as lab,
        run_head(lab.node(), supervisor) as head,
        run_home(lab.node(boot=boot.to_bytes(8, "big")), head, boot=boot) as home,
        trio.open_nursery() as nursery,
    ):
        submits = [home.make(str(number), max_tokens=200) for number in range(16)]
        submits += [heavy(home.make(max_tokens=100)), home.make(max_tokens=100, window=1000)]
        readers = [Reader() for _ in submits]
        leaver = Reader()
        for reader, submit in zip(readers, submits, strict=True):
            nursery.start_soon(reader.read, home, head.node_id, submit)
        nursery.start_soon(leaver.read, home, head.node_id, home.make(max_tokens=10_000))
        await readers[0].reach(50)
        leaver.scope.cancel()
        await leaver.end()
        await home.transport.drop(head.node_id)
        for reader, submit in zip(readers, submits, strict=True):
            await reader.end()
            assert reader.whole(submit)
        starts = head.executor.starts
        assert len(starts) == len(set(starts)) == 19
        while not (head.idle and home.quiet):  # noqa: ASYNC110 - none of it has an event of its own
            await trio.sleep(0.001)


# Leaving.


@pytest.mark.parametrize("count", [0, 1, 2, 4])
async def test_who_leaves_gives_the_place_back_in_each_phase(autojump_clock: MockClock, count: int) -> None:
    async with open_pair(endless_device(running_max=1)) as pair, trio.open_nursery() as nursery:
        reader = Reader()
        nursery.start_soon(reader.read, pair.home, pair.head.node_id, pair.home.make(max_tokens=1000))
        await reader.reach(count)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        reader.scope.cancel()
        await reader.end()
        assert reader.ended_at - began <= 2 * pair.head.device.step_seconds
        assert pair.head.core.idle  # it was really free when the block was left
        await pair.settle(0.1)
        submit = pair.home.make(max_tokens=2)
        another = Reader()
        await another.read(pair.home, pair.head.node_id, submit)
        assert another.whole(submit)


async def test_leaving_ends_an_iteration_that_waits(autojump_clock: MockClock) -> None:
    """As with a supervisor's: the block may be left by another trio task than the reader."""
    async with open_pair() as pair, trio.open_nursery() as nursery:
        ended = trio.Event()
        async with pair.home.heads.submit(pair.head.node_id, pair.home.make(max_tokens=1000)) as events:

            async def read() -> None:
                async for _ in events:
                    pass
                ended.set()

            nursery.start_soon(read)
            await trio.sleep(5)
        with trio.fail_after(1):
            await ended.wait()


async def test_leaving_is_bounded_whatever_the_head_does(autojump_clock: MockClock) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        reader = Reader()
        nursery.start_soon(reader.read, pair.home, pair.head.node_id, pair.home.make(max_tokens=1000))
        await reader.reach(3)
        pair.cut()
        began = trio.current_time()
        reader.scope.cancel()
        await trio.sleep(2 * CANCEL_SECONDS_MAX)
        assert reader.ended_at - began == pytest.approx(CANCEL_SECONDS_MAX)
        assert pair.home.quiet
        pair.network.mend()
        await pair.settle()


async def test_two_hundred_requests_that_leave_at_random_leave_nothing_behind(autojump_clock: MockClock) -> None:
    """C8 (router PR#215)."""
    chance = random.Random(8)
    async with open_pair(endless_device(running_max=64, step_seconds=0.05)) as pair:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                reader, tokens = Reader(), chance.randint(1, 60)
                nursery.start_soon(reader.read, pair.home, pair.head.node_id, pair.home.make(str(number), max_tokens=tokens))
                reader.scope.deadline = trio.current_time() + chance.choice([0.0, 0.001, 0.003, chance.uniform(0, 4)])
                await trio.sleep(chance.choice([0.0, 0.02]))
        began = trio.current_time()
        await pair.settle()
        assert trio.current_time() - began < 3.0
        phases = [phase for phase in pair.head.phases if phase is not RankPhase.RUNNING]
        assert len(phases) == pair.head.phases.count(RankPhase.RUNNING) == pair.head.ended


# Streams that break.

Phase = Callable[[Pair, Reader], Awaitable[None]]


async def accepted(_pair: Pair, reader: Reader) -> None:
    await reader.reach(1)


async def unheard(pair: Pair, _reader: Reader) -> None:
    """The head has answered, and the home has not heard of it."""
    await pair.head.until(lambda: bool(pair.head.answered))


async def midway(_pair: Pair, reader: Reader) -> None:
    await reader.reach(12)


async def ended(pair: Pair, _reader: Reader) -> None:
    """The end is on its way."""
    await pair.head.until(lambda: pair.head.ended > 0)


@pytest.mark.parametrize("phase", [accepted, unheard, midway, ended], ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("times", [1, 3])
async def test_a_stream_that_breaks_is_taken_up_again_with_no_second_run(
    autojump_clock: MockClock, phase: Phase, times: int
) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        reader, submit = Reader(), pair.home.make(max_tokens=20)
        nursery.start_soon(reader.read, pair.home, pair.head.node_id, submit)
        await phase(pair, reader)
        for _ in range(times):
            pair.sever()
            await trio.sleep(STEADY if times > 1 else 1.0)
        await reader.end()
        assert reader.whole(submit)
        assert pair.head.executor.starts == [submit.request.request_id]
        await pair.settle()
        assert pair.home.heads.counters.lost == 0


async def test_a_submission_that_did_not_arrive_is_lost_and_never_runs(autojump_clock: MockClock) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        warm = Reader()
        await warm.read(pair.home, pair.head.node_id, pair.home.make())
        reader, submit = Reader(), pair.home.make(max_tokens=20)
        nursery.start_soon(reader.read, pair.home, pair.head.node_id, submit)
        await wait_all_tasks_blocked()  # it is on its way
        pair.sever()
        await trio.sleep(GRACE_SECONDS)
        assert str(reader.error) == UNKNOWN
        assert submit.request.request_id not in pair.head.executor.starts
        await pair.settle()


async def test_without_a_way_to_the_head_an_attempt_is_lost_after_the_grace(autojump_clock: MockClock) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        reader = Reader()
        nursery.start_soon(reader.read, pair.home, pair.head.node_id, pair.home.make(max_tokens=1000))
        await reader.reach(5)
        pair.cut()
        pair.sever()
        began = trio.current_time()
        await trio.sleep(GRACE_SECONDS + 0.01)
        assert str(reader.error) == UNREACHABLE
        assert reader.ended_at - began == pytest.approx(GRACE_SECONDS)
        await trio.sleep(GRACE_SECONDS_HEAD - GRACE_SECONDS + 2 * pair.head.device.step_seconds)
        assert pair.head.core.idle  # and its engine has stopped
        assert pair.head.phases == [RankPhase.RUNNING, RankPhase.ABORTED]
        assert pair.home.quiet


async def test_an_attempt_at_a_head_that_is_not_connected_is_lost_after_the_grace(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        reader = Reader()
        began = trio.current_time()
        await reader.read(pair.home, new_identity().node_id, pair.home.make())
        assert str(reader.error) == UNREACHABLE
        assert trio.current_time() - began == pytest.approx(GRACE_SECONDS)
        assert reader.events == []
        await trio.sleep(1)
        assert pair.home.quiet


async def test_an_attempt_waits_for_a_head_that_is_just_being_dialled_again(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.sever()
        reader, submit = Reader(), pair.home.make()
        await reader.read(pair.home, pair.head.node_id, submit)
        assert reader.whole(submit)


async def test_what_came_before_the_loss_is_read_before_it_is_told(autojump_clock: MockClock) -> None:
    async with open_pair() as pair, pair.home.heads.submit(pair.head.node_id, pair.home.make(max_tokens=1000)) as events:
        await trio.sleep(10)
        pair.cut()
        pair.sever()
        await trio.sleep(GRACE_SECONDS * 2)
        heard = []
        with pytest.raises(HeadLost):  # noqa: PT012 - after those that came
            while True:
                heard.append(await anext(events))
        assert len(heard) > 8


async def test_a_new_boot_of_the_head_has_lost_its_attempts_at_once(autojump_clock: MockClock) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        network, home, head = pair.network, pair.home, pair.head
        reader, waiting = Reader(), Reader()
        nursery.start_soon(reader.read, home, head.node_id, home.make(max_tokens=1000))
        await reader.reach(5)
        assert isinstance(head.transport, MemoryTransport)
        head.transport.close()  # this boot is gone from the network
        place = head.transport.addresses[0].split("/")[2]
        del network._nodes[place, PORT]
        await until_gone(home.transport, head.transport)
        await trio.sleep(0.001)  # the stream is seen to have ended too
        async with network.open_transport(head.node_id, CLUSTER, host=place, boot=(2).to_bytes(8, "big")) as again:
            nursery.start_soon(waiting.read, home, head.node_id, home.make())
            while home.node_id not in again.peers:
                await again.wait_past(again.revision)
            began = trio.current_time()
            await reader.end()
            assert str(reader.error) == RESTARTED
            assert reader.ended_at - began < 0.01
            await waiting.end()
            assert str(waiting.error) == UNREACHABLE  # it was sent to neither


async def test_a_head_that_is_frozen_costs_the_grace_and_runs_nothing_later(autojump_clock: MockClock) -> None:
    """The connection is there, and nobody answers: what it was sent meanwhile is taken back."""
    async with open_pair() as pair, trio.open_nursery() as nursery:
        pair.cut()
        reader, submit = Reader(), pair.home.make(max_tokens=1000)
        nursery.start_soon(reader.read, pair.home, pair.head.node_id, submit)
        await trio.sleep(GRACE_SECONDS + 0.01)
        assert str(reader.error) == UNREACHABLE
        pair.network.mend()
        await trio.sleep(10)
        await pair.settle()
        assert pair.head.phases in ([], [RankPhase.RUNNING, RankPhase.ABORTED])


async def test_random_breaks_lose_no_event_and_run_nothing_twice(autojump_clock: MockClock) -> None:
    """Whatever attempt got through gave the whole answer, and the others were lost: no engine started twice for one."""
    for seed in range(8):
        chance = random.Random(seed)
        async with open_pair(endless_device(step_seconds=0.05), seed=seed) as pair, trio.open_nursery() as nursery:
            pair.network.set_latency(0.005, jitter=0.02)
            submits = [pair.home.make(str(number), max_tokens=chance.randint(1, 400)) for number in range(20)]
            readers = [Reader() for _ in submits]
            for reader, submit in zip(readers, submits, strict=True):
                nursery.start_soon(reader.read, pair.home, pair.head.node_id, submit)
            for _ in range(6):
                await trio.sleep(chance.uniform(0.01, 8.0))
                pair.sever()
            for reader in readers:
                await reader.end()
            for reader, submit in zip(readers, submits, strict=True):
                assert reader.error is not None or reader.whole(submit)
            starts = pair.head.executor.starts
            assert len(starts) == len(set(starts))
            await pair.settle()
            assert sum(reader.error is None for reader in readers) >= 10


# Slow clients.


async def test_a_client_that_reads_nothing_for_a_minute_holds_up_nobody_and_loses_nothing(autojump_clock: MockClock) -> None:
    async with open_pair(endless_device(step_seconds=0.01)) as pair, trio.open_nursery() as nursery:
        slow, others = pair.home.make(max_tokens=8000), [pair.home.make(str(n), max_tokens=3000) for n in range(3)]
        readers = [Reader() for _ in others]
        async with pair.home.heads.submit(pair.head.node_id, slow) as events:
            for reader, submit in zip(readers, others, strict=True):
                nursery.start_soon(reader.read, pair.home, pair.head.node_id, submit)
            await trio.sleep(60)
            assert all(reader.whole(submit) for reader, submit in zip(readers, others, strict=True))
            (task,) = pair.head.head.tasks
            assert task.outlet.kept_bytes <= 40_000
            late = Reader()
            heard: list[Event] = [event async for event in events]
        late.events = heard
        assert late.whole(slow)
        assert len(pair.head.executor.starts) == 4
        await pair.settle()


async def test_a_slow_client_outlives_breaks(autojump_clock: MockClock) -> None:
    async with open_pair(endless_device(step_seconds=0.01)) as pair:
        submit, reader = pair.home.make(max_tokens=3000), Reader()
        async with pair.home.heads.submit(pair.head.node_id, submit) as events:
            async for event in events:
                reader.events.append(event)
                if len(reader.events) % 150 == 0:
                    pair.sever()
                    await trio.sleep(STEADY)
        assert reader.whole(submit)
        assert len(pair.head.executor.starts) == 1


# Attempts.


async def test_a_higher_attempt_at_the_same_head_follows_the_lower_one(autojump_clock: MockClock) -> None:
    async with open_pair(endless_device(running_max=1)) as pair, trio.open_nursery() as nursery:
        first, second = Reader(), Reader()
        nursery.start_soon(first.read, pair.home, pair.head.node_id, pair.home.make(number=5, attempt=1, max_tokens=1000))
        await first.reach(4)
        submit = pair.home.make(number=5, attempt=2, max_tokens=4)
        nursery.start_soon(second.read, pair.home, pair.head.node_id, submit)
        await trio.sleep(20)
        assert str(first.error) == UNKNOWN
        assert second.whole(submit)
        await pair.settle()


async def test_an_attempt_that_came_before_is_not_run_again(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        submit = pair.home.make(number=5)
        first, second = Reader(), Reader()
        await first.read(pair.home, pair.head.node_id, submit)
        await second.read(pair.home, pair.head.node_id, submit)
        assert first.whole(submit)
        assert str(second.error) == UNKNOWN
        assert len(pair.head.executor.starts) == 1


# Heads that break the rules: tests speak for them.

Act = Callable[[Stream[TaskMessage]], Awaitable[None]]


@asynccontextmanager
async def open_lone_head() -> AsyncIterator[tuple[HomeNode, MemoryTransport]]:
    """A home, connected to a node that serves nothing yet."""
    async with (
        open_network() as network,
        open_home(network) as home,
        network.open_transport(new_identity().node_id, CLUSTER) as transport,
    ):
        await connect(home.transport, transport)
        yield home, transport


@asynccontextmanager
async def open_rude_head(act: Act) -> AsyncIterator[tuple[HomeNode, MemoryTransport]]:
    """A home, and a head that does what the test says after Resume."""

    async def serve(stream: Stream[TaskMessage]) -> None:
        assert isinstance(await stream.receive(), Resume)
        await stream.send(Batch())
        await act(stream)
        async for _ in stream:
            pass

    async with open_lone_head() as (home, transport):
        transport.serve(TASKS_AT_HEAD, serve)
        yield home, transport


@pytest.mark.parametrize(
    "events",
    [
        [(1, "accepted")],
        [(0, "accepted"), (0, "accepted")],
        [(0, "accepted"), (2, "token")],
        [(0, "failed"), (1, "token")],
        [(number, "token") for number in range(2000)],
    ],
    ids=["a gap", "a repetition", "a later gap", "after the end", "without credit"],
)
async def test_a_head_that_breaks_the_rules_loses_its_attempts(
    autojump_clock: MockClock, events: list[tuple[int, str]]
) -> None:
    async def act(stream: Stream[TaskMessage]) -> None:
        submit = await stream.receive()
        request_id = submit.request.request_id  # type: ignore[union-attr]  # it is a Submit
        kinds: dict[str, Event] = {
            "accepted": Accepted(request_id, (1,)),
            "token": Tokens(request_id, (1,), "x"),
            "failed": Failed(request_id, "engine_error", "no"),
        }
        await stream.send(Batch(tuple(Sent(index, kinds[kind]) for index, kind in events)))

    async with open_rude_head(act) as (home, head), trio.open_nursery() as nursery:
        first = Reader()
        nursery.start_soon(first.read, home, head.node_id, home.make())
        await trio.sleep(1)
        if events[0][1] == "failed":
            assert [type(event) for event in first.events] == [Failed]  # the end was heard; what follows it is late
        else:
            assert str(first.error) == RUDE
            assert home.heads.counters.violations == 1
        assert home.quiet


async def test_events_of_what_nobody_waits_for_are_ignored(autojump_clock: MockClock) -> None:
    async def act(stream: Stream[TaskMessage]) -> None:
        submit = await stream.receive()
        request_id = submit.request.request_id  # type: ignore[union-attr]  # it is a Submit
        await stream.send(Batch((Sent(3, Tokens("somebody", (1,), "x")),), (Try(77, 1),)))
        await stream.send(Batch((Sent(0, Failed(request_id, "engine_error", "no")),)))

    async with open_rude_head(act) as (home, head):
        reader = Reader()
        await reader.read(home, head.node_id, home.make())
        assert [type(event) for event in reader.events] == [Failed]
        assert home.heads.counters.late == 1


async def test_a_head_that_serves_no_tasks_costs_the_grace_and_no_more(autojump_clock: MockClock) -> None:
    async with open_lone_head() as (home, head):
        reader = Reader()
        began = trio.current_time()
        await reader.read(home, head.node_id, home.make())
        assert str(reader.error) == UNREACHABLE
        assert trio.current_time() - began == pytest.approx(GRACE_SECONDS)
        tries = head.counters.streams_refused
        assert tries < 10
        await trio.sleep(100)
        assert head.counters.streams_refused <= tries + 1  # nobody needs it any more
        assert home.heads._links == {}


async def test_a_head_that_ends_each_stream_is_given_up(autojump_clock: MockClock) -> None:
    """Opened and ended without end, the stream never counts as up."""
    opened = 0

    async def serve(stream: Stream[TaskMessage]) -> None:
        nonlocal opened
        opened += 1
        await stream.receive()

    async with open_lone_head() as (home, head):
        head.serve(TASKS_AT_HEAD, serve)
        reader = Reader()
        await reader.read(home, head.node_id, home.make())
        assert str(reader.error) == UNREACHABLE
        assert 2 <= opened < 10


# Lines and pulls.


async def test_levels_are_told_again_after_a_break_and_pulls_come_back(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        home, head = pair.home, pair.head
        home.heads.waiting(head.node_id, "aa", 0)  # nothing to tell, and nobody is told
        assert home.heads._links == {}
        home.heads.waiting(head.node_id, "aa", 2, 1.5)
        home.heads.waiting(head.node_id, "bb", 1)
        await trio.sleep(STEADY)
        assert {level[1]: level[2] for level in head.levels} == {"aa": 2, "bb": 1}
        home.heads.waiting(head.node_id, "bb", 0)
        assert head.head.pull(home.node_id, 7, 3)
        await trio.sleep(1)
        assert home.pulls == [(head.node_id, 7, 3)]
        told = len(head.levels)
        pair.sever()
        await trio.sleep(1)
        again = [level for level in head.levels[told:] if level[2]]
        assert [level[1:3] for level in again] == [("aa", 2)]
        assert again[0][3] == pytest.approx(STEADY + 1 + 1.5, abs=1.0)  # how long it has waited by now


async def test_levels_are_told_when_a_head_comes_back_after_long(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.home.heads.waiting(pair.head.node_id, "aa", 2)
        await trio.sleep(STEADY)
        pair.cut()
        pair.sever()
        await trio.sleep(60)
        assert pair.head.levels[-1][1:3] == ("aa", 0)
        pair.network.mend()
        await trio.sleep(20)
        assert pair.head.levels[-1][1:3] == ("aa", 2)


async def test_a_stream_is_kept_while_the_head_is_there_and_forgotten_with_it(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        for _ in range(3):
            await Reader().read(pair.home, pair.head.node_id, pair.home.make())
            await trio.sleep(100)
        assert len(pair.home.heads._links) == 1
        assert pair.head.head.counters.resumed == 0
        pair.home.dialler.forget(pair.head.node_id)
        pair.sever()
        await trio.sleep(1)
        assert pair.home.heads._links == {}
