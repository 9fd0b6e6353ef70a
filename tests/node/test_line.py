"""The line in which requests wait at their home: order, offers and levels, against a plain list."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.line import Line, Place, Seats


class LineMachine(RuleBasedStateMachine):
    """Requests come, try, are refused, are asked for, and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        self.order: list[Place] = []
        self.now = 0.0

    @rule()
    def join(self) -> None:
        self.now += 1
        self.order.append(self.line.join(self.now))

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.order))
        self.order.remove(place)
        self.line.leave(place)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def sit_down(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.order)).seated = True

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def try_or_come_back(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.order))
        if place.on_trial:
            place.on_trial = False
        elif self.line.may_try(place):
            place.offer = None
            place.on_trial = True

    @rule(count=st.integers(1, 3))
    def offer(self, count: int) -> None:
        wanting = [place for place in self.order if place.seated and not place.on_trial and place.offer is None]
        assert self.line.offer(7, count) == min(count, len(wanting))
        assert [place.offer for place in wanting[:count]] == [7] * min(count, len(wanting))

    @invariant()
    def nobody_overtakes_one_that_waits(self) -> None:
        for index, place in enumerate(self.order):
            free = all(other.on_trial for other in self.order[:index])
            assert self.line.may_try(place) == (free or place.offer is not None)

    @invariant()
    def it_tells_how_many_wait_and_since_when(self) -> None:
        waiting = [place for place in self.order if place.seated and not place.on_trial]
        assert self.line.level() == (len(waiting), waiting[0].since if waiting else None)
        seats = Seats(3, {"m": self.line})
        assert seats.taken == self.line.waiting == sum(place.seated for place in self.order)
        assert len(self.line) == len(self.order)


TestLine = LineMachine.TestCase
