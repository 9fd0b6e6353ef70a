"""The records that nodes publish: their kinds, names and values.

Prompts and tokens are never among them; they travel on the streams between home and head. A value's new fields are added at
its end, with a default: older nodes keep and pass on what they don't read. Unknown kinds are passed on whole.

A boot is named by its nonce alone (64 random bits, new with every start): a task is `(home's nonce, number)`, an executor
`(its nonce, spawn)`. Whatever a node did in an earlier life thereby refers to nobody once it comes back, and raising its
counter to outbid an earlier life orphans nothing.
"""

import re
from enum import IntEnum
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from p2p.lattice import NONCE_MAX
from p2p.replica import Schema

TASK, RANK, VERDICT, CANCEL, GAUGE, RUNNER, SHARD = 1, 2, 3, 4, 5, 6, 7
PLACE, WANT, PROFILE, STOP_ORDER, MODEL, NET, DRAIN = 8, 9, 10, 11, 12, 13, 14

RANKS_MAX = 64
REASON_BYTES_MAX = 200
ADDRESSES_MAX = 16

Nonce = Annotated[int, Meta(ge=0, le=NONCE_MAX)]
Small = Annotated[int, Meta(ge=0, lt=1 << 32)]
Large = Annotated[int, Meta(ge=0, lt=1 << 53)]
InstanceId = Annotated[int, Meta(ge=0, le=NONCE_MAX)]
Reason = Annotated[str, Meta(max_length=REASON_BYTES_MAX)]
ModelHash = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=256)]

_TASK_ID = re.compile(r"([0-7][0-9a-f]{15})-(0|[1-9][0-9]{0,17})", re.ASCII)


class TaskId(NamedTuple):
    """A task of one boot of its home; unique without asking anybody."""

    home: int  # nonce of the home's boot
    number: int

    @property
    def text(self) -> str:
        """As people and programs outside name it."""
        return f"{self.home:016x}-{self.number}"

    @staticmethod
    def parse(text: str) -> "TaskId | None":
        """The id that a text names; None where it is none."""
        found = _TASK_ID.fullmatch(text)
        return TaskId(int(found[1], 16), int(found[2])) if found is not None else None


class Executor(NamedTuple):
    """A runner's life on one boot of its node; its place in the header's list is its rank."""

    boot: Nonce
    spawn: Small


class Terminal(IntEnum):
    """How a task ended, by strength of evidence: facts beat decisions that were made without knowing."""

    CANCELLED = 4
    TIMED_OUT = 5
    FAILED = 6
    COMPLETE = 7


class RankPhase(IntEnum):
    """How far a rank is with a task; the last three are ends and final."""

    QUEUED = 1
    RUNNING = 2
    ABORTED = 3
    FAILED = 4
    OK = 5


class RunnerPhase(IntEnum):
    """A runner's phase as its supervisor publishes it."""

    IDLE = 0
    CONNECTING = 1
    LOADING = 2
    WARMING_UP = 3
    READY = 4
    RUNNING = 5
    SHUTTING_DOWN = 6
    SHUTDOWN = 7
    FAILED = 8


class ShardPhase(IntEnum):
    """What the node whose memory it takes says of one rank of an instance."""

    RESERVED = 0
    LOADING = 1
    READY = 2
    DRAINING = 3
    GONE = 4
    REFUSED = 5


class TaskHeader(Struct, frozen=True, array_like=True, gc=False):
    """`task/<number>`, by the home: where its present attempt runs. A higher attempt fences everything of lower ones.

    Without executors the task waits at its home, `instance` means nothing, and `model` says for which model.
    """

    attempt: Small
    instance: InstanceId
    executors: Annotated[tuple[Executor, ...], Meta(max_length=RANKS_MAX)]
    prompt_tokens: Small
    max_tokens: Small
    deadline: Small  # seconds from its beginning, on the home's clock
    model: Text = ""  # by name; needed only where no instance tells it


class RankReport(Struct, frozen=True, array_like=True, gc=False):
    """`rank/<home's nonce, number, attempt, rank>`, by the executing node."""

    phase: RankPhase
    reason: Reason = ""


class Verdict(Struct, frozen=True, array_like=True, gc=False):
    """`verdict/<number>`, by the home, once."""

    status: Terminal
    reason: Reason = ""


class CancelIntent(Struct, frozen=True, array_like=True, gc=False):
    """`cancel/<home's nonce, number>`, by any node."""

    reason: Reason = ""


