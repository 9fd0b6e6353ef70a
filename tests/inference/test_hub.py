"""Hugging Face repositories, against a stand-in hub on loopback: fetched, resumed, refused, and used without a network."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from inference.model_store import ModelStore
from inference.models import Model, ModelDamagedError, ModelError, ModelNetworkError, Progress
from tests.inference.standin_hub import StandinHub
from tests.inference.tiny_models import make_tiny

WEIGHTS = "model.safetensors"
# Weights of 10 MB: large enough to be resumed.
LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("large"), "llama", 0, None, "{{ messages }}", **LARGE)


@pytest.fixture
def hub(large: Path) -> Iterator[StandinHub]:
    with StandinHub({"org/large": large}) as running:
        yield running


@pytest.fixture
def environment(hub: StandinHub, tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def store(tmp_path: Path, environment: dict[str, str]) -> ModelStore:
    return ModelStore(tmp_path / "models", environment)


def _quiet(progress: Progress) -> None:
    pass


def _bytes(model: Model) -> bytes:
    return (model.path / WEIGHTS).read_bytes()


async def test_only_what_is_needed_is_fetched_and_only_once(store: ModelStore, hub: StandinHub, tmp_path: Path) -> None:
    repository = make_tiny(tmp_path / "tiny", quantize=4)
    for name in ("README.md", "pytorch_model.bin", "modeling_own.py", ".gitattributes"):
        (repository / name).write_text("not for us")
    hub.repositories["org/tiny"] = repository
    seen: list[Progress] = []
    model = await store.resolve("org/tiny", seen.append)

    assert {path.name for path in model.path.iterdir()} == {path.name for path in repository.glob("*.json")} | {WEIGHTS}
    assert (model.name, model.quantization) == ("org/tiny", "4-bit")
    assert list(dict.fromkeys(progress.stage for progress in seen)) == ["fetching", "hashing"]
    fetching = [progress for progress in seen if progress.stage == "fetching"]
    assert (
        fetching[-1].done == fetching[-1].total == sum((repository / path.name).stat().st_size for path in model.path.iterdir())
    )

    hub.log.clear()
    assert await store.resolve("org/tiny", _quiet) == model
    assert hub.log == []


@pytest.mark.parametrize("ignores_range", [False, True])
async def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    ignores_range: bool, store: ModelStore, hub: StandinHub, large: Path
) -> None:
    """Or, where the server can only send the whole file, from the beginning."""
    left = [4 << 20, 3 << 20] if ignores_range else [4 << 20] * 9
    hub.break_after = lambda: left.pop(0) if left else None
    hub.ignores_range = ignores_range
    model = await store.resolve("org/large", _quiet)

    assert _bytes(model) == (large / WEIGHTS).read_bytes()
    starts = [_start(wanted) for wanted in hub.ranges(WEIGHTS)]
    assert starts[0] == 0
    assert len(starts) > 2
    assert min(starts[1:]) > 0


def _start(wanted: str) -> int:
    return int(wanted.removeprefix("bytes=").rstrip("-"))


async def test_a_killed_fetch_goes_on_where_it_stopped(store: ModelStore, hub: StandinHub, large: Path, tmp_path: Path) -> None:
    killed = threading.Event()

    def slowly(sent: int) -> None:
        if sent > 3 << 20:
            killed.wait(0.15)

    hub.hold = slowly

    def kill(progress: Progress) -> None:
        if progress.stage == "fetching" and progress.done > 2 << 20:
            (fetching,) = (child for child in psutil.Process().children() if "inference.fetch" in child.cmdline())
            fetching.kill()
            killed.set()

    with pytest.raises(ModelError, match="SIGKILL"):
        await store.resolve("org/large", kill)
    assert store.stored() == []
    assert list((tmp_path / "hf").rglob("*.incomplete")) != []

    hub.log.clear()
    model = await store.resolve("org/large", _quiet)
    assert _bytes(model) == (large / WEIGHTS).read_bytes()
    (wanted,) = hub.ranges(WEIGHTS)
    assert _start(wanted) > 2 << 20
    assert list((tmp_path / "hf").rglob("*.incomplete")) == []


async def test_what_arrives_damaged_is_not_kept(store: ModelStore, hub: StandinHub, large: Path) -> None:
    hub.corrupt = True
    with pytest.raises(ModelDamagedError, match=r"model\.safetensors arrived damaged"):
        await store.resolve("org/large", _quiet)
    hub.corrupt = False

    assert _bytes(await store.resolve("org/large", _quiet)) == (large / WEIGHTS).read_bytes()


async def test_two_nodes_with_one_cache_fetch_a_file_once(hub: StandinHub, environment: dict[str, str], tmp_path: Path) -> None:
    models: list[Model] = []

    async def resolve(name: str) -> None:
        models.append(await ModelStore(tmp_path / name, environment).resolve("org/large", _quiet))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(resolve, "one")
        nursery.start_soon(resolve, "two")

    assert models[0] == models[1]
    assert len(hub.ranges(WEIGHTS)) == 1


async def test_damage_in_the_cache_is_fetched_anew_and_a_new_revision_by_a_refresh(
    store: ModelStore, hub: StandinHub, large: Path, tmp_path: Path
) -> None:
    copy = make_tiny(tmp_path / "copy", **LARGE)
    hub.repositories["org/large"] = copy
    model = await store.resolve("org/large", _quiet)
    blob = (model.path / WEIGHTS).resolve()
    os.truncate(blob, 5000)
    assert await store.resolve("org/large", _quiet) == model
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert await store.resolve("org/large", _quiet) == model
    assert _bytes(model) == (copy / WEIGHTS).read_bytes()

    make_tiny(copy, seed=1, **LARGE)
    assert await store.resolve("org/large", _quiet) == model
    newer = await store.resolve("org/large", _quiet, refresh=True)
    assert newer.model_hash != model.model_hash
    assert [(entry.model, entry.current) for entry in store.stored()] == [(newer, True), (model, False)]


async def test_without_a_network_the_cache_serves(hub: StandinHub, environment: dict[str, str], tmp_path: Path) -> None:
    model = await ModelStore(tmp_path / "one", environment).resolve("org/large", _quiet)
    offline = environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    store = ModelStore(tmp_path / "two", offline)

    assert await store.resolve("org/large", _quiet) == model
    assert await store.resolve("org/large", _quiet, refresh=True) == model
    with pytest.raises(
        ModelNetworkError, match=r"org/other is not complete on this device and http://127.0.0.1:9 can't be reached"
    ):
        await store.resolve("org/other", _quiet)
    os.truncate((model.path / WEIGHTS).resolve(), 5000)
    with pytest.raises(ModelNetworkError, match=r"org/large is not complete on this device"):
        await store.resolve("org/large", _quiet)


async def test_a_snapshot_that_another_program_left_incomplete_is_completed(
    store: ModelStore, hub: StandinHub, tmp_path: Path
) -> None:
    repository = tmp_path / "hf/hub/models--org--large"
    commit = hub.commit("org/large")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((hub.repositories["org/large"] / "config.json").read_bytes())

    model = await store.resolve("org/large", _quiet)
    assert model.path == snapshot


# Several names in one process, as importing the hub's library takes long.
FETCH = """
import json, resource, sys
if (room := int(sys.argv.pop(1))) >= 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
from inference import hub
from inference.models import ModelError
for name in sys.argv[1:]:
    try:
        path = hub.fetch(name, lambda done, total: None, refresh=False)
        print(json.dumps(["fetched", str(path)]))
    except ModelError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def _fetch(environment: dict[str, str], *names: str, room: int = -1) -> list[list[str]]:
    run = [sys.executable, "-c", FETCH, str(room), *names]
    result = subprocess.run(run, capture_output=True, text=True, env=environment, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_refusals_are_one_sentence(hub: StandinHub, environment: dict[str, str], large: Path, tmp_path: Path) -> None:
    hub.repositories |= {"org/gated": large, "org/private": large}
    hub.gated.add("org/gated")
    hub.private.add("org/private")
    ggufs = tmp_path / "ggufs"
    ggufs.mkdir()
    for name in ("README.md", "config.json", "model-Q4_K_M.gguf"):
        (ggufs / name).write_text("{}")
    hub.repositories["org/ggufs"] = ggufs
    names = ["org/none", "org/gated", "org/private", "org/large@v9", "org/a--b", "org/ggufs"]

    assert _fetch(environment, *names) == [
        ["ModelAccessError", f"{hub.url} has no org/none for you (401): it doesn't exist, or needs a token (HF_TOKEN)."],
        [
            "ModelAccessError",
            f"org/gated is gated: ask for access at {hub.url}/org/gated and give a token of yours as HF_TOKEN.",
        ],
        ["ModelAccessError", f"{hub.url} has no org/private for you (401): it doesn't exist, or needs a token (HF_TOKEN)."],
        ["ModelNotFoundError", f"org/large has no revision v9 on {hub.url}."],
        ["ModelNotFoundError", "'org/a--b' is no name of a repository."],
        [
            "ModelUnsupportedError",
            "org/ggufs has no model in mlx-lm's format, with a config.json and model*.safetensors; "
            "of a repository of GGUF files, download one and name it by its path.",
        ],
    ]
    with_token = _fetch(environment | {"HF_TOKEN": hub.token}, "org/none", "org/gated", "org/private")
    assert with_token[0] == ["ModelNotFoundError", f"There is no repository org/none on {hub.url}, or it is private."]
    assert [outcome for outcome, _ in with_token[1:]] == ["fetched", "fetched"]


def test_a_hub_that_fails_and_one_that_must_not_be_asked(hub: StandinHub, environment: dict[str, str]) -> None:
    hub.status = 500
    assert _fetch(environment, "org/large") == [
        ["ModelNetworkError", f"org/large could not be fetched: {hub.url} answered 500."]
    ]

    forbidden = _fetch(environment | {"HF_HUB_OFFLINE": "1"}, "org/large")
    assert forbidden == [
        ["ModelNetworkError", "org/large is not complete on this device and HF_HUB_OFFLINE forbids to fetch it."]
    ]


def test_a_full_disk_is_one_sentence_and_what_came_is_kept(hub: StandinHub, environment: dict[str, str]) -> None:
    full = _fetch(environment, "org/large", room=3 << 20)
    assert full == [["ModelDiskError", "The disk of the hub's cache is full: org/large could not be fetched."]]

    hub.log.clear()
    assert _fetch(environment, "org/large")[0][0] == "fetched"
    assert _start(hub.ranges(WEIGHTS)[0]) == 3 << 20
