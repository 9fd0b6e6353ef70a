"""The one place where asyncio and trio meet: aiohttp needs the one, the node is written for the other.

trio has the main thread, and with it the signals; asyncio has a thread of its own, for as long as a `Bridge` is open
(`open_bridge`). Coroutines over there use it to `call` a trio function or to read a trio `stream`; trio uses it to `host` a
coroutine. Whoever waits is joined with what it waits for: cancelling the asyncio side cancels the trio side and waits for its
end; closing the bridge cancels every trio side and raises `BridgeClosed` at the other. Exceptions cross as they are.

Tokens cross in batches: all that trio's tasks put down in one round of its scheduler costs one wake-up of asyncio. What is
touched from both threads is a deque or a flag, written in an order in which neither side can miss the other's last word.

The road not taken is trio's guest mode inside aiohttp's loop. With a real node, the fake engine and 64 connections it took
16 us of CPU a token against 21, gave a tenth more tokens a second, and was no sooner with the first. But trio would then
share its thread with every HTTP parser; and where tokens came over trio's network too, two threads gave a third more of them
at half the 99th percentile. Both ways serve far more than an engine on two cores makes, so what a node's peers see decides.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar, TypeVarTuple

import trio

H = TypeVar("H")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Items of one stream that lie between the two sides. A reader that is this far behind holds up its own stream's trio task.
STREAM_ITEMS_MAX = 256


class BridgeClosed(Exception):
    """The trio side is going away; what was asked of it is not done or not complete."""


class _Crossing:
    """One trio task on behalf of one asyncio task. `ended` is set in asyncio, last of all."""

    def __init__(self, bridge: "Bridge") -> None:
        self._bridge = bridge
        self._scope = trio.CancelScope()
        self.ended: asyncio.Future[None] = bridge.loop.create_future()
        self.error: BaseException | None = BridgeClosed("the node is stopping")

    def start(self) -> None:
        """asyncio: have the trio task born."""
        try:
            self._bridge.to_trio(self._spawn)
        except trio.RunFinishedError:
            self._end()

    def _spawn(self) -> None:
        if self._bridge.is_closed:
            self._bridge.to_asyncio(self._end)
        else:
            self._bridge.nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            with self._scope:
                try:
                    await self._work()
                    self.error = None
                except Exception as error:  # noqa: BLE001 - whatever it is, it is raised on the other side
                    self.error = error
        finally:
            self._bridge.to_asyncio(self._end)

    async def _work(self) -> None:
        """trio: what is to be done."""
        raise NotImplementedError

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    async def close(self) -> None:
        """asyncio: cancel the trio task where it still runs, and wait for its end, even if cancelled meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        while not self.ended.done():
            try:
                self._bridge.to_trio(self._scope.cancel)
                await asyncio.wait((self.ended,))
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled


class _Call(_Crossing, Generic[T]):
    def __init__(self, bridge: "Bridge", function: Callable[[], Awaitable[T]]) -> None:
        super().__init__(bridge)
        self._function = function
        self.value: T

    async def _work(self) -> None:
        self.value = await self._function()


