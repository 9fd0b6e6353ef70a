"""What HTTP, and any other door, asks of a node; `node.node.Node` is the one that answers."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from inference.requests import Event, Request


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model as clients see it."""

    name: str
    model_hash: str
    created: int  # Unix seconds
    context: int  # prompt + answer tokens of one request


class GenerateError(Exception):
    """Why a request did not start; `str()` is one sentence for its sender."""


class ModelNotFound(GenerateError):
    """No such model is served here; the message lists near names."""


class NoRoute(GenerateError):
    """The model is known but can't be served now (loading for too long, failed, draining)."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds, 1..60


class QueueFull(GenerateError):
    """As many requests as allowed already wait at this node."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds, 1..60


class Answer(Protocol):
    """A request on its way. The first event is Accepted, or a Failed that says why the request itself can't be run."""

    task_id: str
    executed_by: str  # node id
    events: AsyncIterator[Event]  # ends with Finished or Failed; never Refused


class Service(Protocol):
    """What HTTP (and any other door) asks of a node."""

    node_id: str
    name: str

    def models(self) -> tuple[ServedModel, ...]:
        """The models that can be asked for here, ready ones and those on their way."""

    def not_ready(self) -> str | None:
        """None once a model can be served from here, else one sentence why not."""

    def generate(self, model: str | None, request: Request) -> AbstractAsyncContextManager[Answer]:
        """Wait for a place, start the request and yield its answer; leaving the block cancels what still runs.

        `model` is a name or alias; None means the only one served.

        Raises: GenerateError from `__aenter__`, before anything was started.
        """
