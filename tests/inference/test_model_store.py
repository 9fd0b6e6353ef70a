"""From a name to a model on disk, with real processes: what is kept, what is noticed, and what a killed process leaves."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest
import trio

from inference.acquire import acquire
from inference.model_entries import ModelsDir
from inference.model_store import ModelStore, source_of
from inference.models import Model, ModelDamagedError, ModelDiskError, ModelError, ModelNotFoundError, Progress
from tests.inference.gguf_files import tiny_gguf
from tests.inference.tiny_models import make_fake, make_tiny
from tests.real_model import ALIAS, MODEL_HASH

TYPES = ("F32", "Q4_K")


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def store(models_dir: Path) -> ModelStore:
    return ModelStore(models_dir, os.environ)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny_gguf("llama", TYPES).write(tmp_path / "tiny.gguf")


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Acquire(Protocol):
    """What a fetching process does, done here."""

    def __call__(self, path: Path, report: Callable[[Progress], None] | None = None, *, refresh: bool = False) -> Model: ...


@pytest.fixture
def acquired(models_dir: Path) -> Acquire:
    def run(path: Path, report: Callable[[Progress], None] | None = None, *, refresh: bool = False) -> Model:
        shown = (lambda progress: None) if report is None else report
        return acquire(source_of(str(path)), ModelsDir(models_dir), shown, refresh=refresh).records[0].model

    return run


class Seen(list[Progress]):
    """Progress as it came."""

    def __call__(self, progress: Progress) -> None:
        self.append(progress)

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(progress.stage for progress in self))


async def test_a_directory_is_hashed_once_and_again_when_it_changes(store: ModelStore, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    first, again, touched, changed = Seen(), Seen(), Seen(), Seen()

    model = await store.resolve(str(tiny), first)
    assert first.stages == ["hashing"]
    assert (model.name, model.path, model.architecture) == ("tiny", tiny, "llama")

    assert await store.resolve(str(tiny), again) == model
    assert again == []

    os.utime(tiny / "model.safetensors", (1, 1))
    assert await store.resolve(str(tiny), touched) == model
    assert touched.stages == ["hashing"]

    make_tiny(tiny, seed=1)
    other = await store.resolve(str(tiny), changed)
    assert other.model_hash != model.model_hash
    assert [stored.model.model_hash for stored in store.stored()] == [other.model_hash]  # the first one is no longer there


def test_two_hashes_under_one_name_are_two_models(store: ModelStore, acquired: Acquire, tmp_path: Path) -> None:
    first = acquired(make_tiny(tmp_path / "a" / "tiny"))
    second = acquired(make_tiny(tmp_path / "b" / "tiny", seed=1))
    stored = store.stored()

    assert first.name == second.name == "tiny"
    assert {entry.model.model_hash for entry in stored} == {first.model_hash, second.model_hash}
    assert all(entry.current and entry.problem is None for entry in stored)


def test_a_fake_model_is_a_directory_like_any_other(acquired: Acquire, tmp_path: Path) -> None:
    model = acquired(make_fake(tmp_path / "fake", context=77))

    assert (model.architecture, model.context_length, model.weight_bytes) == ("fake", 77, 0)


def test_the_same_gguf_at_two_paths_is_one_model(acquired: Acquire, models_dir: Path, gguf: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(gguf, tmp_path / "copy.gguf"))
    seen = Seen()
    first, second = acquired(gguf, seen), acquired(copy)

    assert seen.stages == ["converting", "hashing"]
    assert (first.model_hash, first.path) == (second.model_hash, second.path)
    assert (first.name, second.name) == ("tiny.gguf", "copy.gguf")
    assert first.path == models_dir / first.model_hash
    assert _directories(models_dir) == [first.model_hash]


def test_a_gguf_that_changed_is_converted_anew_and_the_old_model_stays(
    store: ModelStore, acquired: Acquire, gguf: Path
) -> None:
    old = acquired(gguf)
    tiny_gguf("llama", TYPES, seed=9).write(gguf)
    new = acquired(gguf)

    assert old.model_hash != new.model_hash
    assert [(entry.model.model_hash, entry.current) for entry in store.stored()] == [
        (new.model_hash, True),
        (old.model_hash, False),
    ]


def test_relative_and_home_paths_are_made_absolute(in_tmp_path: Path) -> None:
    assert source_of("./x/../y").identity == str(in_tmp_path / "y")
    assert source_of("~/m.gguf", Path("/home/me")).identity == "/home/me/m.gguf"
    assert source_of("org/name@v1").identity == "org/name@v1"


# ---- damage


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed", "all gone"])
def test_a_damaged_model_of_ours_is_made_anew(
    damage: str, store: ModelStore, acquired: Acquire, models_dir: Path, gguf: Path
) -> None:
    model = acquired(gguf)
    weights = model.path / "model.safetensors"
    match damage:
        case "flipped":
            _flip(weights)
        case "truncated":
            os.truncate(weights, 1000)
        case "removed":
            (model.path / "tokenizer.json").unlink()
        case _:
            shutil.rmtree(model.path)
    assert [stored for stored in store.stored() if stored.problem is None] == []
    seen = Seen()

    assert acquired(gguf, seen) == model
    assert "converting" in seen.stages
    assert _directories(models_dir) == [model.model_hash]
    assert store.stored()[0].problem is None


def test_what_size_and_time_do_not_show_is_found_by_a_refresh(acquired: Acquire, gguf: Path) -> None:
    model = acquired(gguf)
    weights = model.path / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    sound = weights.read_bytes()
    _flip(weights)
    os.utime(weights, ns=times)
    seen, refreshed = Seen(), Seen()

    acquired(gguf, seen)
    assert seen == []
    assert acquired(gguf, refreshed, refresh=True) == model
    assert "converting" in refreshed.stages
    assert weights.read_bytes() == sound


def test_a_damaged_note_about_a_name_is_written_anew(
    store: ModelStore, acquired: Acquire, models_dir: Path, gguf: Path
) -> None:
    model = acquired(gguf)
    (note,) = (models_dir / "names").glob("*.json")
    note.write_bytes(note.read_bytes()[:50])

    assert store.stored() == []
    assert acquired(gguf) == model


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("smollm2", ModelNotFoundError, "did you mean smollm2:135m?"),
        ("./nothing", ModelNotFoundError, "There is no directory"),
        ("./nothing.gguf", ModelNotFoundError, "There is no file"),
        ("./text.gguf", ModelDamagedError, "text.gguf is no intact GGUF file"),
        ("./empty/", ModelNotFoundError, "is no model in mlx-lm's format"),
    ],
)
async def test_what_is_not_there_is_one_sentence(
    name: str, kind: type[ModelError], sentence: str, store: ModelStore, in_tmp_path: Path
) -> None:
    (in_tmp_path / "text.gguf").write_text("this is no model\n" * 100)
    (in_tmp_path / "empty").mkdir()
    with pytest.raises(kind) as caught:
        await store.resolve(name, Seen())

    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.stored() == []


async def test_a_models_directory_that_can_not_be_made_is_one_sentence(tmp_path: Path, gguf: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelDiskError, match=r"file.* can't be read or written"):
        await ModelStore(tmp_path / "file" / "models", os.environ).resolve(str(gguf), Seen())


# ---- several processes, killed ones, full disks


def _directories(models_dir: Path) -> list[str]:
    return sorted(path.name for path in models_dir.iterdir() if path.name not in {"names", "locks"})


async def test_a_second_process_waits_for_the_first(store: ModelStore, models_dir: Path, gguf: Path) -> None:
    seen = Seen()
    with _held(models_dir, gguf) as lock:

        def show(progress: Progress) -> None:
            seen(progress)
            if progress.stage == "waiting":
                fcntl.flock(lock, fcntl.LOCK_UN)

        await store.resolve(str(gguf), show)

    assert seen.stages == ["waiting", "converting", "hashing"]


async def test_of_many_at_once_one_converts(store: ModelStore, models_dir: Path, gguf: Path) -> None:
    seen, models = [Seen() for _ in range(4)], []

    async def resolve(mine: Seen) -> None:
        models.append(await store.resolve(str(gguf), mine))

    async with trio.open_nursery() as nursery:
        for mine in seen:
            nursery.start_soon(resolve, mine)

    assert len(models) == 4
    assert all(model == models[0] for model in models)
    assert sum("converting" in mine.stages for mine in seen) == 1
    assert _directories(models_dir) == [models[0].model_hash]


KILLED = """
import os, signal, sys
from pathlib import Path
from inference.acquire import acquire
from inference.model_entries import ModelsDir
from inference.model_store import source_of
def report(progress):
    if progress.stage == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
