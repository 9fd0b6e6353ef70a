"""The node: takes requests from any door, finds each an instance anywhere in the cluster, and follows it to its end."""

import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import structlog
import trio
from msgspec import Struct

from inference.models import Model
from inference.requests import Event, Failed, Finished, Request
from node.affinity import prefixes
from node.cluster_view import ClusterView, Target
from node.config import Config
from node.executors import Executors
from node.home_task import HomeTask
from node.line import Line, Seats
from node.local_runners import LocalInstance, LocalRunners
from node.names import Unknown
from node.own_records import LocalFacts, NodeFacts
from node.reconciler import Facts, Reconciler
from node.records import CANCEL, TASK, TaskId
from node.resources import runner_memory_bytes
from node.routing import Route, Router, need_tokens
from node.service import Answer, ModelNotFound, NoRoute, QueueFull, ServedModel
from node.standings import NO_MODEL, Standings
from node.task_home import TaskHome
from node.waiting import RETRY_SECONDS_MAX, retry_seconds
from p2p.effects import Changed

DURATIONS_MAX = 32  # of the requests that ended last; what Retry-After is worked out from
TASKS_MAX = 2000  # of this home at once

STOPPING = "This node is stopping."

_log = structlog.get_logger("tasks")


class NodeSettings(Struct, frozen=True, kw_only=True):
    """What of the configuration concerns requests, and what this node tells of itself."""

    aliases: dict[str, str]  # alias: model
    waiting_max: int
    task_timeout_seconds: float
    cluster: str = "default"
    device: str = ""
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    version: str = ""

    @classmethod
    def of(cls, config: Config, memory_bytes: int, device: str, version: str) -> "NodeSettings":
        """As configured, on this device."""
        return cls(
            aliases=dict(config.aliases),
            waiting_max=config.max_waiting,
            task_timeout_seconds=config.task_timeout_seconds,
            cluster=config.cluster,
            device=device,
            memory_bytes=memory_bytes,
            memory_limit_bytes=runner_memory_bytes(config.max_memory_bytes, memory_bytes),
            version=version,
        )


class _Answer(Struct):
    """See `node.service.Answer`."""

    task_id: str
    executed_by: str
    events: AsyncIterator[Event]


