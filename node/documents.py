"""What people and programs are shown: the state of a cluster as one document, and its changes.

Ids are text here: a node by its peer id, an instance by 16 hexadecimal digits, its runners by `<instance>.<rank>`, a task by
`<home's boot>-<number>`. `node.state_document` makes the documents.
"""

from msgspec import Struct


class ModelDocument(Struct, frozen=True, kw_only=True):
    """A model on a node's disk."""

    name: str
    model_hash: str
    weight_bytes: int
    context: int  # tokens
    architecture: str
    quantization: str


class NodeDocument(Struct, frozen=True, kw_only=True):
    """A member. Of one that is dead or has left, only what it is is shown, not what it had."""

    node_id: str  # its peer id; 32 hexadecimal digits as long as that is not known here
    name: str
    status: str  # alive, suspect, dead, left, draining
    generation: int  # higher with every life
    boot: str  # of this life; the first part of the ids of its tasks
    addresses: tuple[str, ...]  # multiaddrs
    device: str
    memory: int  # bytes of the device; 0: not known
    memory_limit: int  # bytes that its runners may use
    version: str
    models: tuple[ModelDocument, ...]
    unreachable: str | None  # why the node that was asked can't connect to it


class RankDocument(Struct, frozen=True, kw_only=True):
    """One rank of an instance: what runs where."""

    rank: int
    node_id: str | None  # None: the boot that was meant is gone
    runner_id: str
    status: str  # proposed, reserved, loading, ready, draining, gone, refused
    layers: int  # 0: all
    epoch: int
    reason: str


class InstanceDocument(Struct, frozen=True, kw_only=True):
    """A model in memory."""

    instance_id: str
    model: str
    model_hash: str
    status: str  # loading, ready, draining, failed
    epoch: int
    head: str | None  # the node of its first runner
    ranks: tuple[RankDocument, ...]
    parallel: str
    pinned: bool
    created: int | None  # Unix seconds, of the head's clock
    reason: str


class RunnerDocument(Struct, frozen=True, kw_only=True):
    """A runner process. Its load is what it said last; None where it has not said any."""

    runner_id: str
    node_id: str
    instance_id: str
    rank: int
    status: str
    since: int | None  # Unix seconds, of its node's clock
    reason: str
    spawn: int  # lives of the process, this one included
    done: int  # of `total` bytes, while loading
    total: int
    slots: int | None  # requests that it works on at once
    context: int | None  # tokens of one request
    running: int | None
    waiting: int | None
    outstanding_tokens: int | None
    tokens_per_second: int | None


class TaskDocument(Struct, frozen=True, kw_only=True):
    """A task. `instance_id` and `executed_by` are None while it waits at its home."""

    task_id: str
    status: str
    model: str | None  # None: its instance is gone
    instance_id: str | None
    accepted_by: str
    executed_by: str | None  # the node of the instance's first runner
    attempt: int
    reason: str
    prompt_tokens: int
    max_tokens: int


class UnreachableDocument(Struct, frozen=True, kw_only=True):
    """Somebody to whom the node that was asked is not connected, though it should be."""

    target: str  # the address as given, or a node's id
    addresses: tuple[str, ...]
    reason: str
    failures: int  # in a row
    next_try_seconds: float


class IncompatibleDocument(Struct, frozen=True, kw_only=True):
    """A peer of this cluster that was met and speaks other versions of the protocol only."""

    node_id: str
    versions: str  # `2`, `2-3`
    remote: str  # host:port


class StateDocument(Struct, frozen=True, kw_only=True):
    """The merged view of the node `node_id`."""

    node_id: str
    cluster: str
    nodes: tuple[NodeDocument, ...]
    instances: tuple[InstanceDocument, ...]
    runners: tuple[RunnerDocument, ...]
    tasks: tuple[TaskDocument, ...]
    in_flight: dict[str, int]  # by instance id
    digest: str
    unreachable: tuple[UnreachableDocument, ...] = ()
    incompatible: tuple[IncompatibleDocument, ...] = ()


class RemovedDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ids of what is not there any more."""

    nodes: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    runners: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


class StateEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of the merged view: either all of it (`state`), or what became of it since the event before.

    Entries that are new or changed are there whole, once, as they are by now; `in_flight`, `unreachable` and `incompatible` are
    there, whole, where anything in them changed.
    """

    revision: int
    digest: str
    state: StateDocument | None = None
    nodes: tuple[NodeDocument, ...] = ()
    instances: tuple[InstanceDocument, ...] = ()
    runners: tuple[RunnerDocument, ...] = ()
    tasks: tuple[TaskDocument, ...] = ()
    in_flight: dict[str, int] | None = None
    unreachable: tuple[UnreachableDocument, ...] | None = None
    incompatible: tuple[IncompatibleDocument, ...] | None = None
    removed: RemovedDocument | None = None
