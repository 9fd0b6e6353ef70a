"""What the engine adds to decoding: its steps against a bare BatchGenerator over the same weights, in one process.

Both decode the same rows in turn, with one BLAS thread; only the steps after the last prompt are timed.
"""

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from inference.requests import Sampling
from inference.runner.blas import fast_blas
from inference.runner.engine import Row
from inference.runner_protocol import LoadModel
from scripts.benchmarks.figures import interleaved, ratio, report
from scripts.benchmarks.models import real_model

if TYPE_CHECKING:
    from inference.runner.mlx_load import Loaded
    from inference.runner.mlx_serving import MlxEngine

STEPS = 24
PROMPT_TOKENS = 32
SHARE_WANTED = 0.98  # over HTTP it is to be 0.95; the rest is for pipes, node and HTTP
SPEED_UP_WANTED = 4.0
MEMORY_BYTES = 4 << 30
GREEDY = Sampling(seed=1, temperature=0)
DRAWN = Sampling(seed=1, temperature=1)


def prompts(rows: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Rows of different beginnings, so that no prefix is shared."""
    return [tuple((31 * i * i + 101 * row + 7) % vocabulary for i in range(PROMPT_TOKENS)) for row in range(rows)]


def of_engine(engine: "MlxEngine", rows: int, sampling: Sampling) -> float:
    """Tokens a second of the engine's steps."""
    for number, ids in enumerate(prompts(rows, 1000)):
        engine.insert(
            Row(
                request_id=str(number),
                prompt_ids=ids,
                generated=(),
                token_count_max=STEPS * 2,
                sampling=sampling,
                top_logprobs=None,
            )
        )
    while len(engine.step().sampled) < rows:
        pass
    seconds = _timed(engine.step)
    for number in range(rows):
        engine.remove(str(number))
    engine.trim_cache(0)
    return rows * STEPS / seconds


def of_batch_generator(loaded: "Loaded", rows: int, sampling: Sampling) -> float:
    """Tokens a second of mlx-lm's BatchGenerator with a sampler of mlx-lm's own."""
    from mlx_lm.generate import BatchGenerator  # noqa: PLC0415 - after the BLAS
    from mlx_lm.sample_utils import make_sampler  # noqa: PLC0415 - only the child process needs it

    generator = BatchGenerator(loaded.model, sampler=make_sampler(sampling.temperature))
    generator.insert([list(ids) for ids in prompts(rows, 1000)], max_tokens=[STEPS * 2] * rows)
    while len(generator.next()[1]) < rows:
        pass
    seconds = _timed(generator.next)
    generator.close()
    return rows * STEPS / seconds


def _timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - started


def main() -> None:
    """Print the ratios."""
    model = real_model()
    blas_cache = model.path.parent / "blas"
    blas = fast_blas(blas_cache, 1)
    from inference.runner.mlx_load import load_weights  # noqa: PLC0415 - after the BLAS
    from inference.runner.mlx_serving import MlxEngine  # noqa: PLC0415 - likewise

    command = LoadModel(
        engine="mlx",
        model_path=str(model.path),
        context=2048,
        memory_bytes=MEMORY_BYTES,
        threads=1,
        blas_cache=str(blas_cache),
    )
    loaded = load_weights(command, blas is not None, lambda _done, _total: None)
    engine = MlxEngine(loaded)
    for name, sampling in (("greedy", GREEDY), ("temperature 1", DRAWN)):
        for rows in (1, 8):
            pairs = interleaved(
                functools.partial(of_engine, engine, rows, sampling),
                functools.partial(of_batch_generator, loaded, rows, sampling),
            )
            share, text = ratio(pairs)
            report(f"engine / BatchGenerator, {name}, batch {rows}", text, f">= {SHARE_WANTED}", reached=share >= SHARE_WANTED)
    eight, one = (functools.partial(of_engine, engine, rows, GREEDY) for rows in (8, 1))
    speed_up, text = ratio(interleaved(eight, one))
    report("8 rows / one", text, f">= {SPEED_UP_WANTED}", reached=speed_up >= SPEED_UP_WANTED)


if __name__ == "__main__":
    main()
