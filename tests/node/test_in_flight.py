"""The index of what is in flight, where a home is its own executor."""

import random

from node.in_flight import InFlight, recount
from node.records import SCHEMA, TASK, VERDICT, Executor, TaskHeader, Terminal, Verdict
from p2p.core import Core
from p2p.effects import Changed
from p2p.lattice import ALIVE, Generation

OWN, BOOT = b"a" * 16, 77


def test_a_home_that_runs_its_only_task_itself_may_rewrite_and_collect_it() -> None:
    core = Core(OWN, Generation(1, BOOT), cluster=bytes(16), schema=SCHEMA, chance=random.Random(1))
    core.start(0.0)
    index = InFlight(core.replica, lambda _: ALIVE)
    index.update(Changed(OWN, None))
    seen = []
    for attempt, spawn in ((1, 1), (2, 1), (3, 2)):
        core.write(TASK, 5, TaskHeader(attempt, 9, (Executor(BOOT, spawn),), 10, 10, 60), 1.0)
        for effect in core.outbox.take():
            if isinstance(effect, Changed):
                index.update(effect)
        seen.append((index.counts[9], recount(core.replica, lambda _: ALIVE)[9]))
    core.write(VERDICT, 5, Verdict(Terminal.COMPLETE), 1.0)
    core.delete(TASK, 5, 1.0)
    for effect in core.outbox.take():
        if isinstance(effect, Changed):
            index.update(effect)
    assert (seen, index.counts[9]) == ([(1, 1)] * 3, 0)
