"""A home at this head: a peer in one of its boots, with what it has here.

What it may hold is bounded in every direction: attempts, prompts that the runner has not looked at, models with a line,
replies that it does not read. Its tasks are found by its own boot, so nothing that it says can meet anybody else's.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
import trio
from msgspec import Struct

from inference.requests import Event, Load, Refused
from inference.supervisor import NO_ROOM
from node.head_stream import HomeStream
from node.head_task import HeadTask, LocalExecutor
from node.home_task import rank_end
from node.records import RankPhase, TaskId
from node.task_credit import Sent
from node.task_protocol import (
    MODELS_MAX,
    TASKS_MAX,
    Cancel,
    Credit,
    Resume,
    Submit,
    TaskMessage,
    Try,
    Waiting,
    request_id,
)
from node.tasks import Outcomes
from p2p.ids import NodeId
from p2p.wire import ProtocolViolation

# What the runner has not said yes or no to: more than any home's router sends, less than what stalls a runner's pipe.
UNANSWERED_MAX = 1024
UNANSWERED_PER_HOME_MAX = 256
PROMPT_BYTES_MAX = 128 << 20  # of those together
PROMPT_BYTES_PER_HOME_MAX = 80 << 20


class Counters(Struct):
    """What homes had run here since the start."""

    submitted: int = 0
    accepted: int = 0
    refused: int = 0
    repeated: int = 0  # submissions that came again, or too late
    resumed: int = 0  # attempts that outlived their stream
    given_up: int = 0  # attempts that were cancelled, or whose home did not come back


class Unanswered(Struct):
    """Submissions that a runner has not said yes or no to."""

    count: int = 0
    prompt_bytes: int = 0

    def add(self, count: int, prompt_bytes: int) -> None:
        """So many more."""
        self.count += count
        self.prompt_bytes += prompt_bytes


class Hosting(Protocol):
    """What all homes at one head share; `node.task_head.Head` is it."""

    counters: Counters
    unanswered: Unanswered
    nursery: trio.Nursery
    report: Callable[[TaskId, int, int, RankPhase, str], None]
    on_waiting: Callable[[NodeId, str, int, float], None]
    on_answered: Callable[[HeadTask], None]
    on_ended: Callable[[HeadTask], None]
    on_over: Callable[[HeadTask], None]

    def instance(self, instance_id: int) -> LocalExecutor | None:
        """One whose head this node is."""


class Home:
    """See the module."""

    def __init__(self, node_id: NodeId, boot: int, hosting: Hosting) -> None:
        self.node_id = node_id
        self.boot = boot
        self.tasks: dict[int, HeadTask] = {}  # by number: the latest attempt
        self.count = 0  # of attempts that hold anything, those that are being cancelled too
        self.large = 0  # submissions that come in on streams of their own
        self.stream: HomeStream | None = None
        self.away_since = trio.current_time()
        self._hosting = hosting
        self._unanswered = Unanswered()
        self._waiting: set[str] = set()  # models with a line, by hash
        self._outcomes = Outcomes()

    def __repr__(self) -> str:
        return f"Home({self.node_id[-8:]}, boot {self.boot:016x}, {self.count} attempts)"

    def say(self, sent: Sent) -> None:
        """Send an event, if there is a stream; if not, its task keeps it."""
        if self.stream is not None:
            self.stream.say(sent)

    def _gone(self, attempt: Try) -> None:
        if self.stream is not None:
            self.stream.say_gone(attempt)

    def stream_ended(self, stream: HomeStream) -> None:
        """Unless there is a newer one by now, what it has here goes on for a grace only, and its lines are not known."""
        if self.stream is not stream:
            return
        self.stream = None
        self.away_since = trio.current_time()
        for task in self.tasks.values():
            task.give_grace()
        for model_hash in self._waiting:
            self._hosting.on_waiting(self.node_id, model_hash, 0, 0.0)
        self._waiting.clear()

    # What it says.

    def resume(self, stream: HomeStream, resume: Resume) -> None:
        """It has a new stream: what it names goes on there, what it doesn't is given up.

        Raises: ProtocolViolation.
        """
        wanted = {held.number: held.attempt for held in resume.attempts}
        for number, task in self.tasks.items():
            if wanted.get(number) != task.attempt:
                task.cancel()
        for held in resume.attempts:
            task_here = self._find(held.number, held.attempt)
            if task_here is None:
                self._not_here(Try(held.number, held.attempt))
                continue
            self._hosting.counters.resumed += 1
            for sent in task_here.resume(held.heard, held.taken):
                stream.say(sent)

    def hear(self, message: TaskMessage) -> None:
        """Any later message of its stream. Raises: ProtocolViolation."""
        match message:
            case Credit():
                for taken in message.attempts:
                    task = self._find(taken.number, taken.attempt)
                    if task is not None:
                        task.credit(taken.taken)
            case Submit():
                self.submit(message)
            case Cancel(number=number, attempt=attempt):
                task = self._find(number, attempt)
                if task is not None:
                    task.cancel()
                else:
                    self._not_here(Try(number, attempt))
            case Waiting():
                self._hear_waiting(message)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} in the middle of a stream")

    def _find(self, number: int, attempt: int) -> HeadTask | None:
        task = self.tasks.get(number)
        return task if task is not None and task.attempt == attempt else None

    def _not_here(self, attempt: Try) -> None:
        """Say so, and let it not run later either: its submission may still be on its way, on a stream of its own."""
        self._outcomes.takes(TaskId(self.boot, attempt.number), attempt.attempt)
        self._gone(attempt)

    def _hear_waiting(self, message: Waiting) -> None:
        if message.count == 0:
            self._waiting.discard(message.model_hash)
        elif len(self._waiting) < MODELS_MAX or message.model_hash in self._waiting:
            self._waiting.add(message.model_hash)
        else:
            raise ProtocolViolation(f"requests of more than {MODELS_MAX} models wait")
        self._hosting.on_waiting(self.node_id, message.model_hash, message.count, message.seconds)

    def submit(self, submit: Submit) -> None:
        """Start an attempt, or say why not. At most once: what was taken before is not run again.

        Raises: ProtocolViolation where its request is not named after it.
        """
        task_id = TaskId(self.boot, submit.number)
        if submit.request.request_id != request_id(task_id, submit.attempt):
            raise ProtocolViolation("a request of another name than its task's")
        counters = self._hosting.counters
        if not self._outcomes.takes(task_id, submit.attempt):
            counters.repeated += 1
            self._gone(Try(submit.number, submit.attempt))
            return
        counters.submitted += 1
        before = self.tasks.pop(submit.number, None)
        if before is not None:
            before.cancel()
        executor = self._hosting.instance(submit.instance_id)
        prompt_bytes = len(msgspec.msgpack.encode(submit.request))
        load = self._refusal(submit, executor, prompt_bytes)
        if executor is None or load is not None:
            counters.refused += 1
            if self.stream is not None:
                self.stream.say_refused(Sent(0, Refused(submit.request.request_id, 0, load or NO_ROOM)))
            return
        self._start(HeadTask(self.node_id, task_id, submit, prompt_bytes, self.say), executor, before)

    def _refusal(self, submit: Submit, executor: LocalExecutor | None, prompt_bytes: int) -> Load | None:
        """The load with which a submission is refused here; None: the runner is to say yes or no."""
        if executor is None or executor.model_hash != submit.model_hash or executor.epoch != submit.epoch:
            return NO_ROOM
        ours, all_homes = self._unanswered, self._hosting.unanswered
        if (
            self.count >= TASKS_MAX
            or ours.count >= UNANSWERED_PER_HOME_MAX
            or all_homes.count >= UNANSWERED_MAX
            or ours.prompt_bytes + prompt_bytes > PROMPT_BYTES_PER_HOME_MAX
            or all_homes.prompt_bytes + prompt_bytes > PROMPT_BYTES_MAX
        ):
            return executor.load
        return None

    # Its attempts, from here on `node.head_task.Notes` of theirs.

    def _start(self, task: HeadTask, executor: LocalExecutor, before: HeadTask | None) -> None:
        self.tasks[task.task_id.number] = task
        self.count += 1
        self._count_unanswered(1, task)
        self._hosting.nursery.start_soon(self._run, task, executor, before)

    async def _run(self, task: HeadTask, executor: LocalExecutor, before: HeadTask | None) -> None:
        try:
            await task.run(executor, before, self)
        finally:
            self.count -= 1
            if not task.answered:
                self._count_unanswered(-1, task)
            if self.tasks.get(task.task_id.number) is task:
                del self.tasks[task.task_id.number]
        if not task.outlet.done:
            self._hosting.counters.given_up += 1
            self._gone(task.key)
        self._hosting.on_over(task)

    def _count_unanswered(self, count: int, task: HeadTask) -> None:
        for unanswered in (self._unanswered, self._hosting.unanswered):
            unanswered.add(count, count * task.prompt_bytes)

    def answered(self, task: HeadTask) -> None:
        """The runner has said yes or no."""
        self._count_unanswered(-1, task)
        hosting = self._hosting
        if task.accepted:
            hosting.counters.accepted += 1
            hosting.report(task.task_id, task.attempt, 0, RankPhase.RUNNING, "")
        else:
            hosting.counters.refused += 1
        hosting.on_answered(task)

    def ended(self, task: HeadTask, end: Event | None) -> None:
        """An accepted one has given its place back."""
        reason = getattr(end, "code", "")
        self._hosting.report(task.task_id, task.attempt, 0, rank_end(end), reason)
        self._hosting.on_ended(task)
