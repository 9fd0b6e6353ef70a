"""Loading: the form that fits the device, and one sentence for what can't be loaded."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from inference.runner.engine import LoadError
from tests.inference.engine_contract import row, run_rows
from tests.inference.mlx_engines import BLAS, BLAS_CACHE, command, engine_for, ignore, load_weights
from tests.inference.tiny_models import make_tiny

import mlx.core as mx  # isort: skip - after the BLAS
from inference.runner.mlx_load import choose, forms  # isort: skip - imports MLX

MIB = 1 << 20


def test_progress_is_told_in_bytes_up_to_all_of_them(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    model = make_tiny(tmp_path, hidden_size=1024, intermediate_size=4096, eos_token_id=300)
    engine = engine_for(model, progress=lambda done, total: reports.append((done, total)))
    assert {total for _, total in reports} == {engine.info.weight_bytes}
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert (reports[0][0], reports[-1][0]) == (0, engine.info.weight_bytes)
    assert len(reports) > 3
    assert engine.info.weight_bytes == sum(array.nbytes for array in load_file(model / "model.safetensors").values())


def test_weights_are_run_dense_in_f32_where_a_blas_is_and_memory_allows(tmp_path: Path) -> None:
    """Dequantized exactly: as the arithmetic of the format says, in f32."""
    assert BLAS is not None, "these tests need scipy-openblas32 or a system OpenBLAS"
    model = make_tiny(tmp_path, quantize=4)
    loaded = load_weights(command(model), True, ignore)
    assert loaded.dtype == "float32"

    stored = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    codes = (stored[f"{name}.weight"][..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    scales, biases = (stored[f"{name}.{part}"].astype(np.float32)[..., None] for part in ("scales", "biases"))
    expected = codes.reshape(*scales.shape[:2], 32).astype(np.float32) * scales + biases
    got = np.asarray(loaded.model.model.layers[0].mlp.up_proj.weight)
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=1e-6, atol=1e-7)


def test_weights_stay_quantized_where_dense_ones_would_take_too_much(tmp_path: Path) -> None:
    """A tiny model's 460 kB as f32 against 110 kB."""
    model = make_tiny(tmp_path, quantize=4)
    for memory_bytes, dequantized in ((1 << 20, True), (1 << 19, False)):
        _, _, form = choose(model, forms(on_cpu=True, blas=True), memory_bytes)
        assert (form.dequantize, form.dtype) == (dequantized, mx.float32)


def test_the_form_follows_the_device() -> None:
    assert forms(on_cpu=False, blas=False)[0].dtype is None
    assert [(form.dtype, form.dequantize) for form in forms(on_cpu=True, blas=True)] == [
        (mx.float32, True),
        (mx.float32, False),
    ]
    assert forms(on_cpu=True, blas=False)[0].dtype == mx.bfloat16


def test_the_context_is_no_longer_than_the_models(tmp_path: Path) -> None:
    assert engine_for(make_tiny(tmp_path), context=1 << 20).info.context == 2048


def test_running_max_is_what_was_asked_for_where_it_fits(tmp_path: Path) -> None:
    model = make_tiny(tmp_path)
    assert engine_for(model, running_max=3).info.running_max == 3
    alone = engine_for(model, running_max=1)
    assert alone.info.running_max == 1
    assert len(run_rows(alone, row(alone, "a"))[0]) > 0


def spoil_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut_weights(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown architecture": (lambda model: spoil_config(model, model_type="nosuch"), "nosuch not supported"),
    "own code": (lambda model: spoil_config(model, model_file="model.py"), "brings its own code"),
    "sizes that do not match": (lambda model: spoil_config(model, hidden_size=96), "can't be loaded"),
    "no sizes": (lambda model: (model / "config.json").write_text('{"model_type": "llama"}'), "can't be loaded"),
    "config is no object": (lambda model: (model / "config.json").write_text("[]"), "names no model_type"),
    "config is no JSON": (lambda model: (model / "config.json").write_text("{"), "can't be read"),
    "no config": (lambda model: (model / "config.json").unlink(), "has no config.json"),
    "no tokenizer config": (lambda model: (model / "tokenizer_config.json").unlink(), "has no tokenizer_config.json"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "tokenizer"),
    "tokenizer is no JSON": (lambda model: (model / "tokenizer.json").write_text("{"), "tokenizer"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "has no model*.safetensors"),
    "weights cut short": (cut_weights, "is damaged"),
    "empty weights": (lambda model: (model / "model.safetensors").write_bytes(b""), "is damaged"),
    "weights are noise": (lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 5000), "is damaged"),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_what_can_not_be_loaded_is_told_in_one_sentence(tmp_path: Path, fault: str) -> None:
    model = make_tiny(tmp_path)
    spoil, reason = SPOILT[fault]
    spoil(model)
    with pytest.raises(LoadError) as caught:
        engine_for(model)
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert len(message) < 1000


def test_a_model_too_big_for_the_memory_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    with pytest.raises(LoadError, match=r"needs .* for its weights, .* may use 100 MiB"):
        engine_for(make_tiny(tmp_path), memory_bytes=100 * MIB, progress=lambda done, total: reports.append((done, total)))
    assert reports == []


def test_a_tokenizer_that_brings_its_own_code_is_not_asked_about_on_stdin(tmp_path: Path) -> None:
    """transformers would prompt for consent; in a runner that would hang or eat commands."""
    model = make_tiny(tmp_path)
    path = model / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            {**json.loads(path.read_text()), "tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["t.Own", "t.Own"]}}
        )
    )
    (model / "t.py").write_text("raise SystemError('this must never run')\n")
    with pytest.raises(LoadError, match="brings its own code, which is never run here"):
        engine_for(model)


PEAK = """
import sys
from pathlib import Path
from inference.requests import Sampling
from inference.runner.engine import Row
from inference.runner.mlx_engine import load
from inference.runner_protocol import LoadModel

memory, model, cache = int(sys.argv[1]), sys.argv[2], sys.argv[3]
engine = load(
    LoadModel(engine="mlx", model_path=model, context=256, memory_bytes=memory, threads=1, blas_cache=cache), lambda d, t: None
)
rows, length = engine.info.running_max, engine.info.context
for turn in range(2):
    for n in range(rows):
        ids = tuple((7 * i + n + turn) % 256 + 3 for i in range(length - 8))
        sampling = Sampling(seed=n)
        engine.insert(
            Row(request_id=str(n), prompt_ids=ids, generated=(), token_count_max=8, sampling=sampling, top_logprobs=2)
        )
    live = set(map(str, range(rows)))
    while live:
        result = engine.step()
        assert not result.failed
        live -= {token.request_id for token in result.sampled if token.last}
    assert engine.cache_bytes() <= engine.info.kv_bytes_max
peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(rows, length, peak << 10)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_a_runner_full_of_rows_stays_within_its_memory(tmp_path: Path) -> None:
    """All rows it says it takes, each as long as the context, twice, with the prefix cache filling what is left."""
    memory = 300 * MIB
    model = make_tiny(tmp_path, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(memory), str(model), str(BLAS_CACHE)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    rows, length, peak = map(int, done.stdout.split())
    assert rows >= 3
    assert length == 256
    assert peak <= memory
