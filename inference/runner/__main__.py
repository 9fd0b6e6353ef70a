"""The runner process: frames in on the stdin it was started with, frames out on the stdout, and nothing else on either.

The main thread is the engine's. A second thread blocks on the commands and hands them over; where they end, the node is gone,
and it ends the process wherever the main thread is.
"""

# First of all, before any library can print: what this process was given as stdout is for frames, and any other output, of C
# code too, goes to stderr. Descriptors made by dup are not inherited by children.
import os

_REPORTS_FD = os.dup(1)
os.dup2(2, 1)
_COMMANDS_FD = os.dup(0)
_null = os.open(os.devnull, os.O_RDONLY)
os.dup2(_null, 0)
os.close(_null)

import faulthandler  # noqa: E402 - descriptor 1 is turned away first
import queue  # noqa: E402 - descriptor 1 is turned away first
import select  # noqa: E402 - descriptor 1 is turned away first
import signal  # noqa: E402 - descriptor 1 is turned away first
import sys  # noqa: E402 - descriptor 1 is turned away first
import threading  # noqa: E402 - descriptor 1 is turned away first
import traceback  # noqa: E402 - descriptor 1 is turned away first
from typing import NoReturn  # noqa: E402 - descriptor 1 is turned away first

from inference.runner.core import Core, one_line  # noqa: E402 - descriptor 1 is turned away first
from inference.runner.engine import Engine, EngineFactory, LoadError  # noqa: E402 - descriptor 1 is turned away first
from inference.runner_protocol import (  # noqa: E402 - descriptor 1 is turned away first
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
    Submit,
)
from p2p.wire import ProtocolViolation  # noqa: E402 - descriptor 1 is turned away first

READ_BYTES = 1 << 16
COMMANDS_MAX = 1024  # taken over but not yet acted on; with more, the pipe is left unread
COMMANDS_PER_STEP_MAX = 32  # acted on between two steps: a burst of requests must not hold up those that run
FULL_CHECK_SECONDS = 0.2  # with the pipe unread, how often its end is looked for
PROGRESS_STEPS_MAX = 100  # how many reports of a loading's progress at most

EXIT_DONE = 0
EXIT_LOAD_FAILED = 1
EXIT_VIOLATION = 2
EXIT_ENGINE_BROKEN = 3


def _end(status: int, sentence: str | None = None) -> NoReturn:
    """End the process from any thread, at once: an evaluation in the other one can't be interrupted in any other way."""
    if sentence is not None:
        os.write(2, f"runner: {sentence}\n".encode())
    os._exit(status)


def _send(report: Report) -> None:
    """Write a frame; blocks while the node doesn't read."""
    rest = memoryview(REPORTS.encode(report))
    try:
        while rest:
            rest = rest[os.write(_REPORTS_FD, rest) :]
    except BrokenPipeError:
        _end(EXIT_DONE)


class _Commands(threading.Thread):
    """Reads commands for the main thread, and ends the process where they end."""

    def __init__(self) -> None:
        super().__init__(name="commands", daemon=True)
        self.queue: queue.Queue[Command] = queue.Queue(COMMANDS_MAX)
        self.loaded = False  # set by the main thread; before that, nobody would look at a Shutdown

    def run(self) -> None:
        reader = COMMANDS.reader()
        try:
            while data := os.read(_COMMANDS_FD, READ_BYTES):
                for command in reader.feed(data):
                    if isinstance(command, Shutdown) and not self.loaded:
                        _end(EXIT_DONE)
                    self._hand_over(command)
        except ProtocolViolation as violation:
            _end(EXIT_VIOLATION, f"what came on stdin is no command: {violation}")
        _end(EXIT_DONE)

    def _hand_over(self, command: Command) -> None:
        while True:
            try:
                return self.queue.put(command, timeout=FULL_CHECK_SECONDS)
            except queue.Full:
                hung_up = select.poll()
                hung_up.register(_COMMANDS_FD, 0)
                if hung_up.poll(0):
                    _end(EXIT_DONE)


def _factory(engine: str) -> EngineFactory:
    """The engine's loader; only what is needed is imported."""
    if engine == "fake":
        from inference.runner import fake_load  # noqa: PLC0415 - one engine is loaded, not both

        return fake_load.load
    from inference.runner import mlx_engine  # noqa: PLC0415 - one engine is loaded, not both

    return mlx_engine.load


class _Progress:
    """Reports how far the loading is, but not more often than anybody would want to know."""

    def __init__(self) -> None:
        self._reported = -1
        self._warming_up = False

    def __call__(self, done: int, total: int) -> None:
        if self._warming_up:
            return
        step = PROGRESS_STEPS_MAX * done // max(total, 1)
        if step > self._reported:
            self._reported = step
            _send(Phase("loading", done, total))
        if done >= total > 0:
            self.warm_up()

    def warm_up(self) -> None:
        if not self._warming_up:
            self._warming_up = True
            _send(Phase("warming_up"))


def _load(command: Command) -> Engine:
    if not isinstance(command, LoadModel):
        _end(EXIT_VIOLATION, "the first command was not to load a model")
    progress = _Progress()
    _send(Phase("loading"))
    try:
        engine = _factory(command.engine)(command, progress)
    except LoadError as error:
        _send(LoadFailed(str(error)))
        _end(EXIT_LOAD_FAILED)
    except Exception as error:  # noqa: BLE001 - a library's fault in loading is told in one sentence, with details on stderr
        traceback.print_exc()
        _send(LoadFailed(f"The model can't be loaded: {one_line(error)}."))
        _end(EXIT_LOAD_FAILED)
    progress.warm_up()
    return engine


def _act(core: Core, command: Command) -> None:
    if isinstance(command, Submit):
        core.submit(command.request)
    elif isinstance(command, Cancel):
        core.cancel(command.request_id)
    elif isinstance(command, Shutdown):
        core.fail_all("runner_stopped", "The runner was stopped while it worked on this request.")
        _send_events(core)
        _send(Bye())
        _end(EXIT_DONE)
    else:
        _end(EXIT_VIOLATION, "a second model was asked for")


def _take_commands(core: Core, commands: queue.Queue[Command]) -> None:
    """Act on what has come since the last step; with nothing running, wait for it, without using the CPU."""
    for _ in range(COMMANDS_PER_STEP_MAX):
        if commands.empty() and not core.idle:
            return
        _act(core, commands.get())
        if commands.empty():
            return


def _send_events(core: Core) -> None:
    report = core.report()
    if report is not None:
        _send(report)


def _step(core: Core) -> None:
    try:
        core.step()
    except Exception as error:  # noqa: BLE001 - the engine is in no known state: a fresh process is the way out
        traceback.print_exc()
        core.fail_all("engine_error", f"The engine failed: {one_line(error)}.")
        _send_events(core)
        _end(EXIT_ENGINE_BROKEN, "the engine raised in a step")


def main() -> NoReturn:
    """Load the model that the first command names, then serve until told to stop."""
    # Stopping is the node's affair, a Ctrl-C is not for a runner; SIGTERM ends it at once, whatever it was started with: a
    # handler in Python would not run during an evaluation.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    faulthandler.enable()
    commands = _Commands()
    commands.start()
    engine = _load(commands.queue.get())
    core = Core(engine)
    commands.loaded = True
    _send(Ready(core.info))
    while True:
        _take_commands(core, commands.queue)
        _send_events(core)
        if not core.idle:
            _step(core)
            _send_events(core)


if __name__ == "__main__":
    sys.exit(main())
