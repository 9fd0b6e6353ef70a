"""A spawn's bounds in time, on virtual time: a process in memory that does only what the test says."""

import itertools
import math
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_one_way_pair, memory_stream_one_way_pair

from inference import spawn as spawn_module
from inference.requests import Request, Sampling, TextPrompt
from inference.restart import RestartPolicy
from inference.runner_protocol import COMMANDS, Cancel, Command, LoadModel, Shutdown
from inference.runner_state import RunnerProcess
from inference.spawn import Spawn, exit_sentence, last_lines
from inference.supervisor import Supervisor
from tests.fake_model import load_command


class StubbornProcess:
    """It reads nothing that the test does not read, and ends by SIGKILL only, unless told to."""

    def __init__(self, *, mortal_by_terminate: bool = False) -> None:
        self.pid = 4242
        self.stdin, self.commands = lockstep_stream_one_way_pair()
        self.reports, self.stdout = memory_stream_one_way_pair()
        self.its_stderr, self.stderr = memory_stream_one_way_pair()
        self._mortal = mortal_by_terminate
        self._status: int | None = None
        self._ended = trio.Event()
        self.signals: list[tuple[float, str]] = []

    def exit(self, status: int) -> None:
        if self._status is None:
            self._status = status
            self._ended.set()
            self.reports.close()
            self.its_stderr.close()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    def terminate(self) -> None:
        self.signals.append((trio.current_time(), "terminate"))
        if self._mortal:
            self.exit(-15)

    def kill(self) -> None:
        self.signals.append((trio.current_time(), "kill"))
        self.exit(-9)


async def test_a_process_that_stops_reading_is_put_down_after_a_while(autojump_clock: MockClock) -> None:
    process = StubbornProcess()
    spawn = Spawn(process)
    spawn.send(Cancel("a"))
    start = trio.current_time()
    ending = await spawn.serve(lambda _: None)
    assert ending.reason == "The runner stopped reading its commands."
    assert trio.current_time() - start == pytest.approx(spawn_module.WRITE_SECONDS_MAX)


async def test_one_with_too_much_unread_is_put_down_at_once(autojump_clock: MockClock) -> None:
    process = StubbornProcess()
    spawn = Spawn(process)
    for _ in range(spawn_module.OUTGOING_FRAMES_MAX):
        spawn.send(Cancel("a"))
    assert process.signals == []
    spawn.send(Cancel("a"))
    start = trio.current_time()
    assert (await spawn.serve(lambda _: None)).reason == "The runner stopped reading its commands."
    assert trio.current_time() == start


async def test_the_bytes_unread_are_bounded_too(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn_module, "OUTGOING_BYTES_MAX", 10_000)
    process = StubbornProcess()
    spawn = Spawn(process)
    spawn.submit(Request(request_id="a", prompt=TextPrompt("x" * 9000), sampling=Sampling(seed=1)))
    assert process.signals == []
    spawn.submit(Request(request_id="b", prompt=TextPrompt("x" * 9000), sampling=Sampling(seed=1)))
    assert [name for _, name in process.signals] == ["kill"]


async def test_one_that_closes_its_reports_and_lives_on_is_put_down(autojump_clock: MockClock) -> None:
    process = StubbornProcess()
    spawn = Spawn(process)
    start = trio.current_time()
    process.reports.close()
    ending = await spawn.serve(lambda _: None)
    assert ending.reason == "The runner closed its reports and went on."
    assert trio.current_time() - start == pytest.approx(spawn_module.LINGER_SECONDS_MAX)


@pytest.mark.parametrize("mortal", [False, True])
async def test_it_is_asked_then_terminated_then_killed(autojump_clock: MockClock, mortal: bool) -> None:
    process = StubbornProcess(mortal_by_terminate=mortal)
    spawn = Spawn(process)
    received: list[Command] = []

    async def read() -> None:
        reader = COMMANDS.reader()
        while data := await process.commands.receive_some(1000):
            received.extend(reader.feed(data))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(spawn.serve, lambda _: None)
        start = trio.current_time()
        await spawn.wind_up(7)
    assert received == [Shutdown()]
    assert process.signals[0] == (start + 7, "terminate")
    if not mortal:
        assert process.signals[1] == (start + 7 + spawn_module.TERMINATE_SECONDS, "kill")


async def test_cancelling_kills(autojump_clock: MockClock) -> None:
    process = StubbornProcess()
    with trio.move_on_after(3):
        await Spawn(process).serve(lambda _: None)
    assert [name for _, name in process.signals] == ["kill"]


async def test_spawns_follow_one_another_at_the_policys_delays(autojump_clock: MockClock) -> None:
    starts: list[float] = []

    async def launch(_command: LoadModel) -> RunnerProcess:
        starts.append(trio.current_time())
        process = StubbornProcess()
        process.exit(1)
        return process

    supervisor = Supervisor("test", load_command(Path("unused")), launch, policy=RestartPolicy())
    await supervisor.run()
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == [pytest.approx(gap) for gap in (0.1, 0.4, 1.6, 6.4)]
    assert supervisor.state.status == "failed"
    assert math.isclose(trio.current_time(), starts[-1])


def test_exits_are_told_by_name() -> None:
    assert exit_sentence(3) == "The runner exited with status 3."
    assert exit_sentence(-11) == "The runner was killed by SIGSEGV."
    assert exit_sentence(-250) == "The runner was killed by signal 250."


def test_last_lines_begin_with_a_whole_one() -> None:
    assert last_lines(b"short\nlines\n") == "short\nlines"
    assert last_lines(b"x" * spawn_module.STDERR_BYTES_MAX + b"\nwhole\n") == "whole"
    assert last_lines(b"") == ""
