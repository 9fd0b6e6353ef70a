"""One task as its home keeps it: what was asked, what has come of it, and its records."""

from typing import Protocol

import msgspec

from inference.requests import Accepted, Event, Failed, Finished, Request, TokenPrompt, Tokens, Usage
from node.cluster_view import Target
from node.records import (
    RANK,
    REASON_BYTES_MAX,
    TASK,
    VERDICT,
    Executor,
    RankPhase,
    RankReport,
    TaskHeader,
    TaskId,
    Terminal,
    Verdict,
)
from node.routing import Route
from node.task_protocol import request_id
from p2p.sync_wire import Name

SMALL_MAX = (1 << 32) - 1


class Records(Protocol):
    """Where this node publishes; `p2p.gossip.Gossip` is one."""

    def write(self, kind: int, name: Name, value: object, *, urgent: bool = False) -> None:
        """Publish a record. Raises: NamespaceFull, of what is not urgent."""

    def delete(self, kind: int, name: Name) -> None:
        """Take one back."""


class HomeTask:
    """See the module."""

    def __init__(
        self, task_id: TaskId, model: str, request: Request, route: Route, *, began: float, seconds_max: float
    ) -> None:
        self.task_id = task_id
        self.model = model  # by its served name
        self.request = request
        self.route = route
        self.began = began
        self.deadline = began + seconds_max
        self._seconds_max = seconds_max
        self.attempt = 0  # the present one's number; each is of its own
        self.admitted = False  # by any attempt: its client may have seen something
        self.model_hash = ""  # of that; it goes on with no other model
        self.left: set[int] = set()  # instances that it was on and had to leave
        self.end: Finished | Failed | None = None
        self.silent_since = float("inf")  # while an attempt owes a first token: when it last made itself heard
        self._published: TaskHeader | None = None
        self._prompt: TokenPrompt | None = None
        self._cached_tokens = 0
        self._generated: list[int] = []
        self._given = 0  # characters

    def __repr__(self) -> str:
        return f"HomeTask({self.task_id.text}, attempt {self.attempt}, {self.end or 'running'})"

    def attempt_request(self) -> Request:
        """What to submit now: the request itself, or what is left of it after the tokens that came already."""
        name = request_id(self.task_id, self.attempt)
        if self._prompt is None:
            return msgspec.structs.replace(self.request, request_id=name)
        return msgspec.structs.replace(
            self.request,
            request_id=name,
            prompt=self._prompt,
            generated=tuple(self._generated),
            given_characters=self._given,
        )

    def hear(self, event: Event, now: float) -> None:
        """Keep what a later attempt would need of an event that goes to the client."""
        match event:
            case Tokens(token_ids=token_ids, text=text):
                self._generated += token_ids
                self._given += len(text)
                self.silent_since = float("inf")
            case Accepted(prompt_ids=prompt_ids, cached_tokens=cached):
                self._prompt = TokenPrompt(prompt_ids)
                self._cached_tokens = cached
                self.admitted = True
                self.silent_since = now
            case Finished() | Failed():
                self.end = event
                self.silent_since = float("inf")
            case _:
                self.silent_since = now

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = len(self._prompt.ids) if self._prompt is not None else 0
        return Usage(prompt, len(self._generated), min(self._cached_tokens, prompt))

    def timed_out(self) -> Failed:
        """The end of a request whose time is over."""
        seconds = f"{self._seconds_max:g}"
        message = f"The request was not complete after {seconds} seconds, which is the longest that one may take here."
        return Failed(self.request.request_id, "timed_out", message)

    # Its records.

    def publish_waiting(self, records: Records) -> None:
        """It stands in line. Raises: NamespaceFull."""
        self._publish(records, 0, ())

    def publish_attempt(self, records: Records, target: Target) -> None:
        """Its next attempt goes there: counted from this moment, before anything is sent. Raises: NamespaceFull."""
        self.attempt += 1
        self._publish(records, target.candidate.instance_id, target.executors)

    def _publish(self, records: Records, instance_id: int, executors: tuple[Executor, ...]) -> None:
        seconds = int(self._seconds_max)
        answer = self.request.max_tokens or 0
        header = TaskHeader(
            self.attempt,
            instance_id,
            executors,
            min(self.route.need_tokens, SMALL_MAX),
            min(answer, SMALL_MAX),
            min(seconds, SMALL_MAX),
            self.model[:256] if not executors else "",
        )
        records.write(TASK, self.task_id.number, header, urgent=self._published is not None)
        self._published = header

    @property
    def published(self) -> TaskHeader | None:
        """The header that the others see."""
        return self._published

    def publish_verdict(self, records: Records, status: Terminal, reason: str = "") -> None:
        """Its end, once."""
        if self._published is not None:
            records.write(VERDICT, self.task_id.number, Verdict(status, short(reason)), urgent=True)

    def publish_rank(self, records: Records, phase: RankPhase, reason: str = "") -> None:
        """How far this node itself is with the present attempt, where it executes what it took on."""
        name = (self.task_id.home, self.task_id.number, self.attempt, 0)
        records.write(RANK, name, RankReport(phase, short(reason)), urgent=True)


def verdict_of(end: Finished | Failed | None) -> tuple[Terminal, str]:
    """What an end means; none at all: its client has left."""
    if isinstance(end, Failed):
        return (Terminal.TIMED_OUT if end.code == "timed_out" else Terminal.FAILED), end.code
    if end is None or end.reason == "cancelled":
        return Terminal.CANCELLED, ""
    return Terminal.COMPLETE, ""


def rank_end(end: Event | None) -> RankPhase:
    """What the executor of an attempt says at its end."""
    if isinstance(end, Finished) and end.reason != "cancelled":
        return RankPhase.OK
    return (
        RankPhase.FAILED if isinstance(end, Failed) and end.code not in ("timed_out", "runner_stopped") else RankPhase.ABORTED
    )


def short(reason: str) -> str:
    """A reason as long as a record takes."""
    return reason[:REASON_BYTES_MAX]
