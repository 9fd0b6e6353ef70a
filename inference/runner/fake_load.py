"""The fake engine's edge: its settings from disk, its pace as sleeps, its faults as real ones."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from inference.runner.engine import LoadError
from inference.runner.fake_engine import FakeEngine, FakeSettings, Fault
from inference.runner_protocol import LoadModel

LOAD_SLICES = 20
EXIT_STATUS = 7


class _Config(Struct):
    model_type: str
    max_position_embeddings: int = 8192
    fake: FakeSettings = FakeSettings()


def load(command: LoadModel, progress: Callable[[int, int], None]) -> FakeEngine:
    """The engine that a model directory's config.json describes.

    Raises: LoadError.
    """
    path = Path(command.model_path) / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as error:
        raise LoadError(f"The fake model at {command.model_path} can't be read: {error}.") from error
    settings = config.fake
    if config.model_type != "fake":
        raise LoadError(f"The model at {command.model_path} is no fake one but of type {config.model_type}.")
    if settings.load_error is not None:
        raise LoadError(settings.load_error)
    if settings.weight_bytes > command.memory_bytes:
        raise LoadError(f"The model's {settings.weight_bytes} bytes don't fit into the {command.memory_bytes} allowed.")
    _pass_phases(settings, progress)
    context = min(command.context, config.max_position_embeddings)
    running_max = min(settings.running_max, command.running_max or settings.running_max)
    return FakeEngine(settings, context, running_max, _stepper(settings))


def _pass_phases(settings: FakeSettings, progress: Callable[[int, int], None]) -> None:
    total = settings.weight_bytes
    for done in range(LOAD_SLICES):
        progress(total * done // LOAD_SLICES, total)
        time.sleep(settings.load_seconds / LOAD_SLICES)
        if done == LOAD_SLICES // 2:
            _strike_all(settings, "loading")
    progress(total, total)
    time.sleep(settings.warm_up_seconds)
    _strike_all(settings, "warming_up")


def _stepper(settings: FakeSettings) -> Callable[[int], None]:
    def before_step(number: int) -> None:
        if settings.step_seconds:
            time.sleep(settings.step_seconds)
        if settings.faults:
            _strike_all(settings, "step", number)

    return before_step


def _strike_all(settings: FakeSettings, at: str, step: int = 1) -> None:
    for fault in settings.faults:
        if (fault.at, fault.step) == (at, step):
            _strike(fault)


def _strike(fault: Fault) -> None:
    if fault.kind == "exit":
        os._exit(EXIT_STATUS)
    elif fault.kind == "abort":
        os.abort()
    elif fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "hang":
        _hang()
    elif fault.kind == "print":
        os.write(1, b"a library prints from C\n")
        print("a library prints", flush=True)  # noqa: T201 - exactly what must not reach the pipe
    elif fault.kind == "modules":
        print("modules:", *sorted(sys.modules), file=sys.stderr, flush=True)  # noqa: T201 - for a test to read
    else:
        raise RuntimeError("the fake engine raises, as its settings ask for")


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)
