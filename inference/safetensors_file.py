"""Safetensors files, header and bytes, without a library: written as a stream, read without a map.

The format: 8 bytes of little-endian length, that many bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
https://github.com/huggingface/safetensors#format
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct

from inference.models import ModelDamagedError

if TYPE_CHECKING:  # a node reads headers and does without numpy
    from numpy.typing import NDArray

HEADER_BYTES_MAX = 100 << 20  # the reference implementation's own bound
# An offset's digits that the reserved header has room for: files below 10^15 bytes.
_OFFSET_DIGITS = 15

DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16,
    "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip


class StoredTensor(Struct, frozen=True):
    """A tensor of a safetensors file; its bytes lie from `start` to `end` of the file."""

    name: str
    dtype: str  # as the format spells it: "F16", "U32"
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a file, by name.

    Raises: ModelDamagedError where the file is truncated, longer than it should be, or no safetensors file; OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(HEADER_BYTES_MAX, size - 8):
            raise ModelDamagedError(f"{path.name} is truncated or no safetensors file.")
        header = file.read(length)
    try:
        entries = json.loads(header)
        found = [_entry(name, entry, 8 + length) for name, entry in sorted(entries.items()) if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelDamagedError(f"{path.name} has a header that can't be read.") from error
    if max((tensor.end for tensor in found), default=8 + length) != size:
        raise ModelDamagedError(f"{path.name} has {size} bytes, not those that its header promises.")
    return found


def _entry(name: str, entry: dict[str, Any], base: int) -> StoredTensor:
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    bits = math.prod(shape) * DTYPE_BITS[entry["dtype"]]
    if start < 0 or min(shape, default=1) < 0 or (end - start) * 8 != bits:
        raise ValueError(name)
    return StoredTensor(name, entry["dtype"], shape, base + start, base + end)


class SafetensorsWriter:
    """Writes a file tensor after tensor, each in pieces; the header goes into room reserved for it at the beginning.

    `planned` are all the names and shapes to come; their dtypes may still be undecided.
    """

    def __init__(self, file: BinaryIO, planned: Iterable[tuple[str, Sequence[int]]]) -> None:
        self._file = file
        largest = 10**_OFFSET_DIGITS - 1
        worst = {name: _header_entry("BF16", shape, largest, largest) for name, shape in planned}
        length = len(_dump({"__metadata__": {"format": "mlx"}, **worst}))
        self._header_bytes = -(-(8 + length) // 64) * 64 - 8  # the data begins at a multiple of 64
        self._expected = set(worst)
        self._entries: dict[str, Any] = {}
        self._offset = 0
        file.write(bytes(8 + self._header_bytes))

    def write(self, name: str, dtype: str, shape: Sequence[int], pieces: "Iterable[NDArray[Any]]") -> None:
        """Write one tensor, whose bytes are those of the contiguous arrays `pieces`, one after the other."""
        start = self._offset
        for piece in pieces:
            self._file.write(piece.data.cast("B"))
            self._offset += piece.nbytes
        assert (self._offset - start) * 8 == math.prod(shape) * DTYPE_BITS[dtype], name
        self._entries[name] = _header_entry(dtype, shape, start, self._offset)

    def close(self) -> None:
        """Put the header in place; the file itself stays open."""
        assert set(self._entries) == self._expected
        header = _dump({"__metadata__": {"format": "mlx"}, **self._entries})
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._header_bytes) + header.ljust(self._header_bytes))

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors written so far."""
        return self._offset


def _header_entry(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _dump(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
