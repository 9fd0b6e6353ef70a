"""What a node and the process that makes a model ready say to each other, one frame a message.

    node              fetching process
    Fetch     ->
              <-      Progress*
              <-      Fetched | NotFetched    (and exit 0)

The end of stdin means that the node is gone or no longer wants the model: the process ends at once, pip and all.
"""

from typing import Literal

from msgspec import Struct

from inference import models
from inference.model_entries import Source
from inference.models import ModelError, Progress
from p2p.wire import FrameCodec

FRAME_BYTES_MAX = 32 << 20

Fault = Literal[
    "ModelError",
    "ModelNotFoundError",
    "ModelAccessError",
    "ModelNetworkError",
    "ModelDiskError",
    "ModelUnsupportedError",
    "ModelDamagedError",
]


class Fetch(Struct, frozen=True, tag="fetch"):
    """Make this model ready."""

    source: Source
    models_dir: str
    refresh: bool  # ask the hub for a newer revision, and verify what is on disk by its hash


class Fetched(Struct, frozen=True, tag="fetched"):
    """It is ready: its entry as `inference.model_entries` writes it."""

    entry: bytes


class NotFetched(Struct, frozen=True, tag="not_fetched"):
    """It can't be had; one sentence."""

    fault: Fault
    message: str


FetchReport = Progress | Fetched | NotFetched

FETCHES: FrameCodec[Fetch] = FrameCodec(Fetch, FRAME_BYTES_MAX)
FETCH_REPORTS: FrameCodec[FetchReport] = FrameCodec(FetchReport, FRAME_BYTES_MAX)


def as_report(error: ModelError) -> NotFetched:
    """An error as it goes over the pipe."""
    return NotFetched(type(error).__name__, str(error))  # type: ignore[arg-type]  # the type is checked when it is read


def as_error(report: NotFetched) -> ModelError:
    """An error as it came over the pipe."""
    kind: type[ModelError] = getattr(models, report.fault)
    return kind(report.message)
