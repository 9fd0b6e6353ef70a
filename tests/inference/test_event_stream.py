"""Events on their way to a consumer: none lost, none waited for."""

import itertools
from collections import deque

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from inference.event_stream import UNMERGED_MAX, EventStream, merged
from inference.requests import Accepted, Event, Finished, Prefilled, TokenLogprob, Tokens, Usage

END = Finished("a", "stop", Usage(1, 1, 0))
EVENTS = st.lists(
    st.one_of(
        st.builds(
            lambda ids, text: Tokens("a", tuple(ids), text, tuple(TokenLogprob(n, "", 0.0) for n in ids)),
            st.lists(st.integers(0, 9), max_size=2),
            st.text("xyz", max_size=2),
        ),
        st.builds(lambda done: Prefilled("a", done, 9), st.integers(0, 9)),
        st.just(Accepted("a", (1,))),
    ),
    max_size=30,
)


def contents(events: list[Event]) -> tuple[str, list[int], list[int]]:
    tokens = [event for event in events if isinstance(event, Tokens)]
    return (
        "".join(event.text for event in tokens),
        [token_id for event in tokens for token_id in event.token_ids],
        [logprob.token_id for event in tokens for logprob in event.logprobs],
    )


@given(EVENTS)
def test_joined_events_say_the_same_in_the_same_order(events: list[Event]) -> None:
    joined = list(merged(deque(events)))
    assert contents(joined) == contents(events)
    kinds = [type(event) for event in joined]
    assert all(one is not other or one is Accepted for one, other in itertools.pairwise(kinds))
    runs = [
        type(event)
        for n, event in enumerate(events)
        if n == 0 or type(event) is not type(events[n - 1]) or type(event) is Accepted
    ]
    assert kinds == runs
    assert list(merged(deque(joined))) == joined


async def test_unread_events_are_joined_above_a_number() -> None:
    stream = EventStream()
    for n in range(UNMERGED_MAX * 20):
        stream.deliver(Tokens("a", (n,), "x"))
    stream.deliver(END)
    events = [event async for event in stream]
    assert len(events) <= UNMERGED_MAX + 1
    assert contents(events)[:2] == ("x" * UNMERGED_MAX * 20, list(range(UNMERGED_MAX * 20)))
    assert events[-1] == END


async def test_a_consumer_that_keeps_up_gets_each_event() -> None:
    stream, events = EventStream(), []

    async def consume() -> None:
        async for event in stream:
            events.append(event)  # noqa: PERF401 - one at a time

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume)
        for n in range(UNMERGED_MAX * 2):
            stream.deliver(Tokens("a", (n,), "x"))
            await trio.testing.wait_all_tasks_blocked()
        stream.deliver(END)
    assert len(events) == UNMERGED_MAX * 2 + 1


async def test_nothing_comes_after_the_end_event() -> None:
    stream = EventStream()
    stream.deliver(END)
    stream.deliver(Tokens("a", (1,), "x"))
    assert [event async for event in stream] == [END]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_closed_stream_still_notes_its_end() -> None:
    stream = EventStream()
    stream.deliver(Tokens("a", (1,), "x"))
    stream.close()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    stream.deliver(END)
    assert stream.ended.is_set()


async def test_reading_can_be_cancelled_also_while_there_are_events() -> None:
    stream = EventStream()
    stream.deliver(Tokens("a", (1,), "x"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(stream)
    assert scope.cancelled_caught
    assert await anext(stream) == Tokens("a", (1,), "x")
