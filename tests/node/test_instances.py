"""Instances are what their shards make them."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.instances import (
    Instance,
    Phase,
    Shard,
    abandoned,
    fold,
    join_wants,
    newest_wants,
    next_want,
    surplus,
    wants_to_copy,
    yields,
)
from node.records import PlaceSpec, ShardPhase, ShardRecord, Want
from tests.p2p.laws import check_triple

SPEC = PlaceSpec(1, "hash", "smollm2:135m", (11, 12))
RESERVED, LOADING, READY = ShardPhase.RESERVED, ShardPhase.LOADING, ShardPhase.READY
DRAINING, GONE, REFUSED = ShardPhase.DRAINING, ShardPhase.GONE, ShardPhase.REFUSED
A, B = b"a" * 16, b"b" * 16


def shard(phase: ShardPhase, boot: int, *, alive: bool = True, epoch: int = 0, reason: str = "") -> Shard:
    return Shard(ShardRecord(phase, 1, SPEC, epoch, reason), A if boot == 11 else B, boot, alive)


def two(first: ShardPhase, second: ShardPhase | None, spec: PlaceSpec | None = SPEC) -> Instance:
    shards = {0: shard(first, 11)}
    if second is not None:
        shards[1] = shard(second, 12)
    instance = fold(5, spec, shards)
    assert instance is not None
    return instance


@pytest.mark.parametrize(
    ("first", "second", "phase", "shown"),
    [
        (RESERVED, None, Phase.PROPOSED, "loading"),
        (READY, None, Phase.PROPOSED, "loading"),
        (RESERVED, RESERVED, Phase.COMMITTED, "loading"),
        (LOADING, RESERVED, Phase.LOADING, "loading"),
        (READY, LOADING, Phase.LOADING, "loading"),
        (READY, READY, Phase.READY, "ready"),
        (READY, DRAINING, Phase.DRAINING, "draining"),
        (DRAINING, GONE, Phase.DRAINING, "draining"),
        (GONE, GONE, Phase.GONE, None),
        (RESERVED, REFUSED, Phase.BROKEN, "failed"),
    ],
)
def test_phases(first: ShardPhase, second: ShardPhase | None, phase: Phase, shown: str | None) -> None:
    assert (two(first, second).phase, two(first, second).phase.shown) == (phase, shown)


def test_shards_carry_the_proposal_of_a_proposer_that_is_gone() -> None:
    assert two(READY, READY, spec=None) == two(READY, READY)
    assert fold(5, None, {}) is None


def test_an_instance_with_a_dead_holder_is_broken_and_says_why() -> None:
    instance = fold(5, SPEC, {0: shard(READY, 11), 1: shard(READY, 12, alive=False)})

    assert instance is not None
    assert (instance.phase, instance.reason) == (Phase.BROKEN, "the node of rank 1 is gone")
    refused = fold(5, SPEC, {0: shard(REFUSED, 11, reason="3 GB are missing")})
    assert refused is not None
    assert refused.reason == "3 GB are missing"


def test_a_holder_that_came_back_as_a_new_boot_holds_nothing() -> None:
    instance = fold(5, SPEC, {0: shard(READY, 11), 1: shard(READY, 99)})

    assert instance is not None
    assert instance.phase is Phase.PROPOSED
    assert abandoned(SPEC.targets, {11: A})
    assert not abandoned(SPEC.targets, {11: A, 12: B})


def test_a_rank_of_an_older_epoch_is_not_ready_for_this_one() -> None:
    instance = fold(5, SPEC, {0: shard(READY, 11, epoch=2), 1: shard(READY, 12, epoch=1)})

    assert instance is not None
    assert (instance.epoch, instance.phase) == (2, Phase.LOADING)
    again = fold(5, SPEC, {0: shard(READY, 11, epoch=2), 1: shard(READY, 12, epoch=2)})
    assert again is not None
    assert again.phase is Phase.READY


def instance(iid: int, lamport: int, phase: Phase, *, pinned: bool = False) -> Instance:
    return Instance(iid, PlaceSpec(lamport, "hash", "m", (11,), pinned=pinned), phase, 0, (None,))


def test_of_two_contenders_the_smaller_key_goes_through() -> None:
    small, large = instance(1, 1, Phase.PROPOSED), instance(2, 1, Phase.COMMITTED)

    assert yields(large, small)
    assert not yields(small, large)
    assert not yields(instance(2, 1, Phase.LOADING), small), "what was started stays"


def test_surplus_is_the_same_whatever_the_order_and_spares_the_pinned() -> None:
    four = [
        instance(1, 3, Phase.READY),
        instance(2, 1, Phase.READY),
        instance(3, 2, Phase.LOADING),
        instance(4, 9, Phase.READY, pinned=True),
    ]
    for order in permutations(four):
        assert [i.instance_id for i in surplus(order, 2)] == [1]
        assert [i.instance_id for i in surplus(order, 0)] == [2, 1]


wants = st.none() | st.builds(
    Want, st.integers(0, 2), st.sampled_from((A, B)), st.integers(0, 2), st.integers(0, 1), st.just(""), st.just(())
)


@given(wants, wants, wants)
def test_wants_are_a_lattice(a: Want | None, b: Want | None, c: Want | None) -> None:
    check_triple(a, b, c, join_wants)


def test_the_last_wish_holds_when_its_author_is_gone() -> None:
    first = next_want(None, A, 2)
    unload = next_want(first, B, 0)
    newest = newest_wants([("m", unload), ("m", first), ("n", first)])

    assert newest == {"m": unload, "n": first}
    assert wants_to_copy({"m": first}, newest) == newest
    assert wants_to_copy(newest, newest) == {}
