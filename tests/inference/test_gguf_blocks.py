"""Every tensor type against decoders that follow ggml's definitions, on random bits."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference import gguf_blocks
from tests.inference.gguf_files import BLOCKS, HALVES, decode, random_blocks

COUNT = 24


def _blocks(kind: str, seed: int = 1) -> tuple[bytes, NDArray[np.uint8]]:
    data = random_blocks(kind, COUNT, np.random.default_rng(seed))
    return data, np.frombuffer(data, np.uint8).reshape(COUNT, -1)


def _unpacked(words: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """MLX's packed words as codes: one long number per group, lowest bits first."""
    numbers = [int.from_bytes(row.astype("<u4").tobytes(), "little") for row in words]
    return np.array([[number >> (bits * i) & (2**bits - 1) for i in range(32)] for number in numbers])


@pytest.mark.parametrize("kind", sorted(gguf_blocks.CODE_BITS))
def test_a_quantized_type_comes_out_exactly(kind: str) -> None:
    """Codes, packed and unpacked again, times scale plus bias, in f32 as MLX computes it."""
    data, blocks = _blocks(kind)
    groups, bits = gguf_blocks.groups(kind, blocks), gguf_blocks.CODE_BITS[kind]
    codes = _unpacked(gguf_blocks.pack(groups.codes, bits), bits).astype(np.float32)
    values = codes * groups.scales[:, None] + groups.biases[:, None]

    np.testing.assert_array_equal(values.reshape(-1), decode(kind, data))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_dense_type_keeps_its_bits(kind: str) -> None:
    data, blocks = _blocks(kind)

    assert gguf_blocks.dense(kind, blocks).tobytes() == data


def test_q6_k_is_exact_before_it_is_kept_as_f16_and_close_after(capsys: pytest.CaptureFixture[str]) -> None:
    """Its scales stand for 16 weights each, for which MLX has no layout."""
    data, blocks = _blocks("Q6_K")
    expected = decode("Q6_K", data)

    np.testing.assert_array_equal(gguf_blocks.q6_k(blocks).reshape(-1), expected)

    error = np.abs(gguf_blocks.dense("Q6_K", blocks).astype(np.float32) - expected)
    relative = float(error.max() / np.abs(expected).max())
    rms = float(np.sqrt((error**2).mean()) / expected.std())
    with capsys.disabled():
        sys.stdout.write(
            f"\nQ6_K kept as f16: largest error {relative:.1e} of the largest weight, rms {rms:.1e} of the deviation\n"
        )

    assert relative <= 2**-11
    assert rms < 3e-4  # the quantization itself is some 2e-2 off


@given(st.binary(min_size=210, max_size=210), st.floats(width=16, allow_nan=False, allow_infinity=False))
def test_q6_k_of_any_bits(bits: bytes, scale: float) -> None:
    block = bits[:208] + np.float16(scale).tobytes()

    np.testing.assert_array_equal(gguf_blocks.q6_k(np.frombuffer(block, np.uint8).reshape(1, -1))[0], decode("Q6_K", block))


@given(st.sampled_from(sorted(gguf_blocks.CODE_BITS)), st.data())
def test_a_quantized_block_of_any_bits(kind: str, data: st.DataObject) -> None:
    """Also with scales that are zero, negative, subnormal or as large as f16 goes."""
    size = BLOCKS[kind][1]
    block = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    for at in HALVES[kind]:
        block[at : at + 2] = np.float16(data.draw(st.floats(width=16, allow_nan=False, allow_infinity=False))).tobytes()
    groups = gguf_blocks.groups(kind, np.frombuffer(bytes(block), np.uint8).reshape(1, -1))
    values = groups.codes.astype(np.float32) * groups.scales[:, None] + groups.biases[:, None]

    np.testing.assert_array_equal(values.reshape(-1), decode(kind, bytes(block)))


def test_q6_k_beyond_f16_is_refused() -> None:
    block = np.full((1, 210), 127, np.uint8)
    block[0, 208:] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)

    with pytest.raises(OverflowError):
        gguf_blocks.dense("Q6_K", block)
