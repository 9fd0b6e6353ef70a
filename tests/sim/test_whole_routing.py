"""Which node a request goes to, over whole nodes. Rows C of the cases that others reported."""

import random

import pytest
import trio
from trio.testing import MockClock

from inference.requests import Failed
from inference.runner.fake_engine import FakeSettings
from node.service import NoRoute
from node.task_home import FIRST_TOKEN_SECONDS
from tests.sim.whole_cases import Asks, Case, open_case, serving
from tests.sim.whole_cluster import until

SHORT = 4  # tokens


async def test_c1_exo_1989_requests_one_by_one_go_to_both_alike(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(), serving()) as case:
        for number in range(100):
            await case.ask(0, text=f"prompt {number}", max_tokens=1 + number % SHORT)

        shares = case.shares()
        assert 40 <= shares[1] <= 60
        assert shares[1] + shares[2] == 100


async def test_one_by_one_at_any_node_four_replicas_get_a_quarter_each(autojump_clock: MockClock) -> None:
    async with open_case(None, None, *[serving()] * 4) as case:
        chance = random.Random(1)
        for number in range(120):
            await case.ask(chance.randrange(6), text=f"prompt {number}", max_tokens=2)

        shares = case.shares()
        assert all(20 <= shares[place] <= 40 for place in range(2, 6)), shares


async def test_c3_exo_1458_whose_only_runner_is_dead_for_good_is_refused_at_once_and_not_listed(
    autojump_clock: MockClock,
) -> None:
    async with open_case(None, serving(), calm_seconds=40) as case:
        node, dying = case.cluster.nodes[0].node, case.cluster.nodes[1]
        assert [model.name for model in node.models()] == ["m"]
        while not dying.down:
            dying.device.die()
            await trio.sleep(1)
        await trio.sleep(1)
        asked = trio.current_time()
        refused = await case.ask(0)

        assert isinstance(refused.error, NoRoute)
        assert "for the 5th time" in str(refused.error)
        assert trio.current_time() - asked < 2
        assert node.models() == ()


async def test_c5_twenty_at_once_are_spread_though_gossip_is_late(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(), serving(), calm_seconds=10) as case:
        case.cluster.network.set_latency(0.35, jitter=0.1)  # there and back, and the wait before telling: about a second
        await trio.sleep(10)
        crowd = [case.begin(0, text=str(number), max_tokens=20) for number in range(20)]
        await case.gone(*crowd)
        case.cluster.network.set_latency(0.001)

        shares = case.shares()
        assert 8 <= shares[1] <= 12
        assert shares[1] + shares[2] == 20


async def test_c7_four_ingresses_with_old_news_crowd_no_replica(autojump_clock: MockClock) -> None:
    places = 4
    async with open_case(*[serving(places, 0.3)] * 4, calm_seconds=10) as case:
        case.cluster.network.set_latency(0.5)
        await trio.sleep(5)
        chance = random.Random(7)
        longest, samples = 0, []
        for number in range(200):
            case.begin(chance.randrange(4), text=str(number), max_tokens=2 + chance.randrange(10))
            await trio.sleep(chance.expovariate(5.0))
            loads = [case.running(place) for place in range(4)]
            longest = max(longest, *loads)
            samples += loads
        await case.gone()
        case.cluster.network.set_latency(0.001)

        assert {client.outcome for client in case.clients} == {"length"}
        assert longest <= 2 * sum(samples) / len(samples) + 3
        assert longest <= places
        shares = case.shares()
        assert all(35 <= shares[place] <= 65 for place in range(4)), shares


async def test_c8_router_215_whoever_leaves_at_any_moment_leaves_nothing_in_flight(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(8), serving(8), serving(8), waiting_max=200) as case:
        chance = random.Random(3)
        for number in range(200):
            wish: Asks = {"text": str(number), "max_tokens": 20}
            if number % 2:
                wish["leaves_after_seconds"] = chance.uniform(0, 2)
            else:
                wish["leaves_after_tokens"] = chance.randrange(1, 20)
            case.begin(chance.randrange(4), **wish)
            await trio.sleep(chance.expovariate(50))
        await case.gone()  # and at the end of the case within three seconds nothing is in flight anywhere

        assert sum(client.outcome == "left" for client in case.clients) > 150


async def test_c13_prod_stack_448_three_hundred_open_streams_are_all_served(autojump_clock: MockClock) -> None:
    async with open_case(None, None, serving(150, 0.2), serving(150, 0.2), waiting_max=0) as case:
        crowd = [case.begin(number % 3, text=str(number), max_tokens=8) for number in range(300)]
        await until(lambda: all(client.token_times for client in crowd), 10)
        open_now = sum(not client.over for client in crowd)
        await case.gone()

        assert open_now == 300
        assert {client.outcome for client in crowd} == {"length"}


