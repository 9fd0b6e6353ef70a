"""Tasks among whole nodes: cancelled from anywhere, served in the order in which they wait, large ones, many of them."""

import trio
from trio.testing import MockClock

from inference.requests import Failed
from node.task_credit import WINDOW_BYTES
from node.task_protocol import HOME_FRAME_BYTES_MAX
from tests.sim.whole_cases import Case, open_case, serving
from tests.sim.whole_cluster import until
from tests.sim.whole_work import Client

EVENT_BYTES_MAX = 200  # by which the last event may go beyond a window


async def test_d7_exo_1579_a_third_node_cancels_and_the_task_ends_at_its_home_once(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(step_seconds=0.1), None) as case:
        client = case.begin(0, max_tokens=100)
        await until(lambda: len(client.token_times) >= 5, 5)
        assert await case.cancel(2, client.task_id) == "running"
        began = trio.current_time()
        await case.gone(client)

        assert client.outcome == "cancelled"
        assert trio.current_time() - began < 1
        assert case.given(1) == 1
        await trio.sleep(1)
        assert [await case.cancel(place, client.task_id) for place in range(3)] == ["cancelled"] * 3
        assert case.running(1) == 0
        home, executor, canceller = case.cluster.live
        tasks = [whole.service.state().tasks for whole in (home, executor, canceller)]
        assert [[task.status for task in found] for found in tasks] == [["cancelled"]] * 3


async def test_a_request_that_waits_in_line_is_cancelled_by_a_third_node(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(1, 0.1), None) as case:
        first = case.begin(0, max_tokens=30)
        await trio.sleep(0.5)
        second = case.begin(0, max_tokens=30)
        await trio.sleep(0.5)
        waiting = [task.task_id for task in case.cluster.nodes[2].service.state().tasks if task.status == "pending"]
        assert len(waiting) == 1
        assert await case.cancel(2, waiting[0]) == "pending"
        await case.gone(second)

        assert (second.outcome, second.task_id) == ("cancelled", waiting[0])
        await case.gone(first)
        assert first.outcome == "length"


async def test_what_waits_at_two_homes_is_served_in_the_order_of_waiting(autojump_clock: MockClock) -> None:
    async with open_case(serving(1, 0.1), None, None) as case:
        case.begin(0, max_tokens=10)
        crowd: list[Client] = []
        for number in range(24):
            await trio.sleep(0.02)
            crowd.append(case.begin((0, 1, 2, 1)[number % 4], text=str(number), max_tokens=3))
        await case.gone()

        assert [client.number for client in in_order_of_service(case)] == list(range(25))


async def test_the_end_of_its_own_task_does_not_put_a_home_before_one_that_has_waited_longer(autojump_clock: MockClock) -> None:
    async with open_case(None, None, serving(1, 0.1)) as case:
        for length in range(4, 24):
            case.begin(0, max_tokens=length)
            await trio.sleep(0.05)
            first = case.begin(1, max_tokens=2)
            await trio.sleep(0.05)
            second = case.begin(0, max_tokens=2)
            await case.gone()

            assert first.token_times[0] < second.token_times[0], length


async def test_a_home_with_a_long_line_does_not_starve_beside_the_head_s_own_clients(autojump_clock: MockClock) -> None:
    async with open_case(serving(1, 0.1), None) as case:
        own = [case.begin(0, text="own", max_tokens=5)]
        await trio.sleep(0.1)
        line: list[Client] = []
        for number in range(10):
            line.append(case.begin(1, text=f"line {number}", max_tokens=5))
            await trio.sleep(0.01)
        while not all(client.over for client in line):  # the head's own node is never without one that waits
            if sum(not client.over for client in own) < 3:
                own.append(case.begin(0, text=f"own {len(own)}", max_tokens=5))
            await trio.sleep(0.05)
        await case.gone()

        waits = [client.token_times[0] - client.asked_at for client in line]
        services = (len(line) + sum(client.ended_at < line[-1].ended_at for client in own)) * 0.6
        assert waits == sorted(waits)
        assert max(waits) < services + 1
        later = [client for client in own if client.asked_at > line[-1].asked_at]
        assert all(client.token_times[0] > line[-1].token_times[0] for client in later), "who came later was served earlier"


