"""Where a request goes: the decisions of the node that accepted it, its home.

    home                                             head (rank 0 of an instance)
    choose() -> an instance; its header is written
    (attempt a)                      submit  ->
                                             <-      Accepted, tokens, end    } all told to heard()
                                             <-      Refused(true load)       }
    choose() again, at most REDIRECTS_MAX times; then it waits in line here
                                             <-      Pull: room here          pulled()

The least loaded instance for its speed is chosen, on counts that may be some gossip old. What keeps that from herding: ties
that each home breaks its own way; one's own headers, which count before they are sent; admission by the head, which alone knows
its load; and above all that nothing queues at a head: what waits does so at its home, and the head that has room pulls it
(node/pulling).

Pure, but for the little memory of a `Router`: `now` and the source of randomness are passed in.
"""

import math
import random
from collections.abc import Sequence

from msgspec import Struct, field

from inference.requests import (
    Accepted,
    ChatPrompt,
    Event,
    Failed,
    Finished,
    Prefilled,
    Prompt,
    Refused,
    Request,
    TextPrompt,
    TokenPrompt,
    Tokens,
)
from node.affinity import Affinity, Prefixes, canonical
from node.instance_health import InstanceHealth, at_fault
from node.refusals import Refusals

REDIRECTS_MAX = 2
TIE = 0.05  # costs so close are the same
INSTANCES_MAX = 1024

# Costs are in tasks' shares: the time of a typical answer. A prompt is evaluated so many times faster, token for token, than an
# answer is generated, so evaluating 2,560 tokens that another instance holds weighs as much as one more task.
ANSWER_TOKENS = 256
PREFILL_SPEEDUP = 10

# Fewer bytes a token than ordinary text has, so that an estimate is seldom too low, and a template's own text.
BYTES_PER_TOKEN_MIN = 3
TEMPLATE_TOKENS = 32


class Candidate(Struct, frozen=True, gc=False):
    """A ready instance whose nodes are alive and take new work.

    `in_flight` is of pending and running tasks only, this home's own headers included: a header is written before its request
    is sent, so whatever this home has decided is in the number already and nothing is added to it here.
    """

    instance_id: int
    node: bytes  # its head's
    in_flight: int
    slots: int = 0  # tasks that it runs at once; 0: not known
    tokens_per_second: int = 0  # of one stream alone; 0: not known
    context: int = 0  # tokens of prompt and answer; 0: not known


class TooLong(Struct, frozen=True):
    """No instance can hold the request: the one with the largest context, which is this, has said so."""

    context: int


class Route(Struct):
    """One request on its way to an instance: what it needs, and what has come of it so far."""

    need_tokens: int  # an estimate, rather too high; see `need_tokens`
    prefixes: Prefixes = Prefixes()
    refused_by: dict[int, None] = field(default_factory=dict)  # since it came, or began to wait
    too_small: int = 0  # the largest context that has turned out too small
    too_small_at: dict[int, None] = field(default_factory=dict)  # the instances that said so; a context may not be known
    chosen: Candidate | None = None  # where it was sent last
    sent: float = 0.0  # when
    answering: bool = False  # a token has come since

    def wait(self) -> None:
        """It stands in line at its home now. Once it tries again, everybody may be asked again."""
        self.refused_by.clear()


def need_tokens(request: Request) -> int:
    """How much context a request may take, prompt and answer together.

    Token ids are counted. Of text nobody knows before it is tokenized, and a home need not have the tokenizer: the estimate is
    cautious, and where it is wrong the instance says so, which costs one hop and is nobody's fault.
    """
    answer = ANSWER_TOKENS if request.max_tokens is None else request.max_tokens
    return _prompt_tokens(request.prompt) + max(answer, len(request.generated) + 1)


