"""Events in virtual time, and streams between nodes that lose, delay, double and reorder frames as they are told.

One heap of events, one seeded source of randomness: a seed gives the same run to the byte, in any process.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

FRAME_OVERHEAD_BYTES = 86  # length 4, yamux 12, Noise 18, TCP with timestamps 32, IPv4 20
TCP_ACK_BYTES = 52  # for a frame that nothing answers at once
DIAL_BYTES = 1700  # sent by each side for TCP, Noise and yamux, measured
DIAL_CPU_SECONDS = 0.010  # of each side, measured
DIAL_TIMEOUT_SECONDS = 1.0
ROOT_TAG = 1


class Weather(Struct):
    """How the network treats frames."""

    delay: float = 0.001  # seconds one way, at least
    jitter: float = 0.001  # seconds on top, at most
    loss: float = 0.0
    exchange_loss: float = 0.0  # of whole repair exchanges, by losing the frame that begins one
    duplication: float = 0.0
    reordering: float = 0.0  # frames that may be overtaken, by up to `reorder_seconds`
    reorder_seconds: float = 0.2


class Events:
    """A heap of calls in virtual time, in the order of their times and then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._made = 0

    def at(self, time: float, call: Callable[..., None], *arguments: object) -> None:
        """Call this then."""
        self._made += 1
        heapq.heappush(self._heap, (time, self._made, call, arguments))

    def run(self, until: float) -> int:
        """Do all that is due; returns the number of events."""
        heap, pop = self._heap, heapq.heappop
        count = 0
        while heap and heap[0][0] <= until:
            self.now, _, call, arguments = pop(heap)
            call(*arguments)
            count += 1
        self.now = until
        return count


class Network:
    """Streams between numbered places, and the ways in which they fail.

    `deliver(place, from, body)`, `opened(place, peer)`, `ended(place, peer, broken)` and `failed(place, target, refused)` are
    the far ends. A frame sent into a cut is lost; that its stream broke is found out only by who probes.
    """

    def __init__(self, events: Events, chance: random.Random, weather: Weather) -> None:
        self.events = events
        self.chance = chance
        self.weather = weather
        self.streams: dict[tuple[int, int], int] = {}  # (from, to) -> number of the stream
        self.up: dict[int, bool] = {}  # the process listens
        self.reachable: dict[int, bool] = {}  # the host answers
        self.sides: dict[int, int] | None = None  # place -> side of a partition
        self.cuts: dict[tuple[int, int], None] = {}  # one way
        self.sent_bytes: Counter[int] = Counter()
        self.dials = 0
        self.counts: Counter[str] = Counter()
        self.deliver: Callable[[int, int, bytes], None] = lambda *_: None
        self.opened: Callable[[int, int], None] = lambda *_: None
        self.ended: Callable[[int, int, bool], None] = lambda *_: None
        self.failed: Callable[[int, int, bool], None] = lambda *_: None
        self._numbers = 0
        self._arrivals: dict[tuple[int, int], float] = {}

    def blocked(self, sender: int, receiver: int) -> bool:
        """Whether a frame that way is lost."""
        if self.sides is not None and self.sides.get(sender) != self.sides.get(receiver):
            self.counts["partitioned"] += 1
            return True
        if self.cuts and (sender, receiver) in self.cuts:
            self.counts["cut"] += 1
            return True
        return not self.reachable.get(receiver, False)

    def send(self, sender: int, receiver: int, body: bytes) -> None:
        """One frame on the stream between two places."""
        number = self.streams.get((sender, receiver))
        if number is None:
            return
        self.sent_bytes[sender] += FRAME_OVERHEAD_BYTES + len(body)
        weather, random_ = self.weather, self.chance.random
        if self.blocked(sender, receiver):
            return
        lossy = weather.loss or (weather.exchange_loss if body[1] == ROOT_TAG else 0.0)
        if lossy and random_() < lossy:
            self.counts["lost"] += 1
            return
        arrival = self.events.now + weather.delay + weather.jitter * random_()
        if weather.reordering and random_() < weather.reordering:
            self.counts["reordered"] += 1
            arrival += weather.reorder_seconds * random_()
        else:
            # A stream keeps the order of its frames.
            arrival = max(arrival, self._arrivals.get((sender, receiver), 0.0))
            self._arrivals[sender, receiver] = arrival
        self.events.at(arrival, self._arrive, number, sender, receiver, body)
        if weather.duplication and random_() < weather.duplication:
            self.counts["duplicated"] += 1
            self.events.at(arrival + 0.05 * random_(), self._arrive, number, sender, receiver, body)

    def _arrive(self, number: int, sender: int, receiver: int, body: bytes) -> None:
        if self.streams.get((sender, receiver)) == number and self.up.get(receiver):
            self.deliver(receiver, sender, body)

    def dial(self, dialler: int, target: int) -> None:
        """Open a stream; `opened` at both ends, or `failed` at the dialler's."""
        if (dialler, target) in self.streams:
            return
        self.dials += 1
        trip = self.weather.delay + self.weather.jitter
        if self.blocked(dialler, target) or self.blocked(target, dialler):
            self.events.at(self.events.now + DIAL_TIMEOUT_SECONDS, self._fail, dialler, target, False)
        elif not self.up.get(target):
            self.events.at(self.events.now + 2 * trip, self._fail, dialler, target, True)
        else:
            self.events.at(self.events.now + 3 * trip + DIAL_CPU_SECONDS, self._open, dialler, target)

    def _fail(self, dialler: int, target: int, refused: bool) -> None:
        if self.up.get(dialler):
            self.failed(dialler, target, refused)

    def _open(self, dialler: int, target: int) -> None:
        if not self.up.get(target) or self.blocked(dialler, target):
            self._fail(dialler, target, not self.blocked(dialler, target))
            return
        if not self.up.get(dialler) or (dialler, target) in self.streams:
            return
        self.sent_bytes[dialler] += DIAL_BYTES
        self.sent_bytes[target] += DIAL_BYTES
        self.join(dialler, target)
        self.opened(dialler, target)
        self.opened(target, dialler)

    def join(self, one: int, other: int) -> None:
        """A stream is there, without a dial."""
        self._numbers += 1
        self.streams[one, other] = self.streams[other, one] = self._numbers

    def close(self, closer: int, peer: int, *, broken: bool = False) -> None:
        """One end closes; the other hears of it unless it is cut off. `broken`: its process is gone."""
        if self.streams.pop((closer, peer), None) is None:
            return
        self.streams.pop((peer, closer), None)
        if not self.blocked(closer, peer):
            self.events.at(self.events.now + self.weather.delay, self._end, peer, closer, broken)
        else:
            # Found out when it next sends: its kernel gets no answer for long. The core's probes are faster.
            self.events.at(self.events.now + 60.0, self._end, peer, closer, True)

    def _end(self, place: int, peer: int, broken: bool) -> None:
        if self.up.get(place) and (place, peer) not in self.streams:
            self.ended(place, peer, broken)

    def stop(self, place: int, *, silent: bool) -> None:
        """A process is gone; the kernel tells its peers, unless the whole host is gone (silent)."""
        self.up[place] = False
        self.reachable[place] = not silent
        for one, other in list(self.streams):
            if one == place:
                if silent:
                    self.streams.pop((one, other))
                    self.streams.pop((other, one))
                else:
                    self.close(place, other, broken=True)

    def listen(self, place: int) -> None:
        """A process is there."""
        self.up[place] = True
        self.reachable[place] = True
