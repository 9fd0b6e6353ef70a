"""The MLX engine's front door: it puts a BLAS under MLX before anything of it is imported, then loads, checks and measures."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from inference.runner.blas import fast_blas
from inference.runner.engine import LoadError
from inference.runner_protocol import LoadModel

if TYPE_CHECKING:
    from inference.runner.mlx_serving import MlxEngine

OPEN_FILES_MIN = 4096  # what `import mlx_lm` sets as the limit, and raises where it may not


def load(command: LoadModel, progress: Callable[[int, int], None]) -> "MlxEngine":
    """Load the model that `command` names; `progress` is called with bytes loaded of how many.

    Raises: LoadError.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < OPEN_FILES_MIN:
        raise LoadError(f"mlx-lm needs a hard limit of {OPEN_FILES_MIN} open files, and here it is {allowed} (ulimit -Hn)")
    blas = fast_blas(Path(command.blas_cache), command.threads)
    from inference.runner.mlx_load import load_weights  # noqa: PLC0415 - MLX binds its BLAS when it is imported
    from inference.runner.mlx_serving import MlxEngine  # noqa: PLC0415 - likewise

    return MlxEngine(load_weights(command, blas is not None, progress))
