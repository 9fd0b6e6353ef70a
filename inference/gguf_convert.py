"""A GGUF file as a directory in mlx-lm's format: config.json, weights, tokenizer.

Needs numpy and tokenizers, not mlx. What is not known is refused by name: a guessed architecture or tokenizer would give a
model that answers nonsense.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from inference import gguf_blocks
from inference.gguf import GgufFile, Tensor
from inference.gguf_config import ROPE_FACTORS, Config, convert_config, expected_tensors
from inference.gguf_tokenizer import convert_tokenizer
from inference.models import ModelDamagedError, ModelUnsupportedError
from inference.safetensors_file import SafetensorsWriter

WEIGHTS_FILE = "model.safetensors"
# Rows are converted in slabs of about this many bytes of the source; the arrays made of a slab take some ten times that.
SLAB_BYTES = 8 << 20

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Shape = tuple[int, ...]


class Plan(Struct, frozen=True):
    """One tensor of the source and what becomes of it."""

    source: Tensor
    name: str  # mlx-lm's: model.layers.0.mlp.up_proj.weight
    head_size: int  # rotary rows of each head are put back in order; 0: rows stay

    @property
    def bits(self) -> int | None:
        """Bits per code, None for a tensor that stays dense."""
        return gguf_blocks.CODE_BITS.get(self.source.type.name)

    @property
    def path(self) -> str:
        """The module that the tensor belongs to."""
        return self.name.rpartition(".")[0]

    def arrays(self) -> dict[str, Shape]:
        """Names and shapes of what is written."""
        shape = self.source.shape
        if self.bits is None:
            return {self.name: shape}
        grouped = (*shape[:-1], shape[-1] // gguf_blocks.GROUP_SIZE)
        words = (*shape[:-1], shape[-1] * self.bits // 32)
        return {self.name: words, f"{self.path}.scales": grouped, f"{self.path}.biases": grouped}


def convert(source: Path, directory: Path, report: Callable[[int, int], None]) -> None:
    """Write the model in `source` into the existing, empty `directory`; `report` gets bytes done and in all.

    Raises: ModelDamagedError, ModelUnsupportedError, OSError. What was written until then is the caller's to remove.
    """
    with GgufFile(source) as gguf:
        config = convert_config(gguf)
        tokenizer, tokenizer_config = convert_tokenizer(gguf.metadata, source.name)
        plans = plan(gguf, config)
        if quantization := _quantization(plans):
            config["quantization"] = quantization
        index = _write_weights(gguf, plans, directory / WEIGHTS_FILE, report)
    _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", config)
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    (directory / "tokenizer.json").write_text(tokenizer, "utf-8")


def plan(gguf: GgufFile, config: Config) -> list[Plan]:
    """What becomes of each tensor, in the order of their places in the file.

    Raises: ModelUnsupportedError for a tensor that such a model doesn't have, ModelDamagedError for a missing or misshapen one.
    """
    expected = expected_tensors(config)
    found = sorted((tensor for tensor in gguf.tensors.values() if tensor.name != ROPE_FACTORS), key=lambda tensor: tensor.start)
    for tensor in found:
        if tensor.name not in expected:
            raise ModelUnsupportedError(
                f"{gguf.path.name} has a tensor {tensor.name!r}, which {config['model_type']} models don't have."
            )
        blocked = tensor.type.values > 1 and len(tensor.shape) < 2
        if tensor.shape != expected[tensor.name] or blocked:
            raise ModelDamagedError(
                f"{gguf.path.name} has tensor {tensor.name!r} of shape {list(tensor.shape)} and type {tensor.type.name}, "
                f"{list(expected[tensor.name])} was expected."
            )
    if missing := min(expected.keys() - gguf.tensors.keys(), default=None):
        raise ModelDamagedError(f"{gguf.path.name} has no tensor {missing!r}.")
    return [_plan_tensor(tensor, config) for tensor in found]


def _plan_tensor(tensor: Tensor, config: Config) -> Plan:
    stem, _, suffix = tensor.name.rpartition(".")
    if not stem.startswith("blk."):
        return Plan(tensor, f"{_TOP_PARTS[stem]}.{suffix}", 0)
    _, layer, part = stem.split(".")
    # ggml's rotation pairs neighbours, mlx-lm's the two halves of a head: convert_hf_to_gguf interleaved the rows of llama's.
    rotary = config["model_type"] == "llama" and part in {"attn_q", "attn_k"}
    return Plan(tensor, f"model.layers.{layer}.{_LAYER_PARTS[part]}.{suffix}", config["head_dim"] if rotary else 0)


def _quantization(plans: list[Plan]) -> Config | None:
    """mlx-lm's entry: the most frequent width, then each path with another one. Dense paths are known by having no scales."""
    bits = {plan.path: plan.bits for plan in plans if plan.bits is not None}
    if not bits:
        return None
    usual = Counter(bits.values()).most_common(1)[0][0]
    return _affine(usual) | {path: _affine(own) for path, own in bits.items() if own != usual}


