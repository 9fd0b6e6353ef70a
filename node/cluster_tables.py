"""A cluster's documents as tables and lines for people.

Pure: documents in, text out. Names come from other nodes, so whoever prints them takes out what a terminal would obey.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct

from node.documents import (
    InstanceDocument,
    NodeDocument,
    RemovedDocument,
    RunnerDocument,
    StateDocument,
    StateEvent,
    TaskDocument,
)
from node.dump_diff import Difference
from node.dump_document import DumpDocument

SHORT_ID_CHARACTERS = 8  # of a node id's end; its beginning is the same for all
NUMBER_HEADINGS = frozenset({"memory", "in flight", "load", "tries", "version", "attempt", "records", "floor", "incarnation"})

Row = tuple[str, ...]


class Section(Struct, frozen=True):
    """A table; one without rows is not shown."""

    title: str
    headings: Row
    rows: tuple[Row, ...]


def short_id(node_id: str) -> str:
    """Enough of a node id to tell it from others."""
    return node_id[-SHORT_ID_CHARACTERS:]


def labels(nodes: Mapping[str, str]) -> dict[str, str]:
    """What to call each node, from names by id: its name, where that is its alone."""
    times = Counter(nodes.values())
    shown = {}
    for node_id, name in nodes.items():
        known = f"{name} ({short_id(node_id)})" if times[name] > 1 else name
        shown[node_id] = known if name else short_id(node_id)
    return shown


def status_sections(state: StateDocument, now: float) -> list[Section]:
    """What `node status` shows; `now` is Unix time."""
    named = labels({node.node_id: node.name for node in state.nodes})
    models = {instance.instance_id: instance.model for instance in state.instances}
    in_flight = [task for task in state.tasks if task.status in {"pending", "running"}]
    return [
        Section(
            "nodes",
            ("name", "id", "status", "device", "memory", "models"),
            tuple(_node_row(node, own=node.node_id == state.node_id) for node in state.nodes),
        ),
        Section(
            "instances",
            ("model", "id", "status", "node", "in flight", "reason"),
            tuple(_instance_row(instance, named, state.in_flight) for instance in state.instances),
        ),
        Section(
            "runners",
            ("id", "node", "model", "status", "since", "load", "reason"),
            tuple(_runner_row(runner, named, models, now) for runner in state.runners),
        ),
        Section(
            "tasks in flight",
            ("id", "status", "model", "accepted by", "executed by", "attempt"),
            tuple(_task_row(task, named) for task in in_flight),
        ),
        Section(
            "not reached from here",
            ("target", "addresses", "reason", "tries", "next try"),
            tuple(
                (
                    named.get(target.target, target.target),
                    " ".join(target.addresses),
                    target.reason,
                    str(target.failures),
                    f"in {target.next_try_seconds:.0f} s",
                )
                for target in state.unreachable
            ),
        ),
        Section(
            "incompatible versions",
            ("node", "address", "protocol versions"),
            tuple((peer.node_id, peer.remote, peer.versions) for peer in state.incompatible),
        ),
    ]


def _node_row(node: NodeDocument, *, own: bool) -> Row:
    memory = f"{size(node.memory_limit)} of {size(node.memory)}" if node.memory else ""
    models = ", ".join(dict.fromkeys(model.name for model in node.models))
    name = f"{node.name or '?'} (this one)" if own else node.name or "?"
    return name, short_id(node.node_id), node.status, node.device, memory, models


def _instance_row(instance: InstanceDocument, named: Mapping[str, str], in_flight: Mapping[str, int]) -> Row:
    nodes = [named.get(rank.node_id, rank.node_id) if rank.node_id is not None else "?" for rank in instance.ranks]
    count = str(in_flight.get(instance.instance_id, 0))
    return instance.model, instance.instance_id, instance.status, " + ".join(nodes), count, instance.reason


def _runner_row(runner: RunnerDocument, named: Mapping[str, str], models: Mapping[str, str], now: float) -> Row:
    status = f"{runner.status} {runner.done * 100 // runner.total} %" if 0 < runner.done < runner.total else runner.status
    since = duration(now - runner.since) if runner.since is not None else ""
    load = "" if runner.running is None else str(runner.running)
    if load and runner.slots:
        load += f"/{runner.slots}"
    node = named.get(runner.node_id, runner.node_id)
    return runner.runner_id, node, models.get(runner.instance_id, ""), status, since, load, runner.reason


def _task_row(task: TaskDocument, named: Mapping[str, str]) -> Row:
    executor = named.get(task.executed_by, task.executed_by) if task.executed_by is not None else ""
    home = named.get(task.accepted_by, task.accepted_by)
    return task.task_id, task.status, task.model or "", home, executor, str(task.attempt)


def dump_sections(dump: DumpDocument) -> list[Section]:
    """What `node dump` shows."""
    named = labels({member.node_id or member.node: member.name for member in dump.members})
    members, written = [], []
    for member in dump.members:
        label = named[member.node_id or member.node]
        counter, boot = member.generation
        counts = (str(member.incarnation), str(member.max_version), str(member.gc_floor), str(len(member.records)))
        standing = (member.stored, member.believed or "not known")
        members.append((label, member.node_id or member.node, f"{counter}.{boot}", *standing, *counts))
        written += [
            (label, record.key, str(record.version), json.dumps(record.value, ensure_ascii=False)) for record in member.records
        ]
    headings = ("node", "id", "generation", "stored", "believed", "incarnation", "version", "floor", "records")
    counters = tuple((name, str(count)) for name, count in sorted(dump.counters.items()))
    return [
        Section("members", headings, tuple(members)),
        Section("records", ("node", "key", "version", "value"), tuple(written)),
        Section("counters", ("counter", "count"), counters),
    ]


def difference_section(found: list[Difference]) -> Section:
    """What `node dump --diff` shows."""
    rows = tuple((short_id(one.node), one.what, one.ours, one.theirs) for one in found)
    return Section("differences", ("node", "what", "here", "there"), rows)


class EventLines:
    """Changes in words, one line each. It remembers what nodes are called."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def lines(self, event: StateEvent) -> Iterator[str]:
        """What one event says."""
        state = event.state
        if state is not None:
            self._names = {node.node_id: node.name for node in state.nodes}
            yield f"{len(state.nodes)} nodes, {len(state.instances)} instances, {len(state.tasks)} tasks, digest {state.digest}"
        self._names |= {node.node_id: node.name for node in event.nodes}
        named = labels(self._names)
        for node in event.nodes:
            yield f"node {named[node.node_id]}: {node.status}"
        for instance in event.instances:
            yield f"instance {instance.instance_id} of {instance.model}: {_with_reason(instance.status, instance.reason)}"
        for runner in event.runners:
            at = named.get(runner.node_id, runner.node_id)
            yield f"runner {runner.runner_id} at {at}: {_with_reason(runner.status, runner.reason)}"
        for task in event.tasks:
            at = named.get(task.executed_by, task.executed_by) if task.executed_by is not None else "no node"
            yield f"task {task.task_id} at {at}: {_with_reason(task.status, task.reason)}"
        for target in event.unreachable or ():
            yield f"not reached: {target.target}: {target.reason}"
        removed = event.removed or RemovedDocument()
        for word, ids in (
            ("node", removed.nodes), ("instance", removed.instances), ("runner", removed.runners), ("task", removed.tasks),
        ):  # fmt: skip
            yield from (f"{word} {gone}: gone" for gone in ids)


def _with_reason(status: str, reason: str) -> str:
    return f"{status} ({reason})" if reason else status


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB"


def duration(seconds: float) -> str:
    """A time for people; what is in the future by another's clock is now."""
    seconds = max(seconds, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
