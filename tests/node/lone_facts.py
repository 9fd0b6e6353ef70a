"""The replicated state of a node that has no peers, on trio's clock."""

import random
from collections.abc import Callable

import trio

from node.records import SCHEMA
from p2p.core import Core
from p2p.effects import Changed, Effect
from p2p.ids import NodeId
from p2p.lattice import Generation, Liveness
from p2p.sync_wire import Name, node16


class LoneFacts:
    """The same calls as Gossip's, over a real core."""

    def __init__(self, node_id: str, boot: int = 77) -> None:
        chance = random.Random(1)
        self.core = Core(node16(node_id), Generation(1, boot), cluster=bytes(16), schema=SCHEMA, chance=chance)
        self.on_changed: list[Callable[[Changed], None]] = []
        self._do(self.core.start(trio.current_time()))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Changed):
                for callback in self.on_changed:
                    callback(effect)

    def write(self, kind: int, name: Name, value: object, *, urgent: bool = False) -> None:
        self.core.write(kind, name, value, trio.current_time(), urgent=urgent)
        self._do(self.core.outbox.take())

    def delete(self, kind: int, name: Name) -> None:
        self.core.delete(kind, name, trio.current_time())
        self._do(self.core.outbox.take())

    def believe(self, node: bytes) -> Liveness | None:
        return self.core.believe(node, trio.current_time())

    def node_id(self, node: bytes) -> NodeId | None:
        return None

    def watch(self, node: bytes) -> None: ...

    def unwatch(self, node: bytes) -> None: ...
