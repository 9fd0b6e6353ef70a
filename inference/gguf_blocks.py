"""GGUF's quantized blocks as MLX's affine layout: codes, and for each group of 32 weights a scale and a bias.

Pure numpy. A weight is `code * scale + bias`, so nothing is quantized anew: of every type but Q6_K the weights come out exactly
(the K types' scales are products of an f16 and a 6-bit number, hence f32). Q6_K has a scale for each 16 weights, which MLX
has no layout for; its weights are kept as f16.

The layouts are those of ggml-common.h: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

GROUP_SIZE = 32

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

# Bits per code of the types that have an affine layout.
CODE_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
# What the other types are kept as: safetensors' names.
DENSE_DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "Q6_K": "F16"}


class Groups(Struct, frozen=True):
    """Groups of 32 weights, `codes * scales + biases` each."""

    codes: Bytes  # [groups, 32], below 2**bits
    scales: Floats  # [groups]
    biases: Floats  # [groups]


def groups(type_name: str, blocks: Bytes) -> Groups:
    """The groups of blocks [count, block size] of a type in `CODE_BITS`, in order."""
    if type_name in {"Q4_K", "Q5_K"}:
        return _k_groups(type_name, blocks)
    bits = CODE_BITS[type_name]
    scale = _f16(blocks[:, :2])
    if type_name == "Q8_0":  # signed bytes: +128 makes them codes
        return Groups(blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale)
    with_minimum = type_name.endswith("_1")
    bias = _f16(blocks[:, 2:4]) if with_minimum else -(1 << (bits - 1)) * scale
    codes = _nibbles(blocks[:, -16:])
    if bits == 5:
        high = 4 if with_minimum else 2
        codes |= _bits(blocks[:, high : high + 4]) << 4
    return Groups(codes, scale, bias)


def dense(type_name: str, blocks: Bytes) -> NDArray[Any]:
    """The weights of blocks of a type in `DENSE_DTYPES`, flat; bfloat16 as uint16.

    Raises: OverflowError where a weight is too large for f16 (Q6_K only).
    """
    if type_name == "Q6_K":
        values = q6_k(blocks)
        if not np.abs(values).max(initial=0) <= np.finfo(np.float16).max:
            raise OverflowError
        return values.astype(np.float16).reshape(-1)
    dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[type_name]
    return blocks.reshape(-1).view(dtype)


def q6_k(blocks: Bytes) -> Floats:
    """The weights of Q6_K blocks, exactly: [blocks, 256]."""
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    # Each half of a block: four runs of 32, whose upper two bits are the four pairs of `high`.
    runs = np.stack([low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4], axis=2)
    runs |= np.stack([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], axis=2)
    codes = runs.reshape(-1, 16, 16).astype(np.float32) - 32
    scales = _f16(blocks[:, 208:210])[:, None] * blocks[:, 192:208].view(np.int8)
    values: Floats = (codes * scales[..., None]).reshape(-1, 256)
    return values


def pack(codes: Bytes, bits: int) -> Words:
    """Codes [groups, 32] as MLX packs them: a little-endian stream of `bits` each, in words [groups, bits]."""
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4")
    if bits == 4:
        return np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4).view("<u4")
    stream = _bits(codes[..., None])[..., :bits].reshape(len(codes), -1)
    return np.packbits(stream, axis=-1, bitorder="little").view("<u4")


def _k_groups(type_name: str, blocks: Bytes) -> Groups:
    """Q4_K and Q5_K: 8 groups a block, scales and minima of 6 bits packed into 12 bytes."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    low = blocks[:, -128:].reshape(-1, 4, 32)
    codes = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 8, 32)
    if type_name == "Q5_K":  # bit g of the 32 bytes belongs to group g
        codes |= _bits(blocks[:, 16:48]).reshape(-1, 32, 8).transpose(0, 2, 1) << 4
    return Groups(
        codes.reshape(-1, 32),
        (_f16(blocks[:, :2])[:, None] * scales).reshape(-1),
        (-_f16(blocks[:, 2:4])[:, None] * minima).reshape(-1),
    )


def _f16(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32).reshape(-1)


def _nibbles(data: Bytes) -> Bytes:
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _bits(data: Bytes) -> Bytes:
    """Eight values of 0 or 1 for each byte, lowest first."""
    return np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little")