class Gauge(Struct, frozen=True, array_like=True, gc=False):
    """`gauge/<runner>`: the executor's own truth about a runner's load."""

    running: Small
    waiting: Small
    outstanding_tokens: Large
    tokens_per_second: Small


class RunnerRecord(Struct, frozen=True, array_like=True, gc=False):
    """`run/<runner>`: a later spawn stands above all of an earlier one."""

    spawn: Small
    phase: RunnerPhase
    instance: InstanceId
    rank: Small
    detail: Reason = ""
    done: Large = 0  # of `total` bytes, while loading
    total: Large = 0
    slots: Small = 0  # requests that it works on at once; 0: not known yet
    context: Small = 0  # prompt + answer tokens of one request; 0: not known yet
    since: Large = 0  # when it came into this phase, Unix seconds of its node's clock; for people


class PlaceSpec(Struct, frozen=True, array_like=True, gc=False):
    """`place/<instance>`, by the proposer: what is to run where. Never changed; `lamport` and the id order proposals."""

    lamport: Large
    model_hash: ModelHash
    model: Text  # as asked for
    targets: Annotated[tuple[Nonce, ...], Meta(min_length=1, max_length=RANKS_MAX)]  # boots, by rank
    layers: Annotated[tuple[Small, ...], Meta(max_length=RANKS_MAX)] = ()  # of each rank; empty: all on one
    parallel: Annotated[str, Meta(max_length=16)] = "pipeline"
    pinned: bool = False
    name_wanted: Text = ""  # the want it serves


class ShardRecord(Struct, frozen=True, array_like=True, gc=False):
    """`shard/<instance, rank>`, by its target. It carries the proposal, so that the proposer may die."""

    phase: ShardPhase
    runner: Small
    spec: PlaceSpec
    epoch: Small = 0  # of the group, told by rank 0; an older one is ignored
    reason: Reason = ""
    created: Large = 0  # Unix seconds of its node's clock; for people


class Want(Struct, frozen=True, array_like=True, gc=False):
    """`want/<name as asked>`: a wish, copied by every node that sees a newer one, so that it outlives its author."""

    lamport: Large
    writer: Annotated[bytes, Meta(min_length=16, max_length=16)]
    replicas: Small  # 0: unload
    shards: Small = 0  # 0: as many as it takes
    parallel: Annotated[str, Meta(max_length=16)] = ""
    split: Annotated[tuple[Small, ...], Meta(max_length=RANKS_MAX)] = ()


class Profile(Struct, frozen=True, array_like=True):
    """`profile/0`: the node as people see it. Numbers are rounded, so that noise is no news."""

    peer_id: Annotated[str, Meta(min_length=1, max_length=128)]
    name: Text
    addresses: Annotated[tuple[Text, ...], Meta(max_length=ADDRESSES_MAX)] = ()
    device: Text = ""
    memory_bytes: Large = 0  # of the device
    memory_limit_bytes: Large = 0  # for runners
    version: Text = ""


class StopPhase(IntEnum):
    """How far a stop order is: given, taken up by the supervisor, and the process is gone."""

    RUNNING = 0
    ACKNOWLEDGED = 1
    COMPLETE = 2


class StopOrder(Struct, frozen=True, array_like=True, gc=False):
    """`stop/<runner>`: the wish to end a runner, with a life of its own. It is no task and never in flight."""

    spawn: Small
    phase: StopPhase


class ModelRecord(Struct, frozen=True, array_like=True, gc=False):
    """`model/<hash>`: a model on this node's disk."""

    name: Text
    weight_bytes: Large
    layers: Small
    context: Small
    architecture: Text = ""
    quantization: Text = ""


class NetRecord(Struct, frozen=True, array_like=True, gc=False):
    """`net/<peer's boot>`: a measured way to another node."""

    round_trip_us: Large
    bytes_per_second: Large


class Drain(Struct, frozen=True, array_like=True, gc=False):
    """`drain/0`: this node takes no new work."""

    since: Large = 0  # seconds of its run


SCHEMA = Schema(
    {
        TASK: (int, TaskHeader),
        RANK: (4, RankReport),
        VERDICT: (int, Verdict),
        CANCEL: (2, CancelIntent),
        GAUGE: (int, Gauge),
        RUNNER: (int, RunnerRecord),
        SHARD: (2, ShardRecord),
        PLACE: (int, PlaceSpec),
        WANT: (str, Want),
        PROFILE: (int, Profile),
        STOP_ORDER: (int, StopOrder),
        MODEL: (str, ModelRecord),
        NET: (int, NetRecord),
        DRAIN: (int, Drain),
    }
)
