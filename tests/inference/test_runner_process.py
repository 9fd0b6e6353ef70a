"""The runner process with the fake engine, driven over its pipes without a supervisor. About 5 s."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inference.launcher import runner_environment
from inference.requests import END_EVENTS, Accepted, Event, Failed, Finished, Request, Sampling, TextPrompt, Tokens
from inference.runner import fake_vocabulary
from inference.runner_protocol import (
    COMMANDS,
    REPORTS,
    Bye,
    Cancel,
    Command,
    LoadFailed,
    LoadModel,
    Phase,
    Ready,
    Report,
    Shutdown,
    Step,
    Submit,
)
from tests.fake_model import expected_ids, load_command, make_fake
from tests.inference.processes import LAUNCH_ENVIRONMENT

END_SECONDS_MAX = 20.0


class Runner:
    """A runner process as a node without any mercy would drive it: blocking, and in the order of the test."""

    def __init__(self, command: LoadModel, program: Sequence[str] = (sys.executable, "-P", "-m", "inference.runner")) -> None:
        self.command = command
        self.process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=runner_environment(command, LAUNCH_ENVIRONMENT),
            start_new_session=True,
        )
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        self._reports = self._read()

    def _read(self) -> Iterator[Report]:
        reader = REPORTS.reader()
        while data := self.stdout.read1(1 << 16):  # type: ignore[attr-defined]  # Popen without buffering gives a raw file
            yield from reader.feed(data)
        assert not reader.midway or self.process.wait() != 0

    def send(self, *commands: Command) -> None:
        self.stdin.write(b"".join([COMMANDS.encode(command) for command in commands]))
        self.stdin.flush()

    def load(self) -> list[Report]:
        """Send the command and take all reports up to Ready."""
        self.send(self.command)
        reports: list[Report] = []
        for report in self._reports:
            reports.append(report)
            if isinstance(report, Ready):
                break
        return reports

    def next_report(self) -> Report:
        return next(self._reports)

    def events_until_ended(self, *request_ids: str) -> list[Event]:
        live = set(request_ids)
        events: list[Event] = []
        for report in self._reports:
            assert isinstance(report, Step)
            events += report.events
            live -= {event.request_id for event in report.events if isinstance(event, END_EVENTS)}
            if not live:
                return events
        raise AssertionError(f"no end of {live}")

    def rest(self) -> list[Report]:
        return list(self._reports)

    def wait(self) -> int:
        return self.process.wait(END_SECONDS_MAX)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator["Start"]:
    starter = Start(tmp_path)
    yield starter
    for runner in starter.runners:
        runner.close()


class Start:
    """Starts runners of fake models with given settings."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runners: list[Runner] = []

    def __call__(self, *, running_max: int | None = None, **settings: Any) -> Runner:  # noqa: ANN401 - JSON
        runner = Runner(load_command(make_fake(self.directory, **settings), running_max=running_max))
        self.runners.append(runner)
        return runner


def make_request(request_id: str = "a", max_tokens: int | None = 20, seed: int = 1, text: str = "hello") -> Request:
    return Request(request_id=request_id, prompt=TextPrompt(text), sampling=Sampling(seed=seed), max_tokens=max_tokens)


def hang(at: str, step: int = 1) -> dict[str, Any]:
    return {"faults": [{"kind": "hang", "at": at, "step": step}]}


def test_from_load_to_bye(start: Start) -> None:
    runner = start()
    reports = runner.load()
    phases = [report.phase for report in reports if isinstance(report, Phase)]
    assert phases == sorted(phases), "loading, then warming up"
    assert {*phases} == {"loading", "warming_up"}
    assert len(phases) <= 110
    loaded = [report for report in reports if isinstance(report, Phase) and report.phase == "loading"]
    assert loaded[-1].done == loaded[-1].total > 0
    runner.send(Submit(make_request()))
    events = runner.events_until_ended("a")
    assert isinstance(events[0], Accepted)
    ids, _ = expected_ids(fake_vocabulary.encode("hello"), Sampling(seed=1), 20)
    assert [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids] == ids
    assert isinstance(events[-1], Finished)
    runner.send(Shutdown())
    assert runner.rest() == [Bye()]
    assert runner.wait() == 0


