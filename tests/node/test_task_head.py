"""What a head makes of anything that a home may send: tests speak for the home, message by message."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import trio
from trio.testing import MockClock

from inference.requests import Accepted, Event, Failed, Finished, Prefilled, Refused, Tokens
from node.head_home import UNANSWERED_PER_HOME_MAX
from node.head_task import LATE_SECONDS
from node.records import RankPhase, TaskId
from node.task_head import GREETING_SECONDS, HOMES_MAX, SUBMIT_SECONDS, SUBMITS_PER_HOME_MAX
from node.task_protocol import (
    GRACE_SECONDS_HEAD,
    SUBMIT,
    TASKS_AT_HOME,
    TASKS_MAX,
    Batch,
    Cancel,
    Credit,
    Held,
    Pull,
    Resume,
    Taken,
    TaskMessage,
    Try,
    Waiting,
)
from p2p.memory_transport import MemoryNetwork, open_network
from p2p.stream import Stream, StreamBroken, StreamProtocol
from p2p.sync_wire import node16
from p2p.transport import Transport
from p2p.wire import FrameCodec
from tests.node.memory_runner import MemoryDevice
from tests.node.task_bench import HeadNode, endless_device, make_submit, open_head
from tests.p2p.transport_lab import CLUSTER, connect, new_identity

BOOT = 99
RAW = StreamProtocol[object]("task/1", FrameCodec(object, 1 << 20))


def task(number: int = 0) -> TaskId:
    return TaskId(BOOT, number)


class Said:
    """A home's end of a stream, with all that it has heard."""

    def __init__(self, stream: Stream[TaskMessage]) -> None:
        self.stream = stream
        self.events: list[tuple[int, Event]] = []
        self.gone: list[Try] = []
        self.pulls: list[Pull] = []
        self.frames = 0

    async def hear(self) -> Batch:
        batch = await self.stream.receive()
        assert isinstance(batch, Batch)
        self.frames += 1
        self.events += [(sent.index, sent.event) for sent in batch.events]
        self.gone += batch.gone
        self.pulls += batch.pulls
        return batch

    async def hear_for(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            while True:
                await self.hear()

    async def hear_events(self, count: int) -> list[Event]:
        """Hear until so many events have come, and take them as its client would."""
        while len(self.events) < count:
            await self.hear()
        return [event for _, event in self.events]

    async def say(self, *messages: TaskMessage) -> None:
        for message in messages:
            await self.stream.send(message)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for _, event in self.events]


@asynccontextmanager
async def open_peer(network: MemoryNetwork, head: HeadNode, boot: int = BOOT) -> AsyncIterator[Transport]:
    async with network.open_transport(new_identity().node_id, CLUSTER, boot=boot.to_bytes(8, "big")) as transport:
        await connect(transport, head.transport)
        yield transport


@asynccontextmanager
async def open_said(peer: Transport, head: HeadNode, *held: Held) -> AsyncIterator[Said]:
    async with await peer.open(head.node_id, TASKS_AT_HOME) as stream:
        said = Said(stream)
        await said.say(Resume(held))
        await said.hear()
        yield said


@asynccontextmanager
async def open_bench(device: MemoryDevice | None = None) -> AsyncIterator[tuple[MemoryNetwork, HeadNode, Transport]]:
    """A network, a head on it, and a peer that is connected to it."""
    async with (
        open_network() as network,
        open_head(network, device or endless_device()) as head,
        open_peer(network, head) as peer,
    ):
        network.set_latency(0.001)
        yield network, head, peer


async def until_idle(head: HeadNode, seconds: float = 20.0) -> float:
    """Wait until nothing is left at a head; how long that took."""
    began = trio.current_time()
    with trio.fail_after(seconds):
        while not head.idle:  # noqa: ASYNC110 - several things, none with an event of its own
            await trio.sleep(0.01)
    return trio.current_time() - began