def _affine(bits: int) -> Config:
    return {"group_size": gguf_blocks.GROUP_SIZE, "bits": bits, "mode": "affine"}


def _write_weights(gguf: GgufFile, plans: list[Plan], path: Path, report: Callable[[int, int], None]) -> Config:
    """Write the weights file and return its index."""
    names: dict[str, Shape] = {}
    for one in plans:
        names |= one.arrays()
    total = sum(one.source.size for one in plans)
    done = 0
    with path.open("wb") as file:
        writer = SafetensorsWriter(file, names.items())
        for one in plans:
            _write_tensor(gguf, one, writer)
            done += one.source.size
            report(done, total)
        writer.close()
    return {"metadata": {"total_size": writer.data_bytes}, "weight_map": dict.fromkeys(sorted(names), path.name)}


def _write_tensor(gguf: GgufFile, one: Plan, writer: SafetensorsWriter) -> None:
    tensor = one.source
    if one.bits is None:
        dtype = gguf_blocks.DENSE_DTYPES[tensor.type.name]
        writer.write(one.name, dtype, tensor.shape, _dense_slabs(gguf, one))
        return
    shapes = list(one.arrays().items())
    scales: list[NDArray[np.float32]] = []
    biases: list[NDArray[np.float32]] = []
    writer.write(*_first(shapes, "U32"), _packed_slabs(gguf, one, one.bits, scales, biases))
    for (name, shape), values in zip(shapes[1:], (np.concatenate(scales), np.concatenate(biases)), strict=True):
        if not np.isfinite(values).all():
            raise ModelDamagedError(f"{gguf.path.name} has infinities in the scales of tensor {tensor.name!r}.")
        half = _exact_half(values)
        writer.write(name, "F32" if half is None else "F16", shape, [values if half is None else half])


def _first(shapes: list[tuple[str, Shape]], dtype: str) -> tuple[str, str, Shape]:
    name, shape = shapes[0]
    return name, dtype, shape


def _exact_half(values: NDArray[np.float32]) -> NDArray[np.float16] | None:
    """The values as f16 where that changes none of them: of all types but the K types, whose scales are products."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), values) else None


def _packed_slabs(
    gguf: GgufFile, one: Plan, bits: int, scales: list[NDArray[np.float32]], biases: list[NDArray[np.float32]]
) -> Iterator[NDArray[np.uint32]]:
    """The packed codes; scales and biases, an eighth of them, are gathered in the two lists."""
    for blocks in gguf.slabs(one.source, _rows_at_once(one)):
        found = gguf_blocks.groups(one.source.type.name, blocks)
        rows = len(blocks) * one.source.type.size // one.source.row_bytes
        scales.append(_in_order(found.scales.reshape(rows, -1), one.head_size))
        biases.append(_in_order(found.biases.reshape(rows, -1), one.head_size))
        yield _in_order(gguf_blocks.pack(found.codes, bits).reshape(rows, -1), one.head_size)


def _dense_slabs(gguf: GgufFile, one: Plan) -> Iterator[NDArray[Any]]:
    tensor = one.source
    for blocks in gguf.slabs(tensor, _rows_at_once(one)):
        try:
            values = gguf_blocks.dense(tensor.type.name, blocks)
        except OverflowError as error:
            raise ModelDamagedError(
                f"{gguf.path.name} has weights beyond the range of f16 in tensor {tensor.name!r}."
            ) from error
        # A vector (a bias) has one element for each of the matrix's rows.
        rows = values.reshape(-1, tensor.shape[-1] if len(tensor.shape) > 1 else 1)
        yield _in_order(rows, one.head_size)


def _rows_at_once(one: Plan) -> int:
    """Rows of a slab: whole heads where rows are moved within one."""
    step = one.head_size or 1
    return max(SLAB_BYTES // one.source.row_bytes // step, 1) * step


def _in_order(rows: NDArray[Any], head_size: int) -> NDArray[Any]:
    """Rows of whole heads, the pairs of each put back into two halves. Groups run along a row, so nothing else moves."""
    if not head_size:
        return rows
    return rows.reshape(-1, head_size // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)  # a copy, contiguous


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
