"""What this node's own records should say, worked out anew from what is; `node.reconciler` writes the difference.

Pure: values in, values out.
"""

from collections.abc import Iterable, Mapping
from math import log2

from msgspec import Struct

from inference.models import Model
from inference.runner_state import RunnerState
from node.local_runners import Down, OnItsWay, Phase, Up
from node.records import (
    ADDRESSES_MAX,
    DRAIN,
    GAUGE,
    MODEL,
    PROFILE,
    REASON_BYTES_MAX,
    RUNNER,
    SHARD,
    STOP_ORDER,
    Drain,
    Gauge,
    ModelRecord,
    PlaceSpec,
    Profile,
    RunnerPhase,
    RunnerRecord,
    ShardPhase,
    ShardRecord,
    StopOrder,
    StopPhase,
)
from p2p.sync_wire import Key

MEMORY_STEP_BYTES = 256 << 20  # memory is told in steps, so that noise is no news
TEXT_CHARACTERS_MAX = 256
MODELS_MAX = 128  # on disk, told to others
OWN_KINDS = frozenset({PROFILE, DRAIN, MODEL, STOP_ORDER, RUNNER, GAUGE, SHARD})
"""The kinds of which these are all records that this node has."""


class LocalFacts(Struct, frozen=True, kw_only=True):
    """One instance of this node."""

    instance_id: int
    number: int  # of its runner on this node
    asked: str
    created: float  # Unix seconds
    pinned: bool
    phase: Phase
    state: RunnerState | None  # None before it has a runner
    model: Model | None  # None before it is on disk
    stop: StopPhase | None = None  # of the order to end its runner, once there is one


class NodeFacts(Struct, frozen=True, kw_only=True):
    """What this node is and has."""

    node_id: str
    boot: int
    name: str
    addresses: tuple[str, ...]
    device: str
    memory_bytes: int
    memory_limit_bytes: int
    version: str
    draining: bool
    models: tuple[Model, ...]  # on disk
    instances: tuple[LocalFacts, ...]


def own_records(facts: NodeFacts) -> dict[Key, object]:
    """All records of `OWN_KINDS` that this node should have."""
    records: dict[Key, object] = {(PROFILE, 0): _profile(facts)}
    if facts.draining:
        records[DRAIN, 0] = Drain()
    for model in facts.models[:MODELS_MAX]:
        records[MODEL, model.model_hash] = _model(model)
    for local in facts.instances:
        if local.stop is not None:  # before the runner's own record, so that nobody sees that one a step ahead of it
            records[STOP_ORDER, local.number] = _stop_order(local.stop, local.state)
        records[RUNNER, local.number] = _runner(local)
        if local.model is not None:
            records[SHARD, (local.instance_id, 0)] = _shard(local, local.model, facts.boot)
        if isinstance(local.phase, Up):
            records[GAUGE, local.number] = _gauge(local.phase, local.state)
    return records


def difference(wanted: Mapping[Key, object], present: Iterable[Key]) -> list[Key]:
    """The keys of records that are there and should not be."""
    return [key for key in present if key[0] in OWN_KINDS and key not in wanted]


def _profile(facts: NodeFacts) -> Profile:
    return Profile(
        facts.node_id,
        _cut(facts.name, TEXT_CHARACTERS_MAX),
        facts.addresses[:ADDRESSES_MAX],
        _cut(facts.device, TEXT_CHARACTERS_MAX),
        _rounded(facts.memory_bytes),
        _rounded(facts.memory_limit_bytes),
        facts.version,
    )


def _rounded(size: int) -> int:
    return size // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES


def _model(model: Model) -> ModelRecord:
    return ModelRecord(
        _cut(model.name, TEXT_CHARACTERS_MAX),
        model.weight_bytes,
        model.layers,
        model.context_length,
        model.architecture,
        model.quantization,
    )


def _stop_order(phase: StopPhase, state: RunnerState | None) -> StopOrder:
    if state is None:
        return StopOrder(0, StopPhase.COMPLETE)
    gone = state.status in {"shutdown", "failed"}
    return StopOrder(state.spawn, StopPhase.COMPLETE if gone else phase)


def _runner(local: LocalFacts) -> RunnerRecord:
    state, phase = local.state, local.phase
    if state is None:
        detail = phase.reason if isinstance(phase, Down) else phase.text if isinstance(phase, OnItsWay) else ""
        status = RunnerPhase.FAILED if isinstance(phase, Down) else RunnerPhase.IDLE
        return RunnerRecord(0, status, local.instance_id, 0, _cut_bytes(detail), since=int(local.created))
    return RunnerRecord(
        state.spawn,
        RunnerPhase[state.status.upper()],
        local.instance_id,
        0,
        _cut_bytes(state.reason or ""),
        state.done if state.status == "loading" else 0,
        state.total if state.status == "loading" else 0,
        state.info.running_max if state.info is not None else 0,
        state.info.context if state.info is not None else 0,
        int(state.since),
    )


def _shard(local: LocalFacts, model: Model, boot: int) -> ShardRecord:
    spec = PlaceSpec(
        int(local.created),
        model.model_hash,
        _cut(model.name, TEXT_CHARACTERS_MAX),
        (boot,),
        pinned=local.pinned,
    )
    phase, reason = ShardPhase.LOADING, ""
    if isinstance(local.phase, Up):
        phase = ShardPhase.READY
    elif isinstance(local.phase, Down):
        phase, reason = ShardPhase.REFUSED, _cut_bytes(local.phase.reason)
    spawn = local.state.spawn if local.state is not None else 0
    return ShardRecord(phase, local.number, spec, spawn, reason, int(local.created))


def _gauge(phase: Up, state: RunnerState | None) -> Gauge:
    speed = state.info.tokens_per_second if state is not None and state.info is not None else 0
    return Gauge(phase.running, 0, 0, 1 << round(log2(speed)) if speed else 0)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"


def _cut_bytes(text: str) -> str:
    """As much of a reason as a record takes: its cap counts characters, its size on the wire bytes."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= REASON_BYTES_MAX:
        return text
    return encoded[: REASON_BYTES_MAX - 3].decode("utf-8", "ignore") + "…"