async def test_a_submission_is_answered_event_by_event(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(make_submit(task(), max_tokens=3))
        events = await said.hear_events(6)
        assert said.kinds == ["Accepted", "Prefilled", "Tokens", "Tokens", "Tokens", "Finished"]
        assert [index for index, _ in said.events] == list(range(6))
        accepted = events[0]
        assert isinstance(accepted, Accepted)
        assert accepted.prompt_ids
        assert head.phases == [RankPhase.RUNNING, RankPhase.OK]
        assert head.reports[0][:3] == (task(), 1, 0)
        assert list(head.head.tasks)  # kept until it is taken
        await said.say(Credit((Taken(0, 1, 6),)))
        await until_idle(head)
        assert (head.answered, head.ended, head.head.running) == ([True], 1, 0)


async def test_what_one_step_makes_for_one_home_is_one_frame(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(*(make_submit(task(number), text=str(number), max_tokens=100) for number in range(20)))
        await said.hear_events(60)
        before = said.frames, len(said.events)
        await said.hear_for(10.0)
        assert len(said.events) - before[1] == 10 * 20
        assert said.frames - before[0] == 10


async def test_a_submission_that_fits_nothing_here_is_refused(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(
            msgspec.structs.replace(make_submit(task(0)), instance_id=8),
            msgspec.structs.replace(make_submit(task(1)), model_hash="bb"),
            msgspec.structs.replace(make_submit(task(2)), epoch=4),
        )
        events = await said.hear_events(3)
        assert all(isinstance(event, Refused) and event.load.running_max == 0 for event in events)
        assert head.executor.starts == []
        assert head.head.counters.refused == 3
        await until_idle(head)


async def test_a_refusal_tells_the_true_load(autojump_clock: MockClock) -> None:
    async with open_bench(endless_device(running_max=2)) as (_, head, peer), open_said(peer, head) as said:
        await said.say(*(make_submit(task(number), max_tokens=50) for number in range(3)))
        await said.hear_for(2.0)
        (refused,) = [event for _, event in said.events if isinstance(event, Refused)]
        assert (refused.load.running, refused.load.running_max) == (2, 2)
        assert head.answered == [True, True, False]
        assert head.phases == [RankPhase.RUNNING] * 2  # a refused attempt has no rank


async def test_a_request_that_is_at_fault_fails_alone(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(make_submit(task(0), max_tokens=1 << 20), make_submit(task(1), max_tokens=2))
        await said.hear_for(5.0)
        failed = [event for _, event in said.events if isinstance(event, Failed)]
        assert [(event.code, event.request_id) for event in failed] == [("context_length_exceeded", f"{task(0).text}.1")]
        assert said.kinds.count("Finished") == 1


@pytest.mark.parametrize("after", [0, 1, 2, 4])
async def test_a_cancel_in_each_phase_gives_the_place_back(autojump_clock: MockClock, after: int) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(make_submit(task(), max_tokens=1000))
        await said.hear_events(after)
        await said.say(Cancel(0, 1))
        await said.hear_for(2.0)
        assert said.gone == [Try(0, 1)]
        assert head.idle
        assert head.phases in ([], [RankPhase.RUNNING, RankPhase.ABORTED])
        assert head.ended == len(head.phases) // 2
        heard = len(said.events)
        await said.hear_for(5.0)
        assert len(said.events) == heard


async def test_a_cancel_that_overtakes_its_submission_keeps_it_from_running(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(Cancel(0, 1), make_submit(task()))
        await said.hear_for(3.0)
        assert said.gone == [Try(0, 1)] * 2
        assert head.executor.starts == []
        assert head.head.counters.repeated == 1


async def test_a_submission_runs_at_most_once(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        submit = make_submit(task(), max_tokens=2)
        await said.say(submit)
        await said.hear_events(5)
        await said.say(Credit((Taken(0, 1, 5),)), submit)
        await said.hear_for(5.0)
        assert said.gone == [Try(0, 1)]
        assert head.executor.starts == [submit.request.request_id]


async def test_a_higher_attempt_begins_after_the_lower_one_has_ended_and_not_the_reverse(autojump_clock: MockClock) -> None:
    async with open_bench(endless_device(running_max=1)) as (_, head, peer), open_said(peer, head) as said:
        await said.say(make_submit(task(), 1, max_tokens=1000))
        await said.hear_events(4)
        await said.say(make_submit(task(), 3, max_tokens=1000))
        await said.hear_for(4.0)
        # There is one place: had the lower one still held it, the higher one would have been refused.
        assert head.answered == [True, True]
        assert said.gone == [Try(0, 1)]
        last = said.events[-1][1]
        assert last.request_id == f"{task().text}.3"
        await said.say(make_submit(task(), 2, max_tokens=1000))
        await said.hear_for(2.0)
        assert said.gone == [Try(0, 1), Try(0, 2)]
        assert [attempt.attempt for attempt in head.head.tasks] == [3]


async def test_many_attempts_of_one_task_at_once_leave_the_last(autojump_clock: MockClock) -> None:
    async with open_bench(endless_device(running_max=1)) as (_, head, peer), open_said(peer, head) as said:
        await said.say(*(make_submit(task(), attempt, max_tokens=1000) for attempt in range(1, 50)))
        await said.hear_for(5.0)
        assert head.head.running == 1
        assert said.events[-1][1].request_id == f"{task().text}.49"
        assert {key.attempt for key in said.gone} == set(range(1, 49))


async def test_the_head_ends_what_its_home_should_have_given_up(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        submit = msgspec.structs.replace(make_submit(task(), max_tokens=1000), seconds_left=10.0)
        began = trio.current_time()
        await said.say(submit)
        while not said.gone:
            await said.hear()
        assert trio.current_time() - began == pytest.approx(10 + LATE_SECONDS, abs=1.5)
        assert head.phases == [RankPhase.RUNNING, RankPhase.ABORTED]
        assert head.idle


async def test_an_answer_that_nobody_takes_is_kept_within_the_window_and_not_for_ever(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        submit = make_submit(task(0), max_tokens=3000)
        await said.say(msgspec.structs.replace(submit, seconds_left=4000.0), make_submit(task(1), text="b", max_tokens=100))
        await said.hear_for(3900.0)
        (slow,) = [task for task in head.head.tasks if task.task_id.number == 0]
        assert slow.outlet.kept_bytes <= 33 << 10
        assert said.kinds.count("Finished") == 1  # the other one's
        assert head.core.idle  # the runner itself is long done
        assert head.head.running <= 1
        await said.hear_for(200.0)
        assert Try(0, 1) in said.gone
        assert head.idle


async def test_all_of_a_merged_answer_gets_through_once_it_is_taken(autojump_clock: MockClock) -> None:
    device = endless_device(step_seconds=0.01)
    async with open_bench(device) as (_, head, peer), open_said(peer, head) as said:
        await said.say(make_submit(task(), max_tokens=5000))
        await trio.sleep(100)  # nothing is taken: the supervisor puts tokens together
        taken = 0
        while "Finished" not in said.kinds:
            await said.hear()
            taken = len(said.events)
            await said.say(Credit((Taken(0, 1, taken),)))
        ids = [token_id for _, event in said.events if isinstance(event, Tokens) for token_id in event.token_ids]
        assert len(ids) == 5000
        assert [index for index, _ in said.events] == list(range(taken))
        assert max(len(event.token_ids) for _, event in said.events if isinstance(event, Tokens)) == 256
        await until_idle(head)


# Streams that break.


async def test_a_home_that_comes_back_goes_on_where_it_was(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer):
        async with open_said(peer, head) as said:
            await said.say(make_submit(task(), max_tokens=20))
            first = await said.hear_events(5)
            said.stream.reset()
        await trio.sleep(GRACE_SECONDS_HEAD - 0.5)
        async with open_said(peer, head, Held(0, 1, 5, 3)) as said:
            rest = await said.hear_events(18)
            assert [index for index, _ in said.events] == list(range(5, 23))
        assert len(head.executor.starts) == 1
        assert head.head.counters.resumed == 1
        tokens = [event for event in [*first, *rest] if isinstance(event, Tokens)]
        assert len(tokens) == 20


async def test_a_home_that_does_not_come_back_loses_what_it_has(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer):
        async with open_said(peer, head) as said:
            await said.say(make_submit(task(0), max_tokens=1000), make_submit(task(1), max_tokens=1000), Waiting("aa", 3))
            await said.hear_events(6)
            said.stream.reset()
        assert 1.0 < await until_idle(head) < GRACE_SECONDS_HEAD + 2 * head.device.step_seconds
        assert head.levels == [(peer.node_id, "aa", 3, 0.0), (peer.node_id, "aa", 0, 0.0)]
        assert head.phases == [RankPhase.RUNNING, RankPhase.RUNNING, RankPhase.ABORTED, RankPhase.ABORTED]
        async with open_said(peer, head, Held(0, 1, 3, 0)) as said:
            assert said.gone == [Try(0, 1)]


async def test_what_a_resume_does_not_name_is_given_up(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer):
        async with open_said(peer, head) as said:
            await said.say(*(make_submit(task(number), max_tokens=1000) for number in range(3)))
            await said.hear_events(9)
            said.stream.reset()
        async with open_said(peer, head, Held(1, 1, 3, 3), Held(2, 2, 0, 0)) as said:
            await said.hear_for(3.0)
            assert [attempt.key for attempt in head.head.tasks] == [Try(1, 1)]
            assert said.gone[0] == Try(2, 2)
            assert head.head.running == 1


async def test_what_was_not_here_at_the_resume_does_not_run_later(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head, Held(0, 1, 0, 0)) as said:
        assert said.gone == [Try(0, 1)]
        async with await peer.open(head.node_id, SUBMIT) as stream:
            await stream.send(make_submit(task()))
            await stream.close_send()
            assert [message async for message in stream] == []
        assert head.executor.starts == []


async def test_a_newer_stream_replaces_one_whose_end_was_not_seen(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as old:
        await old.say(make_submit(task(), max_tokens=1000))
        await old.hear_events(4)
        async with open_said(peer, head, Held(0, 1, 4, 4)) as new:
            await new.hear_events(3)
            with pytest.raises((StreamBroken, trio.EndOfChannel)):  # noqa: PT012 - what was on its way comes first
                while True:
                    await old.stream.receive()
            await new.hear_events(6)
        assert len(head.executor.starts) == 1


async def test_another_boot_of_a_home_ends_what_the_one_before_had(autojump_clock: MockClock) -> None:
    identity = new_identity()
    async with open_network() as network, open_head(network, endless_device()) as head:
        for boot in (5, 6):
            async with network.open_transport(identity.node_id, CLUSTER, boot=boot.to_bytes(8, "big")) as peer:
                await connect(peer, head.transport)
                async with open_said(peer, head) as said:
                    assert [attempt for attempt in head.head.tasks if attempt.task_id.home != boot] == []
                    # The same numbers mean other tasks.
                    await said.say(make_submit(TaskId(boot, 0), max_tokens=1000))
                    await said.hear_events(3)
                    assert {event.request_id for _, event in said.events} == {f"{TaskId(boot, 0).text}.1"}
        await until_idle(head)


# Peers that may send anything at all.


def garbage() -> list[object]:
    chance = random.Random(3)
    submit = make_submit(task())
    return [
        None,
        42,
        "x" * 100_000,
        chance.randbytes(1000),
        [],
        [0],
        [9, 1, 2],
        {"a": 1},
        [[[[]]]],
        [1, 2, 3],
        Batch(),
        msgspec.structs.replace(submit, attempt=-1),
        msgspec.structs.replace(submit, seconds_left=float("nan")),
        msgspec.structs.replace(submit, request=msgspec.structs.replace(submit.request, max_tokens=-5)),
        msgspec.structs.replace(submit, request=msgspec.structs.replace(submit.request, request_id="somebody-else's")),
        make_submit(TaskId(BOOT + 1, 0)),
        Credit((Taken(1, 1, 5),)),
        Resume(),
        Waiting("aa", 1, -1.0),
        Cancel(1 << 60, 1),
    ]


@pytest.mark.parametrize("what", garbage(), ids=lambda what: repr(what)[:40])
async def test_garbage_ends_its_own_stream_and_meets_nobody_else(autojump_clock: MockClock, what: object) -> None:
    async with open_bench() as (network, head, peer), open_peer(network, head, boot=7) as rude, open_said(peer, head) as said:
        await said.say(make_submit(task(1), max_tokens=20))
        await said.hear_events(3)
        async with await rude.open(head.node_id, RAW) as stream:
            await stream.send(Resume())
            await stream.receive()
            await stream.send(what)
            with suppress(StreamBroken, trio.EndOfChannel), trio.move_on_after(1.0) as goes_on:
                while True:
                    await stream.receive()
        # Credit for what does not run here may come late from anybody.
        assert goes_on.cancelled_caught == isinstance(what, Credit)
        assert head.transport.counters.failures == 0
        await said.hear_events(23)
        assert isinstance(said.events[-1][1], Finished)
        assert head.transport.counters.violations == (0 if isinstance(what, Credit) else 1)


@pytest.mark.parametrize("first", [Cancel(0, 1), make_submit(task()), Credit(()), [7], None], ids=repr)
async def test_a_stream_begins_with_a_resume(autojump_clock: MockClock, first: object) -> None:
    async with open_bench() as (_, head, peer):
        async with await peer.open(head.node_id, RAW) as stream:
            await stream.send(first)
            with pytest.raises(StreamBroken):
                await stream.receive()
        assert head.transport.counters.violations == 1
        assert head.executor.starts == []


async def test_who_opens_a_stream_and_says_nothing_is_given_up(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), await peer.open(head.node_id, TASKS_AT_HOME) as stream:
        began = trio.current_time()
        with pytest.raises(StreamBroken):
            await stream.receive()
        assert trio.current_time() - began == pytest.approx(GREETING_SECONDS, abs=0.1)


async def test_credit_for_what_was_not_said_ends_the_stream(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(make_submit(task(), max_tokens=1000))
        await said.hear_events(3)
        await said.say(Credit((Taken(0, 1, 500),)))
        with pytest.raises(StreamBroken):  # noqa: PT012 - what goes before must not raise either
            while True:
                await said.hear()
        await until_idle(head)


async def test_nobody_reaches_the_tasks_of_another_home(autojump_clock: MockClock) -> None:
    async with (
        open_bench() as (network, head, peer),
        open_peer(network, head, boot=7) as other,
        open_said(peer, head) as said,
        open_said(other, head, Held(0, 1, 0, 0)) as theirs,
    ):
        await said.say(make_submit(task(), max_tokens=20))
        await said.hear_events(3)
        await theirs.say(Cancel(0, 1), Credit((Taken(0, 1, 3),)), make_submit(TaskId(7, 0), 2, max_tokens=5))
        await theirs.hear_events(3)
        await said.hear_events(23)
        assert isinstance(said.events[-1][1], Finished)
        assert said.gone == []


async def test_who_claims_the_boot_of_another_is_not_served(autojump_clock: MockClock) -> None:
    async with (
        open_bench() as (network, head, peer),
        open_peer(network, head, boot=BOOT) as liar,
        open_said(peer, head) as said,
    ):
        with pytest.raises(StreamBroken):
            async with open_said(liar, head):
                pass
        assert head.transport.counters.violations == 1
        await said.say(make_submit(task(), max_tokens=2))
        await said.hear_events(5)


async def test_who_came_first_with_the_boot_of_another_makes_way_for_it(autojump_clock: MockClock) -> None:
    async with (
        open_bench() as (network, head, peer),
        open_peer(network, head, boot=BOOT) as liar,
        open_said(liar, head) as lies,
    ):
        await lies.say(make_submit(task(), max_tokens=1000))
        await lies.hear_events(3)
        head.boots[BOOT] = node16(peer.node_id)
        async with open_said(peer, head) as said:
            await said.say(make_submit(task(), max_tokens=2))
            await said.hear_events(5)
        with pytest.raises((StreamBroken, trio.EndOfChannel)):  # noqa: PT012 - what was on its way comes first
            while True:
                await lies.hear()


async def test_a_flood_of_submissions_is_refused_and_held_back(autojump_clock: MockClock) -> None:
    """A home that sends without end and reads nothing: it waits, and others are served meanwhile."""
    device = endless_device(running_max=2)
    async with open_bench(device) as (network, head, peer), open_peer(network, head, boot=7) as rude:
        sent = 0

        async def flood(stream: Stream[TaskMessage]) -> None:
            nonlocal sent
            with suppress(StreamBroken):
                while True:
                    await stream.send(make_submit(TaskId(7, sent), max_tokens=1000))
                    sent += 1

        async with await rude.open(head.node_id, TASKS_AT_HOME) as stream, trio.open_nursery() as nursery:
            await stream.send(Resume())
            nursery.start_soon(flood, stream)
            await trio.sleep(30)
            assert sent < 100_000
            (home,) = head.head._homes.values()
            assert home.count <= TASKS_MAX  # what was refused and not taken counts
            assert home._unanswered.count <= UNANSWERED_PER_HOME_MAX
            assert head.transport.counters.failures == 0
            nursery.cancel_scope.cancel()
        async with open_said(peer, head) as said:
            await trio.sleep(GRACE_SECONDS_HEAD + 2)
            await said.say(make_submit(task(), max_tokens=2))
            await said.hear_events(5)
            await said.say(Credit((Taken(0, 1, 5),)))
        await until_idle(head)


async def test_a_flood_of_cancels_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    """Of a home that reads the replies."""
    count = 20_000
    async with open_bench() as (_, head, peer), open_said(peer, head) as said, trio.open_nursery() as nursery:

        async def flood() -> None:
            for number in range(count):
                await said.say(Cancel(number, 1))

        nursery.start_soon(flood)
        while len(said.gone) < count:
            await said.hear()
        (home,) = head.head._homes.values()
        assert len(home._outcomes._attempts) <= 4096
        assert head.idle


async def test_too_many_attempts_of_one_home_are_refused(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.head_home.TASKS_MAX", 5)
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(*(make_submit(task(number), max_tokens=100) for number in range(8)))
        await said.hear_for(3.0)
        refused = [event for _, event in said.events if isinstance(event, Refused)]
        assert len(refused) == 3
        assert refused[0].load.running_max == 64
        assert TASKS_MAX >= 2000


async def test_homes_are_forgotten_when_there_are_too_many(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.task_head.HOMES_MAX", 3)
    async with open_bench() as (network, head, peer), open_said(peer, head) as said:
        for boot in range(200, 210):
            async with open_peer(network, head, boot=boot) as other, open_said(other, head):
                pass
            await trio.sleep(0.1)
        assert len(head.head._homes) == len(head.head._by_boot) == 3
        await said.say(make_submit(task(), max_tokens=2))
        await said.hear_events(5)
        assert HOMES_MAX >= 1000


async def test_lines_of_too_many_models_end_the_stream(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        with pytest.raises(StreamBroken):  # noqa: PT012 - what goes before must not raise either
            await said.say(*(Waiting(f"{number:064x}", 1) for number in range(300)))
            while True:
                await said.hear()
        await trio.sleep(1)
        assert sum(count for _, _, count, _ in head.levels) == 256  # and each was taken back
        assert len([level for level in head.levels if level[2] == 0]) == 256


# Large submissions.


async def test_a_large_submission_comes_on_a_stream_of_its_own(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        submit = make_submit(task(), text="y" * 40_000, max_tokens=2)
        async with await peer.open(head.node_id, SUBMIT) as stream:
            await stream.send(submit)
            await stream.close_send()
            assert [message async for message in stream] == []
        await said.hear_for(200.0)
        assert isinstance(said.events[0][1], Accepted)
        assert isinstance(said.events[-1][1], Finished)
        assert any(isinstance(event, Prefilled) for _, event in said.events)


async def submit_alone(peer: Transport, head: HeadNode) -> None:
    async with await peer.open(head.node_id, SUBMIT) as stream:
        await stream.send(make_submit(task()))
        await stream.receive()


async def test_a_large_submission_of_a_home_without_a_stream_is_not_run(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer):
        with pytest.raises(StreamBroken):
            await submit_alone(peer, head)
        async with open_said(peer, head):
            pass
        with pytest.raises(StreamBroken):
            await submit_alone(peer, head)
        assert head.executor.starts == []


async def test_large_submissions_that_never_come_whole_are_few_and_given_up(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said, trio.open_nursery() as nursery:
        broken: list[float] = []
        began = trio.current_time()

        async def stall() -> None:
            async with await peer.open(head.node_id, SUBMIT) as stream:
                with suppress(StreamBroken):
                    await stream.receive()
                broken.append(trio.current_time() - began)

        for _ in range(SUBMITS_PER_HOME_MAX + 3):
            nursery.start_soon(stall)
        await trio.sleep(1)
        assert len(broken) == 3
        await said.say(make_submit(task(), max_tokens=2))
        await said.hear_events(5)
        await trio.sleep(SUBMIT_SECONDS)
        assert len(broken) == SUBMITS_PER_HOME_MAX + 3
        await said.say(Credit((Taken(0, 1, 5),)))
        await until_idle(head)


async def test_prompts_that_no_runner_has_looked_at_are_bounded(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.head_home.PROMPT_BYTES_PER_HOME_MAX", 100_000)
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        with head.device.runners[-1].frozen():
            await said.say(*(make_submit(task(number), text="z" * 30_000) for number in range(5)))
            await said.hear_for(2.0)
            assert said.kinds == ["Refused", "Refused"]
            assert 90_000 < head.head.unanswered.prompt_bytes <= 100_000
        await said.hear_for(400.0)
        assert said.kinds.count("Finished") == 3
        assert head.head.unanswered.prompt_bytes == 0


# What the head says by itself.


async def test_pulls_and_levels(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer):
        assert not head.head.pull(peer.node_id, 7, 1)
        async with open_said(peer, head) as said:
            await said.say(Waiting("aa", 3, 1.5), Waiting("bb", 1), Waiting("aa", 0))
            assert head.head.pull(peer.node_id, 7, 2)
            assert head.head.pull(peer.node_id, 7, 4)
            await said.hear_for(1.0)
            assert said.pulls == [Pull(7, 4)]
            assert [level[1:] for level in head.levels] == [("aa", 3, 1.5), ("bb", 1, 0.0), ("aa", 0, 0.0)]
        await trio.sleep(1)
        assert head.levels[3:] == [(peer.node_id, "bb", 0, 0.0)]
        assert not head.head.pull(peer.node_id, 7, 1)


async def test_a_task_can_be_ended_by_somebody_else(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(make_submit(task(), max_tokens=1000))
        await said.hear_events(4)
        assert not head.head.cancel(TaskId(BOOT, 1))
        assert not head.head.cancel(TaskId(BOOT + 1, 0))
        assert head.head.cancel(task())
        await said.hear_for(2.0)
        assert said.gone == [Try(0, 1)]
        assert head.idle


async def test_a_runner_that_dies_fails_its_tasks(autojump_clock: MockClock) -> None:
    async with open_bench() as (_, head, peer), open_said(peer, head) as said:
        await said.say(make_submit(task(), max_tokens=1000))
        await said.hear_events(4)
        head.device.runners[-1].die(-11)
        await said.hear_for(1.0)
        end = said.events[-1][1]
        assert isinstance(end, Failed)
        assert end.code == "runner_crashed"
        assert head.reports[-1] == (task(), 1, 0, RankPhase.FAILED, "runner_crashed")