acquire(source_of(sys.argv[2]), ModelsDir(Path(sys.argv[1])), report)
"""


@pytest.mark.parametrize("stage", ["converting", "hashing"])
def test_a_killed_process_leaves_nothing_that_counts(
    stage: str, store: ModelStore, acquired: Acquire, models_dir: Path, gguf: Path
) -> None:
    run = [sys.executable, "-c", KILLED, str(models_dir), str(gguf), stage]
    assert subprocess.run(run, check=False).returncode == -signal.SIGKILL
    assert store.stored() == []
    assert [name.startswith(".partial-") for name in _directories(models_dir)] == [True]

    model = acquired(gguf)
    assert _directories(models_dir) == [model.model_hash]


def _fetching_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "inference.fetch" in child.cmdline()]


async def test_a_fetching_process_that_is_killed_is_told_in_one_sentence(
    store: ModelStore, models_dir: Path, gguf: Path
) -> None:
    def kill(progress: Progress) -> None:
        assert progress.stage == "waiting"
        for process in _fetching_processes():
            process.kill()

    with _held(models_dir, gguf), pytest.raises(ModelError) as caught:
        await store.resolve(str(gguf), kill)

    assert str(caught.value) == "tiny.gguf was not made ready: the process that did it was ended by SIGKILL."


@contextlib.contextmanager
def _held(models_dir: Path, path: Path) -> Iterator[int]:
    """Another process's lock: whoever fetches this name waits."""
    layout = ModelsDir(models_dir)
    layout.make()
    with layout.lock(source_of(str(path)), lambda: None) as lock:
        yield lock


