"""The life of a task at its home: find it an instance, wait in line for room, follow it to its end, start it again elsewhere.

    in line ──▶ chosen ──▶ submitted ──▶ Accepted ──▶ tokens ──▶ end, verdict
       ▲           │ header counts         │             │
       └───────────┴── Refused ◀───────────┘             └── its head is gone: the next attempt, with the tokens so far

The executor of an attempt is this node's own supervisor or the head of an instance elsewhere; both are asked alike
(`Execute`). Whoever leaves, by an end, an error or a cancel, gives its place up in the same step.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

import trio

from inference.requests import END_EVENTS, Accepted, Event, Failed, Finished, Prefilled, Refused, Tokens
from node.attempt import Attempt, Execute
from node.cluster_view import ClusterView, Target
from node.home_submission import HeadLost
from node.home_task import HomeTask, Records, rank_end, verdict_of
from node.instance_health import at_fault
from node.line import Line, Place, Seats
from node.records import RankPhase
from node.routing import Router, TooLong
from node.service import NoRoute, QueueFull
from node.standing import Coming, Lost, Serving, Standing
from node.task_events import Events
from node.waiting import RETRY_SECONDS_MAX, remaining_seconds
from p2p.namespace import NamespaceFull

LOADING_SECONDS_MAX = 30.0  # how long a request waits for a model that is on its way; longer than a restart after a crash
CRASHES_MAX = 1  # how many runners may die over a request that nothing was said about yet, before it is told so
ATTEMPTS_MAX = 8  # submissions that may fail for reasons other than want of room
# Between two signs of life before the first token, where another instance could take over: longer than any step of an engine
# that works, short enough that a person still waits.
FIRST_TOKEN_SECONDS = 10.0
LOOK_SECONDS = 0.5  # between looks at the cluster while in line, whatever rings


class TaskHome:
    """All tasks that this node has accepted."""

    def __init__(
        self,
        own: bytes,
        view: ClusterView,
        *,
        router: Router,
        records: Records,
        execute: Execute,
        standing: Callable[[str], Standing],
        seats: Seats,
        nursery: trio.Nursery,
        retry_after: Callable[[], int],
        pulled: bool,
    ) -> None:
        """`pulled`: heads with room ask for what waits, so nobody in line tries by itself at every change."""
        self.running: dict[HomeTask, Attempt | None] = {}
        self.ended: dict[HomeTask, float] = {}  # verdicts still to be read by others, and since when
        self.reserved: dict[int, int] = {}  # places at this node's own instances that were promised to other homes
        self.on_line: list[Callable[[str], None]] = []  # told, by a model's name, that its line has changed
        self._own = own
        self._view = view
        self.router = router
        self._records = records
        self._execute = execute
        self._standing = standing
        self._seats = seats
        self._nursery = nursery
        self._retry_after = retry_after
        self._pulled = pulled
        self._closed: str | None = None
        view.on_change.append(self.look)

    def close(self, reason: str) -> None:
        """Send away all who wait, and whoever comes from now on; what was admitted goes on."""
        self._closed = reason
        for line in self._seats.lines.values():
            line.ring_all()

    def look(self) -> None:
        """Something has changed: room may have come up, or the node of an attempt may be gone."""
        for line in self._seats.lines.values():
            line.ring()
        for attempt in self.running.values():
            if attempt is not None and not attempt.lost and not self._view.in_flight.boots.running(attempt.target.boot):
                self._give_up(attempt, "the node that ran it is gone")

    def _give_up(self, attempt: Attempt, reason: str, *, stalled: bool = False) -> None:
        attempt.lost, attempt.stalled = reason, stalled
        self._nursery.start_soon(attempt.close)

    @asynccontextmanager
    async def open(self, task: HomeTask) -> AsyncIterator[Events]:
        """Wait for room, start the task and yield its events; leaving the block cancels what still runs.

        Raises: QueueFull, NoRoute.
        """
        self.running[task] = None
        events = Events(self, task)
        watch = trio.CancelScope()
        self._nursery.start_soon(self._watch, task, watch)
        try:
            events.pending = await self.start(task)
            yield events
        except (QueueFull, NoRoute) as refusal:
            task.end = task.end or Failed(task.task_id.text, "runner_stopped", str(refusal))
            raise
        finally:
            watch.cancel()
            attempt = self.running.pop(task)
            if attempt is not None:
                with trio.CancelScope(shield=True):
                    await attempt.close()
                self._report_end(task, attempt, task.end)
                self.router.dropped(task.route)
            task.publish_verdict(self._records, *verdict_of(task.end))
            self.ended[task] = trio.current_time()

    async def _watch(self, task: HomeTask, scope: trio.CancelScope) -> None:
        """Act when its time is over, or when its instance says nothing where another could."""
        with scope:
            while (now := trio.current_time()) < task.deadline:
                silent_until = task.silent_since + FIRST_TOKEN_SECONDS
                if now >= silent_until:
                    attempt = self.running[task]
                    if attempt is not None and self._elsewhere(task, attempt.target.candidate.instance_id):
                        self._give_up(attempt, "it was silent for too long", stalled=True)
                        task.silent_since = math.inf
                    else:
                        task.silent_since = now
                    continue
                await trio.sleep_until(min(task.deadline, silent_until, now + FIRST_TOKEN_SECONDS))
            attempt = self.running[task]
            if attempt is not None:
                task.end = task.timed_out()
                self._give_up(attempt, "timed out")

    def _elsewhere(self, task: HomeTask, instance_id: int) -> bool:
        return any(target.candidate.instance_id != instance_id for target in self._targets(task))

    def cancel(self, task: HomeTask) -> None:
        """Somebody wishes it to end."""
        if task.end is None:
            task.end = Finished(task.request.request_id, "cancelled", task.usage)
            attempt = self.running.get(task)
            if attempt is not None:
                self._give_up(attempt, "cancelled")
            else:
                for line in self._seats.lines.values():
                    line.ring_all()

    # One attempt after the other.

    async def start(self, task: HomeTask) -> Event:
        """The first event of an attempt that was admitted, or the end of a task that was not.

        Raises: QueueFull, NoRoute.
        """
        line = self._seats.lines.setdefault(task.model, Line())
        with self._in_line(line, task) as place:
            last: Failed | None = None
            trial = 0
            while trial < ATTEMPTS_MAX:
                target = await self._next_target(task, line, place, last)
                if not isinstance(target, Target):
                    return target
                event = await self._submit(task, target)
                place.on_trial = False
                if isinstance(event, Accepted):
                    return event
                if task.end is not None:
                    return task.end
                if isinstance(event, Refused):
                    continue
                if isinstance(event, Failed):
                    last = event
                if not self._may_try_again(task, target, event, trial):
                    break
                trial += 1
        return last or Failed(task.task_id.text, "runner_crashed", "No instance could take the request on.")

    def _may_try_again(self, task: HomeTask, target: Target, event: Event | None, trial: int) -> bool:
        """Whether an attempt that came to nothing is followed by another one."""
        if isinstance(event, Failed):
            if event.code == "context_length_exceeded":  # another one's context may be larger
                return True
            if not (at_fault(event.code) or event.code == "runner_stopped"):
                return False
        if self._elsewhere(task, target.candidate.instance_id):
            task.left.add(target.candidate.instance_id)
            return True
        return trial < CRASHES_MAX and (event is None or (isinstance(event, Failed) and event.code == "runner_crashed"))

    @contextmanager
    def _in_line(self, line: Line, task: HomeTask) -> Iterator[Place]:
        place = line.join(trio.current_time())
        try:
            yield place
        finally:
            line.leave(place)
            self._line_changed(task.model)

    def _line_changed(self, model: str) -> None:
        for callback in tuple(self.on_line):
            callback(model)

    async def _next_target(self, task: HomeTask, line: Line, place: Place, last: Failed | None) -> Target | Event:
        """Wait until there is room somewhere, and count it as taken; or the task's end, where that comes first.

        Raises: QueueFull, NoRoute.
        """
        patience_ends = math.inf
        while True:
            if self._closed is not None and not task.admitted:
                raise NoRoute(self._closed, RETRY_SECONDS_MAX)
            if task.end is not None:
                return task.end
            if trio.current_time() >= task.deadline:
                return task.timed_out()
            found = self._choose(task, place) if self._may_look(line, place) else None
            if isinstance(found, TooLong):
                return last or _too_long(task, found)
            if found is not None:
                self._take(task, found, line, place)
                return found
            patience_ends = self._patience(task, patience_ends)
            self._sit_down(task, place)
            task.route.wait()
            await place.wait(min(task.deadline, patience_ends, place.looks_at))

    def _may_look(self, line: Line, place: Place) -> bool:
        """Where heads ask, looks come by the clock, not when a place comes free: that one is for who waits longest."""
        now = trio.current_time()
        may_try = line.may_try(place)
        if may_try and self._pulled and place.offer is None and now < place.looks_at:
            return False
        place.looks_at = now + LOOK_SECONDS
        return may_try

    def _choose(self, task: HomeTask, place: Place) -> Target | TooLong | None:
        targets = {target.candidate.instance_id: target for target in self._targets(task)}
        candidates = [target.candidate for target in targets.values()]
        now = trio.current_time()
        offer, place.offer = place.offer, None
        if offer in targets:
            largest = max(candidate.context for candidate in candidates)
            if self.router.pulled(task.route, targets[offer].candidate, largest, now):
                return targets[offer]
        choice = self.router.choose(task.route, candidates, now)
        if choice is None or isinstance(choice, TooLong):
            return choice
        return targets[choice.instance_id]

    def _targets(self, task: HomeTask) -> list[Target]:
        """Where it may go now: a task that was admitted goes on with the same model only, and not where it had to leave."""
        hashes = {task.model_hash: None} if task.admitted else dict.fromkeys(self._standing(task.model).hashes)
        found = [target for model_hash in hashes for target in self._view.targets(model_hash, self.reserved)]
        if not task.admitted and len(hashes) > 1:  # two models under one name: never mixed, the first is meant
            first = next((target.model_hash for target in found), "")
            found = [target for target in found if target.model_hash == first]
        return [target for target in found if target.candidate.instance_id not in task.left]

    def _take(self, task: HomeTask, target: Target, line: Line, place: Place) -> None:
        try:
            task.publish_attempt(self._records, target)
        except NamespaceFull:
            self.router.dropped(task.route)
            raise self._full("This node has as many tasks as it can keep account of.") from None
        place.on_trial = True
        line.ring()
        self._line_changed(task.model)

    def _patience(self, task: HomeTask, ends: float) -> float:
        """Until when to wait for a model that nobody serves now.

        Raises: NoRoute, where there is nothing to wait for, or it took too long.
        """
        standing = self._standing(task.model)
        now = trio.current_time()
        state = standing.state
        if isinstance(state, Serving) and self._targets(task):
            return math.inf
        if isinstance(state, Lost):
            raise NoRoute(state.reason, RETRY_SECONDS_MAX)
        if task.admitted:
            raise NoRoute("No other instance of its model is ready.", RETRY_SECONDS_MAX)
        if now < ends:
            return min(ends, now + LOADING_SECONDS_MAX)
        if isinstance(state, Coming):
            raise NoRoute(state.reason, remaining_seconds(now - state.since, state.done, state.total))
        raise NoRoute(f"No instance of the model {task.model!r} takes requests now.", RETRY_SECONDS_MAX)

    def _sit_down(self, task: HomeTask, place: Place) -> None:
        if not place.seated:
            self._take_seat(task, place)
        if task.published is None or task.published.executors:
            try:
                task.publish_waiting(self._records)
            except NamespaceFull:
                raise self._full("This node has as many tasks as it can keep account of.") from None
        self._line_changed(task.model)

    def _take_seat(self, task: HomeTask, place: Place) -> None:
        place.seated = True
        if self._seats.taken > self._seats.seats_max and not task.admitted:
            waiting = self._seats.seats_max
            raise self._full(
                f"{waiting} requests wait at this node already, and that is all it lets wait." if waiting
                else "Every place at the runner is taken, and this node lets no request wait."
            )  # fmt: skip

    def _full(self, message: str) -> QueueFull:
        return QueueFull(message, self._retry_after())

    async def _submit(self, task: HomeTask, target: Target) -> Event | None:
        """Try it there; its first event, None where the head is gone."""
        async with AsyncExitStack() as trial:
            request = task.attempt_request()
            events = await trial.enter_async_context(self._execute(target, task, request))
            stack = AsyncExitStack()
            attempt = Attempt(target, stack, events)
            self.running[task] = attempt
            task.silent_since = trio.current_time()
            stack.push_async_exit(trial.pop_all())
            first: Event | None = None
            try:
                with suppress(StopAsyncIteration, HeadLost):
                    first = await anext(events)
                    while isinstance(first, Prefilled):
                        first = await anext(events)
            finally:
                if not isinstance(first, Accepted):
                    self.running[task] = None
                    await attempt.close()
        now = trio.current_time()
        if first is None:
            self.router.lost(task.route, now, stalled=attempt.stalled)
            return None
        self.router.heard(task.route, first, now)
        if isinstance(first, Accepted):
            task.model_hash = target.model_hash
            if target.head == self._own:
                task.publish_rank(self._records, RankPhase.RUNNING)
        return first

    def _report_end(self, task: HomeTask, attempt: Attempt, end: Event | None) -> None:
        if attempt.target.head == self._own:
            task.publish_rank(self._records, rank_end(end))

    async def go_on(self, task: HomeTask, failure: Failed | None) -> Event | None:
        """Its attempt has broken off: the next one on another instance; an end where there is none, None once it goes on."""
        attempt = self.running[task]
        assert attempt is not None
        self.running[task] = None
        if not attempt.lost:
            await attempt.close()
        self._report_end(task, attempt, failure)
        end = failure or Failed(
            task.task_id.text, "runner_crashed", f"The request broke off: {attempt.lost or 'the node was lost'}."
        )
        now = trio.current_time()
        if failure is None:
            self.router.lost(task.route, now, stalled=attempt.stalled)
        else:
            self.router.heard(task.route, failure, now)
        task.left.add(attempt.target.candidate.instance_id)
        try:
            event = await self.start(task)
        except (NoRoute, QueueFull):
            return end
        return None if isinstance(event, Accepted) else event

    def follow(self, task: HomeTask, event: Event) -> None:
        """An event of the present attempt goes to the client."""
        first = task.silent_since != math.inf
        task.hear(event, trio.current_time())
        if isinstance(event, Tokens):
            if first:
                self.router.heard(task.route, event, trio.current_time())
        elif isinstance(event, END_EVENTS):
            self.router.heard(task.route, event, trio.current_time())


def _too_long(task: HomeTask, found: TooLong) -> Failed:
    message = f"The largest context of {task.model!r} here is {found.context} tokens, and the request is longer."
    return Failed(task.task_id.text, "context_length_exceeded", message, "messages")
