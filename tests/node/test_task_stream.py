"""Tasks between real homes and heads: whatever befalls the streams, an attempt runs once and its client misses nothing."""

import trio
from trio.testing import MockClock

from p2p.memory_transport import open_network
from tests.node.task_bench import Reader, endless_device, open_head, open_home


async def test_an_answer_from_beginning_to_end(autojump_clock: MockClock) -> None:
    async with open_network() as network, open_head(network, endless_device()) as head, open_home(network, head) as home:
        network.set_latency(0.001)
        reader, submit = Reader(), home.make(max_tokens=10)
        await reader.read(home, head.node_id, submit)
        assert reader.whole(submit)
        await trio.sleep(1)
        assert head.idle
        assert home.quiet