def _prompt_tokens(prompt: Prompt) -> int:
    match prompt:
        case TokenPrompt(ids):
            return len(ids)
        case TextPrompt(text):
            return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN_MIN)
        case ChatPrompt():
            size = len(canonical([prompt.messages, prompt.tools]))
            return -(-size // BYTES_PER_TOKEN_MIN) + TEMPLATE_TOKENS


def may_fit(route: Route, candidate: Candidate) -> bool:
    """Whether nothing speaks against its context yet."""
    if candidate.instance_id in route.too_small_at:
        return False
    return not candidate.context or candidate.context > route.too_small


def fits(route: Route, candidate: Candidate, largest: int) -> bool:
    """Whether a request may go there, where `largest` is the largest context of all that could take it.

    Where none seems large enough the largest is asked, since only a tokenizer knows.
    """
    if not may_fit(route, candidate):
        return False
    return not candidate.context or candidate.context >= min(route.need_tokens, largest)


class Router:
    """One home's choices.

    Tell it of a refusal (`heard`), choose again and write the new header in one step: until then the counts still have the
    request where it was refused.
    """

    def __init__(self, chance: random.Random) -> None:
        self.health = InstanceHealth()
        self.affinity = Affinity()
        self._chance = chance
        self._refusals = Refusals()
        self._used: dict[int, int] = {}  # by instance: the number of the last choice of it; the last used at the end
        self._choices = 0

    @property
    def memory_entries(self) -> int:
        """How much it remembers: bounded by 2 * INSTANCES_MAX and the affinity's bound."""
        return len(self._refusals) + len(self._used) + len(self.affinity)

    def choose(self, route: Route, candidates: Sequence[Candidate], now: float) -> Candidate | TooLong | None:
        """Where to send a request now; it counts as sent there. None: nobody seems to have room, it waits at home.

        Instances that failed lately are left alone. Where only such are left, the one whose bar ends first is tried: a client
        whose every choice is bad is served best by an attempt, at worst by an honest error.
        """
        fitting = [c for c in candidates if may_fit(route, c)]
        if not fitting:
            return TooLong(max(c.context for c in candidates)) if candidates else None
        if len(route.refused_by) > REDIRECTS_MAX:
            return None
        trusted = [c for c in fitting if self.health.may_try(c.instance_id, now)] if self.health else fitting
        able = _able(route, trusted or fitting)
        roomy = [c for c in able if c.instance_id not in route.refused_by and not self._full(c, now)]
        if not roomy:
            return None
        choice = self._best(route, roomy, now) if trusted else min(roomy, key=lambda c: self.health.barred_until(c.instance_id))
        self._send(route, choice, now)
        return choice

    def pulled(self, route: Route, candidate: Candidate, largest: int, now: float) -> bool:
        """A head with room asks for a request that waits; whether this one may go there, and then it counts as sent.

        `largest` is the largest context among the candidates.
        """
        if not fits(route, candidate, largest) or not self.health.may_try(candidate.instance_id, now):
            return False
        self._refusals.forget(candidate.instance_id)
        self._send(route, candidate, now)
        return True

    def heard(self, route: Route, event: Event, now: float) -> None:
        """An event of the request's present attempt. Of `Tokens`, the first is enough."""
        if route.chosen is None:
            return
        instance_id = route.chosen.instance_id
        match event:
            case Accepted():
                self.affinity.remember(route.prefixes, instance_id, now)
            case Tokens():
                if not route.answering:
                    route.answering = True
                    self.health.answering(instance_id, sent=route.sent)
            case Prefilled():
                pass
            case Refused():
                route.refused_by[instance_id] = None
                self._refusals.add(instance_id, event.load.running, now)
                self.dropped(route)
            case Finished(reason="cancelled"):
                self.dropped(route)
            case Finished():
                self._refusals.forget(instance_id)
                self.health.served(instance_id, sent=route.sent)
                route.chosen = None
            case Failed():
                self._failed(route, event, now)

    def lost(self, route: Route, now: float, *, stalled: bool = False) -> None:
        """The head can't be reached; `stalled`: it let the request wait too long for a token."""
        if route.chosen is not None:
            instance_id = route.chosen.instance_id
            if self.health.failed(instance_id, sent=route.sent, now=now, stalled=stalled):
                self.affinity.forget(instance_id)
            route.chosen = None

    def dropped(self, route: Route) -> None:
        """The attempt has ended, or is given up, for a reason that says nothing of the instance."""
        if route.chosen is not None:
            self.health.undecided(route.chosen.instance_id, sent=route.sent)
            route.chosen = None

    def _failed(self, route: Route, event: Failed, now: float) -> None:
        assert route.chosen is not None
        if event.code == "context_length_exceeded":
            route.too_small = max(route.too_small, route.chosen.context)
            route.too_small_at[route.chosen.instance_id] = None
        if at_fault(event.code):
            self.lost(route, now)
        else:
            self.dropped(route)

    def _send(self, route: Route, choice: Candidate, now: float) -> None:
        route.chosen, route.sent, route.answering = choice, now, False
        self.health.sent(choice.instance_id, now)
        self._choices += 1
        self._used.pop(choice.instance_id, None)
        self._used[choice.instance_id] = self._choices
        if len(self._used) > INSTANCES_MAX:
            del self._used[next(iter(self._used))]

    def _full(self, candidate: Candidate, now: float) -> bool:
        refused = self._refusals.stands(candidate.instance_id, candidate.in_flight, now)
        return refused or 0 < candidate.slots <= candidate.in_flight

    def _best(self, route: Route, roomy: Sequence[Candidate], now: float) -> Candidate:
        """The least cost; of equal ones that which holds most of the prompt already."""
        saved = self.affinity.saved_tokens(route.prefixes, now)
        most = max(saved.values(), default=0)
        costs = [
            (c.in_flight + 1 + (most - saved.get(c.instance_id, 0)) / (ANSWER_TOKENS * PREFILL_SPEEDUP)) / speed
            for c, speed in zip(roomy, _speeds(roomy), strict=True)
        ]
        least = min(costs)
        ties = [c for c, cost in zip(roomy, costs, strict=True) if cost <= least * (1 + TIE)]
        if saved:
            best = max(saved.get(c.instance_id, 0) for c in ties)
            ties = [c for c in ties if saved.get(c.instance_id, 0) == best]
        return self._least_used(ties)

    def _least_used(self, ties: Sequence[Candidate]) -> Candidate:
        """One at random of the half of equal ones that this home has used least lately.

        Of two or three it is the one used longest ago, so that requests one by one go round. Of many, keeping strictly to that
        would let homes meet more often: simulated, a fifth more refusals among 50 instances.
        """
        order = sorted(ties, key=lambda c: (self._used.get(c.instance_id, 0), self._chance.random()))
        return self._chance.choice(order[: max(1, len(order) // 2)])


def _able(route: Route, candidates: Sequence[Candidate]) -> list[Candidate]:
    largest = max(c.context for c in candidates)
    able = [c for c in candidates if not c.context or c.context >= route.need_tokens]
    return able or [c for c in candidates if c.context == largest]


def _speeds(candidates: Sequence[Candidate]) -> list[float]:
    """Tokens a second of one stream, to a power of two, since measurements differ; the typical where one isn't known.

    A cost is (in flight + 1 + prompt to evaluate) / speed: how long the request takes where all tasks there share the speed.
    """
    known = sorted(c.tokens_per_second for c in candidates if c.tokens_per_second > 0)
    typical = known[len(known) // 2] if known else 1
    return [2.0 ** round(math.log2(c.tokens_per_second or typical)) for c in candidates]
