"""Reading GGUF containers (versions 2 and 3, little-endian): metadata and where each tensor's blocks lie.

mlx's own reader is not used: it decodes Q4_K wrongly and drops the tensors whose type it does not know. Everything in a file
is checked before it is believed: counts against what is left of the file, offsets against its size, so that a hostile or
truncated file costs one sentence, not memory or time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from inference.models import ModelDamagedError, ModelUnsupportedError

# Bounds with room above anything seen: Gemma's vocabulary has 262,144 tokens, Llama 3 has 280,147 merges.
HEADER_BYTES_MAX = 128 << 20
KEYS_MAX = 4096
KEY_BYTES_MAX = 65_535  # the format's own
STRING_BYTES_MAX = 16 << 20
ARRAY_ITEMS_MAX = 4 << 20  # of all arrays together
TENSORS_MAX = 65_536
TENSOR_NAME_BYTES_MAX = 256
DIMENSIONS_MAX = 4  # the format's own
ALIGNMENT_MAX = 1 << 20
ALIGNMENT_DEFAULT = 32

Value = bool | int | float | str | list[str] | NDArray[np.generic]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class BlockType(Struct, frozen=True):
    """How a tensor type stores its values: `values` of them in each block of `size` bytes."""

    name: str
    values: int
    size: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
# Those that are refused, so that the refusal can name them.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


class Tensor(Struct, frozen=True):
    """A tensor of the file; its blocks lie at `start`, row after row."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # outermost dimension first, as numpy has it (the file has it the other way round)
    start: int
    size: int  # bytes

    @property
    def row_count(self) -> int:
        """Rows of the matrix: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; a row is a whole number of blocks."""
        return self.shape[-1] // self.type.values * self.type.size


class GgufFile:
    """An open GGUF file: `metadata`, `tensors`, and the tensors' blocks as they are asked for.

    Plain reads rather than a memory map: a file that shrinks under us is then an error and not a signal.

    Raises: ModelDamagedError, ModelUnsupportedError, OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.metadata, self.tensors = _read_header(_Header(self._file, self.size, path.name))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def slabs(self, tensor: Tensor, rows_at_once: int) -> Iterator[NDArray[np.uint8]]:
        """The tensor's blocks, uint8 [blocks, block size], some rows at a time.

        Raises: ModelDamagedError where the file ends early after all.
        """
        self._file.seek(tensor.start)
        for first in range(0, tensor.row_count, rows_at_once):
            wanted = min(rows_at_once, tensor.row_count - first) * tensor.row_bytes
            data = self._file.read(wanted)
            if len(data) != wanted:
                raise ModelDamagedError(f"{self.path.name} became shorter while it was read.")
            yield np.frombuffer(data, np.uint8).reshape(-1, tensor.type.size)


class _Header:
    """A cursor over the header that refuses to go beyond the file or the bounds."""

    def __init__(self, file: BinaryIO, size: int, file_name: str) -> None:
        self._file, self.size, self.file_name = file, size, file_name
        self.position = 0
        self._items_left = ARRAY_ITEMS_MAX

    def damaged(self, what: str) -> ModelDamagedError:
        return ModelDamagedError(f"{self.file_name} is no intact GGUF file: {what}.")

    def read(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self.damaged("it ends in the middle of its header")
        self.position += count
        if self.position > HEADER_BYTES_MAX:
            raise self.damaged(f"its header is longer than {HEADER_BYTES_MAX >> 20} MiB")
        return self._file.read(count)

    def number(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.read(struct.calcsize(code)))
        return int(value)

    def count(self, what: str, most: int) -> int:
        value = self.number("Q")
        if value > most:
            raise self.damaged(f"it claims {value} {what}, more than {most}")
        return value

    def string(self, most: int = STRING_BYTES_MAX) -> str:
        return self.read(self.count("bytes in a string", most)).decode("utf-8", "replace")

    def scalar(self, code: str) -> bool | int | float:
        value: bool | int | float = struct.unpack("<" + code, self.read(struct.calcsize(code)))[0]
        return value

    def value(self) -> Value:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"a value has the unknown type {kind}")
        return _SCALARS[kind]

    def _array(self) -> list[str] | NDArray[np.generic]:
        kind = self.number("I")
        if kind == _ARRAY:
            raise self.damaged("it nests arrays")
        count = self.count("items in its arrays", self._items_left)
        self._items_left -= count
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        code = self._code(kind)
        return np.frombuffer(self.read(count * struct.calcsize(code)), np.dtype(code).newbyteorder("<"))


def _read_header(header: _Header) -> tuple[dict[str, Value], dict[str, Tensor]]:
    if header.size < 24 or header.read(4) != b"GGUF":
        raise header.damaged("it does not begin as one")
    version = header.number("I")
    if version not in {2, 3}:
        raise ModelUnsupportedError(
            f"{header.file_name} is of GGUF version {version}, only 2 and 3 (little-endian) can be read."
        )
    tensor_count, key_count = header.count("tensors", TENSORS_MAX), header.count("keys", KEYS_MAX)
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = header.string(KEY_BYTES_MAX)
        if key in metadata:
            raise header.damaged(f"the key {key!r} occurs twice")
        metadata[key] = header.value()
    found = [_read_tensor(header) for _ in range(tensor_count)]
    return metadata, _placed(header, found, _alignment(header, metadata))


def _alignment(header: _Header, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
    if not isinstance(alignment, int) or not 8 <= alignment <= ALIGNMENT_MAX or alignment % 8:
        raise header.damaged(f"its alignment is {alignment!r}")
    return alignment


def _read_tensor(header: _Header) -> Tensor:
    """A tensor's entry; `start` is still what the file says, an offset into its data."""
    name = header.string(TENSOR_NAME_BYTES_MAX)
    dimensions = header.number("I")
    if not 1 <= dimensions <= DIMENSIONS_MAX:
        raise header.damaged(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reversed([header.number("Q") for _ in range(dimensions)]))
    kind, offset = header.number("I"), header.number("Q")
    if kind not in BLOCK_TYPES:
        raise ModelUnsupportedError(
            f"{header.file_name} has tensor {name!r} of type {_OTHER_TYPES.get(kind, f'number {kind}')}, which can't be read; "
            f"these can: {', '.join(block.name for block in BLOCK_TYPES.values())}."
        )
    block = BLOCK_TYPES[kind]
    if min(shape) < 1 or shape[-1] % block.values:
        raise header.damaged(f"tensor {name!r} of type {block.name} has the shape {list(shape)}")
    return Tensor(name, block, shape, offset, math.prod(shape) // block.values * block.size)


def _placed(header: _Header, found: list[Tensor], alignment: int) -> dict[str, Tensor]:
    base = -(-header.position // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for tensor in found:
        start = base + tensor.start
        if tensor.name in tensors:
            raise header.damaged(f"tensor {tensor.name!r} occurs twice")
        if start + tensor.size > header.size:
            raise header.damaged(
                f"tensor {tensor.name!r} ends at byte {start + tensor.size} of {header.size}, so the file is truncated"
            )
        tensors[tensor.name] = Tensor(tensor.name, tensor.type, tensor.shape, start, tensor.size)
    # Overlapping tensors would let a small file become a huge model.
    if sum(tensor.size for tensor in tensors.values()) > header.size - base:
        raise header.damaged("its tensors overlap")
    return tensors