class Stream(_Crossing, Generic[H, T]):
    """What a trio context manager gave (`head`), and its items as they come."""

    def __init__(
        self,
        bridge: "Bridge",
        open_: Callable[[], AbstractAsyncContextManager[H]],
        items: Callable[[H], AsyncIterator[T]],
    ) -> None:
        super().__init__(bridge)
        self._open = open_
        self._items = items
        self._buffer: deque[T] = deque()
        self._announced = False  # a wake-up of the reader is on its way
        self._room: trio.Event | None = None  # trio waits for the reader
        self._waiter: asyncio.Future[None] | None = None
        self._nudged = False
        self._heads: list[H] = []  # none before it is open, one from then on
        self.opened: asyncio.Future[None] = bridge.loop.create_future()  # or ended before it was

    @property
    def head(self) -> H:
        """What the context manager gave."""
        return self._heads[0]

    @property
    def is_open(self) -> bool:
        """Whether the context manager was entered."""
        return bool(self._heads)

    async def batch(self) -> list[T] | None:
        """asyncio: the items that came since the last call, at least one; [] after `nudge`; None at the end.

        Raises: what the trio side raised, after the items before it; BridgeClosed.
        """
        buffer = self._buffer
        while not buffer:
            if self.ended.done():
                if self.error is not None:
                    raise self.error
                return None
            if self._nudged:
                self._nudged = False
                return []
            self._waiter = self._bridge.loop.create_future()
            await self._waiter
        batch = [buffer.popleft() for _ in range(len(buffer))]
        if self._room is not None:
            self._bridge.to_trio(self._make_room)
        return batch

    def nudge(self) -> None:
        """asyncio: let a waiting `batch` return at once."""
        self._nudged = True
        self._resume()

    async def _work(self) -> None:
        buffer = self._buffer
        async with self._open() as head:
            self._heads.append(head)
            self._bridge.to_asyncio(self._set_opened)
            items = self._items(head)
            try:
                async for item in items:
                    buffer.append(item)
                    if not self._announced:
                        self._announced = True
                        self._bridge.to_asyncio(self._wake)
                    if len(buffer) >= STREAM_ITEMS_MAX:
                        await self._wait_for_room()
            finally:
                if isinstance(items, AsyncGenerator):
                    await items.aclose()

    async def _wait_for_room(self) -> None:
        self._room = room = trio.Event()
        if len(self._buffer) >= STREAM_ITEMS_MAX:  # else the reader came between
            await room.wait()
        self._room = None

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()

    def _set_opened(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def _wake(self) -> None:
        self._announced = False
        self._resume()

    def _resume(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self) -> None:
        super()._end()
        self._set_opened()
        self._resume()


class Bridge:
    """Both sides' ends; made by `open_bridge`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, nursery: trio.Nursery) -> None:
        self.loop = loop
        self.nursery = nursery
        self.is_closed = False
        self.to_trio: Callable[[Callable[[], object]], None] = trio.lowlevel.current_trio_token().run_sync_soon
        self._outbox: deque[Callable[[], object]] = deque()
        self._flush_is_due = False

    def to_asyncio(self, callback: Callable[[], object]) -> None:
        """trio: run it in asyncio soon; what is left here before asyncio gets to it shares one wake-up."""
        self._outbox.append(callback)
        if not self._flush_is_due:
            self._flush_is_due = True
            self.loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False  # before the first look, so that nothing put down from now on is missed
        while self._outbox:
            self._outbox.popleft()()

    async def call(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """asyncio: what the trio function returns.

        Raises: what it raises; BridgeClosed.
        """
        crossing = _Call(self, lambda: function(*args))
        crossing.start()
        try:
            await asyncio.wait((crossing.ended,))
        finally:
            await crossing.close()
        if crossing.error is not None:
            raise crossing.error
        return crossing.value

    @asynccontextmanager
    async def stream(
        self,
        open_: Callable[[], AbstractAsyncContextManager[H]],
        items: Callable[[H], AsyncIterator[T]],
    ) -> AsyncIterator[Stream[H, T]]:
        """asyncio: enter the trio context manager and read its items; leaving the block leaves it over there.

        Raises: what entering raises; BridgeClosed.
        """
        stream = Stream(self, open_, items)
        stream.start()
        try:
            await asyncio.wait((stream.opened,))
            if not stream.is_open:
                raise stream.error or BridgeClosed("the node is stopping")
            yield stream
        finally:
            await stream.close()

    async def host(self, function: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        """trio: what the coroutine function returns; cancelling cancels it over there and waits for its end.

        Raises: what it raises.
        """
        ended = trio.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self.loop.create_task(function(*args))
            tasks.append(task)
            task.add_done_callback(lambda _: self.to_trio(ended.set))

        self.to_asyncio(start)
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                self.to_asyncio(lambda: tasks[0].cancel())  # noqa: PLW0108 - there is no task yet
                with trio.CancelScope(shield=True):
                    await ended.wait()
        return tasks[0].result()

    def close(self) -> None:
        """trio: cancel what runs here for the other side, and take on nothing more."""
        self.is_closed = True
        self.nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_bridge() -> AsyncIterator[Bridge]:
    """trio: a bridge, until the end of the block, which must leave nothing running in asyncio.

    Raises: what the block raises, as it is.
    """
    error: Exception | None = None
    loop = asyncio.new_event_loop()
    async with trio.open_nursery() as thread:
        thread.start_soon(trio.to_thread.run_sync, _run_loop, loop)
        try:
            async with trio.open_nursery() as nursery:
                bridge = Bridge(loop, nursery)
                try:
                    yield bridge
                except Exception as raised:  # noqa: BLE001 - raised again below, where no nursery can wrap it
                    error = raised
                finally:
                    bridge.close()
        finally:
            loop.call_soon_threadsafe(loop.stop)
    if error is not None:
        raise error


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
