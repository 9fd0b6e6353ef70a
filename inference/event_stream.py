"""The events of one request on their way to whoever asked, between a reader that never waits and a consumer that may."""

from collections import deque
from typing import Self

import trio

from inference.requests import END_EVENTS, EndEvent, Event, Prefilled, Tokens

# Above so many unread events the consumer lags, and tokens are put together: each costs its id and text then, no event more.
UNMERGED_MAX = 256


class EventStream:
    """An async iterator that ends after the request's end event.

    What it holds is bounded by the request itself: its events are put together when there are too many, and an answer has at
    most max_tokens tokens. So the side that delivers never waits for a slow consumer.
    """

    __slots__ = ("_events", "_finished", "_waiting", "closed", "ended")

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._waiting = trio.lowlevel.ParkingLot()
        self._finished = False  # whether the consumer has had the end event
        self.ended = trio.Event()  # set once the end event was delivered
        self.closed = False

    def deliver(self, event: Event) -> None:
        """Add an event; those after the end event are dropped."""
        if self.ended.is_set():
            return
        if isinstance(event, EndEvent):
            self.ended.set()
        if self.closed:
            return
        events = self._events
        events.append(event)
        if len(events) > UNMERGED_MAX:
            self._events = merged(events)
        self._waiting.unpark()

    def close(self) -> None:
        """Nobody will read any more, and whoever waits to is woken; only the end event still counts."""
        self.closed = True
        self._events.clear()
        self._waiting.unpark_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._events:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not self._events:
            if self._finished or self.closed:
                raise StopAsyncIteration
            await self._waiting.park()
        event = self._events.popleft()
        self._finished = isinstance(event, END_EVENTS)
        return event


def merged(events: deque[Event]) -> deque[Event]:
    """The same events with neighbouring Tokens put together, and of neighbouring Prefilled only the last."""
    result: deque[Event] = deque()
    run: list[Tokens] = []
    for event in events:
        if isinstance(event, Tokens):
            run.append(event)
            continue
        if run:
            result.append(_joined(run))
            run = []
        if isinstance(event, Prefilled) and result and isinstance(result[-1], Prefilled):
            result.pop()
        result.append(event)
    if run:
        result.append(_joined(run))
    return result


def _joined(run: list[Tokens]) -> Tokens:
    token_ids = tuple(token_id for tokens in run for token_id in tokens.token_ids)
    logprobs = tuple(logprob for tokens in run for logprob in tokens.logprobs)
    return Tokens(run[0].request_id, token_ids, "".join([tokens.text for tokens in run]), logprobs)
