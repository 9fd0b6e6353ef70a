"""Requests that wait and places that are free find each other.

    home: a line changes ──▶ level to each head of the model ──▶ head: a place is free ──▶ pull ──▶ home: the first in line goes

A node's own line is to its own instances a home like any other, so that nobody's requests stand back behind others'. What is
worked out here is `node.pulling`; this file passes it on.
"""

import math
import random
from collections.abc import Callable

import trio

from node.cluster_view import Target
from node.instances import Phase
from node.local_runners import Up
from node.own_node import OwnNode
from node.pulling import PULL_JITTER_SECONDS, HomeLine, Pulls
from p2p.ids import NodeId
from p2p.sync_wire import node16

LEVELS_MAX = 4096  # of other homes' lines, remembered for instances that come up later


class PullExchange:
    """One node's."""

    def __init__(
        self,
        node: OwnNode,
        *,
        tell: Callable[[NodeId, str, int, float], None],
        ask: Callable[[NodeId, int, int], bool],
        unanswered: Callable[[int], int],
        chance: random.Random,
    ) -> None:
        """`tell(head, model hash, count, seconds)` and `ask(home, instance, free)` say so over the network; `unanswered` counts
        the submissions of other homes that an instance has not said yes or no to.
        """
        self._node = node
        self._own = node.facts.core.node
        self._tell = tell
        self._ask = ask
        self._unanswered = unanswered
        self._chance = chance
        self._pulls: dict[int, Pulls] = {}  # by own instance
        self._free: dict[int, int] = {}  # places, when last looked at
        self._trying: dict[int, int] = {}  # own requests that an own instance has not said yes or no to
        self._levels: dict[tuple[bytes, str], HomeLine] = {}  # by home and model
        self._told: dict[str, tuple[str, dict[NodeId, None]]] = {}  # by served name: the model and its heads elsewhere
        self._roster: object = None  # that those heads were looked up in
        self._due: dict[int, float] = {}  # when to pull, by own instance
        self._stirred = trio.Event()
        node.home.on_line.append(self._line_changed)
        node.view.on_change.append(self._view_changed)

    # This node as a home.

    def _line_changed(self, model: str) -> None:
        line = self._node.lines.get(model)
        count, since = line.level() if line is not None else (0, None)
        before = self._told.get(model)
        if not count and before is None:
            return
        now = trio.current_time()
        waited = now - since if since is not None else 0.0
        model_hash = next(iter(self._node.standings.standing(model).hashes), "") if count else ""
        heads = self._heads(model_hash) if model_hash else {}
        if before is not None:
            for head in before[1]:
                if before[0] != model_hash or head not in heads:
                    self._tell(head, before[0], 0, 0.0)
            if before[0] != model_hash:
                self._hear_level(self._own, before[0], 0, 0.0)
        if model_hash:
            self._told[model] = model_hash, heads
            for head in heads:
                self._tell(head, model_hash, count, waited)
            self._hear_level(self._own, model_hash, count, waited)
        else:
            self._told.pop(model, None)

    def _heads(self, model_hash: str) -> dict[NodeId, None]:
        """Who heads an instance of a model elsewhere, ready or soon; in an order that no hash seed decides."""
        nodes = {
            instance.head.node: None
            for instance in self._node.view.roster.instances.values()
            if instance.spec.model_hash == model_hash and instance.phase <= Phase.READY and instance.head is not None
        }
        found = (self._node.facts.node_id(node) for node in nodes if node != self._own)
        return {node_id: None for node_id in found if node_id is not None}

    def _view_changed(self) -> None:
        """Whoever heads an instance of what waits here is told, newcomers too."""
        if self._roster is self._node.view.roster:
            return
        self._roster = self._node.view.roster
        for model, line in list(self._node.lines.items()):
            if line.waiting:
                self._line_changed(model)

    def on_pull(self, head: NodeId, instance_id: int, free: int) -> None:
        """A head elsewhere has room for so many."""
        instance = self._node.view.roster.instances.get(instance_id)
        if instance is not None and instance.head is not None and instance.head.node == node16(head):
            self._offer(instance_id, instance.spec.model_hash, free)

    def _offer(self, instance_id: int, model_hash: str, free: int) -> None:
        for model, (told, _) in list(self._told.items()):
            line = self._node.lines.get(model)
            if told == model_hash and line is not None and free > 0:
                free -= line.offer(instance_id, free)

    # This node as a head.

    def on_waiting(self, home: NodeId, model_hash: str, count: int, seconds: float) -> None:
        """A home elsewhere tells of its line."""
        self._hear_level(node16(home), model_hash, count, seconds)

    def _hear_level(self, home: bytes, model_hash: str, count: int, seconds: float) -> None:
        now = trio.current_time()
        if count <= 0:
            self._levels.pop((home, model_hash), None)
        elif len(self._levels) < LEVELS_MAX or (home, model_hash) in self._levels:
            self._levels[home, model_hash] = HomeLine(count, now - seconds)
        for instance_id, pulls in self._pulls.items():
            local = self._node.instance(instance_id)
            if local is not None and local.model is not None and local.model.model_hash == model_hash:
                pulls.told(home, count, seconds, now)
        if count > 0:
            self._wish(now + self._chance.random() * PULL_JITTER_SECONDS)

    def _wish(self, at: float) -> None:
        """Pull at that moment, unless it happens earlier."""
        for instance_id in self._node.own_instances:
            self._due[instance_id] = min(at, self._due.get(instance_id, math.inf))
        self._stirred.set()

    def trying(self, target: Target) -> Callable[[bool | None], None]:
        """A request of this home is submitted to an own instance; call what comes back, once, with whether it was taken.

        None: it left before it had an answer.
        """
        instance_id = target.candidate.instance_id
        self._trying[instance_id] = self._trying.get(instance_id, 0) + 1

        def answered(accepted: bool | None) -> None:
            left = self._trying[instance_id] - 1
            if left:
                self._trying[instance_id] = left
            else:
                del self._trying[instance_id]
            self.came(self._own, instance_id, accepted=accepted is not False)  # who has left was not refused

        return answered

    def came(self, home: bytes, instance_id: int, *, accepted: bool) -> None:
        """A request of a home was taken by an own instance, or refused."""
        pulls = self._pulls.get(instance_id)
        if pulls is not None:
            pulls.came(home, accepted=accepted)
            self._reserve(instance_id, pulls)
            self.look()

    def look(self) -> None:
        """Places may have come free at an own instance: ask for requests at once, since nobody else has this place to give."""
        if self._levels:
            now = trio.current_time()
            for instance_id in self._node.own_instances:
                self._pull(instance_id, now)

    def _pull(self, instance_id: int, now: float) -> None:
        local = self._node.instance(instance_id)
        if local is None or local.model is None or not isinstance(local.phase, Up) or self._node.draining:
            return
        model_hash = local.model.model_hash
        pulls = self._pulls.get(instance_id)
        if pulls is None:
            pulls = self._pulls[instance_id] = Pulls()
            for (home, of), line in self._levels.items():
                if of == model_hash:
                    pulls.told(home, line.count, now - line.since, now)
        free = local.phase.free - self._unanswered(instance_id) - self._trying.get(instance_id, 0)
        if free > self._free.get(instance_id, 0):
            pulls.ended()
        self._free[instance_id] = free
        asked = pulls.next(free, now)
        self._reserve(instance_id, pulls)
        for home, count in asked.items():
            if home == self._own:
                self._offer(instance_id, model_hash, count)
            elif (node_id := self._node.facts.node_id(home)) is not None:
                self._ask(node_id, instance_id, count)
        deadline = pulls.deadline()
        if deadline < math.inf:
            self._due[instance_id] = min(deadline, self._due.get(instance_id, math.inf))
            self._stirred.set()

    def _reserve(self, instance_id: int, pulls: Pulls) -> None:
        """Places that were promised to others are not for this home's own requests."""
        promised = pulls.promised(self._own)
        if promised:
            self._node.home.reserved[instance_id] = promised
        else:
            self._node.home.reserved.pop(instance_id, None)

    async def run(self) -> None:
        """Pull when it is time to. For ever."""
        while True:
            now = trio.current_time()
            for instance_id, at in list(self._due.items()):
                if at <= now:
                    del self._due[instance_id]
                    self._pull(instance_id, now)
            self._stirred = trio.Event()
            with trio.move_on_at(min(self._due.values(), default=math.inf)):
                await self._stirred.wait()
