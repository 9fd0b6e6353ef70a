"""The state that people and programs see."""

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from node.documents import InstanceDocument, StateDocument
from node.records import PROFILE, SHARD, TASK, Profile, ShardPhase, ShardRecord, TaskHeader
from node.state_document import About, state_document, task_document
from p2p.dialler import Unreached
from p2p.ids import NodeId
from p2p.lattice import DEAD, LEFT, SUSPECT
from p2p.replica import Replica
from p2p.sync_wire import node16
from p2p.transport import Incompatible, Versions
from tests.node.cluster_replica import (
    BOOTS,
    BUSY_INSTANCE,
    DESK,
    LAPTOP,
    NAS,
    READY_INSTANCE,
    ClusterReplica,
    about,
    executor,
    home,
    task_of,
)

READY, BUSY = f"{READY_INSTANCE:016x}", f"{BUSY_INSTANCE:016x}"


def shown(cluster: ClusterReplica, own: str = DESK) -> StateDocument:
    return state_document(cluster.view(own), about(own))


def instance(state: StateDocument, instance_id: str) -> InstanceDocument:
    return next(instance for instance in state.instances if instance.instance_id == instance_id)


def test_every_name_that_programs_rely_on_is_there() -> None:
    document = msgspec.json.decode(msgspec.json.encode(shown(home())))

    promised = {
        "nodes": {"node_id", "name", "status", "generation", "addresses", "memory", "models"},
        "instances": {"instance_id", "model", "status", "epoch", "head", "ranks", "model_hash"},
        "runners": {"runner_id", "node_id", "instance_id", "rank", "status", "since", "reason"},
        "tasks": {"task_id", "status", "model", "instance_id", "accepted_by", "executed_by", "attempt", "reason"},
    }
    assert {"node_id", "cluster", *promised, "in_flight", "digest"} <= set(document)
    for name, fields in promised.items():
        assert document[name]
        assert [entry for entry in document[name] if fields - set(entry)] == []


def test_nodes() -> None:
    cluster = home()
    cluster.beliefs[node16(LAPTOP)] = SUSPECT
    desk, laptop, nas = shown(cluster).nodes

    assert (desk.node_id, desk.name, desk.status, desk.device, desk.memory) == (DESK, "desk", "alive", "M2 Pro", 16 << 30)
    assert (desk.generation, desk.boot) == (1_800_000_000, f"{BOOTS[DESK]:016x}")
    assert (laptop.status, nas.status) == ("suspect", "draining")
    assert [(model.name, model.model_hash) for model in laptop.models] == [("smollm2:135m", "aa" * 32)]


def test_instances_are_named_as_their_holder_names_the_model() -> None:
    ready, busy = instance(shown(home()), READY), instance(shown(home()), BUSY)

    assert (ready.model, ready.model_hash, ready.status, ready.head) == ("smollm2:135m", "aa" * 32, "ready", LAPTOP)
    assert (ready.pinned, ready.created) == (True, 1_800_000_000)
    assert (busy.model, busy.status, busy.head) == ("big:7b", "loading", LAPTOP)
    assert [(rank.node_id, rank.status, rank.layers) for rank in busy.ranks] == [(LAPTOP, "loading", 20), (NAS, "proposed", 12)]
    assert [rank.runner_id for rank in busy.ranks] == [f"{BUSY}.0", f"{BUSY}.1"]


def test_runners() -> None:
    running, loading = shown(home()).runners

    assert (running.runner_id, running.node_id, running.status, running.since) == (
        f"{READY}.0", LAPTOP, "running", 1_800_000_100,
    )  # fmt: skip
    assert (running.running, running.slots, running.tokens_per_second) == (2, 8, 60)
    assert (loading.status, loading.reason, loading.since, loading.slots, loading.running) == (
        "loading", "weights", None, None, None,
    )  # fmt: skip


def test_tasks() -> None:
    waiting, running, failed = shown(home()).tasks

    assert (running.task_id, running.status, running.model) == (task_of(DESK, 1).text, "running", "smollm2:135m")
    assert (running.instance_id, running.accepted_by, running.executed_by) == (READY, DESK, LAPTOP)
    assert (failed.status, failed.reason) == ("failed", "the runner ended with signal 9")
    assert (waiting.status, waiting.model, waiting.instance_id, waiting.executed_by) == ("pending", "big:7b", None, None)
    assert (waiting.accepted_by, waiting.attempt) == (NAS, 1)


