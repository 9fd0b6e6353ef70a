"""MLX engines for tests, in the test's own process.

Import this before anything that imports MLX: a BLAS must be in place by then, and without one models run in bfloat16, where
nothing is exact.
"""

from collections.abc import Callable
from pathlib import Path

from inference.runner.blas import fast_blas
from inference.runner.mlx_engine import load
from inference.runner_protocol import LoadModel

BLAS_CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "blas"
MEMORY_BYTES = 1 << 30
BLAS = fast_blas(BLAS_CACHE, threads=1)

from inference.runner.mlx_load import load_weights  # noqa: E402 - imports MLX
from inference.runner.mlx_sampling import Chooser, chooser  # noqa: E402 - likewise
from inference.runner.mlx_serving import MlxEngine  # noqa: E402 - likewise


def command(model: Path, *, context: int = 2048, memory_bytes: int = MEMORY_BYTES, running_max: int | None = None) -> LoadModel:
    """What a launcher would send."""
    return LoadModel(
        engine="mlx",
        model_path=str(model),
        context=context,
        running_max=running_max,
        memory_bytes=memory_bytes,
        threads=1,
        blas_cache=str(BLAS_CACHE),
    )


def ignore(_done: int, _total: int) -> None:
    """Progress that nobody looks at."""


def engine_for(
    model: Path,
    *,
    context: int = 2048,
    memory_bytes: int = MEMORY_BYTES,
    running_max: int | None = None,
    progress: Callable[[int, int], None] = ignore,
) -> MlxEngine:
    """Load a model in this process."""
    return load(command(model, context=context, memory_bytes=memory_bytes, running_max=running_max), progress)


__all__ = ["BLAS", "BLAS_CACHE", "Chooser", "MlxEngine", "chooser", "command", "engine_for", "ignore", "load_weights"]
