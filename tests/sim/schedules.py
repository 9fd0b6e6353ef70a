"""Seeded schedules: a hundred and more random steps over a few cores, with a mix of faults of its own for each seed."""

import random
from collections import Counter
from collections.abc import Callable

from node.records import RankPhase
from p2p import namespace, sync
from tests.sim.model import BAG_MAX, Model

STEPS = 110
SIZES = (4, 4, 4, 5)
FULL_CHECK_EVERY = 1000  # deliveries


class SmallLimits:
    """Limits so small that a hundred steps reach them: of the log of deletes and of what one flush carries."""

    def __enter__(self) -> None:
        self._before = (namespace.DELETES_MAX, sync.FLUSH_BYTES_MAX)
        namespace.DELETES_MAX, sync.FLUSH_BYTES_MAX = 3, 400

    def __exit__(self, *_: object) -> None:
        namespace.DELETES_MAX, sync.FLUSH_BYTES_MAX = self._before


def _steps(model: Model, chance: random.Random) -> dict[str, tuple[Callable[[], None], float]]:
    """All kinds of steps with their usual weights."""
    size = len(model.places)
    roll, pick = chance.random, chance.randrange

    def node() -> int:
        return int(roll() * size)

    def index() -> int:
        return int(roll() * 4096)

    def group() -> tuple[int, ...]:
        return tuple(node() for _ in range(1 + (roll() < 0.5)))

    return {
        "write": (lambda: model.write(node(), pick(5), index()), 8),
        "delete": (lambda: model.delete(node(), pick(5)), 4),
        "flush": (lambda: model.flush(node()), 10),
        "compare": (lambda: model.compare(node(), node()), 8),
        "deliver": (lambda: model.deliver(index()), 40),
        "in order": (lambda: model.deliver(0), 20),
        "replay": (lambda: model.replay(index()), 6),
        "lose": (lambda: model.lose(index()), 8),
        "exchange": (lambda: model.exchange(node(), node()), 5),
        "restart": (lambda: model.restart(node(), disk=True), 0.6),
        "lost disk": (lambda: model.restart(node(), disk=False), 0.6),
        "forget": (lambda: model.forget(node(), node()), 1),
        "accuse": (lambda: model.accuse(node(), node(), dead=roll() < 0.5), 2),
        "begin": (lambda: model.begin(node(), group()), 2),
        "retry": (lambda: model.retry(index(), group()), 1),
        "submission": (lambda: model.submission(index(), lost=roll() < 0.2, doubled=roll() < 0.2), 9),
        "progress": (lambda: model.progress(index(), RankPhase((2, 3, 4, 5, 5, 5)[pick(6)])), 14),
        "attend": (lambda: model.attend(index()), 6),
        "cancel": (lambda: model.cancel(node(), index()), 3),
        "time out": (lambda: model.time_out(index()), 3),
        "judge": (lambda: model.judge(index()), 12),
        "collect": (lambda: model.collect(index(), 5.0 + 60.0 * roll()), 8),
        "collect cancels": (lambda: model.collect_cancels(node()), 2),
    }


# What may be missing in a schedule or be frequent in it; a different subset for each seed finds more than the mean of all.
SWARM = (
    "replay",
    "lose",
    "restart",
    "lost disk",
    "forget",
    "accuse",
    "retry",
    "cancel",
    "time out",
    "delete",
    "exchange",
    "compare",
)


def run_schedule(seed: int, *, steps: int = STEPS, converge: bool | None = None) -> Counter[str]:
    """One schedule; the counts of what happened. At its end all is repaired and compared, by default of each eighth seed.

    Raises: Broken where a check fails.
    """
    chance = random.Random(seed)
    model = Model(SIZES[seed % len(SIZES)], chance)
    kinds = _steps(model, chance)
    weights = {kind: weight for kind, (_, weight) in kinds.items()}
    for kind in SWARM:
        mood = chance.random()
        weights[kind] = 0 if mood < 0.25 else weights[kind] * (4 if mood > 0.75 else 1)
    names = list(kinds)
    chosen = chance.choices(names, [weights[name] for name in names], k=steps)
    for kind in chosen:
        kinds[kind][0]()
        if len(model.bag) > BAG_MAX:
            break
    if seed % 8 == 0 if converge is None else converge:
        model.converge()
    elif (seed * STEPS) % FULL_CHECK_EVERY < STEPS:
        for place in range(len(model.places)):
            model.check(place)
    model.counts["schedules"] += 1
    model.counts["steps"] += steps
    model.counts["checks"] += model.oracle.checks
    return model.counts
