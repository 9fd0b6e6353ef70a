"""What a home and the head of an instance say to each other about tasks, as types that the one codec checks.

    home ──▶ head   Resume    first on each stream: the attempts that the home wants from this head, and how far it has them
                    Submit    start an attempt
                    Cancel    end one; answered by its end event, or as gone once its place is free
                    Credit    so many events were taken by the client
                    Waiting   so many requests of a model are in line at the home (a level)
    head ──▶ home   Batch     all that came up for this home since the last frame: events, attempts that are gone, pulls

Each ordered pair has one stream, `task/1`, opened by the home and kept. A Submit that is larger than a frame of it goes on a
stream of its own, `submit/1`, whose clean end says that the head has it; the answer comes on the first.

Tasks are named by their number alone: the rest of the id is the home's boot, which the connection itself tells (`Peer.boot`),
so no message can name another home's task. An attempt is submitted once and never again: what the head does not know when the
home resumes, the home tries as a new attempt.
"""

from typing import Annotated

from msgspec import Meta, Struct

from inference.requests import Request
from node.records import InstanceId, Large, ModelHash, Small, TaskId
from node.task_credit import WINDOW_BYTES, WINDOW_BYTES_MAX, Sent
from p2p.stream import Peer, StreamProtocol
from p2p.wire import FrameCodec

# How long an attempt outlives its stream: the home tries to come back for so long, the head waits a little longer, so that
# what the home still takes up is there.
GRACE_SECONDS = 2.0
GRACE_SECONDS_HEAD = 2.5

HOME_FRAME_BYTES_MAX = 256 << 10
SUBMIT_FRAME_BYTES_MAX = 64 << 20
BATCH_FRAME_BYTES_MAX = 64 << 20  # as the runner's: the token ids of the longest prompt fit
TASKS_MAX = 2048  # of one home at one head
MODELS_MAX = 256  # of which one home has requests in line
PULLS_MAX = 256  # in one frame
SECONDS_LEFT_MAX = 30 * 86_400.0


class Try(Struct, frozen=True, array_like=True, gc=False):
    """One attempt of a task."""

    number: Large  # of the task, at its home's boot
    attempt: Small


class Held(Struct, frozen=True, array_like=True, gc=False):
    """An attempt that goes on: its home has heard `heard` events, and its client taken `taken` of them."""

    number: Large
    attempt: Small
    heard: Large
    taken: Large


class Taken(Struct, frozen=True, array_like=True, gc=False):
    """The client has taken the first `taken` events of an attempt; these may be forgotten, and as many more be said."""

    number: Large
    attempt: Small
    taken: Large


class Pull(Struct, frozen=True, array_like=True, gc=False):
    """Room at an instance: send up to `free` of the requests that wait for its model."""

    instance_id: InstanceId
    free: Small


class Resume(Struct, frozen=True, array_like=True, tag=0):
    """First on each stream. Attempts that it does not name are given up."""

    attempts: Annotated[tuple[Held, ...], Meta(max_length=TASKS_MAX)] = ()


class Submit(Struct, frozen=True, array_like=True, tag=1, kw_only=True):
    """Start an attempt. `request.request_id` is that of `request_id`; the first event is Accepted, Refused or Failed."""

    number: Large
    attempt: Small
    instance_id: InstanceId
    model_hash: ModelHash
    epoch: Small
    request: Request
    seconds_left: Annotated[float, Meta(ge=0, le=SECONDS_LEFT_MAX)]  # until its home gives it up
    version: Large  # how far the home's own records were, its header among them
    window: Annotated[int, Meta(ge=1, le=WINDOW_BYTES_MAX)] = WINDOW_BYTES  # see `node.task_credit`


class Cancel(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """End an attempt."""

    number: Large
    attempt: Small


class Credit(Struct, frozen=True, array_like=True, tag=3):
    """What the clients of several attempts have taken."""

    attempts: Annotated[tuple[Taken, ...], Meta(max_length=TASKS_MAX)]


class Waiting(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """`count` requests of a model are in line at this home, the oldest since so many seconds; 0: none any more."""

    model_hash: ModelHash
    count: Small
    seconds: Annotated[float, Meta(ge=0, le=SECONDS_LEFT_MAX)] = 0.0


class Batch(Struct, frozen=True, array_like=True, tag=0):
    """What came up for a home: events in order, then attempts that don't run here (any more), then pulls.

    The first one on a stream answers Resume, with nothing in it if need be.
    """

    events: tuple[Sent, ...] = ()
    gone: tuple[Try, ...] = ()
    pulls: Annotated[tuple[Pull, ...], Meta(max_length=PULLS_MAX)] = ()


HomeMessage = Resume | Submit | Cancel | Credit | Waiting
TaskMessage = HomeMessage | Batch


class _OneEnd(FrameCodec[TaskMessage]):
    """Takes what the other end may say; each end has caps of its own."""

    def __init__(self, takes: object, takes_bytes_max: int, says_bytes_max: int) -> None:
        super().__init__(takes, takes_bytes_max)
        self._says: FrameCodec[TaskMessage] = FrameCodec(takes, says_bytes_max)

    def encode(self, message: TaskMessage) -> bytes:
        return self._says.encode(message)


_TASK = "task/1"
TASKS_AT_HOME = StreamProtocol[TaskMessage](_TASK, _OneEnd(Batch, BATCH_FRAME_BYTES_MAX, HOME_FRAME_BYTES_MAX))
TASKS_AT_HEAD = StreamProtocol[TaskMessage](_TASK, _OneEnd(HomeMessage, HOME_FRAME_BYTES_MAX, BATCH_FRAME_BYTES_MAX))
SUBMIT = StreamProtocol[Submit]("submit/1", FrameCodec(Submit, SUBMIT_FRAME_BYTES_MAX))


def request_id(task: TaskId, attempt: int) -> str:
    """What one attempt is called everywhere, in the runner too."""
    return f"{task.text}.{attempt}"


def home_boot(peer: Peer) -> int:
    """The nonce of the boot that a peer runs, which its tasks' ids begin with."""
    return int.from_bytes(peer.boot, "big")


def frame_bytes(submit: Submit) -> int:
    """How long a submission is in a frame.

    Raises: ValueError where it has no valid one: a client's request may hold what the head would take for a violation.
    """
    return len(SUBMIT.codec.encode_checked(submit))
