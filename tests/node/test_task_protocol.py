"""The messages, and the law of credit: over a stream that breaks anywhere, each event once, in order, within the window."""

from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference.requests import (
    Accepted,
    ChatPrompt,
    Event,
    Failed,
    Finished,
    Prefilled,
    TokenLogprob,
    Tokens,
    Usage,
)
from node.records import TaskId
from node.task_credit import PIECE_TOKENS_MAX, WINDOW_BYTES, Inlet, Outlet, Sent, pieces, weight
from node.task_protocol import (
    HOME_FRAME_BYTES_MAX,
    SECONDS_LEFT_MAX,
    TASKS_AT_HEAD,
    TASKS_AT_HOME,
    TASKS_MAX,
    Batch,
    Cancel,
    Credit,
    Held,
    Pull,
    Resume,
    Submit,
    Taken,
    TaskMessage,
    Try,
    Waiting,
    frame_bytes,
)
from p2p.wire import HEADER_BYTES, ProtocolViolation
from tests.node.task_bench import make_submit

HOME_SAYS: list[TaskMessage] = [
    Resume((Held(1, 2, 30, 20),)),
    make_submit(TaskId(1, 5)),
    Cancel(1, 2),
    Credit((Taken(1, 2, 3),)),
    Waiting("aa", 3, 1.5),
]
HEAD_SAYS = Batch((Sent(0, Accepted("a", (1, 2))), Sent(1, Tokens("a", (5,), "x"))), (Try(1, 2),), (Pull(7, 3),))


def body(end: str, message: object) -> bytes:
    codec = (TASKS_AT_HOME if end == "home" else TASKS_AT_HEAD).codec
    return codec.encode(message)[HEADER_BYTES:]  # type: ignore[arg-type]  # either end may say it


@pytest.mark.parametrize("message", HOME_SAYS, ids=lambda message: type(message).__name__)
def test_each_end_takes_what_the_other_says_and_nothing_else(message: TaskMessage) -> None:
    assert TASKS_AT_HEAD.codec.decode(body("home", message)) == message
    with pytest.raises(ProtocolViolation):
        TASKS_AT_HOME.codec.decode(body("home", message))


def test_a_home_takes_batches_and_a_head_does_not() -> None:
    assert TASKS_AT_HOME.codec.decode(body("head", HEAD_SAYS)) == HEAD_SAYS
    with pytest.raises(ProtocolViolation):
        TASKS_AT_HEAD.codec.decode(body("head", HEAD_SAYS))


@pytest.mark.parametrize(
    "message",
    [
        Waiting("aa", 1, float("nan")),
        Waiting("aa", -1),
        Waiting("a" * 65, 1),
        Cancel(-1, 0),
        Credit(tuple(Taken(n, 1, 1) for n in range(TASKS_MAX + 1))),
        Resume(tuple(Held(n, 1, 1, 1) for n in range(TASKS_MAX + 1))),
        msgspec.structs.replace(make_submit(TaskId(1, 1)), seconds_left=float("inf")),
        msgspec.structs.replace(make_submit(TaskId(1, 1)), seconds_left=2 * SECONDS_LEFT_MAX),
        msgspec.structs.replace(make_submit(TaskId(1, 1)), window=0),
        msgspec.structs.replace(make_submit(TaskId(1, 1)), window=1 << 40),
    ],
    ids=repr,
)
def test_what_is_out_of_range_is_a_violation(message: TaskMessage) -> None:
    with pytest.raises(ProtocolViolation):
        TASKS_AT_HEAD.codec.decode(body("home", message))


