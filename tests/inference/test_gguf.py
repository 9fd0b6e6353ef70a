"""The GGUF container: what it reads, what it refuses, and that a hostile file costs a sentence and nothing else."""

import contextlib
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference import gguf
from inference.gguf import GgufFile
from inference.models import ModelDamagedError, ModelError, ModelUnsupportedError
from tests.inference.gguf_files import Array, Gguf, tiny_gguf


def _small() -> Gguf:
    metadata = {
        "general.architecture": "llama",
        "a.list": Array(5, [1, 2, 3]),
        "some.text": "ä",
        "words": Array(8, ["x", "yz"]),
    }
    return Gguf(metadata, {"one": ("F32", (4, 2), bytes(range(32))), "two": ("Q8_0", (3, 32), bytes(3 * 34))})


def _refusal(data: bytes, directory: Path) -> str:
    path = directory / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught, GgufFile(path):
        pass
    return str(caught.value)


def test_it_reads_what_was_written(tmp_path: Path) -> None:
    small = _small()
    with GgufFile(small.write(tmp_path / "small.gguf")) as file:
        assert file.metadata["some.text"] == "ä"
        assert file.metadata["words"] == ["x", "yz"]
        assert list(file.metadata["a.list"]) == [1, 2, 3]  # type: ignore[arg-type]  # an array
        one, two = file.tensors["one"], file.tensors["two"]
        assert (one.shape, one.type.name, two.shape, two.type.name) == ((4, 2), "F32", (3, 32), "Q8_0")
        assert b"".join(slab.tobytes() for slab in file.slabs(one, 3)) == bytes(range(32))
        assert [len(slab) for slab in file.slabs(two, 2)] == [2, 1]


def test_an_alignment_of_its_own_is_followed(tmp_path: Path) -> None:
    small = _small()
    small.alignment = small.metadata["general.alignment"] = 128
    with GgufFile(small.write(tmp_path / "small.gguf")) as file:
        assert file.tensors["one"].start % 128 == 0
        assert next(file.slabs(file.tensors["one"], 4)).tobytes() == bytes(range(32))


def _with(change: Callable[[Gguf], None]) -> bytes:
    small = _small()
    change(small)
    return small.header() + bytes(256)


def _set(name: str, value: object) -> Callable[[Gguf], None]:
    return lambda small: setattr(small, name, value)


def _meta(key: str, value: object) -> Callable[[Gguf], None]:
    return lambda small: small.metadata.update({key: value})


def _tensor(kind: str, shape: tuple[int, ...]) -> Callable[[Gguf], None]:
    return lambda small: small.tensors.update({"one": (kind, shape, b"")})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_set("counts", (1 << 60, 1)), "claims 1152921504606846976 tensors"),
        (_set("counts", (1, 1 << 60)), "claims 1152921504606846976 keys"),
        (_set("counts", (60_000, 4)), "is no intact GGUF file"),
        (_set("version", 1), "is of GGUF version 1"),
        (_set("version", 3 << 24), "is of GGUF version 50331648"),  # big-endian
        (_meta("general.alignment", 0), "its alignment is 0"),
        (_meta("general.alignment", 12), "its alignment is 12"),
        (_meta("general.alignment", "x"), "its alignment is 'x'"),
        (_meta("nested", Array(9, [Array(5, [1])])), "it nests arrays"),
        (_meta("unknown", Array(77, [])), "unknown type 77"),
        (_tensor("F32", (1 << 40, 1 << 40)), "so the file is truncated"),
        (_tensor("F32", (1 << 63, 1 << 63, 1 << 63, 1 << 63)), "so the file is truncated"),
        (_tensor("F32", (0, 4)), "has the shape [0, 4]"),
        (_tensor("F32", (1, 1, 1, 1, 1)), "has 5 dimensions"),
        (_tensor("Q8_0", (3, 31)), "has the shape [3, 31]"),
    ],
)
def test_nonsense_is_refused(change: Callable[[Gguf], None], sentence: str, tmp_path: Path) -> None:
    assert sentence in _refusal(_with(change), tmp_path)


@pytest.mark.parametrize(("number", "name"), [(10, "Q2_K"), (11, "Q3_K"), (20, "IQ4_NL"), (39, "MXFP4"), (999, "number 999")])
def test_an_unknown_tensor_type_is_refused_by_name(number: int, name: str, tmp_path: Path) -> None:
    sentence = _refusal(_with(lambda small: small.type_numbers.update(Q8_0=number)), tmp_path)

    assert f"has tensor 'two' of type {name}, which can't be read" in sentence


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    """Else a small file could become a huge model."""
    data = bytearray(_small().header())
    offset = data.rindex(struct.pack("<IQ", 8, 32))  # of "two"
    data[offset + 4 : offset + 12] = bytes(8)
    many = Gguf({}, {f"t{i}": ("F32", (64,), b"") for i in range(100)})

    assert "overlap" in _refusal(bytes(data) + bytes(102), tmp_path)
    assert "overlap" in _refusal(many.header() + bytes(256), tmp_path)


def test_two_tensors_or_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    header = _small().header()

    assert "tensor 'one' occurs twice" in _refusal(header.replace(b"two", b"one") + bytes(256), tmp_path)
    assert "the key 'words' occurs twice" in _refusal(header.replace(b"a.list", b"words\0").replace(
        struct.pack("<Q", 6) + b"words\0", struct.pack("<Q", 5) + b"words") + bytes(256), tmp_path)  # fmt: skip


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = _small().write(tmp_path / "whole.gguf").read_bytes().rstrip(b"\0")
    last = 34 * 3 + len(_small().header()) + 32

    for length in range(0, last - 1, 7):
        assert _refusal(whole.ljust(last, b"\0")[:length], tmp_path)


def test_a_claim_of_many_items_costs_no_memory(tmp_path: Path) -> None:
    """Each count is checked against what is left of the file before anything is allocated for it."""
    small = _small()
    small.metadata = {"list": Array(8, [])}
    at = small.header().index(struct.pack("<IIQ", 9, 8, 0)) + 8
    tracemalloc.start()
    try:
        for count in (gguf.ARRAY_ITEMS_MAX, 1 << 31, (1 << 64) - 1):
            data = bytearray(small.header())
            data[at : at + 8] = struct.pack("<Q", count)
            assert "is no intact GGUF file" in _refusal(bytes(data), tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = tiny_gguf().write(tmp_path / "tiny.gguf")
    with GgufFile(path) as file:
        tensor = file.tensors["output_norm.weight"]
        os.truncate(path, tensor.start + 8)
        with pytest.raises(ModelDamagedError, match="became shorter"):
            next(file.slabs(tensor, 1))


_WHOLE = _small().header() + bytes(256)


@given(st.integers(0, len(_WHOLE) - 1), st.binary(min_size=1, max_size=12))
def test_any_damage_is_either_harmless_or_one_sentence(at: int, junk: bytes) -> None:
    data = _WHOLE[:at] + junk + _WHOLE[at + len(junk) :]
    # The constructor's parts, so as not to write a file each time.
    header = gguf._Header(_InMemory(data), len(data), "bad.gguf")  # type: ignore[arg-type]  # an array
    with contextlib.suppress(ModelDamagedError, ModelUnsupportedError):
        gguf._read_header(header)


class _InMemory:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]
