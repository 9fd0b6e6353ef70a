"""The models on this node's disk, as the others are told of them. Other programs put them there too: it looks now and then."""

from collections.abc import Callable

import structlog
import trio

from inference.model_store import ModelStore
from inference.models import Model

LOOK_SECONDS = 60.0

_log = structlog.get_logger("models")


class DiskModels:
    """What was there when it was looked for last."""

    def __init__(self, store: ModelStore) -> None:
        self.models: tuple[Model, ...] = ()
        self.on_change: list[Callable[[], None]] = []
        self._store = store

    async def look(self) -> None:
        """Look once; a disk that can't be read changes nothing."""
        try:
            stored = await trio.to_thread.run_sync(self._store.stored)
        except OSError as error:
            _log.warning("the models directory can't be read", why=error.strerror)
            return
        by_hash = {entry.model.model_hash: entry.model for entry in stored if entry.problem is None}
        found = tuple(by_hash[model_hash] for model_hash in sorted(by_hash))
        if found != self.models:
            self.models = found
            for callback in tuple(self.on_change):
                callback()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await trio.sleep(LOOK_SECONDS)
