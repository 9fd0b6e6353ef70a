"""The state document of a view.

Everything is sorted by id, so that two nodes that see the same show the same, but for what each knows of its own connections.

Pure: values in, values out.
"""

from collections.abc import Mapping

from msgspec import Struct

from node.documents import (
    IncompatibleDocument,
    InstanceDocument,
    ModelDocument,
    NodeDocument,
    RankDocument,
    RunnerDocument,
    StateDocument,
    TaskDocument,
    UnreachableDocument,
)
from node.instances import Instance
from node.view import NodeView, RunnerView, TaskView, View
from p2p.dialler import Unreached
from p2p.lattice import DEAD
from p2p.sync_wire import node16
from p2p.transport import Incompatible


class About(Struct, frozen=True, kw_only=True):
    """What a node knows beside its view. `peer_ids` are of nodes that have no profile here yet, by their 16 bytes."""

    node_id: str
    cluster: str
    peer_ids: Mapping[bytes, str] = {}
    unreachable: tuple[Unreached, ...] = ()
    incompatible: tuple[Incompatible, ...] = ()


def instance_text(instance_id: int) -> str:
    """An instance's id outside."""
    return f"{instance_id:016x}"


def runner_text(instance_id: int, rank: int) -> str:
    """A runner's id outside; it keeps it over all its lives."""
    return f"{instance_id:016x}.{rank}"


def state_document(view: View, about: About) -> StateDocument:
    """The whole picture."""
    names = _Names(view, about)
    shown = {iid: instance for iid, instance in view.instances.items() if _is_held(instance)}
    in_flight = {instance_text(iid): view.load(iid) for iid in sorted({*shown, *view.in_flight})}
    nodes = (_node(node, names, about) for node in view.nodes.values())
    runners = (_runner(runner, names) for runner in view.runners)
    return StateDocument(
        node_id=about.node_id,
        cluster=about.cluster,
        nodes=tuple(sorted(nodes, key=lambda node: node.node_id)),
        instances=tuple(_instance(shown[iid], view, names) for iid in sorted(shown)),
        runners=tuple(sorted(runners, key=lambda runner: (runner.runner_id, runner.node_id))),
        tasks=tuple(_task(view.tasks[task_id], view, names) for task_id in sorted(view.tasks)),
        in_flight=in_flight,
        digest=view.digest,
        unreachable=tuple(_unreachable(target) for target in about.unreachable),
        incompatible=tuple(_incompatible(peer) for peer in about.incompatible),
    )


def task_document(task: TaskView, view: View, about: About) -> TaskDocument:
    """One task of a view."""
    return _task(task, view, _Names(view, about))


class _Names:
    """Nodes' ids as text, by their 16 bytes and by boot."""

    def __init__(self, view: View, about: About) -> None:
        self._nodes = {node: _peer_id(node, seen, about) for node, seen in view.nodes.items()}
        self._nodes[view.own] = about.node_id
        self._boots = {seen.generation.nonce: node for node, seen in view.nodes.items()}

    def node(self, node: bytes) -> str:
        return self._nodes.get(node) or node.hex()

    def of_boot(self, boot: int) -> str | None:
        node = self._boots.get(boot)
        return self.node(node) if node is not None else None


def _peer_id(node: bytes, seen: NodeView, about: About) -> str:
    """A profile speaks for its own node only."""
    if seen.profile is not None and node16(seen.profile.peer_id) == node:
        return seen.profile.peer_id
    return about.peer_ids.get(node) or node.hex()


def _node(seen: NodeView, names: _Names, about: About) -> NodeDocument:
    profile = seen.profile
    node_id = names.node(seen.node)
    models = seen.models if seen.liveness < DEAD else {}
    documents = (
        ModelDocument(
            name=record.name,
            model_hash=model_hash,
            weight_bytes=record.weight_bytes,
            context=record.context,
            architecture=record.architecture,
            quantization=record.quantization,
        )
        for model_hash, record in models.items()
    )
    return NodeDocument(
        node_id=node_id,
        name=profile.name if profile is not None else "",
        status=seen.shown,
        generation=seen.generation.counter,
        boot=f"{seen.generation.nonce:016x}",
        addresses=profile.addresses if profile is not None else (),
        device=profile.device if profile is not None else "",
        memory=profile.memory_bytes if profile is not None else 0,
        memory_limit=profile.memory_limit_bytes if profile is not None else 0,
        version=profile.version if profile is not None else "",
        models=tuple(sorted(documents, key=lambda model: (model.name, model.model_hash))),
        unreachable=next((target.reason for target in about.unreachable if target.target == node_id), None),
    )


