"""Tasks that ended a while ago are still told of, by their home and by whoever asks it."""

import msgspec
import trio
from trio.testing import MockClock

from node.documents import TaskDocument
from node.ended_tasks import ENDED_MAX, LOOKUP, EndedTasks, ask_home
from p2p.memory_transport import open_network
from tests.p2p.transport_lab import CLUSTER, connect, new_identity

DOCUMENT = TaskDocument(
    task_id="0-1",
    status="failed",
    model="m",
    instance_id=None,
    accepted_by="home",
    executed_by=None,
    attempt=2,
    reason="runner_crashed",
    prompt_tokens=3,
    max_tokens=4,
)


def test_the_last_thousand_are_kept() -> None:
    ended = EndedTasks()
    for number in range(ENDED_MAX + 5):
        ended.add(msgspec.structs.replace(DOCUMENT, task_id=f"0-{number}"))
    assert len(ended) == ENDED_MAX
    assert ended.get("0-4") is None
    assert ended.get("0-5") is not None


async def test_a_home_is_asked_over_the_network(autojump_clock: MockClock) -> None:
    ended = EndedTasks()
    ended.add(DOCUMENT)
    async with (
        open_network() as network,
        network.open_transport(new_identity().node_id, CLUSTER) as home,
        network.open_transport(new_identity().node_id, CLUSTER) as other,
    ):
        assert await ask_home(other, home.node_id, "0-1") is None  # not connected
        await connect(other, home)
        assert await ask_home(other, home.node_id, "0-1") is None  # an older version, which does not know the question
        home.serve(LOOKUP, ended.serve)
        assert await ask_home(other, home.node_id, "0-1") == DOCUMENT
        assert await ask_home(other, home.node_id, "0-2") is None
        began = trio.current_time()
        network.silent.update({(address.split("/")[2], int(address.split("/")[4])) for address in home.addresses})
        network.partition({home.node_id}, {other.node_id})
        assert await ask_home(other, home.node_id, "0-1") is None
        assert trio.current_time() - began <= 2.0
