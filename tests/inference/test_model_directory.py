"""A directory in mlx-lm's format: what makes it whole, what it says of itself, and what its hash is made from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from inference.model_directory import describe, hash_directory, read_directory
from inference.models import Model, ModelDamagedError, ModelError, ModelNotFoundError, ModelUnsupportedError
from inference.safetensors_file import SafetensorsWriter, read_header
from tests.inference.tiny_models import CHATML, make_fake, make_tiny


def _hash(path: Path) -> str:
    return hash_directory(read_directory(path), lambda done, total: None)


def _model(path: Path) -> Model:
    return describe(read_directory(path), "x", "0" * 64)


def _json(
    path: Path, change: Callable[[dict[str, Any]], object], indent: int | None = None, *, sort_keys: bool = False
) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, indent=indent, sort_keys=sort_keys))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny")


def _reshard(path: Path) -> None:
    arrays = load_file(path / "model.safetensors")
    names = sorted(arrays)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: arrays[name] for name in part}, path / f"model-{number}-of-2.safetensors")


def _move_template(path: Path) -> None:
    _json(path / "tokenizer_config.json", lambda value: value.pop("chat_template"))
    (path / "chat_template.jinja").write_text(CHATML)


@pytest.mark.parametrize(
    "change",
    [
        _reshard,
        _move_template,
        lambda path: _json(path / "config.json", lambda _: None, indent=7, sort_keys=True),
        lambda path: (path / "README.md").write_text("read me"),
        lambda path: path.rename(path.with_name("other")) and shutil.copytree(path.with_name("other"), path),
    ],
    ids=["shards", "template file", "JSON layout", "readme", "copied"],
)
def test_the_hash_is_of_content_alone(change: Callable[[Path], object], tiny: Path) -> None:
    before = _hash(tiny)
    change(tiny)

    assert _hash(tiny) == before


def _flip(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def _rename_tensor(path: Path) -> None:
    arrays = load_file(path / "model.safetensors")
    arrays["model.norm2.weight"] = arrays.pop("model.norm.weight")
    save_file(arrays, path / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        _flip,
        _rename_tensor,
        lambda path: _json(path / "config.json", lambda value: value.update(rope_theta=1.0)),
        lambda path: (path / "generation_config.json").write_text('{"eos_token_id": 7}'),
        lambda path: (path / "chat_template.jinja").write_text("another"),
        lambda path: _json(path / "tokenizer_config.json", lambda value: value.pop("chat_template")),
        lambda path: _json(path / "tokenizer_config.json", lambda value: value.update(eos_token="x")),
        lambda path: _json(path / "tokenizer.json", lambda value: value["model"]["vocab"].update(zz=300)),
        lambda path: (path / "merges.txt").write_text("a b"),
    ],
    ids=["bit", "tensor", "config", "generation", "template", "no template", "eos", "vocabulary", "merges"],
)
def test_the_hash_tells_models_apart(change: Callable[[Path], object], tiny: Path) -> None:
    before = _hash(tiny)
    change(tiny)

    assert _hash(tiny) != before


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (lambda path: (path / "config.json").unlink(), ModelNotFoundError, "has no config.json"),
        (shutil.rmtree, ModelNotFoundError, "There is no directory"),
        (lambda path: (path / "config.json").write_text("{"), ModelDamagedError, "config.json is no JSON file"),
        (lambda path: (path / "config.json").write_text("[" * 100_000), ModelDamagedError, "config.json is no JSON file"),
        (lambda path: (path / "config.json").write_text("[]"), ModelDamagedError, "names no model_type"),
        (lambda path: (path / "model.safetensors").unlink(), ModelDamagedError, "model.safetensors is missing"),
        (lambda path: [file.unlink() for file in path.glob("model*")], ModelDamagedError, "it has no model*.safetensors"),
        (lambda path: (path / "tokenizer.json").unlink(), ModelDamagedError, "it has no tokenizer"),
        (lambda path: _cut(path / "model.safetensors", -1), ModelDamagedError, "not those that its header promises"),
        (lambda path: _cut(path / "model.safetensors", 100), ModelDamagedError, "is truncated or no safetensors file"),
        (lambda path: _cut(path / "model.safetensors", 3), ModelDamagedError, "is truncated or no safetensors file"),
        (
            lambda path: _json(path / "config.json", lambda value: value.update(model_file="own.py")),
            ModelUnsupportedError,
            "wants to run code of its own ('own.py')",
        ),
    ],
)
def test_what_is_not_whole_is_refused(
    change: Callable[[Path], object], kind: type[ModelError], sentence: str, tiny: Path
) -> None:
    change(tiny)
    with pytest.raises(kind) as caught:
        read_directory(tiny)

    assert sentence in str(caught.value)


def _cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def test_a_model_says_what_it_is(tmp_path: Path) -> None:
    dense, packed = _model(make_tiny(tmp_path / "d", "qwen3")), _model(make_tiny(tmp_path / "q", "qwen3", quantize=4))

    assert (dense.quantization, packed.quantization) == ("f32", "4-bit")
    assert (
        dense.parameters
        == packed.parameters
        == 259 * 64 + 64 + 2 * (2 * 64 + 2 * 16 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    )
    assert (dense.architecture, dense.layers, dense.context_length) == ("qwen3", 2, 2048)
    assert dense.weight_bytes == (tmp_path / "d/model.safetensors").stat().st_size


def test_sizes_of_a_model_that_also_sees_come_from_its_text_config(tiny: Path) -> None:
    def move(config: dict[str, Any]) -> None:
        config["text_config"] = {key: config.pop(key) for key in ("num_hidden_layers", "max_position_embeddings")}

    _json(tiny / "config.json", move)

    assert (_model(tiny).layers, _model(tiny).context_length) == (2, 2048)


def test_a_fake_model_is_its_config(tmp_path: Path) -> None:
    fake = make_fake(tmp_path / "fake", context=100, pace=3)
    other = make_fake(tmp_path / "other", context=100, pace=4)

    assert (_model(fake).architecture, _model(fake).context_length, _model(fake).quantization) == ("fake", 100, "none")
    assert _hash(fake) != _hash(other)
    assert _hash(fake) == _hash(make_fake(tmp_path / "again", context=100, pace=3))


def test_the_writer_is_understood_by_the_library(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "a": np.arange(12, dtype=np.uint32).reshape(3, 4),
        "b": np.array([1.5, -2], np.float16),
        "ü": np.zeros((1, 1, 2), np.float32),
    }
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        writer = SafetensorsWriter(file, [(name, array.shape) for name, array in arrays.items()])
        for name, array in arrays.items():
            writer.write(
                name, {"u": "U32", "f": "F16" if array.dtype == np.float16 else "F32"}[array.dtype.kind], array.shape, [array]
            )
        writer.close()
    loaded = load_file(path)

    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
    assert [tensor.name for tensor in read_header(path)] == ["a", "b", "ü"]


@given(st.data())
def test_a_damaged_header_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = b"\x50\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]}}'.ljust(80) + bytes(8)
    at, junk = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.binary(min_size=1, max_size=6))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
    try:
        found = read_header(path)
    except ModelDamagedError:
        return
    assert all(0 <= tensor.start <= tensor.end <= path.stat().st_size for tensor in found)
