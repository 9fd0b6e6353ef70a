"""A node's service with nothing but an engine in it: the runner's own core over the fake engine, in this process.

Everything that crosses processes in a node is left out; what clients can see is the same.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from msgspec import Struct

from inference.event_stream import EventStream
from inference.requests import Event, Refused, Request
from inference.runner.core import Core
from inference.runner.fake_engine import FakeEngine, FakeSettings
from inference.runner_protocol import Step
from node.service import ModelNotFound, NoRoute, QueueFull, ServedModel

MODEL = ServedModel(name="fake:1", model_hash="ab" * 32, created=1_700_000_000, context=8192)
NODE_ID = "12D3KooWMemory"


class Pace:
    """Lets the engine step: freely, or step by step as a test says."""

    def __init__(self) -> None:
        self._free = trio.Event()
        self._free.set()
        self._allowed = 0
        self._changed = trio.Event()

    def hold(self) -> None:
        """No further step until `allow` or `release`."""
        self._free = trio.Event()
        self._allowed = 0

    def allow(self, steps: int) -> None:
        """So many more steps."""
        self._allowed += steps
        self._changed.set()

    def release(self) -> None:
        """Go on freely."""
        self._free.set()
        self._changed.set()

    async def wait(self) -> None:
        """Until a step may be made."""
        while not self._free.is_set() and not self._allowed:
            self._changed = trio.Event()
            await self._changed.wait()
        self._allowed = max(self._allowed - 1, 0)


class MemoryAnswer(Struct):
    task_id: str
    executed_by: str
    events: AsyncIterator[Event]


class MemoryService:
    """See the module; `run` must run beside whatever uses it."""

    node_id = NODE_ID
    name = "memory"

    def __init__(
        self,
        settings: FakeSettings = FakeSettings(),  # noqa: B008 - frozen
        *,
        waiting_max: int = 2,
        models: tuple[ServedModel, ...] = (MODEL,),
    ) -> None:
        self.pace = Pace()
        self.reason: str | None = None
        self.no_route: str | None = None
        self.requests: list[Request] = []
        self.running = 0
        self.waiting = 0
        self.left_early: list[str] = []  # ids of requests whose block was left before their end
        self._core = Core(FakeEngine(settings, MODEL.context, settings.running_max, lambda _number: None))
        self._models = models
        self._waiting_max = waiting_max
        self._streams: dict[str, EventStream] = {}
        self._work = trio.Event()
        self._changed = trio.Event()

    def models(self) -> tuple[ServedModel, ...]:
        return self._models

    def not_ready(self) -> str | None:
        return self.reason

    async def wait_until(self, condition: Callable[["MemoryService"], bool]) -> None:
        """Until the condition holds; looked at after every change here."""
        while not condition(self):
            await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    @asynccontextmanager
    async def generate(self, model: str | None, request: Request) -> AsyncIterator[MemoryAnswer]:
        if model is not None and model not in {served.name for served in self._models}:
            raise ModelNotFound(f"There is no model {model!r} here; there is 'fake:1'.")
        if self.no_route is not None:
            raise NoRoute(self.no_route, 500)
        self.requests.append(request)
        stream = EventStream()
        await self._admit(request, stream)
        self.running += 1
        self._change()
        try:
            yield MemoryAnswer(f"task-{request.request_id[:8]}", NODE_ID, stream)
        finally:
            if not stream.ended.is_set():
                self.left_early.append(request.request_id)
                self._core.cancel(request.request_id)
            self._streams.pop(request.request_id, None)
            self.running -= 1
            self._change()

    async def _admit(self, request: Request, stream: EventStream) -> None:
        self._streams[request.request_id] = stream
        try:
            while self._is_refused(request):
                if self.waiting >= self._waiting_max:
                    raise QueueFull("Too many requests are waiting here.", 3)  # noqa: TRY301 - as the real service does
                self.waiting += 1
                try:
                    self._change()
                    await self._changed.wait()
                finally:
                    self.waiting -= 1
        except BaseException:
            del self._streams[request.request_id]
            self._change()
            raise

    def _is_refused(self, request: Request) -> bool:
        self._core.submit(request)
        self._work.set()
        report = self._core.report()
        assert report is not None
        if any(isinstance(event, Refused) and event.request_id == request.request_id for event in report.events):
            return True
        self._deliver(report)
        return False

    def _deliver(self, report: Step | None) -> None:
        for event in report.events if report else ():
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.deliver(event)

    def crash(self) -> None:
        """End all that runs, as a runner's end does."""
        self._core.fail_all("runner_crashed", "The runner ended with signal 9.")
        self._deliver(self._core.report())

    async def run(self) -> None:
        """Step as long as there is work."""
        while True:
            if self._core.idle:
                self._work = trio.Event()
                await self._work.wait()
            await self.pace.wait()
            await trio.lowlevel.checkpoint()
            self._core.step()
            self._deliver(self._core.report())
