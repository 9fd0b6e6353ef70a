"""Runs attempts among peers: this home's on its own runners and at heads elsewhere, other homes' on the runners here."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self

import trio
from msgspec import Struct

from inference.requests import Accepted, Event, Load, Request
from inference.supervisor import NO_ROOM, Supervisor
from node.cluster_view import Target
from node.executors import Executors
from node.head_task import HeadTask
from node.home_submission import HeadLost
from node.home_task import HomeTask, short
from node.own_node import OwnNode
from node.pull_exchange import PullExchange
from node.reconciler import home_sight
from node.records import CANCEL, RANK, TASK, CancelIntent, RankPhase, RankReport, TaskId
from node.task_head import Head
from node.task_protocol import SECONDS_LEFT_MAX, Submit
from node.task_stream import Heads
from node.tasks import executor_aborts
from p2p.effects import Changed
from p2p.ids import NodeId
from p2p.namespace import NamespaceFull
from p2p.sync_wire import node16
from p2p.transport import Transport


class _Local(Struct, frozen=True):
    """One of this node's instances, for other homes; see `node.head_task.LocalExecutor`."""

    model_hash: str
    supervisor: Supervisor

    @property
    def epoch(self) -> int:
        return self.supervisor.state.spawn

    @property
    def load(self) -> Load:
        return self.supervisor.state.load or NO_ROOM

    def generate(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return self.supervisor.generate(request)


class PeerExecutors(Executors):
    """Of a node in a cluster. `run` must run."""

    pulls = True

    def __init__(self, transport: Transport, nursery: trio.Nursery, chance: random.Random | None = None) -> None:
        super().__init__()
        self._chance = random.Random() if chance is None else chance  # noqa: S311 - spreads load, hides nothing
        self._transport = transport
        self._nursery = nursery

    def bind(self, node: OwnNode) -> None:
        """The node whose runners these are; from now on other homes are served."""
        super().bind(node)
        self.heads = Heads(self._transport, node.boot, self._nursery, on_pull=self._on_pull)
        self.head = Head(
            self,
            self._nursery,
            report=self._report,
            on_waiting=self._on_waiting,
            on_answered=self._on_answered,
            on_ended=self._on_ended,
            on_over=lambda _task: node.look_idle(),
            boot_owner=node.view.in_flight.boots.node,
        )
        self.exchange = PullExchange(
            node,
            tell=self.heads.waiting,
            ask=self.head.pull,
            unanswered=self._unanswered,
            chance=self._chance,
        )
        self.head.serve_on(self._transport)

    async def run(self) -> None:
        """For ever."""
        await self.exchange.run()

    def _on_pull(self, head: NodeId, instance_id: int, free: int) -> None:
        self.exchange.on_pull(head, instance_id, free)

    def _on_waiting(self, home: NodeId, model_hash: str, count: int, seconds: float) -> None:
        self.exchange.on_waiting(home, model_hash, count, seconds)

    # This home's attempts.

    @asynccontextmanager
    async def execute(self, target: Target, task: HomeTask, request: Request, /) -> AsyncIterator[AsyncIterator[Event]]:
        """See `node.attempt.Execute`."""
        facts = self._node.facts
        if target.head == facts.core.node:
            async with super().execute(target, task, request) as events:
                noted = _Noted(events, self.exchange.trying(target))
                try:
                    yield noted
                finally:
                    noted.leave()
            return
        node_id = facts.node_id(target.head)
        if node_id is None:
            yield _Lost()
            return
        submit = Submit(
            number=task.task_id.number,
            attempt=task.attempt,
            instance_id=target.candidate.instance_id,
            model_hash=target.model_hash,
            epoch=target.epoch,
            request=request,
            seconds_left=min(max(0.0, task.deadline - trio.current_time()), SECONDS_LEFT_MAX),
            version=facts.core.me.namespace.max_version,
        )
        facts.watch(target.head)
        try:
            async with self.heads.submit(node_id, submit) as events:
                yield events
        finally:
            facts.unwatch(target.head)

    # Other homes' attempts.

    def instance(self, instance_id: int) -> _Local | None:
        """One whose head this node is; none takes anything new once the node is about to stop."""
        local = self._node.instance(instance_id)
        if local is None or local.supervisor is None or local.model is None or self._node.draining:
            return None
        return _Local(local.model.model_hash, local.supervisor)

    @property
    def running(self) -> int:
        """Tasks of other homes that run here, or whose last events are not taken yet."""
        return sum(1 for _ in self.head.tasks)

    def _unanswered(self, instance_id: int) -> int:
        return sum(task.instance_id == instance_id and not task.answered for task in self.head.tasks)

    def _report(self, task_id: TaskId, attempt: int, rank: int, phase: RankPhase, reason: str) -> None:
        self._node.facts.write(RANK, (*task_id, attempt, rank), RankReport(phase, short(reason)), urgent=True)

    def _on_answered(self, task: HeadTask) -> None:
        home = node16(task.home)
        if task.accepted:
            self.submitted[task.task_id, task.attempt] = task.version
            self._node.facts.watch(home)
        self.exchange.came(home, task.instance_id, accepted=task.accepted)

    def _on_ended(self, task: HeadTask) -> None:
        self._node.facts.unwatch(node16(task.home))
        self.exchange.look()

    def cancel(self, task_id: TaskId) -> bool:
        """Wish for the end of another home's task; whether it is known.

        Its home hears of the wish and ends it, wherever it runs: an executor that ended it by itself would look lost.
        """
        if self._node.view.in_flight.header(task_id) is None:
            return False
        try:
            self._node.facts.write(CANCEL, tuple(task_id), CancelIntent(), urgent=True)
        except NamespaceFull:
            return False
        return True

    def changed(self, change: Changed) -> None:
        """Tasks whose home is gone, or has gone on with another attempt, are given up."""
        if not change.changes:
            for task in list(self.head.tasks):
                if node16(task.home) == change.node:
                    self._look_at(task)
            return
        member = self._node.facts.core.replica.members.get(change.node)
        for written in change.changes:
            kind, name = written.key
            if kind == TASK and isinstance(name, int) and member is not None:
                found = self.head.task(TaskId(member.standing.generation.nonce, name))
                if found is not None:
                    self._look_at(found)

    def _look_at(self, task: HeadTask) -> None:
        sight, _ = home_sight(self._node.facts.core, self._node.view, task.task_id)
        if executor_aborts(sight, task.attempt, cancelled=False, submitted_version=task.version):
            task.cancel()

    def look(self) -> None:
        """An own instance has come, gone, or made a step."""
        self.exchange.look()


class _Noted:
    """An attempt's events; whoever counts on its place is told of the first of them."""

    def __init__(self, events: AsyncIterator[Event], answered: Callable[[bool | None], None]) -> None:
        self._events = events
        self._answered: Callable[[bool | None], None] | None = answered

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        if self._answered is not None:
            answered, self._answered = self._answered, None
            answered(isinstance(event, Accepted))
        return event

    def leave(self) -> None:
        """Nobody reads on."""
        if self._answered is not None:
            answered, self._answered = self._answered, None
            answered(None)


class _Lost:
    """The events of an attempt that could not be submitted."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        raise HeadLost("its node is not known any more")
