"""A directory in mlx-lm's format: whether it is whole, what it holds, and its hash.

The hash is made from content: from each tensor's name, dtype, shape and bytes, however they are spread over files; from the
JSON files' values, however they are spaced and ordered; from the chat template, whichever file holds it. File names, times,
index files and readmes are no part of it.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from inference.models import FAKE_ARCHITECTURE, Model, ModelDamagedError, ModelNotFoundError, ModelUnsupportedError
from inference.requests import Json
from inference.safetensors_file import StoredTensor, read_header

# A new way of hashing must give other hashes: two nodes that hash alike hold alike models.
HASH_FORMAT = b"shoal model 1\n"
JSON_BYTES_MAX = 256 << 20
READ_BYTES = 4 << 20

WEIGHTS_PATTERN = "model*.safetensors"  # mlx-lm's own
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILES = ("config.json", "generation_config.json", "hf_quant_config.json")
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model",
)  # fmt: skip
# transformers prefers the file to the key in tokenizer_config.json, and the newer file to the older.
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# One of these is enough to make tokens.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

_DTYPE_NAMES = {"F16": "f16", "BF16": "bf16", "F32": "f32", "F64": "f64"}


class Directory(Struct, frozen=True):
    """What a whole directory holds; its weights' bytes have not been looked at."""

    path: Path
    config: dict[str, Any]
    weights: tuple[tuple[Path, tuple[StoredTensor, ...]], ...]  # files with their tensors

    def files(self) -> list[Path]:
        """All files that the hash is made from, weights first, and the index, which loading needs."""
        index = self.path / INDEX_FILE
        return [path for path, _ in self.weights] + _side_files(self.path) + ([index] if index.is_file() else [])


