"""Changes of the merged view, for those who watch it.

Nothing is kept for a reader but the revision that it has seen. Each entry of the state carries the revision of its last change,
and what was taken out is remembered for `REMOVALS_MAX` removals: so a reader is told, in one event, everything that changed
since its last one, each entry once and as it is by now, however slow it was; whoever is further behind gets the whole state. It
is the same idea as that of the replica's own deletes (`p2p.namespace`).

While nobody watches, nothing is computed.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from operator import attrgetter

import trio
from msgspec import Struct, structs

from node.documents import RemovedDocument, StateDocument, StateEvent, UnreachableDocument

INTERVAL_SECONDS = 0.1  # between two events of one reader, and between two looks at the state
REMOVALS_MAX = 1024

Key = tuple[str, str]  # which list, and the entry's id

_LISTS = (
    ("nodes", attrgetter("node_id")),
    ("instances", attrgetter("instance_id")),
    ("runners", attrgetter("runner_id")),
    ("tasks", attrgetter("task_id")),
)
_WHOLES = ("digest", "in_flight", "unreachable", "incompatible")


class _Entry(Struct):
    """What is there now, and the revision of its last change."""

    revision: int
    content: object


class Ledger:
    """The last state that was looked at, with the revision of each part's last change. Pure but for being updated."""

    def __init__(self, removals_max: int = REMOVALS_MAX) -> None:
        self.revision = 0
        self.state: StateDocument | None = None
        self._entries: dict[Key, _Entry] = {}
        self._wholes: dict[str, _Entry] = {}
        self._removed: dict[Key, int] = {}  # the revision at which; oldest first
        self._floor = 0  # removals up to this revision are forgotten
        self._removals_max = removals_max

    def update(self, state: StateDocument) -> None:
        """Take in the state as it is now; the revision rises where anything is new."""
        revision = self.revision + 1
        changed = False
        found: dict[Key, None] = {}
        for key, content in _entries(state):
            found[key] = None
            entry = self._entries.get(key)
            if entry is None or entry.content != content:
                self._entries[key] = _Entry(revision, content)
                self._removed.pop(key, None)
                changed = True
        for key in [key for key in self._entries if key not in found]:
            del self._entries[key]
            self._removed[key] = revision
            changed = True
        for name in _WHOLES:
            content = _steady(getattr(state, name))
            whole = self._wholes.get(name)
            if whole is None or whole.content != content:
                self._wholes[name] = _Entry(revision, content)
                changed = True
        self._forget()
        self.state = state
        if changed:
            self.revision = revision

    def _forget(self) -> None:
        while len(self._removed) > self._removals_max:
            key = next(iter(self._removed))
            self._floor = self._removed.pop(key)

    def since(self, seen: int) -> StateEvent | None:
        """What is new after the revision `seen`, None for nothing; the whole state for 0, and for whoever missed removals."""
        state = self.state
        assert state is not None, "there was an update"
        if seen == 0 or seen < self._floor:
            return StateEvent(revision=self.revision, digest=state.digest, state=state)
        if seen >= self.revision:
            return None
        changed: dict[str, list[object]] = {}
        for (name, _), entry in self._entries.items():
            if entry.revision > seen:
                changed.setdefault(name, []).append(entry.content)
        removed: dict[str, list[str]] = {}
        for (name, entry_id), revision in self._removed.items():
            if revision > seen:
                removed.setdefault(name, []).append(entry_id)
        event = StateEvent(
            revision=self.revision,
            digest=state.digest,
            removed=RemovedDocument(**{name: tuple(ids) for name, ids in removed.items()}) if removed else None,
        )
        wholes = {name: getattr(state, name) for name, whole in self._wholes.items() if whole.revision > seen}
        return structs.replace(event, **wholes, **{name: tuple(documents) for name, documents in changed.items()})


def _entries(state: StateDocument) -> Iterator[tuple[Key, object]]:
    for name, id_of in _LISTS:
        documents: Iterable[object] = getattr(state, name)
        for document in documents:
            yield (name, id_of(document)), document


def _steady(content: object) -> object:
    """Without what changes by itself: when the next try is due, and how many there were."""
    if not isinstance(content, tuple):
        return content
    return tuple(
        structs.replace(item, failures=0, next_try_seconds=0.0) if isinstance(item, UnreachableDocument) else item
        for item in content
    )


class StateChanges:
    """Tells any number of readers what becomes of the state. `state` gives it as it is; `touch` says that it may differ."""

    def __init__(self, state: Callable[[], StateDocument], *, removals_max: int = REMOVALS_MAX) -> None:
        self._state = state
        self._ledger = Ledger(removals_max)
        self._is_stale = True
        self._looked_at = -math.inf
        self._touched = trio.Event()

    def touch(self) -> None:
        """Something that the state shows has changed, or may have. Costs next to nothing; call it as often as need be."""
        self._is_stale = True
        self._touched.set()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncIterator[StateEvent]]:
        """The whole state and then its changes, for ever, one event in `INTERVAL_SECONDS` at most."""
        async with aclosing(self._events()) as events:
            yield events

    async def _events(self) -> AsyncGenerator[StateEvent, None]:
        seen = 0
        while True:
            await self._look()
            event = self._ledger.since(seen)
            if event is None:
                await self._touched.wait()
                continue
            seen = event.revision
            yield event
            await trio.sleep(INTERVAL_SECONDS)

    async def _look(self) -> None:
        """Bring the ledger up to date, if it isn't; all readers share what one of them has looked at."""
        await trio.sleep_until(max(self._looked_at + INTERVAL_SECONDS, trio.current_time()))
        if self._is_stale:
            self._ledger.update(self._state())
            self._is_stale = False
            self._touched = trio.Event()
            self._looked_at = trio.current_time()