def test_requests_end_as_stopped_at_a_shutdown(start: Start) -> None:
    runner = start(stop_one_in=0)
    runner.load()
    runner.send(Submit(make_request(max_tokens=8000)), Shutdown())
    reports = runner.rest()
    assert reports[-1] == Bye()
    events = [event for report in reports if isinstance(report, Step) for event in report.events]
    assert isinstance(events[-1], Failed)
    assert events[-1].code == "runner_stopped"


def test_what_libraries_print_goes_to_stderr(start: Start) -> None:
    faults = [{"kind": "print", "at": at} for at in ("loading", "warming_up", "step")]
    runner = start(faults=faults)
    runner.load()
    runner.send(Submit(make_request()))
    assert isinstance(runner.events_until_ended("a")[-1], Finished)
    runner.send(Shutdown())
    assert runner.rest() == [Bye()]
    said = runner.stderr.read().decode()
    assert said.count("a library prints from C") == said.count("a library prints\n") == 3


def test_a_live_runner_has_not_imported_what_it_must_not_know(start: Start) -> None:
    runner = start(faults=[{"kind": "modules", "at": "step"}])
    runner.load()
    runner.send(Submit(make_request()))
    runner.events_until_ended("a")
    runner.send(Shutdown())
    modules = runner.stderr.read().decode().split()
    assert "inference.runner.core" in modules
    roots = {module.partition(".")[0] for module in modules}
    assert not roots & {
        "trio",
        "libp2p",
        "aiohttp",
        "asyncio",
        "mlx",
        "mlx_lm",
        "transformers",
        "numpy",
        "pydantic",
        "structlog",
        "node",
    }


@pytest.mark.parametrize("phase", ["loading", "warming_up", "idle", "hang in a step", "working", "never loaded"])
def test_it_ends_with_its_stdin(start: Start, phase: str) -> None:
    settings = hang(phase) if phase in ("loading", "warming_up") else hang("step", 3) if "hang" in phase else {"stop_one_in": 0}
    runner = start(**settings)
    if phase in ("loading", "warming_up"):
        runner.send(runner.command)
        while runner.next_report() != (Phase("warming_up") if phase == "warming_up" else Phase("loading")):
            pass
    elif phase != "never loaded":
        runner.load()
    if phase in ("working", "hang in a step"):
        runner.send(Submit(make_request(max_tokens=8000)))
        runner.next_report()
    runner.stdin.close()
    assert runner.wait() == 0


def test_it_ends_with_its_stdin_also_while_nobody_reads_its_reports(start: Start) -> None:
    runner = start(stop_one_in=0)
    runner.load()
    runner.send(*[Submit(make_request(f"r{n}", None)) for n in range(8)])
    runner.next_report()
    runner.stdin.close()
    assert runner.wait() == 0


def test_it_ends_with_its_stdin_also_with_more_commands_than_it_takes_over(start: Start) -> None:
    runner = start(**hang("step"))
    runner.load()
    runner.send(Submit(make_request()))
    runner.next_report()
    runner.send(*[Cancel("nobody")] * 2000)
    runner.stdin.close()
    assert runner.wait() == 0


def test_nothing_is_lost_while_a_reader_stalls(start: Start) -> None:
    """The pipe fills, the runner blocks on it and works on when it is read again."""
    runner = start(stop_one_in=0)
    runner.load()
    runner.send(*[Submit(make_request(f"r{n}", 3000, seed=n)) for n in range(4)])
    with pytest.raises(subprocess.TimeoutExpired):
        runner.process.wait(0.5)  # time to fill the pipe; if that takes longer, the test is only easier
    events = runner.events_until_ended(*[f"r{n}" for n in range(4)])
    for n in range(4):
        mine = [event for event in events if isinstance(event, Tokens) and event.request_id == f"r{n}"]
        assert len(mine) == 3000


