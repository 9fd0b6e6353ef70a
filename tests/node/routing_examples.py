"""What the tests of routing have in common: instances to choose from, and requests that go all the way."""

from collections.abc import Sequence

from inference.requests import Accepted, ChatPrompt, Finished, Load, Refused, Tokens, Usage
from node.affinity import prefixes
from node.routing import Candidate, Route, Router, TooLong

FULL = Load(4, 4, 0, 0)
DONE = Finished("r", "stop", Usage(1, 1, 0))


def candidates(*in_flight: int, slots: int = 4, speeds: Sequence[int] = (), contexts: Sequence[int] = ()) -> list[Candidate]:
    """Instances 0, 1, ... with so many in flight."""
    return [
        Candidate(
            number,
            bytes([number]) * 16,
            count,
            slots,
            speeds[number] if speeds else 0,
            contexts[number] if contexts else 0,
        )
        for number, count in enumerate(in_flight)
    ]


def went(choice: Candidate | TooLong | None) -> int:
    """The instance that was chosen."""
    assert isinstance(choice, Candidate)
    return choice.instance_id


def refuse(router: Router, route: Route, load: Load = FULL, now: float = 0.0) -> None:
    """The head that was chosen has no room."""
    router.heard(route, Refused("r", 0, load), now)


def turns(count: int, words: int = 20) -> list[ChatPrompt]:
    """The prompts of a conversation's turns."""
    messages: list[dict[str, object]] = []
    prompts = []
    for turn in range(count):
        messages.append({"role": "user", "content": f"question {turn}"})
        prompts.append(ChatPrompt(tuple(messages)))
        messages.append({"role": "assistant", "content": "word " * words})
    return prompts


def run(router: Router, prompt: ChatPrompt, cluster: list[Candidate], now: float = 0.0) -> int:
    """One request from its choice to its end."""
    route = Route(1, prefixes(prompt, "m"))
    chosen = went(router.choose(route, cluster, now))
    for event in (Accepted("r", (1,)), Tokens("r", (1,), "a"), DONE):
        router.heard(route, event, now)
    return chosen
