"""A replica written by hand: members by peer id, each with the records that it would have written itself."""

import msgspec

from node.records import (
    DRAIN,
    GAUGE,
    MODEL,
    PLACE,
    PROFILE,
    RANK,
    RUNNER,
    SCHEMA,
    SHARD,
    TASK,
    VERDICT,
    Drain,
    Executor,
    Gauge,
    ModelRecord,
    PlaceSpec,
    Profile,
    RankPhase,
    RankReport,
    RunnerPhase,
    RunnerRecord,
    ShardPhase,
    ShardRecord,
    TaskHeader,
    TaskId,
    Terminal,
    Verdict,
)
from node.replica_dump import ReplicaDump, take_dump
from node.state_document import About
from node.view import View, take_view
from p2p.lattice import ALIVE, Generation, Liveness, Standing
from p2p.replica import Replica
from p2p.sync_wire import Name, node16

DESK, LAPTOP, NAS = "12D3KooWDesk0001", "12D3KooWLaptop02", "12D3KooWNas00003"
BOOTS = {DESK: 0xD1 << 48, LAPTOP: 0xA2 << 48, NAS: 0xB3 << 48}
READY_INSTANCE, BUSY_INSTANCE = 0xAB, (1 << 62) + 1


class ClusterReplica:
    """What one node holds, and what it believes: by default what is stored."""

    def __init__(self) -> None:
        self.replica = Replica(SCHEMA)
        self.beliefs: dict[bytes, Liveness] = {}

    def join(self, peer_id: str, *, boot: int | None = None, liveness: Liveness = ALIVE) -> None:
        """Add a member, or change its standing."""
        node = node16(peer_id)
        boot = BOOTS[peer_id] if boot is None else boot
        self.replica.join_standing(node, Standing(Generation(1_800_000_000, boot), 0, liveness))

    def write(self, peer_id: str, kind: int, name: Name, value: object) -> None:
        """Have a member write a record."""
        member = self.replica.members[node16(peer_id)]
        encoded = msgspec.msgpack.encode(value)
        content = value if kind in SCHEMA.readers else None
        member.namespace.write((kind, name), encoded, content)
        self.replica.touch(member)

    def believe(self, node: bytes) -> Liveness | None:
        member = self.replica.members.get(node)
        return None if member is None else self.beliefs.get(node, member.standing.liveness)

    def view(self, own: str = DESK) -> View:
        return take_view(node16(own), self.replica, self.believe)

    def dump(self, own: str = DESK) -> ReplicaDump:
        return take_dump(own, self.replica, self.believe)


def about(own: str = DESK) -> About:
    return About(node_id=own, cluster="home")


def task_of(peer_id: str, number: int) -> TaskId:
    return TaskId(BOOTS[peer_id], number)


def executor(peer_id: str) -> Executor:
    return Executor(BOOTS[peer_id], 1)


def home() -> ClusterReplica:
    """Three nodes: an instance on the laptop, one over laptop and nas that loads, and tasks in every state."""
    cluster = ClusterReplica()
    for peer_id, name in ((DESK, "desk"), (LAPTOP, "laptop"), (NAS, "nas")):
        cluster.join(peer_id)
        cluster.write(
            peer_id, PROFILE, 0, Profile(peer_id, name, ("/ip4/10.0.0.1/tcp/4001",), "M2 Pro", 16 << 30, 12 << 30, "1")
        )
    cluster.write(LAPTOP, MODEL, "aa" * 32, ModelRecord("smollm2:135m", 80_000_000, 30, 8192, "llama", "4-bit"))
    cluster.write(NAS, DRAIN, 0, Drain())
    one = PlaceSpec(1, "aa" * 32, "/models/smol.gguf", (BOOTS[LAPTOP],), pinned=True)
    two = PlaceSpec(2, "bb" * 32, "big:7b", (BOOTS[LAPTOP], BOOTS[NAS]), (20, 12))
    cluster.write(DESK, PLACE, BUSY_INSTANCE, two)
    cluster.write(LAPTOP, SHARD, (READY_INSTANCE, 0), ShardRecord(ShardPhase.READY, 1, one, created=1_800_000_000))
    cluster.write(LAPTOP, SHARD, (BUSY_INSTANCE, 0), ShardRecord(ShardPhase.LOADING, 2, two))
    cluster.write(
        LAPTOP,
        RUNNER,
        1,
        RunnerRecord(1, RunnerPhase.RUNNING, READY_INSTANCE, 0, slots=8, context=8192, since=1_800_000_100),
    )
    cluster.write(LAPTOP, GAUGE, 1, Gauge(2, 0, 300, 60))
    cluster.write(LAPTOP, RUNNER, 2, RunnerRecord(3, RunnerPhase.LOADING, BUSY_INSTANCE, 0, "weights", 40, 100))
    add_tasks(cluster)
    return cluster


def add_tasks(cluster: ClusterReplica) -> None:
    runs = TaskHeader(0, READY_INSTANCE, (executor(LAPTOP),), 10, 20, 60)
    cluster.write(DESK, TASK, 1, runs)
    cluster.write(LAPTOP, RANK, (*task_of(DESK, 1), 0, 0), RankReport(RankPhase.RUNNING))
    cluster.write(DESK, TASK, 2, runs)
    cluster.write(DESK, VERDICT, 2, Verdict(Terminal.FAILED, "the runner ended with signal 9"))
    cluster.write(NAS, TASK, 3, TaskHeader(1, 0, (), 10, 20, 60, "big:7b"))