def _is_held(instance: Instance) -> bool:
    """Whether anybody who is there takes part in it or has yet to answer: the rest went with its nodes."""
    answers = [shard for shard in instance.shards if shard is not None]
    return not answers or any(shard.alive for shard in answers)


def _model_name(instance: Instance, view: View) -> str:
    """The name under which a holder has the files; what was asked for as long as nobody has them."""
    for shard in instance.shards:
        model = view.nodes[shard.node].models.get(instance.spec.model_hash) if shard is not None else None
        if model is not None:
            return model.name
    return instance.spec.model


def _instance(instance: Instance, view: View, names: _Names) -> InstanceDocument:
    spec, head = instance.spec, instance.head
    shown = instance.phase.shown
    assert shown is not None, "a view has no instances that are gone"
    return InstanceDocument(
        instance_id=instance_text(instance.instance_id),
        model=_model_name(instance, view),
        model_hash=spec.model_hash,
        status=shown,
        epoch=instance.epoch,
        head=names.of_boot(spec.targets[0]),
        ranks=tuple(_rank(instance, rank, names) for rank in range(len(spec.targets))),
        parallel=spec.parallel,
        pinned=spec.pinned,
        created=_known(head.record.created) if head is not None else None,
        reason=instance.reason,
    )


def _rank(instance: Instance, rank: int, names: _Names) -> RankDocument:
    spec, shard = instance.spec, instance.shards[rank]
    return RankDocument(
        rank=rank,
        node_id=names.of_boot(spec.targets[rank]),
        runner_id=runner_text(instance.instance_id, rank),
        status=shard.record.phase.name.lower() if shard is not None else "proposed",
        layers=spec.layers[rank] if rank < len(spec.layers) else 0,
        epoch=shard.record.epoch if shard is not None else 0,
        reason=shard.record.reason if shard is not None else "",
    )


def _runner(runner: RunnerView, names: _Names) -> RunnerDocument:
    record, gauge = runner.record, runner.gauge
    return RunnerDocument(
        runner_id=runner_text(record.instance, record.rank),
        node_id=names.node(runner.node),
        instance_id=instance_text(record.instance),
        rank=record.rank,
        status=record.phase.name.lower(),
        since=_known(record.since),
        reason=record.detail,
        spawn=record.spawn,
        done=record.done,
        total=record.total,
        slots=_known(record.slots),
        context=_known(record.context),
        running=gauge.running if gauge is not None else None,
        waiting=gauge.waiting if gauge is not None else None,
        outstanding_tokens=gauge.outstanding_tokens if gauge is not None else None,
        tokens_per_second=gauge.tokens_per_second if gauge is not None else None,
    )


def _task(task: TaskView, view: View, names: _Names) -> TaskDocument:
    header = task.header
    instance = view.instances.get(header.instance) if header.executors else None
    first = task.executors[0] if task.executors else None
    return TaskDocument(
        task_id=task.task_id.text,
        status=task.status.shown,
        model=_model_name(instance, view) if instance is not None else header.model or None,
        instance_id=instance_text(header.instance) if header.executors else None,
        accepted_by=names.node(task.home),
        executed_by=names.node(first) if first is not None else None,
        attempt=header.attempt,
        reason=task.reason,
        prompt_tokens=header.prompt_tokens,
        max_tokens=header.max_tokens,
    )


def _unreachable(target: Unreached) -> UnreachableDocument:
    return UnreachableDocument(
        target=target.target,
        addresses=target.addresses,
        reason=target.reason,
        failures=target.failures,
        next_try_seconds=round(target.next_try_seconds, 1),
    )


def _incompatible(peer: Incompatible) -> IncompatibleDocument:
    return IncompatibleDocument(node_id=peer.node_id, versions=str(peer.versions), remote=peer.remote)


def _known(number: int) -> int | None:
    """0 stands for what is not known."""
    return number or None
