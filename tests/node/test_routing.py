"""Where a home sends a request: load, speed, room, context, what was sent there before, and what failed there."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.requests import (
    Accepted,
    ChatPrompt,
    Event,
    Failed,
    Load,
    Request,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from node.affinity import prefixes
from node.refusals import REFUSAL_SECONDS
from node.routing import (
    ANSWER_TOKENS,
    INSTANCES_MAX,
    REDIRECTS_MAX,
    Candidate,
    Route,
    Router,
    TooLong,
    need_tokens,
)
from tests.node.routing_examples import DONE, candidates, refuse, run, turns, went


@pytest.fixture
def router() -> Router:
    return Router(random.Random(1))


def test_the_least_loaded_for_its_speed(router: Router) -> None:
    assert went(router.choose(Route(1), candidates(3, 1, 2), 0.0)) == 1
    assert went(router.choose(Route(1), candidates(0, 0, speeds=(20, 90)), 0.0)) == 1
    assert went(router.choose(Route(1), candidates(0, 3, slots=8, speeds=(20, 90)), 0.0)) in {0, 1}
    assert went(router.choose(Route(1), candidates(0, 4, slots=8, speeds=(20, 90)), 0.0)) == 0
    assert went(router.choose(Route(1), candidates(1, 0, 1, speeds=(60, 0, 70)), 0.0)) == 1, "unknown: as the others"


def test_speeds_that_differ_by_noise_are_the_same(router: Router) -> None:
    chosen = Counter(went(router.choose(Route(1), candidates(0, 0, speeds=(60, 70)), 0.0)) for _ in range(10))

    assert chosen == {0: 5, 1: 5}


def test_ties_within_five_percent(router: Router) -> None:
    chosen = Counter(went(router.choose(Route(1), candidates(40, 41, 50, slots=0), 0.0)) for _ in range(10))

    assert chosen == {0: 5, 1: 5}


def test_the_first_choice_among_equal_ones_is_random() -> None:
    first = Counter(went(Router(random.Random(seed)).choose(Route(1), candidates(0, 0, 0, 0), 0.0)) for seed in range(200))

    assert min(first[number] for number in range(4)) > 25


def test_a_full_instance_gets_nothing_and_unknown_slots_are_tried(router: Router) -> None:
    assert went(router.choose(Route(1), candidates(4, 3), 0.0)) == 1
    assert router.choose(Route(1), candidates(4, 4), 0.0) is None
    assert went(router.choose(Route(1), candidates(4, slots=0), 0.0)) == 0
    assert router.choose(Route(1), [], 0.0) is None


def test_at_most_two_redirects_and_then_it_waits(router: Router) -> None:
    route = Route(1)
    asked = []
    for _ in range(REDIRECTS_MAX + 1):
        asked.append(went(router.choose(route, candidates(0, 0, 0, 0, 0), 0.0)))
        refuse(router, route)
    assert len(set(asked)) == REDIRECTS_MAX + 1, "nobody is asked twice"
    assert router.choose(route, candidates(0, 0, 0, 0, 0), 0.0) is None

    route.wait()
    assert went(router.choose(route, candidates(0, 0, 0, 0, 0), 0.0)) not in asked, "their refusals are still believed"


def test_a_refusal_stands_against_the_view_for_others_too_until_the_view_shows_an_end(router: Router) -> None:
    route = Route(1)
    router.choose(route, candidates(0), 0.0)
    refuse(router, route)

    def full(in_flight: int, now: float = 0.0) -> bool:
        return router.choose(Route(1), candidates(in_flight), now) is None

    assert full(0), "the view is behind"
    assert full(3)
    assert full(4), "now it has caught up"
    assert not full(3), "and this is news"
    refuse(router, Route(1, chosen=candidates(0)[0]), now=1.0)
    assert full(0, 1.0 + REFUSAL_SECONDS - 0.1)
    assert not full(0, 1.0 + REFUSAL_SECONDS)


def test_a_refusal_for_want_of_memory_is_believed_though_places_are_free(router: Router) -> None:
    refuse(router, Route(1, chosen=candidates(0)[0]), Load(1, 4, 900, 1000))

    assert router.choose(Route(1), candidates(1), 0.0) is None
    assert went(router.choose(Route(1), candidates(0), 0.0)) == 0


@pytest.mark.parametrize("opening", ["own end", "pull"])
def test_what_shows_room_ends_a_refusal(router: Router, opening: str) -> None:
    running, refused = Route(1), Route(1)
    router.choose(running, candidates(0), 0.0)
    router.choose(refused, candidates(1), 0.0)
    refuse(router, refused)
    assert router.choose(refused, candidates(1), 0.0) is None
    refused.wait()

    if opening == "own end":
        router.heard(running, DONE, 1.0)
        assert went(router.choose(refused, candidates(0), 1.0)) == 0
    else:
        assert router.pulled(refused, candidates(4)[0], 0, 1.0)
        assert went(router.choose(Route(1), candidates(2), 1.0)) == 0


# Context.


def ask(prompt: str | tuple[int, ...], max_tokens: int | None = None, generated: tuple[int, ...] = ()) -> Request:
    shape = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt)
    return Request(request_id="r", prompt=shape, sampling=Sampling(seed=0), max_tokens=max_tokens, generated=generated)


def test_what_a_request_needs() -> None:
    assert need_tokens(ask((1,) * 100, 50)) == 150
    assert need_tokens(ask((1,) * 100)) == 100 + ANSWER_TOKENS
    assert need_tokens(ask((1,) * 100, 50, (1,) * 20)) == 150, "max_tokens counts what was generated"
    assert need_tokens(ask((1,) * 100, None, (1,) * 500)) == 601
    assert need_tokens(ask("word " * 300, 1)) == 501, "a third of a byte count: some 300 in truth"
    chat = Request(request_id="r", prompt=ChatPrompt(({"role": "user", "content": "\ud800"},)), sampling=Sampling(seed=0))
    assert ANSWER_TOKENS < need_tokens(chat) < ANSWER_TOKENS + 100


def test_it_goes_where_it_surely_fits(router: Router) -> None:
    for _ in range(4):
        assert went(router.choose(Route(2000), candidates(0, 2, contexts=(512, 8192)), 0.0)) == 1
    assert went(router.choose(Route(500), candidates(0, 2, contexts=(512, 8192)), 0.0)) == 0
    assert went(router.choose(Route(2000), candidates(0, 2, contexts=(0, 8192)), 0.0)) == 0, "not known: may fit"
    assert router.choose(Route(2000), candidates(0, 4, contexts=(512, 8192)), 0.0) is None, "rather than to certain failure"


def too_long(router: Router, route: Route) -> None:
    router.heard(route, Failed("r", "context_length_exceeded", "too long"), 0.0)


def test_an_estimate_that_was_too_low_goes_on_to_a_larger_context() -> None:
    """C18 (mesh-llm PR#131), the prompt of 2,000 tokens that seemed short."""
    for seed in range(10):
        router, route = Router(random.Random(seed)), Route(100)
        cluster = candidates(0, 3, 0, contexts=(512, 8192, 512))
        assert went(router.choose(route, cluster, 0.0)) in {0, 2}
        too_long(router, route)
        assert went(router.choose(route, cluster, 0.0)) == 1
        assert route.refused_by == {}, "no redirect"
        assert all(router.health.may_try(c.instance_id, 0.0) for c in cluster), "nor a fault"


def test_only_the_largest_context_says_that_a_request_is_too_long(router: Router) -> None:
    """C18 (mesh-llm PR#141), the prompt of 10,000 tokens."""
    route, cluster = Route(10_000), candidates(0, 3, 2, contexts=(512, 8192, 4096))
    assert went(router.choose(route, cluster, 0.0)) == 1, "an estimate is no proof"
    too_long(router, route)

    assert router.choose(route, cluster, 0.0) == TooLong(8192)


def test_an_instance_of_unknown_context_is_asked_once(router: Router) -> None:
    route, cluster = Route(100), candidates(0, 1, contexts=(0, 512))
    for expected in (0, 1):
        assert went(router.choose(route, cluster, 0.0)) == expected
        assert router.health.may_try(expected, 0.0)
        too_long(router, route)

    assert router.choose(route, cluster, 0.0) == TooLong(512)


def test_a_pull_from_too_small_a_context_gets_nothing(router: Router) -> None:
    small, large = candidates(0, 0, contexts=(512, 8192))

    assert not router.pulled(Route(2000), small, 8192, 0.0)
    assert router.pulled(Route(2000), large, 8192, 0.0)
    assert router.pulled(Route(10_000), large, 8192, 0.0), "only it can say that it is too small"
    assert not router.pulled(Route(100, too_small=8192), large, 8192, 0.0)


# Beginnings of prompts.


def test_the_turns_of_a_chat_stay_on_one_of_three_idle_replicas(router: Router) -> None:
    assert len({run(router, prompt, candidates(0, 0, 0)) for prompt in turns(10)}) == 1


def test_twenty_chats_split_evenly() -> None:
    router = Router(random.Random(3))
    chats = [
        ChatPrompt(({"role": "system", "content": "Be kind. " * 500}, {"role": "user", "content": f"{n}"})) for n in range(20)
    ]

    assert sorted(Counter(run(router, chat, candidates(0, 0, 0)) for chat in chats).values()) == [6, 7, 7]


def test_a_beginning_is_worth_the_wait_only_where_it_saves_more(router: Router) -> None:
    short, long = turns(2, words=20), turns(2, words=8000)
    held = {run(router, prompt, candidates(0, 9, slots=0)) for prompt in (short[0], long[0])}
    assert held == {0}

    assert went(router.choose(Route(1, prefixes(short[1], "m")), candidates(1, 0), 0.0)) == 1
    assert went(router.choose(Route(1, prefixes(long[1], "m")), candidates(2, 0), 0.0)) == 0, "10,000 tokens: some 4 shares"
    assert went(router.choose(Route(1, prefixes(long[1], "m")), candidates(3, 0, speeds=(16, 64)), 0.0)) == 1
    assert went(router.choose(Route(1, prefixes(long[1], "m")), candidates(4, 0), 0.0)) == 1, "it is full"


# Bursts.


@pytest.mark.parametrize("seed", range(5))
def test_sequential_requests_go_to_both_replicas(seed: int) -> None:
    """C1 (exo#1989): what has ended is not in flight, so each of 100 requests finds two idle replicas."""
    router = Router(random.Random(seed))
    chosen = Counter(
        run(router, ChatPrompt(({"role": "user", "content": f"question {n}"},)), candidates(0, 0), n * 1.0) for n in range(100)
    )

    assert 40 <= chosen[0] <= 60
    assert chosen.total() == 100


@pytest.mark.parametrize("slots", [0, 16])
@pytest.mark.parametrize("seed", range(5))
def test_a_burst_at_one_home_splits_on_its_own_headers_alone(seed: int, slots: int) -> None:
    """C5: 20 at once, and for a second nobody else hears of them."""
    router = Router(random.Random(seed))
    headers = [0, 0]
    for _ in range(20):
        headers[went(router.choose(Route(1), candidates(*headers, slots=slots), 0.0))] += 1

    assert 8 <= headers[0] <= 12


def test_its_memory_is_bounded(router: Router) -> None:
    for number in range(2 * INSTANCES_MAX):
        route = Route(1)
        router.choose(route, [Candidate(number, b"", 0)], 0.0)
        refuse(router, route)

    assert router.memory_entries <= 3 * INSTANCES_MAX


ANY = st.builds(
    Candidate,
    instance_id=st.integers(0, 5),
    node=st.just(b""),
    in_flight=st.integers(0, 6),
    slots=st.integers(0, 4),
    tokens_per_second=st.integers(0, 1000),
    context=st.sampled_from([0, 512, 8192]),
)


@given(
    st.lists(ANY, max_size=6, unique_by=lambda c: c.instance_id), st.lists(st.sampled_from("acfrtsx")), st.integers(1, 20_000)
)
def test_every_request_comes_to_an_instance_an_error_or_the_line(cluster: list[Candidate], events: str, need: int) -> None:
    router, route = Router(random.Random(0)), Route(need)
    for step, event in enumerate(events):
        now = float(step)
        choice = router.choose(route, cluster, now)
        if not isinstance(choice, Candidate):
            assert choice is None or choice.context == max(c.context for c in cluster)
            route = Route(need)
            continue
        assert choice in cluster
        assert not choice.slots or choice.in_flight < choice.slots
        assert choice.instance_id not in route.refused_by
        if event == "r":
            refuse(router, route, now=now)
        elif event == "t":
            too_long(router, route)
        elif event == "s":
            router.lost(route, now, stalled=True)
        elif event == "x":
            router.dropped(route)
        else:
            heard: dict[str, Event] = {"a": Accepted("r", (1,)), "c": DONE, "f": Failed("r", "engine_error", "")}
            router.heard(route, heard[event], now)
