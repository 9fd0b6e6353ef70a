"""The head's side of tasks over the network: what other homes have run on the instances whose head this node is.

    stream opened ─▶ Resume: the attempts that it names go on, all others of this home are cancelled
    stream ended  ─▶ GRACE_SECONDS_HEAD later, unless there is a new one, everything of this home is cancelled

A home has one stream here; a newer one replaces an older, whose end was perhaps not seen. Whatever breaks the protocol ends its
own stream and meets nobody else.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import trio

from node.head_home import Counters, Home, Unanswered
from node.head_stream import HomeStream
from node.head_task import HeadTask, LocalExecutor
from node.records import RankPhase, TaskId
from node.task_protocol import SUBMIT, TASKS_AT_HEAD, Resume, Submit, TaskMessage, home_boot
from p2p.ids import NodeId
from p2p.stream import Peer, Stream, StreamBroken
from p2p.sync_wire import node16
from p2p.transport import Transport
from p2p.wire import ProtocolViolation

HOMES_MAX = 1024  # remembered
GREETING_SECONDS = 5.0  # for the first message of a stream
SUBMIT_SECONDS = 60.0  # for a large submission to come in
SUBMITS_MAX = 8  # large ones coming in at once
SUBMITS_PER_HOME_MAX = 2


class Instances(Protocol):
    """The instances of this node, for other homes."""

    def instance(self, instance_id: int) -> LocalExecutor | None:
        """One whose head this node is."""


class Head:
    """What this node is to the homes whose attempts it runs."""

    def __init__(
        self,
        instances: Instances,
        nursery: trio.Nursery,
        *,
        report: Callable[[TaskId, int, int, RankPhase, str], None],
        on_waiting: Callable[[NodeId, str, int, float], None] = lambda _home, _model_hash, _count, _seconds: None,
        on_answered: Callable[[HeadTask], None] = lambda _task: None,
        on_ended: Callable[[HeadTask], None] = lambda _task: None,
        on_over: Callable[[HeadTask], None] = lambda _task: None,
        boot_owner: Callable[[int], bytes | None] = lambda _boot: None,
    ) -> None:
        """`report(task, attempt, rank, phase, reason)` publishes how far a rank is. `on_waiting(home, model hash, count,
        seconds)` gets each level of a home's lines, 0 when the home is lost. `on_answered` is told of each attempt that a
        runner has accepted or refused, `on_ended` of each accepted one that gave its place back, `on_over` of each of which
        nothing is kept any more. `boot_owner` gives the
        16 bytes of the node that runs a boot, as far as the replicated state knows: who claims another's is not served.
        When the nursery is about to end, `instances` must have none any more.
        """
        self.counters = Counters()
        self.unanswered = Unanswered()
        self.nursery = nursery
        self.report = report
        self.on_waiting = on_waiting
        self.on_answered = on_answered
        self.on_ended = on_ended
        self.on_over = on_over
        self._instances = instances
        self._boot_owner = boot_owner
        self._homes: dict[NodeId, Home] = {}
        self._by_boot: dict[int, Home] = {}
        self._large = 0

    def serve_on(self, transport: Transport) -> None:
        """Serve homes; call it before the first `await` after the transport was opened."""
        transport.serve(TASKS_AT_HEAD, self.serve)
        transport.serve(SUBMIT, self.serve_submit)

    def instance(self, instance_id: int) -> LocalExecutor | None:
        """One whose head this node is."""
        return self._instances.instance(instance_id)

    @property
    def tasks(self) -> Iterator[HeadTask]:
        """The latest attempt of each task of another home that holds anything here."""
        for home in self._homes.values():
            yield from home.tasks.values()

    def task(self, task_id: TaskId) -> HeadTask | None:
        """The latest attempt of a task, while it holds anything here."""
        home = self._by_boot.get(task_id.home)
        return home.tasks.get(task_id.number) if home is not None else None

    @property
    def running(self) -> int:
        """How many hold a place at a runner."""
        return sum(task.running for task in self.tasks)

    def cancel(self, task_id: TaskId) -> bool:
        """End a task by somebody else's wish than its home's, which hears that it is gone; whether it was here."""
        task = self.task(task_id)
        if task is not None:
            task.cancel()
        return task is not None

    def pull(self, node_id: NodeId, instance_id: int, free: int) -> bool:
        """Ask a home for up to `free` of its waiting requests; whether it can be asked now."""
        home = self._homes.get(node_id)
        return home is not None and home.stream is not None and home.stream.say_pull(instance_id, free)

    # Streams.

    async def serve(self, stream: Stream[TaskMessage]) -> None:
        """Serve a home's stream of tasks until it ends.

        Raises: StreamBroken, ProtocolViolation.
        """
        home = self._known(stream.peer)
        first: TaskMessage | None = None
        with trio.move_on_after(GREETING_SECONDS):
            first = await stream.receive()
        if first is None:
            raise StreamBroken(f"the home said nothing for {GREETING_SECONDS:g} s")
        if not isinstance(first, Resume):
            raise ProtocolViolation(f"{type(first).__name__} before Resume")
        await self._follow(home, HomeStream(stream), stream, first)

    async def _follow(self, home: Home, said: HomeStream, stream: Stream[TaskMessage], first: Resume) -> None:
        violation: ProtocolViolation | None = None
        with said.scope:
            self._take_over(home, said)
            try:
                async with trio.open_nursery() as nursery:
                    try:
                        home.resume(said, first)
                        nursery.start_soon(said.run)
                        async for message in stream:
                            await said.room()
                            home.hear(message)
                    except ProtocolViolation as found:
                        violation = found
                    nursery.cancel_scope.cancel()
            finally:
                home.stream_ended(said)
        if violation is not None:
            raise violation  # by itself, not in the nursery's group, so that it is counted for what it is

    async def serve_submit(self, stream: Stream[Submit]) -> None:
        """Take in one large submission, of a home that has a stream of tasks here.

        Raises: StreamBroken, ProtocolViolation.
        """
        home = self._homes.get(stream.peer.node_id)
        if home is None or home.boot != home_boot(stream.peer):
            raise StreamBroken("a submission of a home that is not here")
        if home.large >= SUBMITS_PER_HOME_MAX or self._large >= SUBMITS_MAX:
            raise StreamBroken("too many large submissions at once")
        home.large += 1
        self._large += 1
        try:
            with trio.fail_after(SUBMIT_SECONDS):
                submit = await stream.receive()
        except trio.TooSlowError:
            raise StreamBroken(f"a submission took longer than {SUBMIT_SECONDS:g} s") from None
        finally:
            home.large -= 1
            self._large -= 1
        if home.stream is None:
            raise StreamBroken("the home is gone")
        home.submit(submit)

    # Homes come and go.

    def _known(self, peer: Peer) -> Home:
        """The home behind a stream.

        Raises: ProtocolViolation where its boot is another node's; StreamBroken where there are too many homes.
        """
        boot = home_boot(peer)
        namesake = self._by_boot.get(boot)
        if namesake is not None and namesake.node_id == peer.node_id:
            return namesake
        owner = self._boot_owner(boot)
        if owner != node16(peer.node_id) and (owner is not None or namesake is not None):
            raise ProtocolViolation("it claims another node's boot")
        for former in (namesake, self._homes.get(peer.node_id)):
            if former is not None:
                self._forget(former)
        self._make_room()
        home = self._homes[peer.node_id] = self._by_boot[boot] = Home(peer.node_id, boot, self)
        return home

    def _make_room(self) -> None:
        """Forget the home that has been away longest, if there are too many. Raises: StreamBroken."""
        if len(self._homes) < HOMES_MAX:
            return
        away = [home for home in self._homes.values() if home.stream is None and home.count == 0]
        if not away:
            raise StreamBroken("too many homes")
        self._forget(min(away, key=lambda home: home.away_since))

    def _forget(self, home: Home) -> None:
        """Another boot runs at its node, or it has been away for long."""
        del self._homes[home.node_id], self._by_boot[home.boot]
        if home.stream is not None:
            home.stream.scope.cancel()
            home.stream_ended(home.stream)
        for task in home.tasks.values():
            task.cancel()

    def _take_over(self, home: Home, said: HomeStream) -> None:
        if self._homes.get(home.node_id) is not home:
            raise StreamBroken("another boot of this home has come")
        if home.stream is not None:
            if home.stream.connection > said.connection:
                raise StreamBroken("the home has a newer stream")
            home.stream.scope.cancel()
        home.stream = said