def test_the_head_takes_no_longer_frame_than_a_home_says() -> None:
    submit = make_submit(TaskId(1, 1), text="x" * HOME_FRAME_BYTES_MAX)
    with pytest.raises(ValueError, match="above the cap"):
        TASKS_AT_HOME.codec.encode(submit)
    with pytest.raises(ProtocolViolation, match="the cap is"):
        TASKS_AT_HEAD.codec.length((HOME_FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
    tokens = tuple(range(100_000))
    assert TASKS_AT_HEAD.codec.encode(Batch((Sent(0, Accepted("a", tokens)),)))


def test_the_largest_resume_fits_its_frame() -> None:
    largest = (1 << 53) - 1
    resume = Resume(tuple(Held(largest - n, 1 << 31, largest, largest) for n in range(TASKS_MAX)))
    assert TASKS_AT_HEAD.codec.decode(body("home", resume)) == resume


def with_message(message: dict[str, object]) -> Submit:
    submit = make_submit(TaskId(1, 1))
    request = msgspec.structs.replace(submit.request, prompt=ChatPrompt(messages=(message,)))
    return msgspec.structs.replace(submit, request=request)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_how_long_a_submission_is() -> None:
    submit = make_submit(TaskId(1, 1), text="x" * 1000)
    assert frame_bytes(submit) == len(TASKS_AT_HOME.codec.encode(submit)) > 1000


@pytest.mark.parametrize(
    "submit",
    [
        with_message({"content": "\ud800"}),
        with_message({"content": 1 << 70}),
        with_message({"content": nested(5000)}),
        msgspec.structs.replace(make_submit(TaskId(1, 1)), attempt=-1),
    ],
    ids=["half a character", "a large number", "deep", "out of range"],
)
def test_what_no_head_would_take_is_known_before_it_is_sent(submit: Submit) -> None:
    with pytest.raises(ValueError, match=r".+"):
        frame_bytes(submit)


# Pieces.

tokens_events = st.builds(
    lambda ids, text, logprobs: Tokens(
        "a", tuple(ids), text, tuple(TokenLogprob(token_id, "t", -1.0) for token_id in ids) if logprobs else ()
    ),
    st.lists(st.integers(0, 1000), max_size=3 * PIECE_TOKENS_MAX),
    st.text(max_size=20),
    st.booleans(),
)


@given(tokens_events)
def test_pieces_are_the_same_event_and_text_comes_with_the_last(event: Tokens) -> None:
    parts = pieces(event)
    assert all(isinstance(part, Tokens) and len(part.token_ids) <= PIECE_TOKENS_MAX for part in parts)
    tokens = [part for part in parts if isinstance(part, Tokens)]
    assert tuple(token_id for part in tokens for token_id in part.token_ids) == event.token_ids
    assert tuple(logprob for part in tokens for logprob in part.logprobs) == event.logprobs
    assert [part.text for part in tokens] == [""] * (len(tokens) - 1) + [event.text]


def test_other_events_are_one_piece() -> None:
    event = Accepted("a", tuple(range(10_000)))
    assert pieces(event) == (event,)


# Credit.

middle_events = st.one_of(
    st.builds(lambda n: Prefilled("a", n, 1000), st.integers(0, 1000)),
    st.builds(lambda n, text: Tokens("a", (n,), text), st.integers(0, 1000), st.text(max_size=200)),
)
end_events = st.sampled_from([Finished("a", "stop", Usage(1, 2, 0)), Failed("a", "engine_error", "no")])


class CreditMachine(RuleBasedStateMachine):
    """An outlet and an inlet with a stream between them that may break at any moment, with all that is on it."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 300
        self.outlet, self.inlet = Outlet(self.window), Inlet(self.window)
        self.to_home: deque[Sent] = deque()
        self.to_head: deque[int] = deque()
        self.up = True
        self.put: list[Event] = []
        self.taken: list[Event] = []
        self.ended = False

    def say(self, event: Event) -> None:
        self.put.append(event)
        sent = self.outlet.put(event)
        if self.up:
            self.to_home.append(sent)

    @precondition(lambda self: self.outlet.room and not self.ended)
    @rule(event=middle_events)
    def the_engine_makes_an_event(self, event: Event) -> None:
        self.say(event)

    @precondition(lambda self: self.outlet.room and not self.ended)
    @rule(event=end_events)
    def the_engine_ends(self, event: Event) -> None:
        self.ended = True
        self.say(event)

    @precondition(lambda self: self.to_home)
    @rule()
    def the_home_hears(self) -> None:
        self.inlet.hear(self.to_home.popleft())
        if self.inlet.ended:
            self.to_head.append(self.inlet.credit())

    @precondition(lambda self: self.inlet)
    @rule()
    def the_client_takes(self) -> None:
        self.taken.append(self.inlet.take())
        if self.inlet.owes_credit and self.up:
            self.to_head.append(self.inlet.credit())

    @precondition(lambda self: self.to_head)
    @rule()
    def the_head_hears(self) -> None:
        self.outlet.credit(self.to_head.popleft())

    @precondition(lambda self: self.up)
    @rule()
    def the_stream_breaks(self) -> None:
        self.up = False
        self.to_home.clear()
        self.to_head.clear()

    @precondition(lambda self: not self.up)
    @rule()
    def the_home_comes_back(self) -> None:
        self.up = True
        heard, taken = self.inlet.heard, self.inlet.credit()
        self.to_home.extend(self.outlet.resume(heard, taken))

    @invariant()
    def nothing_is_lost_doubled_or_reordered(self) -> None:
        assert self.taken == self.put[: len(self.taken)]

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        bound = self.window + 1000  # and the one event that may go beyond
        assert self.outlet.kept_bytes <= bound
        assert sum(weight(event) for event in self.put[self.inlet.taken : self.inlet.heard]) <= bound

    def teardown(self) -> None:
        """Whatever happened, the rest gets through: nobody waits for the other."""
        if not self.up:
            self.the_home_comes_back()
        while not self.outlet.done:
            if self.outlet.room and not self.ended:
                self.the_engine_ends(Finished("a", "stop", Usage(1, 2, 0)))
            elif self.to_home:
                self.the_home_hears()
            elif self.to_head:
                self.the_head_hears()
            else:
                self.the_client_takes()
        while self.inlet:
            self.the_client_takes()
        assert self.taken == self.put


TestCredit = CreditMachine.TestCase
TestCredit.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def say(outlet: Outlet, count: int) -> list[Sent]:
    return [outlet.put(Prefilled("a", n, count)) for n in range(count)]


@pytest.mark.parametrize("taken", [3, 1 << 50])
def test_more_taken_than_said_is_a_violation(taken: int) -> None:
    outlet = Outlet(1000)
    say(outlet, 2)
    with pytest.raises(ProtocolViolation):
        outlet.credit(taken)


@pytest.mark.parametrize(("heard", "taken"), [(3, 0), (0, 0), (1, 2), (2, 3)])
def test_a_resume_that_cannot_be_is_a_violation(heard: int, taken: int) -> None:
    outlet = Outlet(1000)
    say(outlet, 2)
    outlet.credit(1)
    with pytest.raises(ProtocolViolation):
        outlet.resume(heard, taken)


def test_credit_that_was_told_before_says_nothing_new() -> None:
    outlet = Outlet(1000)
    say(outlet, 3)
    outlet.credit(2)
    outlet.credit(1)
    assert [sent.index for sent in outlet.resume(2, 1)] == [2]


@pytest.mark.parametrize("index", [0, 2, 3, -1])
def test_events_out_of_order_are_a_violation(index: int) -> None:
    inlet = Inlet(1000)
    inlet.hear(Sent(0, Accepted("a", ())))
    with pytest.raises(ProtocolViolation):
        inlet.hear(Sent(index, Prefilled("a", 1, 1)))


def test_events_after_the_end_are_a_violation() -> None:
    inlet = Inlet(1000)
    inlet.hear(Sent(0, Failed("a", "engine_error", "no")))
    with pytest.raises(ProtocolViolation):
        inlet.hear(Sent(1, Failed("a", "engine_error", "no")))


def test_events_without_credit_are_a_violation() -> None:
    inlet = Inlet(WINDOW_BYTES)
    with pytest.raises(ProtocolViolation, match="without credit"):  # noqa: PT012 - whichever it is
        for index in range(WINDOW_BYTES):
            inlet.hear(Sent(index, Prefilled("a", 1, 1)))
    assert inlet.heard <= WINDOW_BYTES // 64 + 1
