"""What people do with a cluster: they ask at any node, read on or leave, and have each other's requests cancelled."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import trio

from inference.requests import ChatPrompt, Event, Failed, Finished, Request, Sampling, Tokens
from node.service import GenerateError
from tests.sim.whole_cluster import WholeCluster
from tests.sim.whole_node import WholeNode

STOPS = ((), (), (), ("END",), ("abc", "\n\n"))


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a client asks for, and how patient it is."""

    model: str = "m"
    text: str = "hi"
    seed: int = 1
    temperature: float = 1.0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    leaves_after_tokens: float = math.inf  # events with tokens; 0: with the first sign of life
    leaves_after_seconds: float = math.inf
    pause_seconds: float = 0.0  # between two events that it reads

    @property
    def request(self) -> Request:
        """As a door makes it."""
        return Request(
            request_id="from-the-door",
            prompt=ChatPrompt(({"role": "user", "content": self.text},)),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )

    @property
    def sampling(self) -> Sampling:
        """How its tokens are drawn."""
        return Sampling(seed=self.seed, temperature=self.temperature)


class Client:
    """One request as its sender sees it."""

    def __init__(self, number: int, wish: Wish, tell: Callable[..., None] = lambda *_: None) -> None:
        self.number = number
        self.wish = wish
        self.task_id = ""
        self.executed_by = ""
        self.events: list[Event] = []
        self.error: GenerateError | None = None
        self.asked_at = math.inf
        self.token_times: list[float] = []
        self.ended_at = math.inf
        self.home: WholeNode | None = None
        self.left = False
        self.home_died = False
        self.gone = trio.Event()
        self._scope = trio.CancelScope()
        self._tell = tell

    def __repr__(self) -> str:
        return f"Client({self.number}, {self.task_id or self.wish.text!r}, {self.outcome})"

    @property
    def over(self) -> bool:
        """Whether it has gone, with an answer or not."""
        return self.ended_at < math.inf

    @property
    def end(self) -> Finished | Failed | None:
        """The end that it was told."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished | Failed) else None

    @property
    def outcome(self) -> str:
        """In one word."""
        end = self.end
        if isinstance(end, Finished):
            return end.reason
        if end is not None:
            return end.code
        if self.error is not None:
            return type(self.error).__name__
        return "left" if self.left else "home died" if self.home_died else "open"

    @property
    def complete(self) -> bool:
        """Whether it has a whole answer."""
        return self.outcome in {"stop", "length"}

    @property
    def token_ids(self) -> list[int]:
        """All that it got."""
        return [token_id for event in self.events if isinstance(event, Tokens) for token_id in event.token_ids]

    @property
    def text(self) -> str:
        """All that it got."""
        return "".join(event.text for event in self.events if isinstance(event, Tokens))

    def leave(self) -> None:
        """It goes, wherever it is."""
        self.left = True
        self._scope.cancel()

    async def ask(self, home: WholeNode) -> None:
        """From its question to its going."""
        self.home, self.asked_at = home, trio.current_time()
        self._tell("asks", self.number, home.place, self.wish.model, self.wish.max_tokens)
        home.clients[self._scope] = None
        self._scope.deadline = self.asked_at + self.wish.leaves_after_seconds
        try:
            with self._scope:
                await self._talk(home)
        except GenerateError as error:
            self.error = error
        del home.clients[self._scope]
        if self._scope.cancel_called and self.end is None and self.error is None:
            self.home_died = home.ended
            self.left = not self.home_died
        self.ended_at = trio.current_time()
        self.gone.set()
        self._tell("gone", self.number, self.task_id, self.outcome, self.error or "")

    async def _talk(self, home: WholeNode) -> None:
        tokens = 0
        async with home.node.generate(self.wish.model, self.wish.request) as answer:
            self.task_id, self.executed_by = answer.task_id, answer.executed_by
            async for event in answer.events:
                self.events.append(event)
                self._tell("hears", self.number, type(event).__name__, getattr(event, "token_ids", ""))
                if isinstance(event, Tokens):
                    tokens += 1
                    self.token_times.append(trio.current_time())
                if tokens >= self.wish.leaves_after_tokens:
                    self.leave()
                    await trio.lowlevel.checkpoint()
                if self.wish.pause_seconds:
                    await trio.sleep(self.wish.pause_seconds)


class Work:
    """Clients at random nodes, at random moments, by one seed."""

    def __init__(self, cluster: WholeCluster, chance: random.Random, models: tuple[str, ...]) -> None:
        self.clients: list[Client] = []
        self.cancelled: dict[str, None] = {}  # tasks that somebody wished to end
        self._cluster = cluster
        self._chance = chance
        self._models = models

    def client(self, wish: Wish) -> Client:
        """One more."""
        client = Client(len(self.clients), wish, self._cluster.trace.tell)
        self.clients.append(client)
        return client

    def wish(self) -> Wish:
        """Some wish."""
        chance = self._chance
        patience: dict[str, float] = {}
        mood = chance.random()
        if mood < 0.12:
            patience["leaves_after_seconds"] = chance.choice((0.0, 0.001, 0.01, 0.1, 1.0, 3.0)) * (1 + chance.random())
        elif mood < 0.24:
            patience["leaves_after_tokens"] = chance.randrange(12)
        elif mood < 0.3:
            patience["pause_seconds"] = chance.uniform(0, 0.5)
        return Wish(
            model=chance.choice(self._models),
            text="".join(chance.choice("ab \n日") for _ in range(int(chance.expovariate(0.05)) + 1)),
            seed=chance.randrange(1 << 40),
            temperature=chance.choice((0.0, 0.7)),
            max_tokens=1 + int(chance.expovariate(1 / 24)),
            stop=chance.choice(STOPS),
            **patience,
        )

    async def run(self, seconds: float, rate: float, cancels: float) -> None:
        """So many requests a second for a while, and so many cancels; returns when the last client has gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_some, seconds, cancels)
            until = trio.current_time() + seconds
            while True:
                await trio.sleep(self._chance.expovariate(rate))
                if trio.current_time() >= until:
                    break
                for _ in range(1 if self._chance.random() < 0.9 else self._chance.randrange(2, 10)):  # at times many at once
                    live = self._cluster.live
                    if live:
                        nursery.start_soon(self.client(self.wish()).ask, self._chance.choice(live))

    async def _cancel_some(self, seconds: float, rate: float) -> None:
        until = trio.current_time() + seconds
        while rate:
            await trio.sleep(self._chance.expovariate(rate))
            if trio.current_time() >= until:
                return
            live = self._cluster.live
            if live:
                await self.cancel_any(self._chance.choice(live))

    async def cancel_any(self, node: WholeNode) -> None:
        """Have some task that a node knows of ended, whoever's it is."""
        known = [task.task_id for task in node.service.state().tasks if task.status in {"pending", "running"}]
        if known:
            await self.cancel(node, self._chance.choice(sorted(known)))

    async def cancel(self, node: WholeNode, task_id: str) -> str | None:
        """Have a task ended by any node; its status then."""
        self.cancelled[task_id] = None
        status = await node.service.cancel(task_id)
        self._cluster.trace.tell("cancels", node.place, task_id, status)
        return status
