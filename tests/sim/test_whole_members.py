"""Members come and go, and who asks elsewhere notices nothing. Rows A of the cases that others reported."""

from itertools import pairwise, permutations

import trio
from trio.testing import MockClock

from p2p.effects import Changed
from p2p.lattice import ALIVE, DEAD
from tests.sim.whole_cases import Case, open_case, serving
from tests.sim.whole_cluster import until

DETECTION_SECONDS = 8.0  # a silent death among few nodes, and a second
HEAL_SECONDS = 10.0


def listed(case: Case, place: int) -> dict[str, str]:
    """The members that a node shows, by name, with their status."""
    return {node.name: node.status for node in case.cluster.nodes[place].service.state().nodes}


async def test_a1_exo_2197_each_node_in_turn_is_restarted_and_the_others_answer(autojump_clock: MockClock) -> None:
    model = serving(step_seconds=0.1)
    async with open_case(model, model, model, calm_seconds=10) as case:
        for number, order in enumerate(permutations(range(3))):
            for place in order:
                others = [other for other in range(3) if other != place]
                before = [case.begin(other, seed=number, max_tokens=20) for other in others for _ in range(2)]
                await trio.sleep(0.5)
                if number % 2:
                    case.cluster.kill(place)
                else:
                    case.cluster.nursery.start_soon(case.cluster.stop, place)
                await trio.sleep(0.2)
                meanwhile = [case.begin(other, seed=number, max_tokens=5) for other in others]
                await case.gone(*before, *meanwhile)
                await trio.sleep(1)
                await case.cluster.start(place, others[:1], models=[model])
                after = [case.begin(other, max_tokens=3) for other in range(3)]
                await case.gone(*after)

        assert {client.outcome for client in case.clients} == {"length"}
        assert len(case.clients) == 6 * 3 * 9


async def test_a3_exo_2094_two_idle_nodes_know_each_other_and_nothing_changes(autojump_clock: MockClock) -> None:
    changes: list[tuple[int, Changed]] = []
    async with open_case(serving(), None) as case:
        assert trio.current_time() < 5
        await trio.sleep(2)
        for whole in case.cluster.live:
            whole.gossip.on_changed.append(lambda change, place=whole.place: changes.append((place, change)))  # type: ignore[misc]  # its default is a place
        await trio.sleep(60)

        assert listed(case, 0) == listed(case, 1) == {"node-0": "alive", "node-1": "alive"}
        assert changes == []


async def test_a4_exo_2266_the_end_of_a_node_that_has_no_part_in_it_leaves_an_answer_alone(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(step_seconds=0.1), None) as case:
        client = case.begin(0, max_tokens=60)
        await trio.sleep(2)
        case.cluster.kill(2)
        await case.gone(client)
        given = case.given(1)
        times = client.token_times

        assert (client.outcome, given) == ("length", 1)
        assert max(late - early for early, late in pairwise(times)) < 0.2


async def test_a5_exo_2135_a_node_that_nobody_can_ask_executes_for_another(autojump_clock: MockClock) -> None:
    async with open_case(None, serving()) as case:
        client = await case.ask(0, max_tokens=5)

        assert client.executed_by == case.cluster.nodes[1].node_id
        assert listed(case, 0)["node-1"] == "alive"


async def _gone_in_time(case: Case) -> None:
    """Nothing that the second node had is shown by the others, which hold it for gone."""

    def gone() -> bool:
        states = [whole.service.state() for whole in case.cluster.live]
        return all(not s.runners and not s.instances for s in states) and all(
            listed(case, whole.place).get("node-1") in {None, "dead", "left"} for whole in case.cluster.live
        )

    await until(gone, DETECTION_SECONDS)


async def test_a7_exo_1743_whatever_a_stopped_node_had_is_gone(autojump_clock: MockClock) -> None:
    async with open_case(None, serving(), None) as case:
        assert case.cluster.nodes[0].service.state().runners
        await case.ask(0)
        await case.cluster.stop(1)
        await _gone_in_time(case)


async def test_a7_exo_1739_whatever_a_killed_node_had_is_gone(autojump_clock: MockClock) -> None:
    for silent in (False, True):
        async with open_case(None, serving(step_seconds=0.1), None, calm_seconds=10) as case:
            cut_off = case.begin(0, max_tokens=100)
            await trio.sleep(1)
            killed_at = trio.current_time()
            case.cluster.kill(1, silent=silent)
            await _gone_in_time(case)
            await case.gone(cut_off)

            assert cut_off.outcome == "runner_crashed"
            assert cut_off.ended_at - killed_at < (DETECTION_SECONDS if silent else 3)


async def test_a14_exo_510_a_node_without_memory_routes_and_runs_nothing(autojump_clock: MockClock) -> None:
    model = serving()
    async with open_case(None, model, model) as case:
        await case.cluster.stop(0)
        await case.cluster.start(0, [1], memory_bytes=0)
        for _ in range(10):
            await case.ask(0, max_tokens=2)

        assert {client.outcome for client in case.clients} == {"length"}
        assert not case.cluster.nodes[0].instances
        assert min(case.shares()[1], case.shares()[2]) >= 4


async def test_a18_parallax_166_a_node_that_came_back_counts_once(autojump_clock: MockClock) -> None:
    model = serving()
    async with open_case(model, model, model, calm_seconds=10) as case:
        for disk in (True, False, True, False):
            case.cluster.kill(1)
            await trio.sleep(0.5)
            await case.cluster.start(1, [0], models=[model], disk=disk)
            await until(case.cluster.settled, 10)

            for whole in case.cluster.live:
                state = whole.service.state()
                assert sorted((node.name, node.status) for node in state.nodes) == [(f"node-{n}", "alive") for n in range(3)]
                assert len(state.runners) == len(state.instances) == 3
        await case.ask(0)


async def test_a20_petals_254_after_five_minutes_without_a_network_all_is_well_again(autojump_clock: MockClock) -> None:
    model = serving()
    async with open_case(model, model, model, None, calm_seconds=10) as case:
        network, nodes = case.cluster.network, case.cluster.nodes
        network.partition({nodes[0].node_id, nodes[3].node_id}, {nodes[1].node_id, nodes[2].node_id})
        await trio.sleep(300)
        assert nodes[0].sees(nodes[1]) is DEAD
        apart = [await case.ask(place, max_tokens=3) for place in range(4)]
        network.mend()
        await until(case.cluster.agree, HEAL_SECONDS)
        together = [await case.ask(3, max_tokens=3, text=str(number)) for number in range(9)]

        assert {client.outcome for client in (*apart, *together)} == {"length"}
        assert len({client.executed_by for client in together}) == 3
        assert all(one.sees(other) is ALIVE for one in nodes.values() for other in nodes.values())
