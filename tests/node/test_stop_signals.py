"""Signals become wishes to stop, wherever trio is just then."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from node.stop_signals import StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    stop = StopSignals()
    stop.install()
    yield stop
    for number, action in before.items():
        signal.signal(number, action)


def test_a_signal_before_trio_runs_is_not_lost(signals: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)

    trio.run(signals.wait, 1)
    assert signals.count == 1


async def test_first_and_second_wish(signals: StopSignals) -> None:
    async with trio.open_nursery() as nursery:
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(os_kill, signal.SIGINT)
        await signals.wait(1)
        nursery.start_soon(os_kill, signal.SIGHUP)
        await signals.wait(2)


async def os_kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_a_third_wish_ends_the_process() -> None:
    program = "import os, signal, time\nfrom node.stop_signals import StopSignals\nStopSignals().install()\n"
    program += "[os.kill(os.getpid(), signal.SIGTERM) for _ in range(3)]\ntime.sleep(60)"

    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=Path.cwd(), timeout=50)

    assert done.returncode == 128 + signal.SIGTERM


def test_sighup_stays_ignored_under_nohup() -> None:
    program = "import signal\nfrom node.stop_signals import StopSignals\nStopSignals().install()\n"
    program += "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"

    done = subprocess.run(["nohup", sys.executable, "-c", program], check=True, capture_output=True, text=True)

    assert done.stdout == "True\n"