def in_order_of_service(case: Case) -> list[Client]:
    """Those who were answered, by when their first token came."""
    return sorted(case.clients, key=lambda client: client.token_times[0])


async def test_b5_exo_1583_a_prompt_of_megabytes_goes_through_or_is_refused_and_gossip_carries_none_of_it(
    autojump_clock: MockClock,
) -> None:
    async with open_case(None, serving(context=500_000), calm_seconds=10) as case:
        gossiped = [whole.gossip.counters.bytes_out for whole in case.cluster.live]
        answered = await case.ask(0, text="x" * (HOME_FRAME_BYTES_MAX + 100_000), max_tokens=4)
        refused = await case.ask(0, text="x" * 5_000_000, max_tokens=4)
        gossiped = [whole.gossip.counters.bytes_out - before for whole, before in zip(case.cluster.live, gossiped, strict=True)]

        assert answered.outcome == "length"
        assert isinstance(refused.end, Failed)
        assert refused.end.code == "context_length_exceeded"
        assert max(gossiped) < 20_000
        assert (await case.ask(0, max_tokens=2)).outcome == "length"


async def _records(case: Case) -> int:
    """How many records there are once all that ended is taken back."""
    await trio.sleep(75)
    return sum(len(whole.gossip.core.me.namespace.records) for whole in case.cluster.live)


async def test_b1_b2_exo_1824_exo_1423_what_is_kept_and_what_a_newcomer_is_told_do_not_grow(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(64), calm_seconds=10) as case:
        kept: list[int] = []
        told: list[int] = []
        took: list[float] = []
        for count in (10, 400):
            for _ in range(count // 10):
                await case.gone(*[case.begin(0, text=str(number), max_tokens=1) for number in range(10)])
            kept.append(await _records(case))
            newcomer = await case.cluster.start(2, [0])
            took.append(await until(case.cluster.agree, 5))
            told.append(newcomer.gossip.counters.bytes_in)
            await case.cluster.stop(2)
            await trio.sleep(5)

        assert kept[0] == kept[1]
        assert max(took) < 2
        assert told[1] - told[0] < 2000  # the member that has left; of 390 tasks it would be ten times that
        assert {client.outcome for client in case.clients} == {"length"}


async def test_who_reads_slowly_holds_up_nobody_and_gets_all_of_it_over_streams_that_break(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(4, 0.02), task_seconds=600.0) as case:
        home, head = (whole.node_id for whole in case.cluster.live)
        slow = case.begin(0, max_tokens=900, pause_seconds=0.1)
        await trio.sleep(1)
        quick = [case.begin(0, text=str(number), max_tokens=100) for number in range(2)]
        for _ in range(7):
            await trio.sleep(8)
            kept = [task.outlet.kept_bytes for task in case.cluster.nodes[1].executors.head.tasks]
            assert sum(kept) <= WINDOW_BYTES + EVENT_BYTES_MAX
            case.cluster.network.sever(home, head)
        await case.gone()

        assert [client.outcome for client in case.clients] == ["length"] * 3
        assert max(client.ended_at - client.asked_at for client in quick) < 3
        assert slow.ended_at - slow.asked_at > 60  # what a reader that lags finds put together is read at once
        assert case.given(1) == 3
        counters = case.cluster.nodes[0].executors.heads.counters
        assert (counters.lost, counters.violations) == (0, 0)
        assert counters.resumed >= 3  # until the home has heard all that was left


async def test_d3_exo_1586_who_waits_for_a_model_in_load_is_answered_though_its_runner_dies(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(loads=False), settle=False) as case:
        await until(lambda: case.cluster.agree() and len(case.cluster.nodes[0].service.state().runners) == 1, 10)
        client = case.begin(0, max_tokens=3)
        await trio.sleep(1)
        device = case.cluster.nodes[1].device
        device.die()
        await trio.sleep(1)
        assert not client.over
        device.may_load.set()
        await case.gone()

        assert client.outcome == "length"
