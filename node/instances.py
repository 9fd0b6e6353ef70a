"""Instances, folded from the records of those whose memory they take.

A placement is a proposal; only its targets can commit their memory, each by its own shard record, which carries the proposal so
that the proposer may be gone. Nobody writes an instance's phase: it is what its shards make it.

Pure: values in, values out.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum

from msgspec import Struct

from node.records import PlaceSpec, ShardPhase, ShardRecord, Want


class Phase(IntEnum):
    """What an instance is."""

    PROPOSED = 0  # somebody has not answered yet
    COMMITTED = 1  # all have reserved
    LOADING = 2
    READY = 3
    DRAINING = 4
    BROKEN = 5  # refused, or a holder is gone: everybody releases
    GONE = 6

    @property
    def shown(self) -> str | None:
        """The word for people; what is gone isn't shown."""
        if self is Phase.GONE:
            return None
        if self <= Phase.LOADING:
            return "loading"
        return "failed" if self is Phase.BROKEN else self.name.lower()


class Shard(Struct, frozen=True):
    """A rank's record with what is thought of its writer."""

    record: ShardRecord
    node: bytes
    boot: int  # nonce of the writer's boot
    alive: bool  # neither dead nor gone


class Instance(Struct, frozen=True):
    """One instance as a node sees it."""

    instance_id: int
    spec: PlaceSpec
    phase: Phase
    epoch: int  # as rank 0 says; reports of older ones are ignored
    shards: tuple[Shard | None, ...]  # by rank
    reason: str = ""

    @property
    def head(self) -> Shard | None:
        """The entry for tasks: rank 0's."""
        return self.shards[0]

    @property
    def order(self) -> tuple[int, int]:
        """Its place among all proposals, the same everywhere."""
        return self.spec.lamport, self.instance_id


def fold(instance_id: int, spec: PlaceSpec | None, shards: Mapping[int, Shard]) -> Instance | None:
    """An instance from its proposal, if that is still there, and its shards by rank; None where neither tells what it is.

    Shards of boots that the proposal doesn't name, or of an older epoch than the head's, are not part of it.
    """
    if spec is None:
        spec = next((shard.record.spec for _, shard in sorted(shards.items())), None)
    if spec is None:
        return None
    ranks = [shards.get(rank) for rank in range(len(spec.targets))]
    ours = tuple(
        shard if shard is not None and shard.boot == target else None for shard, target in zip(ranks, spec.targets, strict=True)
    )
    epoch = ours[0].record.epoch if ours[0] is not None else 0
    phase, reason = _phase(ours, epoch)
    return Instance(instance_id, spec, phase, epoch, ours, reason)


def _phase(shards: tuple[Shard | None, ...], epoch: int) -> tuple[Phase, str]:
    for rank, shard in enumerate(shards):
        if shard is None:
            continue
        if shard.record.phase is ShardPhase.REFUSED:
            return Phase.BROKEN, shard.record.reason or f"rank {rank} was refused"
        if not shard.alive:
            return Phase.BROKEN, f"the node of rank {rank} is gone"
    if any(shard is None for shard in shards):
        return Phase.PROPOSED, ""
    phases = [
        # A rank that still reports of an older forming of the group is not ready for this one.
        min(shard.record.phase, ShardPhase.LOADING)
        if shard.record.epoch < epoch and shard.record.phase <= ShardPhase.READY
        else shard.record.phase
        for shard in shards
        if shard is not None
    ]
    if all(phase is ShardPhase.GONE for phase in phases):
        return Phase.GONE, ""
    if any(phase >= ShardPhase.DRAINING for phase in phases):
        return Phase.DRAINING, ""
    if all(phase is ShardPhase.READY for phase in phases):
        return Phase.READY, ""
    return (Phase.LOADING if any(phase >= ShardPhase.LOADING for phase in phases) else Phase.COMMITTED), ""


def abandoned(target_boots: tuple[int, ...], current_boots: Mapping[int, bytes]) -> bool:
    """Whether a proposal names a boot that isn't there any more: it can never come to anything."""
    return any(boot not in current_boots for boot in target_boots)


def yields(held: Instance, contender: Instance) -> bool:
    """Whether a target gives a reservation up for another: nothing of it was started, and the other's key is smaller.

    Keys are ordered the same everywhere, so the smallest contender always goes through and nobody waits in a circle.
    """
    return held.phase <= Phase.COMMITTED and contender.order < held.order


def surplus(instances: Iterable[Instance], wanted: int) -> list[Instance]:
    """Ready instances of one model beyond what is wanted, the last proposed first to go; pinned ones always stay."""
    ready = sorted((i for i in instances if i.phase is Phase.READY), key=lambda i: (not i.spec.pinned, i.order))
    return [instance for instance in ready[wanted:] if not instance.spec.pinned]


def join_wants(ours: Want | None, theirs: Want | None) -> Want | None:
    """The newer wish."""
    if ours is None or theirs is None:
        return ours or theirs
    return max(ours, theirs, key=_want_order)


def newest_wants(copies: Iterable[tuple[str, Want]]) -> dict[str, Want]:
    """The last wish for each name, over everybody's copies, also those of nodes that are gone."""
    newest: dict[str, Want] = {}
    for name, want in copies:
        before = newest.get(name)
        if before is None or _want_order(want) > _want_order(before):
            newest[name] = want
    return newest


def wants_to_copy(own: Mapping[str, Want], newest: Mapping[str, Want]) -> dict[str, Want]:
    """The wishes that this node has yet to take into its own records, and onto its disk."""
    return {name: want for name, want in newest.items() if own.get(name) != want}


def next_want(newest: Want | None, writer: bytes, replicas: int) -> Want:
    """A wish above the last one; 0 replicas unloads, and is kept like any other."""
    return Want((newest.lamport if newest is not None else 0) + 1, writer, replicas)


def _want_order(want: Want) -> tuple[int, bytes, int, int, str, tuple[int, ...]]:
    # One writer gives one wish to a number; the rest only keeps the join free of order if it should ever not.
    return want.lamport, want.writer, want.replicas, want.shards, want.parallel, want.split