def test_any_start_clears_away_what_others_left(acquired: Acquire, models_dir: Path, tmp_path: Path) -> None:
    left, busy = models_dir / ".partial-left", models_dir / ".partial-busy"
    for partial in (left, busy):
        (partial / "converted").mkdir(parents=True)
    (models_dir / "locks").mkdir()
    with (models_dir / "locks" / "busy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        acquired(make_fake(tmp_path / "fake"))

    assert (left.exists(), busy.exists()) == (False, True)


async def test_cancelling_ends_the_process_at_once(store: ModelStore, models_dir: Path, gguf: Path) -> None:
    with _held(models_dir, gguf), trio.CancelScope() as scope:
        await store.resolve(str(gguf), lambda progress: scope.cancel())

    assert scope.cancelled_caught
    assert _fetching_processes() == []
    assert store.stored() == []


NODE = """
import os, sys, trio
from pathlib import Path
from inference.model_store import ModelStore
def show(progress): print(progress.stage, flush=True)
trio.run(ModelStore(Path(sys.argv[1]), os.environ).resolve, sys.argv[2], show)
"""


def test_when_the_node_is_killed_its_fetching_process_ends_too(models_dir: Path, gguf: Path) -> None:
    """While it waits for another process, the state in which it would otherwise live longest."""
    with _held(models_dir, gguf):
        node = subprocess.Popen([sys.executable, "-c", NODE, str(models_dir), str(gguf)], stdout=subprocess.PIPE)
        assert node.stdout is not None
        assert node.stdout.readline() == b"waiting\n"
        (fetching,) = psutil.Process(node.pid).children()
        node.kill()
        node.wait()
        node.stdout.close()
        psutil.wait_procs([fetching], timeout=20)
        assert not fetching.is_running()


FULL = """
import resource, sys
from pathlib import Path
from inference.acquire import acquire
from inference.acquire import acquire
from inference.model_entries import ModelsDir
from inference.model_store import source_of
from inference.models import ModelDiskError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    acquire(source_of(sys.argv[2]), ModelsDir(Path(sys.argv[1])), lambda progress: None)
except ModelDiskError as error:
    print(error)
"""


@pytest.mark.parametrize("room", [200_000, 100, 0])
def test_a_full_disk_is_one_sentence_and_nothing_is_left(room: int, acquired: Acquire, models_dir: Path, gguf: Path) -> None:
    """At the weights, at the smaller files after them, and at the first byte."""
    run = [sys.executable, "-c", FULL, str(models_dir), str(gguf), str(room)]
    result = subprocess.run(run, capture_output=True, text=True, check=False)

    assert result.stdout.startswith("The disk is full"), result.stderr
    assert len(result.stdout.splitlines()) == 1
    assert _directories(models_dir) == []
    assert acquired(gguf).layers == 2


@pytest.mark.model
def test_the_real_model_is_what_it_always_was(smollm2: Model) -> None:
    assert smollm2.model_hash == MODEL_HASH
    assert (smollm2.name, smollm2.architecture, smollm2.quantization) == (ALIAS, "llama", "4-bit")
    assert (smollm2.parameters, smollm2.layers, smollm2.context_length) == (134_515_008, 30, 8192)
