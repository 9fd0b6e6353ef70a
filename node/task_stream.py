"""The home's side of tasks over the network: attempts at heads elsewhere look as those of its own supervisor do."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

from inference.requests import Event, Failed, Refused
from inference.supervisor import NO_ROOM
from node.home_link import Counters, HomeLink
from node.home_submission import HeadLost, Submission
from node.task_credit import Sent
from node.task_protocol import Submit, frame_bytes
from p2p.ids import NodeId
from p2p.transport import Transport

__all__ = ["HeadLost", "Heads"]


class Heads:
    """All heads that this home has to do with."""

    def __init__(
        self,
        transport: Transport,
        boot: int,
        nursery: trio.Nursery,
        *,
        on_pull: Callable[[NodeId, int, int], None] = lambda _head, _instance_id, _free: None,
    ) -> None:
        """`boot` is the nonce of this node's boot, the one that its transport greets with. `on_pull(head, instance, free)`:
        a head has room for so many of the requests that wait here.
        """
        self.counters = Counters()
        self._transport = transport
        self._boot = boot
        self._nursery = nursery
        self._on_pull = on_pull
        self._links: dict[NodeId, HomeLink] = {}

    @asynccontextmanager
    async def submit(self, node_id: NodeId, submit: Submit) -> AsyncIterator[AsyncIterator[Event]]:
        """Submit an attempt to a head; the block gets its events, which begin with Accepted, Refused or Failed.

        Their iteration raises HeadLost where the head can't be reached for GRACE_SECONDS, runs another boot by now, or knows
        nothing of the attempt. Leaving the block cancels what still runs and waits, within a bound, until its place is free;
        iterations that wait then end.
        """
        request_id = submit.request.request_id
        try:
            size = frame_bytes(submit)
        except ValueError as error:
            yield _ended(submit, Failed(request_id, "invalid_parameter", f"The request can't be passed on: {error}."))
            return
        link = self._link(node_id)
        if link.full:
            yield _ended(submit, Refused(request_id, 0, NO_ROOM))
            return
        attempt = Submission(submit, size, link.owe)
        link.add(attempt)
        try:
            yield attempt
        finally:
            await link.leave(attempt)

    def waiting(self, node_id: NodeId, model_hash: str, count: int, seconds: float = 0.0) -> None:
        """Have a head know how many requests of a model wait here, the oldest since so many seconds; 0: none any more.

        It is a level: after a break the head is told again.
        """
        if count or node_id in self._links:
            self._link(node_id).set_level(model_hash, count, trio.current_time() - seconds)

    def _link(self, node_id: NodeId) -> HomeLink:
        link = self._links.get(node_id)
        if link is None:
            link = self._links[node_id] = HomeLink(node_id, self._boot, self._transport, self.counters, self._on_pull)
            self._nursery.start_soon(link.run, partial(self._forget, node_id))
        return link

    def _forget(self, node_id: NodeId) -> None:
        del self._links[node_id]


def _ended(submit: Submit, end: Event) -> Submission:
    """An attempt that came to its end here."""
    attempt = Submission(submit, 0, lambda _: None)
    attempt.hear(Sent(0, end))
    return attempt
