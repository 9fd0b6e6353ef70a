"""Decode speed over HTTP against mlx-lm's BatchGenerator in one process, with the same BLAS and dtypes; 8 streams against one.

Both sides decode the same questions greedily, in turn. The other process stays loaded meanwhile, and idle.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

from scripts.benchmarks.figures import interleaved, ratio, report
from scripts.benchmarks.models import THREADS, real_model
from scripts.benchmarks.node_process import NodeProcess, Streamed, running_node, stream_chat, user_message
from scripts.benchmarks.prompts import LONG_ANSWERS

TOKENS = 64
MEMORY_BYTES = 8 << 30


def over_http(node: NodeProcess, model: str, streams: int) -> float:
    """Tokens a second of so many streams at once, while all of them run."""
    answers: list[Streamed] = []

    def ask(question: str) -> None:
        body: dict[str, object] = {"model": model, "temperature": 0, "max_tokens": TOKENS, "messages": user_message(question)}
        answers.append(stream_chat(node.port, body))

    threads = [threading.Thread(target=ask, args=(question,)) for question in LONG_ANSWERS[:streams]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == streams, "a stream failed"
    begin = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    return sum(begin < moment <= end for answer in answers for moment in answer.arrivals) / (end - begin)


class Reference:
    """BatchGenerator in a process of its own, which loads the model exactly as a runner does."""

    def __init__(self, model: Path, blas_cache: Path) -> None:
        command = [sys.executable, "-m", "scripts.benchmarks.decode", str(model), str(blas_cache)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def rate(self, rows: int) -> float:
        """Tokens a second of so many rows."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rows}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the reference process ended")
        return line

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Print the ratios."""
    model = real_model()
    with running_node("--model", model.name) as node:
        reference = Reference(model.path, model.path.parent / "blas")
        try:
            for streams in (1, 8):
                pairs = interleaved(lambda n=streams: over_http(node, model.name, n), lambda n=streams: reference.rate(n))  # type: ignore[misc]  # a default binds the loop variable
                share, text = ratio(pairs)
                report(f"decode over HTTP / BatchGenerator, batch {streams}", text, ">= 0.95", reached=share >= 0.95)
        finally:
            reference.close()
        value, text = ratio(interleaved(lambda: over_http(node, model.name, 8), lambda: over_http(node, model.name, 1)))
        report("8 streams / one", text, ">= 4", reached=value >= 4)


def _serve_reference(path: str, blas_cache: str) -> None:
    from inference.runner.blas import fast_blas  # noqa: PLC0415 - only in the reference's process, and before MLX
    from inference.runner_protocol import LoadModel  # noqa: PLC0415 - only the child process needs it

    blas = fast_blas(Path(blas_cache), THREADS)
    from mlx_lm.generate import BatchGenerator  # noqa: PLC0415 - only the child process needs it

    from inference.runner.mlx_load import load_weights  # noqa: PLC0415 - only the child process needs it

    command = LoadModel(
        engine="mlx", model_path=path, context=2048, memory_bytes=MEMORY_BYTES, threads=THREADS, blas_cache=blas_cache
    )
    loaded = load_weights(command, blas is not None, lambda _done, _total: None)
    template = loaded.tokenizer.apply_chat_template
    prompts = [template(user_message(question), add_generation_prompt=True) for question in LONG_ANSWERS]
    print("loaded", flush=True)
    for line in sys.stdin:
        rows = int(line)
        generator = BatchGenerator(loaded.model)
        generator.insert(prompts[:rows], max_tokens=[2 * TOKENS] * rows)
        while len(generator.next()[1]) < rows:
            pass
        started = time.perf_counter()
        for _ in range(TOKENS):
            generator.next()
        print(rows * TOKENS / (time.perf_counter() - started), flush=True)
        generator.close()


if __name__ == "__main__":
    _serve_reference(*sys.argv[1:3])