class Node:
    """The service that this device offers; see `node.service.Service`. Made in trio, after the facts were begun."""

    def __init__(
        self,
        node_id: str,
        name: str,
        settings: NodeSettings,
        *,
        facts: Facts,
        runners: LocalRunners,
        executors: Executors,
        nursery: trio.Nursery,
        joining_seconds: float = 0.0,
        addresses: Callable[[], tuple[str, ...]] = tuple,
        models: Callable[[], tuple[Model, ...]] = tuple,
        chance: random.Random | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`joining_seconds`: for so long others may still be met that run what is asked for."""
        self.node_id = node_id
        self.name = name
        self.settings = settings
        self.facts = facts
        self.runners = runners
        self._executors = executors
        self._addresses = addresses
        self._models = models
        self._chance = random.Random() if chance is None else chance  # noqa: S311 - spreads load, hides nothing
        self._wall_clock = wall_clock
        core = facts.core
        self.boot = core.me.standing.generation.nonce
        self.view = ClusterView(core.node, core.replica, facts.believe)
        self._instances: dict[int, LocalInstance] = {}
        self.standings = Standings(self.view, self._instances, settings.aliases)
        self._seats = Seats(settings.waiting_max, {})
        self.home = TaskHome(
            core.node,
            self.view,
            router=Router(self._chance),
            records=facts,
            execute=executors.execute,
            standing=self.standings.standing,
            seats=self._seats,
            nursery=nursery,
            retry_after=self._retry_after,
            pulled=executors.pulls,
        )
        self.reconciler = Reconciler(facts, self.view, self._own_facts, self.home, executors.submitted)
        self._tasks: dict[int, HomeTask] = {}  # by number
        self._numbers = 0
        self._pinned: set[int] = set()
        self._durations: deque[float] = deque(maxlen=DURATIONS_MAX)
        self._none_in_flight = trio.Event()
        self._draining = False
        self._joining_until = trio.current_time() + joining_seconds
        self._joined = trio.lowlevel.ParkingLot()  # for anything new in the view
        self.view.on_change.append(self._look_who_joined)
        facts.on_changed.append(self._on_changed)
        executors.bind(self)

    # Its own instances.

    def run_model(self, model: str, *, pinned: bool = True) -> LocalInstance:
        """Have a model run here; requests for it wait from now on."""
        instance_id = self._chance.getrandbits(63)
        instance = self.runners.start(f"{instance_id:016x}", model, self._wall_clock())
        self.adopt(instance_id, instance, pinned=pinned)
        return instance

    def adopt(self, instance_id: int, instance: LocalInstance, *, pinned: bool) -> None:
        """Take on an instance that is on its way already."""
        self._instances[instance_id] = instance
        if pinned:
            self._pinned.add(instance_id)
        instance.on_change.append(self._on_instance)
        self._on_instance()

    def instance(self, instance_id: int) -> LocalInstance | None:
        """One of this node's."""
        return self._instances.get(instance_id)

    @property
    def own_instances(self) -> tuple[int, ...]:
        """The ids of this node's."""
        return tuple(self._instances)

    @property
    def lines(self) -> Mapping[str, Line]:
        """The requests that wait here, by the served name of their model."""
        return self._seats.lines

    def _on_instance(self) -> None:
        self.reconciler.publish()
        self.standings.own_changed()
        self.home.look()
        self._executors.look()

    def _look_who_joined(self) -> None:
        self._joined.unpark_all()

    def _on_changed(self, change: Changed) -> None:
        self.view.update(change)
        self._executors.changed(change)
        if change.changes:
            for written in change.changes:
                kind, name = written.key
                if kind == CANCEL and isinstance(name, tuple) and name[0] == self.boot and written.record is not None:
                    task = self._tasks.get(name[1])
                    if task is not None:
                        self.home.cancel(task)

    def _own_facts(self) -> NodeFacts:
        settings = self.settings
        return NodeFacts(
            node_id=self.node_id,
            boot=self.boot,
            name=self.name,
            addresses=self._addresses(),
            device=settings.device,
            memory_bytes=settings.memory_bytes,
            memory_limit_bytes=settings.memory_limit_bytes,
            version=settings.version,
            draining=self._draining,
            models=self._models(),
            instances=tuple(
                LocalFacts(
                    instance_id=instance_id,
                    number=number,
                    asked=instance.asked,
                    created=instance.created,
                    pinned=instance_id in self._pinned,
                    phase=instance.phase,
                    state=instance.supervisor.state if instance.supervisor is not None else None,
                    model=instance.model,
                    stop=instance.stop_phase,
                )
                for number, (instance_id, instance) in enumerate(self._instances.items(), 1)
            ),
        )

    # What is served, under which names.

    def models(self) -> tuple[ServedModel, ...]:
        """See `node.service.Service`."""
        return self.standings.models()

    def not_ready(self) -> str | None:
        """None once a model can be served from here, else one sentence why not."""
        return STOPPING if self._draining else self.standings.not_ready()

    # Requests.

    @property
    def in_flight(self) -> int:
        """Requests of this home that wait or run, and those of others that run here."""
        return len(self._tasks) + self._executors.running

    @asynccontextmanager
    async def generate(self, model: str | None, request: Request) -> AsyncIterator[Answer]:
        """Wait for a place, start the request and yield its answer; leaving the block cancels what still runs.

        A request whose time is over before it was admitted gets a Failed `timed_out` as its only event.

        Raises: GenerateError, before anything was started.
        """
        if self._draining:
            raise NoRoute(STOPPING, RETRY_SECONDS_MAX)
        task = self._new_task(await self._meant(model), request)
        self._tasks[task.task_id.number] = task
        try:
            async with self.home.open(task) as events:
                try:
                    yield _Answer(task.task_id.text, self._executed_by(task), events)
                finally:
                    _log_end(task)
        finally:
            del self._tasks[task.task_id.number]
            self._durations.append(trio.current_time() - task.began)
            self._look_idle()

    async def _meant(self, model: str | None) -> str:
        """The served name of the model that is meant; a node that has just been started may not know of it at once.

        Raises: ModelNotFound, NoRoute.
        """
        with trio.move_on_at(self._joining_until):
            while trio.current_time() < self._joining_until:
                with suppress(ModelNotFound, NoRoute):
                    return self._known(model)
                await self._joined.park()
        return self._known(model)

    def _known(self, model: str | None) -> str:
        if self.standings.none:
            raise NoRoute(NO_MODEL, RETRY_SECONDS_MAX)
        name = self.standings.named(model)
        if isinstance(name, Unknown):
            raise ModelNotFound(name.message)
        return name

    def _new_task(self, name: str, request: Request) -> HomeTask:
        if len(self._tasks) >= TASKS_MAX:
            raise QueueFull(f"{TASKS_MAX} requests are at this node already, and that is all it takes.", self._retry_after())
        self._numbers += 1
        served = self.standings.served(name)
        route = Route(need_tokens(request), prefixes(request.prompt, served.model_hash if served is not None else name))
        task_id = TaskId(self.boot, self._numbers)
        return HomeTask(
            task_id, name, request, route, began=trio.current_time(), seconds_max=self.settings.task_timeout_seconds
        )

    def _executed_by(self, task: HomeTask) -> str:
        attempt = self.home.running[task]
        return self.node_id if attempt is None else self.name_of(attempt.target)

    def name_of(self, target: Target) -> str:
        """The node id of an instance's head."""
        if target.head == self.facts.core.node:
            return self.node_id
        return self.facts.node_id(target.head) or target.head.hex()

    def _retry_after(self) -> int:
        """Seconds after which a request that was turned away may find a seat."""
        now = trio.current_time()
        durations = list(self._durations) or [now - task.began for task in self._tasks.values()]
        return retry_seconds(durations, len(self._tasks) - self._seats.taken, self._seats.taken)

    def cancel(self, task_id: TaskId) -> bool:
        """Wish for the end of a task, of any node; whether it is known here."""
        if task_id.home == self.boot:
            task = self._tasks.get(task_id.number)
            if task is not None:
                self.home.cancel(task)
            return task is not None or (TASK, task_id.number) in self.facts.core.me.namespace.records
        return self._executors.cancel(task_id)

    def look_idle(self) -> None:
        """Somebody's task has ended here."""
        self._look_idle()

    def _look_idle(self) -> None:
        if not self.in_flight:
            self._none_in_flight.set()

    async def drain(self) -> None:
        """Refuse new work and send away what waits; returns once nothing runs any more."""
        self._draining = True
        self.reconciler.publish()
        self.home.close(STOPPING)
        while self.in_flight:
            self._none_in_flight = trio.Event()
            await self._none_in_flight.wait()

    @property
    def draining(self) -> bool:
        """Whether it takes no new work."""
        return self._draining


def _log_end(task: HomeTask) -> None:
    match task.end:
        case Finished(reason=reason, usage=usage):
            _log.debug("task ended", task=task.task_id.text, reason=reason, tokens=usage.completion_tokens)
        case Failed(code=code):  # its message may quote the prompt
            _log.info("task failed", task=task.task_id.text, code=code)
        case None:
            _log.debug("task cancelled", task=task.task_id.text)
