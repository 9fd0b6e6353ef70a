"""From a GGUF file to what `mlx_lm.load` takes: every weight in its place and with its value, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.gguf_convert import convert
from inference.models import ModelDamagedError, ModelError, ModelUnsupportedError
from inference.safetensors_file import read_header
from tests.inference.gguf_files import TINY, Array, Gguf, decode, tiny_gguf, tiny_tokens

MIXED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "F16", "BF16", "F32")

# Loads each model named on the command line and writes its weights, dequantized, and a short greedy answer beside it.
LOAD = """
import json, sys
import mlx.core as mx, numpy as np
from mlx.utils import tree_flatten
mx.set_default_device(mx.cpu)
from mlx_lm import load
for path in sys.argv[1:]:
    model, tokenizer = load(path)
    weights = {}
    for name, module in model.named_modules():
        if hasattr(module, "scales"):
            arrays = module.weight, module.scales.astype(mx.float32), module.biases.astype(mx.float32)
            weights[name + ".weight"] = mx.dequantize(*arrays, group_size=module.group_size, bits=module.bits)
    for name, value in tree_flatten(model.parameters()):
        if not name.endswith((".scales", ".biases")):
            weights.setdefault(name, value)
    np.savez(path + "/loaded.npz", **{name: np.array(value.astype(mx.float32)) for name, value in weights.items()})
    logits = model(mx.array([tokenizer.encode("hello")]))
    assert mx.isfinite(logits).all().item()
    facts = {"eos": sorted(tokenizer.eos_token_ids), "decoded": tokenizer.decode(tokenizer.encode("hello Ä\\n")),
        "template": tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)}
    open(path + "/facts.json", "w").write(json.dumps(facts))