def test_in_flight_counts_instances_that_have_none_too() -> None:
    assert shown(home()).in_flight == {READY: 1, BUSY: 0}


def test_one_task_is_shown_as_in_the_whole() -> None:
    cluster = home()
    view = cluster.view()

    assert [task_document(task, view, about()) for _, task in sorted(view.tasks.items())] == list(shown(cluster).tasks)


def test_of_a_dead_node_nothing_is_left_but_itself_and_what_others_had_with_it() -> None:
    for liveness in (DEAD, LEFT):
        cluster = home()
        cluster.beliefs[node16(LAPTOP)] = liveness
        state = shown(cluster)

        laptop = next(node for node in state.nodes if node.node_id == LAPTOP)
        assert (laptop.status, laptop.name, laptop.models) == (liveness.name.lower(), "laptop", ())
        assert (state.instances, state.runners, state.in_flight) == ((), (), {})
        assert [task.accepted_by for task in state.tasks] == [NAS, DESK, DESK]


def test_an_instance_that_lost_one_of_its_nodes_has_failed_and_says_why() -> None:
    cluster = home()
    spec = cluster.view().instances[BUSY_INSTANCE].spec
    cluster.write(NAS, SHARD, (BUSY_INSTANCE, 1), ShardRecord(ShardPhase.LOADING, 1, spec))
    cluster.beliefs[node16(LAPTOP)] = DEAD

    broken = instance(shown(cluster), BUSY)
    assert (broken.status, broken.reason) == ("failed", "the node of rank 0 is gone")


def test_a_profile_speaks_for_its_own_node_only() -> None:
    cluster = home()
    cluster.write(NAS, PROFILE, 0, Profile(DESK, "desk"))
    state = shown(cluster)

    assert [node.node_id for node in state.nodes] == sorted([DESK, LAPTOP, node16(NAS).hex()])


def test_a_node_without_a_profile_goes_by_what_else_is_known_of_it() -> None:
    cluster = ClusterReplica()
    for peer_id in (DESK, LAPTOP, NAS):
        cluster.join(peer_id)
    known = About(node_id=DESK, cluster="home", peer_ids={node16(LAPTOP): LAPTOP})
    state = state_document(cluster.view(), known)

    assert {node.node_id for node in state.nodes} == {DESK, LAPTOP, node16(NAS).hex()}


def test_a_task_whose_executor_came_back_as_another_boot_names_nobody() -> None:
    cluster = home()
    cluster.write(DESK, TASK, 9, TaskHeader(0, 5, (executor(NAS),), 1, 1, 1))
    cluster.join(NAS, boot=1 << 60)
    task = next(task for task in shown(cluster).tasks if task.task_id == task_of(DESK, 9).text)

    assert (task.executed_by, task.instance_id, task.model) == (None, f"{5:016x}", None)


def test_who_is_not_reached_and_who_does_not_understand() -> None:
    known = About(
        node_id=DESK,
        cluster="home",
        unreachable=(
            Unreached("nas.local:4001", ("nas.local:4001",), "connection refused", 3, 1.26),
            Unreached(NAS, ("/ip4/10.0.0.9/tcp/1",), "no answer for 3 s", 1, 0.0),
        ),
        incompatible=(Incompatible(NodeId("12D3KooWOld"), Versions(2, 3), "10.0.0.7:4001"),),
    )
    state = state_document(home().view(), known)

    assert [(target.target, target.reason, target.next_try_seconds) for target in state.unreachable] == [
        ("nas.local:4001", "connection refused", 1.3),
        (NAS, "no answer for 3 s", 0.0),
    ]
    assert {node.node_id: node.unreachable for node in state.nodes} == {DESK: None, LAPTOP: None, NAS: "no answer for 3 s"}
    assert [(peer.node_id, peer.versions) for peer in state.incompatible] == [("12D3KooWOld", "2-3")]


@given(st.randoms(use_true_random=False))
def test_the_order_in_which_things_became_known_does_not_show(chance: random.Random) -> None:
    cluster = home()
    before = shown(cluster)
    members = list(cluster.replica.members.items())
    chance.shuffle(members)
    replica = Replica.__new__(Replica)
    replica.__dict__.update(cluster.replica.__dict__, members=dict(members))
    for member in replica.members.values():
        records = list(member.namespace.records.items())
        chance.shuffle(records)
        member.namespace.records = dict(records)
    cluster.replica = replica

    assert shown(cluster) == before
