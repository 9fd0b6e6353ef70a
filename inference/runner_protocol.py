"""What a node and its runner say to each other over the runner's stdin and stdout, one frame a message.

    node                                  runner
    Load            ->
                    <-                    Phase*  (loading k of n, warming_up)
                    <-                    Ready | LoadFailed
    Submit, Cancel* ->
                    <-                    Step*   (all that one engine step made, for all requests)
    Shutdown        ->
                    <-                    Bye     (and exit 0)

The end of stdin means that the node is gone: the runner ends at once, wherever it is.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from inference.requests import Count, Event, Load, Request, RequestId
from p2p.wire import FrameCodec

# A prompt of some megabytes and the token ids of one fit; a runner is trusted, so the cap only stops nonsense.
FRAME_BYTES_MAX = 64 << 20

RunnerStatus = Literal["idle", "connecting", "loading", "warming_up", "ready", "running", "shutting_down", "shutdown", "failed"]

TRANSITIONS: dict[RunnerStatus, frozenset[RunnerStatus]] = {
    "idle": frozenset({"connecting", "loading", "shutting_down", "failed"}),
    "connecting": frozenset({"loading", "shutting_down", "failed"}),  # sharded runners only
    "loading": frozenset({"warming_up", "shutting_down", "failed"}),
    "warming_up": frozenset({"ready", "shutting_down", "failed"}),
    "ready": frozenset({"running", "shutting_down", "failed"}),
    "running": frozenset({"ready", "shutting_down", "failed"}),
    "shutting_down": frozenset({"shutdown", "failed"}),
    "shutdown": frozenset(),
    "failed": frozenset(),
}
"""Which statuses may follow one within a spawn; each spawn begins at idle."""


class LoadModel(Struct, frozen=True, kw_only=True, array_like=True, tag="load"):
    """The first message: everything a runner needs to know; it reads no configuration of its own."""

    engine: Literal["mlx", "fake"]
    model_path: str  # the directory, in mlx-lm's format; of the fake engine one whose config.json holds its settings
    context: Annotated[int, Meta(ge=1)]  # prompt + answer tokens of one request
    running_max: Annotated[int, Meta(ge=1)] | None = None  # None: by memory
    memory_bytes: Annotated[int, Meta(ge=1)]  # what this process may use for weights, KV and work space
    threads: Annotated[int, Meta(ge=1)]  # for BLAS on a CPU
    blas_cache: str  # directory for the BLAS made fit for MLX


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """Start a request; its answer is its events."""

    request: Request


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """End a request between two steps; answered by its end event, whichever it is. An unknown id is no error."""

    request_id: RequestId


class Shutdown(Struct, frozen=True, array_like=True, tag="shutdown"):
    """End now: running requests end as `runner_stopped`, then Bye."""


Command = LoadModel | Submit | Cancel | Shutdown


class Phase(Struct, frozen=True, array_like=True, tag="phase"):
    """How far start-up is: `done` of `total` bytes loaded, or warming up."""

    phase: Literal["loading", "warming_up"]
    done: Count = 0
    total: Count = 0


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What a loaded engine is and can take on."""

    device: str  # "cpu", "gpu (Apple M4)", "fake"
    dtype: str
    batched: bool  # whether the self-check found a batch equal to single requests
    context: Count
    running_max: Count
    kv_bytes_per_token: Count
    kv_bytes_max: Count  # budget for KV, prefix cache included
    weight_bytes: Count  # in memory
    kv_step: Annotated[int, Meta(ge=1)] = 256  # positions by which a row's cache grows at once: what admission rounds up to
    token_characters_max: Count = 0  # of text that one token stands for; 0: not known
    tokens_per_second: Count = 0  # of one row alone, as measured when it was loaded; 0: not known


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """Loaded and warm; Submit is welcome from now on."""

    info: EngineInfo


class LoadFailed(Struct, frozen=True, array_like=True, tag="load_failed"):
    """Start-up failed for this reason, one sentence; the process exits with 1."""

    reason: str


class Step(Struct, frozen=True, array_like=True, tag="step"):
    """All events of one engine step, in order, and the load after it."""

    number: Count
    events: tuple[Event, ...]
    load: Load


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The last message of an orderly end."""


Report = Phase | Ready | LoadFailed | Step | Bye

COMMANDS: FrameCodec[Command] = FrameCodec(Command, FRAME_BYTES_MAX)
REPORTS: FrameCodec[Report] = FrameCodec(Report, FRAME_BYTES_MAX)