def test_an_interrupt_from_the_terminal_is_ignored(start: Start) -> None:
    runner = start()
    runner.load()
    runner.process.send_signal(signal.SIGINT)
    runner.send(Submit(make_request()))
    assert isinstance(runner.events_until_ended("a")[-1], Finished)


def test_it_can_be_terminated_wherever_it_is(start: Start) -> None:
    runner = start(**hang("step"))
    runner.load()
    runner.send(Submit(make_request()))
    runner.next_report()
    runner.process.terminate()
    assert runner.wait() == -signal.SIGTERM


def test_it_can_be_terminated_whatever_its_parent_did_about_signals(tmp_path: Path) -> None:
    """Ignored and blocked signals are inherited."""
    script = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM});"
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'inference.runner'])"
    )
    runner = Runner(load_command(make_fake(tmp_path)), [sys.executable, "-c", script])
    try:
        runner.load()
        runner.process.terminate()
        assert runner.wait() == -signal.SIGTERM
    finally:
        runner.close()


def test_a_shutdown_while_loading_is_heard(start: Start) -> None:
    runner = start(**hang("loading"))
    runner.send(runner.command, Shutdown())
    assert runner.wait() == 0


def test_what_is_no_command_ends_it_with_a_sentence(start: Start) -> None:
    runner = start()
    runner.load()
    runner.stdin.write(b"\x00\x00\x00\x03abc")
    runner.stdin.flush()
    assert runner.wait() == 2
    assert "no command" in runner.stderr.read().decode()


@pytest.mark.parametrize("loaded", [False, True])
def test_commands_out_of_order_end_it_with_a_sentence(start: Start, loaded: bool) -> None:
    runner = start()
    if loaded:
        runner.load()
        runner.send(runner.command)
    else:
        runner.send(Submit(make_request()))
    assert runner.wait() == 2
    assert runner.stderr.read().decode().startswith("runner: ")


def test_why_a_model_cannot_be_loaded_is_told(start: Start) -> None:
    runner = start(load_error="The model is broken.")
    runner.send(runner.command)
    assert runner.rest()[-1] == LoadFailed("The model is broken.")
    assert runner.wait() == 1


def test_an_error_that_nobody_foresaw_in_loading_is_told_in_one_sentence(start: Start) -> None:
    runner = start(faults=[{"kind": "raise", "at": "loading"}])
    runner.send(runner.command)
    last = runner.rest()[-1]
    assert isinstance(last, LoadFailed)
    assert "RuntimeError" in last.reason
    assert runner.wait() == 1
    assert "Traceback" in runner.stderr.read().decode()


def test_an_engine_that_raises_in_a_step_fails_its_requests_and_ends_the_process(start: Start) -> None:
    runner = start(stop_one_in=0, faults=[{"kind": "raise", "at": "step", "step": 4}])
    runner.load()
    runner.send(Submit(make_request("a", 500)), Submit(make_request("b", 500)))
    events = runner.events_until_ended("a", "b")
    ends = [event for event in events if isinstance(event, END_EVENTS)]
    assert all(isinstance(end, Failed) and end.code == "engine_error" for end in ends)
    assert runner.wait() == 3


def test_a_request_is_cancelled_between_two_steps(start: Start) -> None:
    runner = start(stop_one_in=0)
    runner.load()
    runner.send(Submit(make_request("a", None)), Submit(make_request("b", 50)))
    runner.next_report()
    runner.send(Cancel("a"))
    events = runner.events_until_ended("a", "b")
    ends = {event.request_id: event for event in events if isinstance(event, Finished)}
    assert ends["a"].reason == "cancelled"
    assert ends["b"].reason == "length"
