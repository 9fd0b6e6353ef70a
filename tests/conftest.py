"""Async tests run under trio; with the `autojump_clock` fixture they run on virtual time."""

import functools
import inspect
import signal
from collections.abc import Awaitable, Callable

import hypothesis
import pytest
import trio
from trio.testing import MockClock

ASYNC_TEST_SECONDS_MAX = 100.0

# Started in the background of a shell, a process ignores Ctrl-C, and so would every child that a test sends it to.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("shoal", deadline=None)
hypothesis.settings.load_profile("shoal")


@pytest.fixture
def autojump_clock() -> MockClock:
    """Virtual time, which jumps to the next deadline whenever every trio task waits."""
    return MockClock(autojump_threshold=0)


async def _bounded(test: Callable[[], Awaitable[None]], seconds: float) -> None:
    with trio.fail_after(seconds):
        await test()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in trio (the idea is that of trio's own test suite)."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    clock = next((value for value in arguments.values() if isinstance(value, MockClock)), None)
    seconds = ASYNC_TEST_SECONDS_MAX if clock is None else 1e9
    trio.run(_bounded, functools.partial(pyfuncitem.obj, **arguments), seconds, clock=clock)
    return True
