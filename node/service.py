"""What HTTP, and any other door, asks of a node; `node.node.Node` is the one that answers."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from inference.requests import Event, Request
from node.documents import StateDocument, StateEvent, TaskDocument
from node.replica_dump import ReplicaDump


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


class ClusterService(Protocol):
    """What HTTP asks of a node about the cluster it is part of. All but old tasks is answered from its own replica, at once."""

    node_id: str

    def state(self) -> StateDocument:
        """The merged view."""

    def dump(self) -> ReplicaDump:
        """The raw replica; `node.dump_document` makes it readable, in whatever thread."""

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[StateEvent]]:
        """The whole state and then its changes, for ever. A slow reader is told once what changed meanwhile."""

    async def task(self, task_id: str) -> TaskDocument | None:
        """One task of any node; None where there is none, or its home has forgotten it. Its home is asked if need be."""

    async def cancel(self, task_id: str) -> str | None:
        """Have a task of any node cancelled; its status by now, None where there is none. What has ended stays as it ended."""