"""


def _converted(gguf: Gguf, directory: Path, name: str) -> Path:
    out = directory / name
    out.mkdir()
    seen: list[tuple[int, int]] = []
    convert(gguf.write(directory / f"{name}.gguf"), out, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0
    return out


NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "token_embd": "model.embed_tokens",
    "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
ROWS_LOOKED_AT = 12


def _mlx_name(name: str) -> str:
    *prefix, part, suffix = name.split(".")
    where = f"model.layers.{prefix[1]}." if prefix else ""
    return f"{where}{NAMES[part]}.{suffix}"


def _expected_rows(gguf: Gguf, name: str, architecture: str) -> dict[int, NDArray[np.float32]]:
    """Some rows of a tensor as mlx-lm numbers them, each decoded alone; llama's rotary rows lie elsewhere in their head."""
    kind, shape, data = gguf.tensors[name]
    if len(shape) == 1:
        return {0: decode(kind, data)}
    row_bytes, half = len(data) // shape[0], TINY["head"] // 2
    rows = {}
    for row in {*range(0, shape[0], shape[0] // ROWS_LOOKED_AT), shape[0] - 1}:
        source = row
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            head, inside = divmod(row, TINY["head"])
            second_half, i = divmod(inside, half)
            source = head * TINY["head"] + 2 * i + second_half
        rows[row] = decode(kind, data[source * row_bytes : (source + 1) * row_bytes])
    return rows


def test_mlx_lm_loads_every_weight_exactly(tmp_path: Path) -> None:
    """Three families, all exact types in one file, tied and untied; Q6_K within f16."""
    models = {
        "llama": ("llama", tiny_gguf("llama", MIXED, seed=1)),
        "llama-shifted": ("llama", tiny_gguf("llama", MIXED[3:] + MIXED[:3], tied=False, seed=2)),
        "qwen2": ("qwen2", tiny_gguf("qwen2", ("Q4_K", "Q5_K"), seed=3)),
        "qwen3": ("qwen3", tiny_gguf("qwen3", ("Q6_K", "Q4_K"), tied=False, seed=4)),
        "dense": ("llama", tiny_gguf("llama", ("F16",), seed=5)),
    }
    paths = {name: _converted(gguf, tmp_path, name) for name, (_, gguf) in models.items()}
    run = [sys.executable, "-c", LOAD, *map(str, paths.values())]
    result = subprocess.run(run, capture_output=True, text=True, env={"MLX_DISABLE_COMPILE": "1", "PATH": ""}, check=False)
    assert result.returncode == 0, result.stderr

    for name, (architecture, gguf) in models.items():
        loaded = np.load(paths[name] / "loaded.npz")
        assert set(loaded) == {_mlx_name(weight) for weight in gguf.tensors}
        for weight, (kind, shape, _) in gguf.tensors.items():
            values = loaded[_mlx_name(weight)]
            assert values.shape == shape
            for row, expected in _expected_rows(gguf, weight, architecture).items():
                found = values[row] if len(shape) > 1 else values
                if kind == "Q6_K":
                    np.testing.assert_allclose(found, expected, rtol=2**-11, atol=2**-25)
                else:
                    np.testing.assert_array_equal(found, expected, err_msg=f"{name} {weight} {row}")
        facts = json.loads((paths[name] / "facts.json").read_text())
        assert facts == {"eos": [2], "decoded": "hello Ä\n", "template": "hi"}


def test_scales_are_f16_where_that_is_exact_and_f32_for_k_types(tmp_path: Path) -> None:
    out = _converted(tiny_gguf("llama", ("Q4_1", "Q4_K")), tmp_path, "m")
    dtypes = {tensor.name: tensor.dtype for tensor in read_header(out / "model.safetensors")}

    assert dtypes["model.embed_tokens.scales"] == "F16"
    assert dtypes["model.layers.0.self_attn.q_proj.scales"] == "F32"
    assert dtypes["model.norm.weight"] == "F32"


def test_paths_of_another_width_have_their_own_entry(tmp_path: Path) -> None:
    gguf = tiny_gguf("llama", ("Q4_0",))
    gguf.tensors["token_embd.weight"] = tiny_gguf("llama", ("Q8_0",)).tensors["token_embd.weight"]
    config = json.loads((_converted(gguf, tmp_path, "m") / "config.json").read_text())

    affine = {"group_size": 32, "mode": "affine"}
    assert config["quantization"] == {**affine, "bits": 4, "model.embed_tokens": {**affine, "bits": 8}}
    assert (config["rms_norm_eps"], config["eos_token_id"], config["tie_word_embeddings"]) == (1e-5, 2, True)


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (_converted(tiny_gguf("qwen2", ("Q4_K",)), tmp_path, name) for name in ("a", "b"))

    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_slabs_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tiny_gguf("llama", MIXED, seed=6)
    whole = _converted(gguf, tmp_path, "whole")
    monkeypatch.setattr("inference.gguf_convert.SLAB_BYTES", 1)
    sliced = _converted(gguf, tmp_path, "sliced")

    assert (whole / "model.safetensors").read_bytes() == (sliced / "model.safetensors").read_bytes()


def test_llama_3_scaling_is_recognised(tmp_path: Path) -> None:
    """The factors are those that the published parameters give, computed here wave by wave as the model's authors do."""
    gguf = tiny_gguf()
    gguf.metadata["llama.rope.freq_base"] = 500000.0
    factors = []
    for i in range(TINY["head"] // 2):
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / TINY["head"])
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    gguf.tensors["rope_freqs.weight"] = "F32", (len(factors),), np.array(factors, "<f4").tobytes()
    scaling = json.loads((_converted(gguf, tmp_path, "m") / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)

    gguf.tensors["rope_freqs.weight"] = "F32", (len(factors),), np.array([*factors[:-2], 17.0, 32.0], "<f4").tobytes()
    with pytest.raises(ModelUnsupportedError, match="in a way that can't be converted"):
        _converted(gguf, tmp_path, "other")


def _meta(key: str, value: object) -> Callable[[Gguf], object]:
    return lambda gguf: gguf.metadata.update({key: value})


def _extra(name: str, shape: tuple[int, ...]) -> Callable[[Gguf], object]:
    return lambda gguf: gguf.tensors.update({name: ("F32", shape, bytes(4 * int(np.prod(shape))))})


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (_meta("general.architecture", "mamba"), ModelUnsupportedError, "architecture 'mamba'"),
        (_meta("tokenizer.ggml.model", "llama"), ModelUnsupportedError, "tokenizer of model 'llama'"),
        (_meta("tokenizer.ggml.pre", "tekken"), ModelUnsupportedError, "pre-tokenizer 'tekken'"),
        (lambda gguf: gguf.metadata.pop("tokenizer.ggml.pre"), ModelUnsupportedError, "pre-tokenizer 'None'"),
        (_meta("llama.expert_count", 8), ModelUnsupportedError, "is a mixture of experts"),
        (_meta("llama.rope.scaling.type", "yarn"), ModelUnsupportedError, "scales its rotary positions ('yarn')"),
        (_meta("llama.rope.dimension_count", 32), ModelUnsupportedError, "rotates only part of its heads"),
        (_meta("split.count", 3), ModelUnsupportedError, "is one part of several"),
        (_extra("blk.0.ffn_gate_exps.weight", (4, 256)), ModelUnsupportedError, "tensor 'blk.0.ffn_gate_exps.weight'"),
        (_extra("blk.7.attn_q.weight", (4, 256)), ModelUnsupportedError, "tensor 'blk.7.attn_q.weight'"),
        (_extra("blk.0.attn_q.weight", (128, 256)), ModelDamagedError, "of shape [128, 256]"),
        (lambda gguf: gguf.tensors.pop("blk.1.ffn_up.weight"), ModelDamagedError, "has no tensor 'blk.1.ffn_up.weight'"),
        (_meta("llama.block_count", 4_000_000_000), ModelDamagedError, "llama.block_count = 4000000000"),
        (_meta("llama.block_count", 1_000_000), ModelDamagedError, "claims to have 1000000 layers"),
        (_meta("llama.attention.head_count", 0), ModelDamagedError, "a positive number is needed"),
        (_meta("llama.attention.key_length", 63), ModelDamagedError, "has 4 heads of 63"),
        (_meta("llama.attention.head_count_kv", 3), ModelDamagedError, "has 4 heads of 64"),
        (_meta("llama.context_length", "long"), ModelDamagedError, "llama.context_length = 'long'"),
        (_meta("llama.embedding_length", 255.5), ModelDamagedError, "a whole number is needed"),
        (_meta("tokenizer.ggml.bos_token_id", 1 << 20), ModelDamagedError, "has no token of the number that it gives for bos"),
        (_meta("tokenizer.ggml.merges", Array(8, ["no such"])), ModelDamagedError, "has merges of tokens that it doesn't have"),
        (_meta("tokenizer.ggml.tokens", Array(8, ["a"] * len(tiny_tokens()))), ModelDamagedError, "a damaged list of tokens"),
    ],
)
def test_what_is_not_known_or_not_whole_is_refused_by_name(
    change: Callable[[Gguf], object], kind: type[ModelError], sentence: str, tmp_path: Path
) -> None:
    gguf = tiny_gguf()
    change(gguf)
    with pytest.raises(kind) as caught:
        _converted(gguf, tmp_path, "m")

    assert sentence in str(caught.value)
    assert str(caught.value).count("\n") == 0
    assert not (tmp_path / "m" / "config.json").exists()


def test_infinite_scales_are_refused(tmp_path: Path) -> None:
    gguf = tiny_gguf("llama", ("Q8_0",))
    kind, shape, data = gguf.tensors["blk.0.attn_v.weight"]
    gguf.tensors["blk.0.attn_v.weight"] = kind, shape, np.float16(np.inf).tobytes() + data[2:]

    with pytest.raises(ModelDamagedError, match=r"infinities in the scales of tensor 'blk.0.attn_v.weight'"):
        _converted(gguf, tmp_path, "m")
