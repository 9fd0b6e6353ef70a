"""`node pull` and `node models`: the models of this device, on disk and loaded."""

import http.client
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from inference.model_store import ModelStore
from inference.models import SHORT_HASH_DIGITS, Model, ModelError, StoredModel
from node.config import process_environment
from node.errors import CommandError
from node.pull_progress import PullProgress

EXIT_DONE = 0
EXIT_INTERRUPTED = 130  # as shells say it for SIGINT
API_SECONDS_MAX = 3.0
API_BYTES_MAX = 4 << 20


def pull(name: str, models_dir: Path, as_json: bool) -> int:
    """Fetch a model to this device: the newest revision, verified by its hash. Progress goes to stderr.

    Raises: CommandError with the reason, one sentence.
    """
    with PullProgress(name, sys.stderr) as progress:
        outcome = trio.run(_resolve, ModelStore(models_dir, process_environment()), name, progress)
    if outcome is None:
        print(f"node: {name} was not fetched to its end; `node pull {name}` goes on with it", file=sys.stderr)
        return EXIT_INTERRUPTED
    if isinstance(outcome, ModelError):
        raise CommandError(str(outcome))
    if as_json:
        print(json.dumps(_document(outcome), indent=2, ensure_ascii=False))
    else:
        facts = f"{outcome.quantization}, {decimal(outcome.weight_bytes)}, up to {outcome.context_length} tokens"
        print(f"{outcome.name} is here: {facts}, hash {_short(outcome.model_hash)}, in {outcome.path}")
    return EXIT_DONE


async def _resolve(store: ModelStore, name: str, progress: PullProgress) -> Model | ModelError | None:
    """The model, or why it can't be had; None where Ctrl-C came first."""
    outcome: Model | ModelError | None = None
    # SIGTERM as well: the fetching process is in a group of its own and shall not be left to find out by itself.
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on, signals, nursery.cancel_scope)
            try:
                outcome = await store.resolve(name, progress.update, refresh=True)
            except ModelError as error:
                outcome = error
            nursery.cancel_scope.cancel()
    return outcome


async def _cancel_on(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()


def models(models_dir: Path, api: str | None, as_json: bool, api_key: str | None = None) -> int:
    """List the models that are on this device, and which of them the node at `api` serves, where one runs.

    Raises: CommandError.
    """
    try:
        stored = ModelStore(models_dir, {}).stored()
    except ModelError as error:
        raise CommandError(str(error)) from error
    loaded = None if api is None else served_hashes(api, api_key)
    if as_json:
        print(json.dumps({"models": [_listed(entry, loaded) for entry in stored]}, indent=2, ensure_ascii=False))
    elif not stored:
        print("No models here yet: `node pull smollm2:135m` fetches a small one.")
    else:
        Console(soft_wrap=not sys.stdout.isatty()).print(table(stored, loaded))
    return EXIT_DONE


def table(stored: list[StoredModel], loaded: frozenset[str] | None) -> Table:
    """What people see: one row a model, the names that lead elsewhere by now marked as earlier ones."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "hash", "size", "quantization", "context", "state"):
        shown.add_column(heading, justify="right" if heading in {"size", "context"} else "left", no_wrap=heading != "state")
    for entry in stored:
        model = entry.model
        name = model.name if entry.current else f"{model.name} (earlier)"
        shown.add_row(
            name,
            _short(model.model_hash),
            decimal(entry.disk_bytes),
            model.quantization,
            str(model.context_length),
            _state(entry, loaded),
        )
    return shown


def _state(entry: StoredModel, loaded: frozenset[str] | None) -> str:
    if loaded is not None and entry.model.model_hash in loaded:
        return "loaded"
    return entry.problem or "on disk"


def _short(model_hash: str) -> str:
    return model_hash[:SHORT_HASH_DIGITS]


def _document(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "model_hash": model.model_hash,
        "path": str(model.path),
        "architecture": model.architecture,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "layers": model.layers,
        "context_length": model.context_length,
        "quantization": model.quantization,
    }


def _listed(entry: StoredModel, loaded: frozenset[str] | None) -> dict[str, Any]:
    return _document(entry.model) | {
        "kind": entry.kind,
        "source": entry.source,
        "disk_bytes": entry.disk_bytes,
        "current": entry.current,
        "problem": entry.problem,
        "loaded": None if loaded is None else entry.model.model_hash in loaded,
    }


def served_hashes(api: str, api_key: str | None) -> frozenset[str] | None:
    """Hashes of the models that a node serves; None where it doesn't answer, which is no failure of a listing."""
    parts = urlsplit(api)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=API_SECONDS_MAX)
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}/v1/models", headers=headers)
            document = json.loads(connection.getresponse().read(API_BYTES_MAX))
            return frozenset(model["model_hash"] for model in document["data"])
        finally:
            connection.close()
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return None
