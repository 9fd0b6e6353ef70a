"""What was really written, as bare dicts, and the checks that hold every replica against it.

Kept apart from the workload and from the faults: it is told of writes, boots and terminal statuses where they are made, and
looks at replicas from outside.
"""

from collections.abc import Iterable

from msgspec import Struct, field

from p2p.lattice import Generation, Standing
from p2p.namespace import Namespace
from p2p.replica import Replica
from p2p.sync_wire import Key


class Broken(AssertionError):
    """An invariant doesn't hold."""


class Life(Struct):
    """All that one boot ever wrote: for each key its versions in order, with the value (None: a delete)."""

    node: bytes
    history: dict[Key, list[tuple[int, bytes | None]]] = field(default_factory=dict)
    version: int = 0

    def write(self, key: Key, value: bytes | None) -> None:
        """The next version."""
        self.version += 1
        self.history.setdefault(key, []).append((self.version, value))

    def at(self, key: Key, version: int) -> tuple[int, bytes | None]:
        """The last change of a key up to a version."""
        found: tuple[int, bytes | None] = (0, None)
        for change in self.history.get(key, ()):
            if change[0] > version:
                break
            found = change
        return found


class Oracle:
    """Every life, and how far every observer has come; nobody may go back."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}  # by nonce
        self.highest: dict[bytes, Generation] = {}
        self.reached: dict[tuple[int, bytes], tuple[Standing, tuple[Generation, int]]] = {}  # by observer and member
        self.terminals: dict[tuple[int, int, int], int] = {}  # observer, home's nonce, number -> status
        self.verdicts: dict[tuple[int, int], int] = {}  # as the home wrote them
        self.checks = 0

    def born(self, node: bytes, generation: Generation) -> None:
        """A boot begins."""
        self.lives[generation.nonce] = Life(node)
        self.claimed(node, generation)

    def claimed(self, node: bytes, generation: Generation) -> None:
        """A generation is out there."""
        self.highest[node] = max(generation, self.highest.get(node, generation))

    def renewed(self, node: bytes, before: Generation, after: Generation) -> None:
        """A node raised its generation: allowed only against a higher one of another life of its own."""
        if self.highest[node] <= before:
            raise Broken(f"{node.hex()[-2:]} raised its generation though nobody else had a higher one")
        self.claimed(node, after)

    def forgotten(self, observer: int, node: bytes | None = None) -> None:
        """An observer has dropped what it knew of a member, or of everybody."""
        for key in [k for k in self.reached if k[0] == observer and node in (None, k[1])]:
            del self.reached[key]
        lives = [nonce for nonce, life in self.lives.items() if node in (None, life.node)]
        for task in [k for k in self.terminals if k[0] == observer and k[1] in lives]:
            del self.terminals[task]

    def check(self, observer: int, replica: Replica, node: bytes, keys: Iterable[Key] | None) -> None:
        """Hold one observer's replica of one member against what was written; `keys` None: all of them."""
        self.checks += 1
        member = replica.members.get(node)
        if member is None:
            if (observer, node) in self.reached:
                raise Broken(f"{observer} lost a member without having forgotten it")
            return
        namespace = member.namespace
        reached = (member.standing, (namespace.generation, namespace.max_version))
        before = self.reached.get((observer, node))
        if before is not None and (reached[0] < before[0] or reached[1] < before[1]):
            raise Broken(f"{observer} went back on {node.hex()[-2:]}: from {before} to {reached}")
        self.reached[observer, node] = reached
        life = self.lives.get(namespace.generation.nonce)
        if life is None or life.node != node:
            raise Broken(f"{observer} holds a life that never was: {namespace}")
        if keys is None:
            keys = [*life.history, *namespace.records]
        for key in keys:
            self._check_key(observer, namespace, life, key)

    @staticmethod
    def _check_key(observer: int, namespace: Namespace, life: Life, key: Key) -> None:
        """The replica's invariant: the current value, or else the current version is still above what it has."""
        record = namespace.records.get(key)
        history = life.history.get(key)
        if not history:
            raise Broken(f"{observer} holds a record that was never written: {key}")
        version, value = history[-1]
        if record is not None and life.at(key, record.version) != (record.version, record.value):
            raise Broken(f"{observer} holds a value that was never written: {key} at {record.version}")
        if version <= namespace.max_version and (record.value if record is not None else None) != value:
            what = "a deleted record is back" if value is None else "a record is missing or old"
            raise Broken(f"{what}: {key} at {observer}, {namespace}, its current version is {version}")

    def settled(self, task: tuple[int, int], status: int) -> None:
        """A home writes a verdict: once for each task."""
        if task in self.verdicts:
            raise Broken(f"a second verdict {status} for task {task[1]}, the first was {self.verdicts[task]}")
        self.verdicts[task] = status

    def saw(self, observer: int, task: tuple[int, int], status: int, *, terminal: bool) -> None:
        """An observer sees a task with a status."""
        key = (observer, *task)
        before = self.terminals.get(key)
        if before is not None and status != before:
            raise Broken(f"{observer} saw task {task[1]} end as {before} and now sees {status}")
        if not terminal:
            return
        if self.verdicts.get(task) != status:
            raise Broken(f"{observer} sees task {task[1]} end as {status}, its home said {self.verdicts.get(task)}")
        self.terminals[key] = status


def whole(replica: Replica) -> dict[bytes, tuple[Standing, Generation, int, dict[Key, tuple[int, bytes]]]]:
    """A replica as a plain value, to be compared."""
    return {
        node: (
            member.standing,
            member.namespace.generation,
            member.namespace.max_version,
            {key: (record.version, record.value) for key, record in member.namespace.records.items()},
        )
        for node, member in replica.members.items()
    }
