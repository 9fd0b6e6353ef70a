"""What a runner is told about its model."""

from pathlib import Path

import msgspec

from inference.models import FAKE_ARCHITECTURE, Model
from node.local_runners import RunnerSettings, load_command

MODEL = Model(
    model_hash="ab" * 32, name="m", path=Path("/models/m"), architecture="llama", parameters=1, weight_bytes=1, layers=1,
    context_length=4096, quantization="4-bit",
)  # fmt: skip
SETTINGS = RunnerSettings(context=None, running_max=None, memory_bytes=1 << 30, threads=2, blas_cache=Path("/models/blas"))


def context_of(model_context: int, option: int | None) -> int:
    model = msgspec.structs.replace(MODEL, context_length=model_context)
    return load_command(model, msgspec.structs.replace(SETTINGS, context=option)).context


def test_the_context_is_the_models_or_8192_or_what_was_asked_for_if_the_model_has_so_much() -> None:
    assert context_of(4096, None) == 4096
    assert context_of(131072, None) == 8192
    assert context_of(131072, 32768) == 32768
    assert context_of(4096, 32768) == 4096
    assert context_of(4096, 100) == 100


def test_the_engine_follows_from_the_model() -> None:
    assert load_command(MODEL, SETTINGS).engine == "mlx"
    assert load_command(msgspec.structs.replace(MODEL, architecture=FAKE_ARCHITECTURE), SETTINGS).engine == "fake"


def test_the_rest_is_what_the_device_allows() -> None:
    command = load_command(MODEL, msgspec.structs.replace(SETTINGS, running_max=3))

    assert (command.model_path, command.running_max, command.memory_bytes) == ("/models/m", 3, 1 << 30)
    assert (command.threads, command.blas_cache) == (2, "/models/blas")
