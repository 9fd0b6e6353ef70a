"""Many homes with old views: no herd, nothing lost, and close to one queue for all."""

import pytest

from tests.node.routing_simulation import Regime, Simulation, central, omniscient, p99, trace

INGRESSES = REPLICAS = 4


@pytest.mark.parametrize(("slots", "load"), [(4, 0.7), (100, 0.1)])
@pytest.mark.parametrize("seed", range(3))
def test_no_herd_from_several_ingresses_with_old_views(seed: int, slots: int, load: float) -> None:
    """C7: 200 Poisson requests, every view half a service old (500 ms where an answer takes a second).

    With 100 slots no head ever refuses: then it is by the homes' own headers, which count at once, that they don't herd.
    """
    regime = Regime(REPLICAS, slots, load, 0.5, 200, homes=INGRESSES, steady=True)
    simulation = Simulation(regime, trace(regime, seed), seed)
    worst = 0.0

    def compare() -> None:
        nonlocal worst
        mean = sum(simulation.headers) / REPLICAS
        worst = max(worst, max(simulation.headers) - (2 * mean + 3))

    simulation.watch = compare
    simulation.run()

    assert worst <= 0


@pytest.mark.parametrize("load", [0.7, 0.9])
def test_waits_are_no_longer_than_with_a_router_that_knows_everything(load: float) -> None:
    regime = Regime(10, 1, load, 0.25, 3000)
    arrivals = trace(regime, 1)

    waits = Simulation(regime, arrivals, 1).run().waits

    assert p99(central(regime, arrivals)) < p99(waits) < p99(omniscient(regime, arrivals, 1))


@pytest.mark.parametrize("slots", [1, 3])
def test_with_fresh_views_nobody_waits_beside_an_idle_place(slots: int) -> None:
    regime = Regime(6, slots, 0.9, 0.0, 2000)

    simulation = Simulation(regime, trace(regime, 2), 2).run()

    assert simulation.misroutes == 0


def test_an_overloaded_cluster_serves_everybody_in_the_end() -> None:
    regime = Regime(3, 2, 3.0, 1.0, 300)
    simulation = Simulation(regime, trace(regime, 3), 3).run()

    assert len(simulation.waits) == 300
    assert simulation.pulls > 100
