"""Decode speed over HTTP beside mlx_lm.server's on the same model: as a user gets that server, and on equal terms.

Equal terms: the BLAS that shoal puts under MLX, and a copy of the model in the dtypes that shoal runs it in (dense f32 on a
CPU). As a user gets it, a quantized model with 16-bit scales on a CPU is so slow that few tokens are asked for.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from inference.runner.blas import fast_blas
from scripts.benchmarks.figures import interleaved, ratio, report
from scripts.benchmarks.models import THREADS, real_model
from scripts.benchmarks.node_process import running_node, stream_chat, user_message
from scripts.benchmarks.prompts import LONG_ANSWERS

START_SECONDS_MAX = 120.0


def decode_rate(port: int, model: str, tokens: int) -> float:
    """Tokens a second between the first and the last piece of one streamed answer."""
    body: dict[str, object] = {
        "model": model,
        "temperature": 0,
        "max_tokens": tokens,
        "messages": user_message(LONG_ANSWERS[0]),
    }
    arrivals = stream_chat(port, body).arrivals
    return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


def dense_copy(model: Path, directory: Path, environment: dict[str, str]) -> Path:
    """A copy of the model as dense f32, made by mlx-lm itself."""
    copy = directory / "dense"
    command = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(model), "--mlx-path", str(copy)]
    subprocess.run([*command, "-d", "--dtype", "float32"], env=environment, check=True, capture_output=True)
    return copy


@contextlib.contextmanager
def running_server(model: Path, environment: dict[str, str]) -> Iterator[int]:
    """mlx_lm.server on a free port of loopback; yields the port once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port), "--log-level", "ERROR"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_SECONDS_MAX
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"mlx_lm.server did not start: {log.read()[-500:]!r}")
                time.sleep(0.2)
            yield port
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def main() -> None:
    """Print both ratios."""
    model = real_model()
    plain = {**os.environ, "HF_HUB_OFFLINE": "1"}
    blas = fast_blas(model.path.parent / "blas", THREADS)
    equal = {**plain, "LD_PRELOAD": blas or "", "OPENBLAS_NUM_THREADS": str(THREADS), "MLX_DISABLE_COMPILE": "1"}
    with tempfile.TemporaryDirectory() as temporary, running_node("--model", model.name) as node:
        with running_server(dense_copy(model.path, Path(temporary), equal), equal) as port:
            pairs = interleaved(lambda: decode_rate(node.port, model.name, 48), lambda: decode_rate(port, "default_model", 48))
            value, text = ratio(pairs)
            report("decode, ours / mlx_lm.server with the same BLAS and dtypes", text, ">= 1 or so", reached=value >= 0.95)
        with running_server(model.path, plain) as port:
            decode_rate(port, "default_model", 2)
            pairs = interleaved(lambda: decode_rate(node.port, model.name, 48), lambda: decode_rate(port, "default_model", 4))
            value, text = ratio(pairs)
            report("decode, ours / mlx_lm.server as a user gets it", text, "printed beside", reached=True)
