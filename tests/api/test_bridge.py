"""asyncio and trio joined: values, exceptions and cancellation cross both ways, and buffers are bounded."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from api.bridge import STREAM_ITEMS_MAX, Bridge, BridgeClosed, open_bridge

T = TypeVar("T")


class OddError(Exception):
    pass


class Source:
    """A trio context manager that notes what becomes of it."""

    def __init__(self, items: int = 0, *, forever: bool = False, error: Exception | None = None) -> None:
        self.items = items
        self.forever = forever
        self.error = error
        self.given = 0
        self.entered = trio.Event()
        self.left = trio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Source"]:
        self.entered.set()
        try:
            yield self
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()  # an end takes its time
            self.left.set()

    async def read(self) -> AsyncIterator[int]:
        for item in range(self.items):
            self.given += 1
            yield item
        if self.error is not None:
            raise self.error
        if self.forever:
            await trio.sleep_forever()


def read(source: Source) -> AsyncIterator[int]:
    return source.read()


async def read_all(bridge: Bridge, source: Source) -> list[int]:
    items: list[int] = []
    async with bridge.stream(source.open, read) as stream:
        assert stream.head is source
        while (batch := await stream.batch()) is not None:
            items += batch
    return items


async def test_a_call_gives_its_value() -> None:
    async def double(number: int) -> int:
        await trio.lowlevel.checkpoint()
        return number * 2

    async with open_bridge() as bridge:
        assert await bridge.host(bridge.call, double, 21) == 42


async def test_exceptions_cross_with_their_type() -> None:
    async def fail() -> None:
        raise OddError

    @asynccontextmanager
    async def fail_to_open() -> AsyncIterator[Source]:
        await fail()
        yield Source()

    async def open_it(bridge: Bridge) -> None:
        async with bridge.stream(fail_to_open, read):
            raise AssertionError("it was opened")

    async with open_bridge() as bridge:
        with pytest.raises(OddError):
            await bridge.host(bridge.call, fail)
        with pytest.raises(OddError):
            await bridge.host(open_it, bridge)


@pytest.mark.parametrize("count", [0, 1, STREAM_ITEMS_MAX, 5 * STREAM_ITEMS_MAX + 1])
async def test_a_stream_gives_all_items_in_order(count: int) -> None:
    source = Source(count)
    async with open_bridge() as bridge:
        assert await bridge.host(read_all, bridge, source) == list(range(count))
        assert source.left.is_set()


async def test_a_streams_error_comes_after_its_items() -> None:
    async def collect(bridge: Bridge) -> tuple[list[int], bool]:
        items: list[int] = []
        async with bridge.stream(Source(3, error=OddError()).open, read) as stream:
            while True:
                try:
                    items += await stream.batch() or []
                except OddError:
                    return items, True

    async with open_bridge() as bridge:
        assert await bridge.host(collect, bridge) == ([0, 1, 2], True)


async def test_leaving_a_stream_leaves_it_on_the_other_side_first() -> None:
    source = Source(1, forever=True)

    async def look(bridge: Bridge) -> bool:
        async with bridge.stream(source.open, read) as stream:
            assert await stream.batch() == [0]
            assert not source.left.is_set()
        return source.left.is_set()

    async with open_bridge() as bridge:
        assert await bridge.host(look, bridge)


async def until(condition: Callable[[], bool]) -> None:
    """asyncio: let the loop go round until what trio does shows."""
    while not condition():  # noqa: ASYNC110 - an asyncio.Event can't be set from trio
        await asyncio.sleep(0)


async def cancelled_once_it_waits(function: Callable[[], Awaitable[T]], is_waiting: Callable[[], bool]) -> bool:
    """asyncio: whether the function ends as cancelled when it is."""
    task = asyncio.ensure_future(function())
    await until(is_waiting)
    task.cancel()
    await asyncio.wait((task,))
    return task.cancelled()


async def test_a_cancelled_reader_cancels_the_other_side_and_waits_for_its_end() -> None:
    source = Source(forever=True)

    async def look(bridge: Bridge) -> tuple[bool, bool]:
        cancelled = await cancelled_once_it_waits(lambda: read_all(bridge, source), source.entered.is_set)
        return cancelled, source.left.is_set()

    async with open_bridge() as bridge:
        assert await bridge.host(look, bridge) == (True, True)


async def test_a_cancelled_call_cancels_the_other_side_and_waits_for_its_end() -> None:
    source = Source(forever=True)

    async def hold() -> None:
        async with source.open():
            await trio.sleep_forever()

    async def look(bridge: Bridge) -> tuple[bool, bool]:
        cancelled = await cancelled_once_it_waits(lambda: bridge.call(hold), source.entered.is_set)
        return cancelled, source.left.is_set()

    async with open_bridge() as bridge:
        assert await bridge.host(look, bridge) == (True, True)


async def test_cancelling_again_does_not_stop_the_wait_for_the_end() -> None:
    entered, may_end, ended = trio.Event(), trio.Event(), trio.Event()

    async def end_slowly() -> None:
        try:
            entered.set()
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await may_end.wait()
            ended.set()

    async def look(bridge: Bridge) -> tuple[bool, bool, bool]:
        task = asyncio.ensure_future(bridge.call(end_slowly))
        await until(entered.is_set)
        for _ in range(3):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        done_early = task.done()
        bridge.to_trio(may_end.set)
        await asyncio.wait((task,))
        return done_early, task.cancelled(), ended.is_set()

    async with open_bridge() as bridge:
        assert await bridge.host(look, bridge) == (False, True, True)


async def test_a_reader_that_stays_behind_holds_up_its_stream_at_the_bound() -> None:
    source = Source(10 * STREAM_ITEMS_MAX)

    async def look(bridge: Bridge) -> int:
        async with bridge.stream(source.open, read) as stream:
            await bridge.call(wait_all_tasks_blocked)
            given = source.given
            assert await stream.batch() == list(range(given))
            assert (await stream.batch() or [])[0] == given  # it goes on
            return given

    async with open_bridge() as bridge:
        assert await bridge.host(look, bridge) == STREAM_ITEMS_MAX


async def test_a_nudge_lets_a_waiting_reader_return_with_nothing() -> None:
    async def look(bridge: Bridge) -> list[int] | None:
        async with bridge.stream(Source(forever=True).open, read) as stream:
            waiting = asyncio.ensure_future(stream.batch())
            await asyncio.sleep(0)
            stream.nudge()
            return await waiting

    async with open_bridge() as bridge:
        assert await bridge.host(look, bridge) == []


async def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    source, other = Source(1, forever=True), Source(forever=True)

    async def hold() -> None:
        async with other.open():
            await trio.sleep_forever()

    async def close() -> None:
        bridge.close()

    async def look() -> None:
        async with bridge.stream(source.open, read) as stream:
            assert await stream.batch() == [0]
            call = asyncio.ensure_future(bridge.call(hold))
            await until(other.entered.is_set)
            await bridge.call(close)
            with pytest.raises(BridgeClosed):
                await stream.batch()
            with pytest.raises(BridgeClosed):
                await call
            with pytest.raises(BridgeClosed):
                await read_all(bridge, Source())

    async with open_bridge() as bridge:
        with trio.CancelScope(shield=True):
            await bridge.host(look)


async def test_a_cancelled_host_cancels_the_other_side_and_waits_for_its_end() -> None:
    ended = trio.Event()
    scope = trio.CancelScope()

    async def hold(bridge: Bridge) -> None:
        try:
            bridge.to_trio(scope.cancel)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async with open_bridge() as bridge:
        with scope:
            await bridge.host(hold, bridge)

        assert scope.cancelled_caught
        assert ended.is_set()
