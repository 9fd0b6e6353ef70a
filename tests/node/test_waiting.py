"""The line before a runner, driven by every order of events that Hypothesis finds."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.waiting import RETRY_SECONDS_UNKNOWN, Line, remaining_seconds, retry_seconds

PLACES = 3


class LineMachine(RuleBasedStateMachine):
    """A line before a runner with three places; the runner answers trials in the order in which they began."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        self.arrived: list[str] = []  # not admitted, in order
        self.trials: list[tuple[str, int]] = []
        self.running: list[str] = []
        self.admitted: list[str] = []
        self.count = 0

    @rule()
    def arrive(self) -> None:
        self.count += 1
        ticket = f"t{self.count}"
        self.line.join(ticket)
        self.arrived.append(ticket)

    def eligible(self) -> list[str]:
        return [ticket for ticket in self.arrived if self.line.may_try(ticket, PLACES - len(self.running))]

    @precondition(lambda self: self.eligible())
    @rule()
    def try_next(self) -> None:
        (ticket,) = self.eligible()  # never two at the same time: the order of submission is the order of arrival
        self.trials.append((ticket, self.line.begin_trial(ticket)))

    @precondition(lambda self: self.trials)
    @rule()
    def answer(self) -> None:
        ticket, openings = self.trials.pop(0)
        if len(self.running) < PLACES:
            self.running.append(ticket)
            self.admitted.append(ticket)
            self.arrived.remove(ticket)
            self.line.leave(ticket)
        else:
            self.line.refuse(ticket, openings)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.running.remove(data.draw(st.sampled_from(self.running)))
        self.line.openings += 1

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.arrived))
        self.line.leave(ticket)
        self.arrived.remove(ticket)
        if any(tried == ticket for tried, _ in self.trials):
            self.trials = [trial for trial in self.trials if trial[0] != ticket]
            self.line.openings += 1

    @invariant()
    def none_starves_beside_a_free_place(self) -> None:
        if self.arrived and not self.trials and len(self.running) < PLACES:
            assert self.eligible() == self.arrived[:1], self.line

    @invariant()
    def none_overtakes_one_that_waits(self) -> None:
        numbers = [int(ticket[1:]) for ticket in self.admitted]
        assert numbers == sorted(numbers)


TestLine = LineMachine.TestCase


def test_the_first_may_try_although_the_figures_see_no_place() -> None:
    line = Line()
    line.join("a")
    line.join("b")

    assert line.may_try("a", free=0)
    line.begin_trial("a")
    assert not line.may_try("b", free=0)
    assert line.may_try("b", free=2)


def test_one_refusal_is_enough_until_something_ends() -> None:
    line = Line()
    line.join("a")
    line.refuse("a", line.begin_trial("a"))
    assert not line.may_try("a", free=9)

    line.openings += 1
    assert line.may_try("a", free=0)


def test_an_opening_during_the_trial_counts() -> None:
    line = Line()
    line.join("a")
    began = line.begin_trial("a")
    line.openings += 1
    line.refuse("a", began)

    assert line.may_try("a", free=0)


def test_whoever_had_to_wait_keeps_its_seat_while_on_trial() -> None:
    line = Line()
    line.join("a")
    assert line.waiting == 0
    assert line.seat("a")
    assert not line.seat("a")

    line.begin_trial("a")
    assert line.waiting == 1
    line.leave("a")
    assert line.waiting == 0


def test_when_to_come_back() -> None:
    assert retry_seconds([], 4, 32) == RETRY_SECONDS_UNKNOWN
    assert retry_seconds([8.0], running=4, waiting=8) == 16
    assert retry_seconds([0.01], running=4, waiting=8) == 1
    assert retry_seconds([500.0], running=1, waiting=8) == 60
    assert remaining_seconds(10.0, 25, 100) == 30
    assert remaining_seconds(10.0, 0, 0) == RETRY_SECONDS_UNKNOWN


@given(st.lists(st.floats(0, 1e6)), st.integers(0, 100), st.integers(0, 100), st.integers(0, 10), st.integers(0, 10))
def test_it_is_always_between_a_second_and_a_minute(
    durations: list[float], running: int, waiting: int, done: int, total: int
) -> None:
    assert 1 <= retry_seconds(durations, running, waiting) <= 60
    assert 1 <= remaining_seconds(sum(durations), done, total) <= 60
