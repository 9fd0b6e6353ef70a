"""GGUF files for tests: a writer, and decoders that follow ggml's definitions block by block in plain Python.

Neither shares a line or a library with the reader under test, numpy's f16 aside.
"""

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.inference.tiny_models import SPECIAL_TOKENS, tiny_tokenizer

Floats = NDArray[np.float32]

TYPE_NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30,
}  # fmt: skip
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
    "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
# Where a block's f16 numbers lie.
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208],
}  # fmt: skip

TINY = {"hidden": 256, "inner": 512, "layers": 2, "heads": 4, "kv_heads": 2, "head": 64, "context": 512}


class Array(list[Any]):
    """A metadata array: its items and their type's number (8: strings, 5: i32, 9: arrays)."""

    def __init__(self, kind: int, items: list[Any]) -> None:
        super().__init__(items)
        self.kind = kind


class Gguf:
    """A file to be: metadata by key, tensors by name as (type, shape, bytes)."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        self.metadata, self.tensors = dict(metadata), dict(tensors)
        self.version, self.alignment = 3, 32
        self.type_numbers = dict(TYPE_NUMBERS)
        self.counts: tuple[int, int] | None = None

    def header(self) -> bytes:
        """Everything before the tensors' data, its padding included."""
        tensors, keys = self.counts or (len(self.tensors), len(self.metadata))
        out = struct.pack("<4sIQQ", b"GGUF", self.version, tensors, keys)
        for key, value in self.metadata.items():
            out += _string(key) + _value(value)
        offset = 0
        for name, (kind, shape, data) in self.tensors.items():
            out += _string(name) + struct.pack(
                f"<I{len(shape)}QIQ", len(shape), *reversed(shape), self.type_numbers[kind], offset
            )
            offset += len(data) + -len(data) % self.alignment
        return out + bytes(-len(out) % self.alignment)

    def write(self, path: Path) -> Path:
        """Write it."""
        with path.open("wb") as file:
            file.write(self.header())
            for _, _, data in self.tensors.values():
                file.write(data + bytes(-len(data) % self.alignment))
        return path


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    match value:
        case Array():
            items = b"".join(_value(item)[4:] if value.kind in {8, 9} else struct.pack("<i", item) for item in value)
            return struct.pack("<IIQ", 9, value.kind, len(value)) + items
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case _:
            return struct.pack("<I", 8) + _string(str(value))