def read_directory(path: Path) -> Directory:
    """Look at a model's directory; cheap: headers only.

    Raises: ModelNotFoundError, ModelDamagedError, ModelUnsupportedError; OSError.
    """
    if not path.is_dir():
        raise ModelNotFoundError(f"There is no directory {path}.")
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{path} is no model in mlx-lm's format: it has no config.json.")
    config = read_json(path / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelDamagedError(f"{path / 'config.json'} names no model_type.")
    if config["model_type"] == FAKE_ARCHITECTURE:
        return Directory(path, config, ())
    if "model_file" in config:
        raise ModelUnsupportedError(f"{path} wants to run code of its own ({config['model_file']!r}), which is not done here.")
    weights = tuple((file, tuple(read_header(file))) for file in sorted(path.glob(WEIGHTS_PATTERN)))
    _check_whole(path, weights)
    return Directory(path, config, weights)


def _check_whole(path: Path, weights: tuple[tuple[Path, tuple[StoredTensor, ...]], ...]) -> None:
    present = {file.name for file, _ in weights}
    index_file = path / INDEX_FILE
    index = read_json(index_file) if index_file.is_file() else {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    wanted = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    if missing := min(wanted - present, default=None):
        raise ModelDamagedError(f"{path} is incomplete: {missing} is missing.")
    if not present:
        raise ModelDamagedError(f"{path} is incomplete: it has no {WEIGHTS_PATTERN}.")
    if not any((path / name).is_file() for name in _TOKENIZERS) and not list(path.glob("*.tiktoken")):
        raise ModelDamagedError(f"{path} is incomplete: it has no tokenizer.")


def _side_files(path: Path) -> list[Path]:
    """Config, tokenizer and templates, those that are there."""
    names = (*CONFIG_FILES, *TOKENIZER_FILES, *TEMPLATE_FILES)
    found = [path / name for name in names if (path / name).is_file()]
    return found + sorted(path.glob("*.tiktoken")) + sorted(path.glob("additional_chat_templates/*.jinja"))


def describe(directory: Directory, name: str, model_hash: str) -> Model:
    """The model in a directory.

    Raises: ModelDamagedError where its config lacks what is needed.
    """
    config, text = directory.config, directory.config.get("text_config")
    settings: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config
    fake = config["model_type"] == FAKE_ARCHITECTURE
    context = _whole(settings, directory.path, ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"))
    layers = 0 if fake else _whole(settings, directory.path, ("num_hidden_layers", "n_layers", "n_layer", "num_layers"))
    parameters, quantization = count_parameters(directory)
    return Model(
        model_hash=model_hash,
        name=name,
        path=directory.path,
        architecture=config["model_type"],
        parameters=parameters,
        weight_bytes=sum(file.stat().st_size for file, _ in directory.weights),
        layers=layers,
        context_length=context,
        quantization=quantization,
    )


def _whole(settings: dict[str, Any], path: Path, keys: tuple[str, ...]) -> int:
    for key in keys:
        value = settings.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ModelDamagedError(f"{path / 'config.json'} has no {keys[0]}.")


def count_parameters(directory: Directory) -> tuple[int, str]:
    """The number of weights, and how most of them are kept: "4-bit", or a dtype.

    Of a quantized matrix the scales and biases don't count, and its width is what its words hold against its scales.
    """
    quantized = directory.config.get("quantization") or directory.config.get("quantization_config") or {}
    usual = quantized if isinstance(quantized, dict) else {}
    amounts: Counter[str] = Counter()
    for _, tensors in directory.weights:
        scaled = {tensor.name.removesuffix(".scales") for tensor in tensors if tensor.name.endswith(".scales")}
        for tensor in tensors:
            module, _, part = tensor.name.rpartition(".")
            values = math.prod(tensor.shape)
            if module not in scaled or part not in {"weight", "scales", "biases"}:
                amounts[_DTYPE_NAMES.get(tensor.dtype, tensor.dtype.lower())] += values
            elif part == "weight":
                own = usual.get(module)
                bits = (own if isinstance(own, dict) else usual).get("bits", 4)
                amounts[f"{bits}-bit"] += values * 32 // bits
    if not amounts:
        return 0, "none"
    return amounts.total(), amounts.most_common(1)[0][0]


def hash_directory(directory: Directory, report: Callable[[int, int], None]) -> str:
    """The model's hash, 64 hex digits; `report` gets bytes done and in all.

    Raises: ModelDamagedError where a file became shorter or a JSON file can't be read; OSError.
    """
    total = sum(tensor.end - tensor.start for _, tensors in directory.weights for tensor in tensors)
    done = 0
    lines = list(_side_lines(directory.path))
    for file_path, tensors in directory.weights:
        with file_path.open("rb") as file:
            for tensor in tensors:
                sha = hashlib.sha256()
                for chunk in _read(file_path, file.fileno(), tensor):
                    sha.update(chunk)
                    done += len(chunk)
                    report(done, total)
                lines.append(_line("tensor", tensor.name, tensor.dtype, list(tensor.shape), sha.hexdigest()))
    return hashlib.sha256(HASH_FORMAT + b"".join(sorted(lines))).hexdigest()


def _read(path: Path, descriptor: int, tensor: StoredTensor) -> Iterator[bytes]:
    position = tensor.start
    while position < tensor.end:
        chunk = os.pread(descriptor, min(READ_BYTES, tensor.end - position), position)
        if not chunk:
            raise ModelDamagedError(f"{path} became shorter while it was read.")
        position += len(chunk)
        yield chunk


def _side_lines(path: Path) -> Iterator[bytes]:
    for file in _side_files(path):
        if file.name in TEMPLATE_FILES:
            continue
        if file.suffix != ".json":
            yield _line("file", file.name, hashlib.sha256(file.read_bytes()).hexdigest())
            continue
        value = read_json(file)
        if file.name == TOKENIZER_CONFIG and isinstance(value, dict):
            value = {key: entry for key, entry in value.items() if key != "chat_template"}
        yield _line("json", file.name, value)
    if (template := chat_template(path)) is not None:
        yield _line("template", template)


def chat_template(path: Path) -> Json:
    """The chat template that counts: a string, or named ones; None where there is none."""
    if (newer := path / TEMPLATE_FILES[0]).is_file():
        return newer.read_text("utf-8")
    for name in (TEMPLATE_FILES[1], TOKENIZER_CONFIG):
        value = read_json(path / name) if (path / name).is_file() else None
        if isinstance(value, dict) and value.get("chat_template") is not None:
            return value["chat_template"]
    return None


def read_json(path: Path) -> Json:
    """A JSON file's value.

    Raises: ModelDamagedError, OSError.
    """
    if path.stat().st_size > JSON_BYTES_MAX:
        raise ModelDamagedError(f"{path} is far too long.")
    try:
        value: Json = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelDamagedError(f"{path} is no JSON file.") from error
    return value


def _line(*parts: Json) -> bytes:
    """One line of what is hashed: canonical JSON, in which equal values are equal bytes."""
    return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