async def test_c15_petals_389_small_differences_of_load_move_nothing(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(8, 0.5), serving(8, 0.5)) as case:
        chance = random.Random(2)
        ends = trio.current_time() + 300
        while trio.current_time() < ends:
            case.begin(0, text=str(len(case.clients)), max_tokens=20)
            await trio.sleep(chance.uniform(4, 8))
        await case.gone()

        assert {client.outcome for client in case.clients} == {"length"}
        assert case.given(1) + case.given(2) == len(case.clients)


async def test_c16_olla_144_an_instance_that_fails_at_once_gets_little_and_later_work_again(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(), serving()) as case:
        bad = case.cluster.nodes[1]
        bad.device.settings = FakeSettings(running_max=32, fail_marker="")
        bad.device.die()
        await until(lambda: bad.up and case.cluster.settled(), 10)
        for number in range(100):
            await case.ask(0, text=str(number), max_tokens=2)

        assert {client.outcome for client in case.clients} == {"length"}
        assert case.given(1) <= 5

        bad.device.settings = serving().settings
        bad.device.die()
        await until(lambda: bad.up and case.cluster.settled(), 10)
        given, mended_at = case.given(1), trio.current_time()
        while case.given(1) == given:
            await case.ask(0, text="again", max_tokens=1)
            await trio.sleep(1)
        assert trio.current_time() - mended_at <= 61


@pytest.mark.parametrize("whole_node", [False, True], ids=["runner", "node"])
async def test_c17_mesh_llm_597_only_the_first_waits_for_what_is_stuck(autojump_clock: MockClock, whole_node: bool) -> None:
    warm = "the same beginning " * 200
    async with open_case(None, serving(), serving(), calm_seconds=20) as case:
        first = await case.ask(0, text=warm, max_tokens=SHORT)
        stuck = case.cluster.place_of(first.executed_by)
        if whole_node:
            network, node_id = case.cluster.network, case.cluster.nodes[stuck].node_id
            network.partition({node_id}, {whole.node_id for whole in case.cluster.live} - {node_id})
        with case.cluster.nodes[stuck].device.runners[-1].frozen():
            asked = [await case.ask(0, text=warm, max_tokens=SHORT) for _ in range(5)]
        case.cluster.network.mend()

        assert {client.outcome for client in asked} == {"length"}
        waits = [client.token_times[0] - client.asked_at for client in asked]
        assert 1 < waits[0] <= FIRST_TOKEN_SECONDS + 1
        assert max(waits[1:]) < 1


async def test_c18_mesh_llm_131_a_long_prompt_goes_where_it_fits(autojump_clock: MockClock) -> None:
    small, large = serving(context=512), serving(context=8192)
    async with open_case(small, large) as case:
        for _ in range(10):
            for place in (0, 1):
                client = await case.ask(place, text="x" * 2000, max_tokens=SHORT)
                assert client.outcome == "length"
                assert case.cluster.place_of(client.executed_by) == 1
        for place in (0, 1):
            client = await case.ask(place, text="x" * 10_000, max_tokens=SHORT)
            assert isinstance(client.end, Failed)
            assert client.end.code == "context_length_exceeded"
            assert "8192" in client.end.message


async def test_c19_mesh_llm_1592_same_bytes_are_one_model_and_other_bytes_another(autojump_clock: MockClock) -> None:
    # Both answer alike, so that nothing but the router keeps them apart.
    one, other = serving(content="one", step_seconds=0.1), serving(content="other", step_seconds=0.1)
    async with open_case(None, one, one, other, calm_seconds=10) as case:
        node = case.cluster.nodes[0].node
        hashes = {model.name: model.model_hash for model in node.models()}
        assert len(hashes) == 2
        assert len(set(hashes.values())) == 2
        assert "m" in hashes
        meant = hashes["m"]
        places = [place for place, model in ((1, one), (2, one), (3, other)) if model.model_hash == meant]
        for number in range(12):
            await case.ask(number % 4, text=str(number), max_tokens=2)
        shares = case.shares()
        assert sorted(shares) == places

        await _breaks_off_rather_than_mixes(case, places)


async def _breaks_off_rather_than_mixes(case: Case, places: list[int]) -> None:
    """With the last replica of its bytes gone, an answer goes on with no other bytes."""
    for place in places[1:]:
        await case.cluster.stop(place)
    client = case.begin(0, text="long", max_tokens=40)
    await trio.sleep(1)
    case.cluster.kill(places[0])
    await case.gone(client)

    assert client.outcome == "runner_crashed"
    given = [request.request_id for device in case.cluster.devices for request in device.submitted]
    assert sum(request_id.startswith(client.task_id + ".") for request_id in given) == 1