def random_blocks(kind: str, count: int, random: np.random.Generator) -> bytes:
    """That many blocks of random bits, whose f16 and f32 numbers are small and finite."""
    size = BLOCKS[kind][1]
    if kind == "F32":
        return random.normal(0, 0.05, count).astype("<f4").tobytes()
    if kind == "BF16":
        return (random.normal(0, 0.05, count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = random.normal(0, 0.002, count).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    return blocks.tobytes()


def tiny_gguf(architecture: str = "llama", types: tuple[str, ...] = ("F32",), *, tied: bool = True, seed: int = 0) -> Gguf:
    """A whole random model; its matrices take the types in turn."""
    random = np.random.default_rng(seed)
    tokens, hidden, inner = tiny_tokens(), TINY["hidden"], TINY["inner"]
    queries, keys = TINY["heads"] * TINY["head"], TINY["kv_heads"] * TINY["head"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), hidden)}
    for layer in range(TINY["layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (queries, hidden),
            "attn_k.weight": (keys, hidden),
            "attn_v.weight": (keys, hidden),
            "attn_output.weight": (hidden, queries),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden),
            "ffn_down.weight": (hidden, inner),
        }
        if architecture == "qwen2":
            parts |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if architecture == "qwen3":
            parts |= {"attn_q_norm.weight": (TINY["head"],), "attn_k_norm.weight": (TINY["head"],)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not tied:
        shapes["output.weight"] = (len(tokens), hidden)
    tensors, turn = {}, 0
    for name, shape in shapes.items():
        kind = "F32"
        if len(shape) == 2:
            kind, turn = types[turn % len(types)], turn + 1
        tensors[name] = kind, shape, random_blocks(kind, math.prod(shape) // BLOCKS[kind][0], random)
    return Gguf(_metadata(architecture, tokens), tensors)


def tiny_tokens() -> list[str]:
    """The tiny tokenizer's tokens and a few merged ones."""
    vocabulary = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    return [token for token, _ in vocabulary] + ["he", "ll", "hell", "hello"]


def _metadata(architecture: str, tokens: list[str]) -> dict[str, Any]:
    numbers = {
        "block_count": TINY["layers"],
        "context_length": TINY["context"],
        "embedding_length": TINY["hidden"],
        "feed_forward_length": TINY["inner"],
        "attention.head_count": TINY["heads"],
        "attention.head_count_kv": TINY["kv_heads"],
        "attention.key_length": TINY["head"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in numbers.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if architecture.startswith("qwen") else "smollm",
        "tokenizer.ggml.tokens": Array(8, tokens),
        "tokenizer.ggml.token_type": Array(5, [3 if token in SPECIAL_TOKENS else 1 for token in tokens]),
        "tokenizer.ggml.merges": Array(8, ["h e", "l l", "he ll", "hell o"]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }


# ---- decoders: one block of bytes to its values, as the definitions say it


def decode(kind: str, data: bytes) -> Floats:
    """All values of a tensor's bytes."""
    if kind == "F32":
        return np.frombuffer(data, "<f4").copy()
    if kind == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    size = BLOCKS[kind][1]
    values = [value for at in range(0, len(data), size) for value in _DECODERS[kind](data[at : at + size])]
    return np.array(values, np.float32)


def _half(block: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, at)[0])


def _q4_0(block: bytes) -> list[np.float32]:
    d = _half(block, 0)
    quants = [block[2 + i] & 0xF for i in range(16)] + [block[2 + i] >> 4 for i in range(16)]
    return [np.float32(q - 8) * d for q in quants]


def _q4_1(block: bytes) -> list[np.float32]:
    d, m = _half(block, 0), _half(block, 2)
    quants = [block[4 + i] & 0xF for i in range(16)] + [block[4 + i] >> 4 for i in range(16)]
    return [np.float32(q) * d + m for q in quants]


def _five_bits(block: bytes, high_at: int, low_at: int) -> list[int]:
    high = struct.unpack_from("<I", block, high_at)[0]
    quants = [0] * 32
    for i in range(16):
        quants[i] = block[low_at + i] & 0xF | (high >> i & 1) << 4
        quants[i + 16] = block[low_at + i] >> 4 | (high >> (i + 16) & 1) << 4
    return quants


def _q5_0(block: bytes) -> list[np.float32]:
    d = _half(block, 0)
    return [np.float32(q - 16) * d for q in _five_bits(block, 2, 6)]


def _q5_1(block: bytes) -> list[np.float32]:
    d, m = _half(block, 0), _half(block, 2)
    return [np.float32(q) * d + m for q in _five_bits(block, 4, 8)]


def _q8_0(block: bytes) -> list[np.float32]:
    d = _half(block, 0)
    return [np.float32(q) * d for q in struct.unpack_from("<32b", block, 2)]


def _scale_and_minimum(j: int, packed: bytes) -> tuple[int, int]:
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 0xF | (packed[j - 4] >> 6) << 4, packed[j + 4] >> 4 | (packed[j] >> 6) << 4


def _k_block(block: bytes, low_at: int, high_at: int | None) -> list[np.float32]:
    d, dmin = _half(block, 0), _half(block, 2)
    values = []
    for j in range(8):
        scale, minimum = _scale_and_minimum(j, block[4:16])
        for i in range(32):
            byte = block[low_at + j // 2 * 32 + i]
            q = byte & 0xF if j % 2 == 0 else byte >> 4
            if high_at is not None:
                q += 16 * (block[high_at + i] >> j & 1)
            values.append(d * np.float32(scale) * np.float32(q) - dmin * np.float32(minimum))
    return values


def _q6_k(block: bytes) -> list[np.float32]:
    d, scales = _half(block, 208), struct.unpack_from("<16b", block, 192)
    values = [np.float32(0)] * 256
    for half in range(2):
        low, high, scale, out = 64 * half, 128 + 32 * half, 8 * half, 128 * half
        for i in range(32):
            bits = block[high + i]
            quants = [
                block[low + i] & 0xF | (bits & 3) << 4,
                block[low + i + 32] & 0xF | (bits >> 2 & 3) << 4,
                block[low + i] >> 4 | (bits >> 4 & 3) << 4,
                block[low + i + 32] >> 4 | (bits >> 6 & 3) << 4,
            ]
            for run, q in enumerate(quants):
                values[out + 32 * run + i] = d * np.float32(scales[scale + i // 16 + 2 * run]) * np.float32(q - 32)
    return values


_DECODERS: dict[str, Callable[[bytes], list[np.float32]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": lambda block: _k_block(block, 16, None),
    "Q5_K": lambda block: _k_block(block, 48, 16),
    "Q6_K": _q6_k,
}
