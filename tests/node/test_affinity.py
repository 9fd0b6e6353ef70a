"""Beginnings of prompts: what counts as the same, what is remembered, and that it is bounded."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from node.affinity import (
    FIRST_MESSAGE_TOKENS_MIN,
    HOLDERS_MAX,
    PREFIXES_MAX,
    REMEMBER_SECONDS,
    REMEMBERED_MAX,
    Affinity,
    prefixes,
)

MODEL = "abc"
LONG = "long " * FIRST_MESSAGE_TOKENS_MIN


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, object], tools: tuple[dict[str, object], ...] = ()) -> ChatPrompt:
    return ChatPrompt(messages, tools)


def saved(affinity: Affinity, prompt: Prompt, now: float = 0.0, model: str = MODEL) -> dict[int, int]:
    return affinity.saved_tokens(prefixes(prompt, model), now)


def ran(prompt: Prompt, instance_id: int = 1, affinity: Affinity | None = None) -> Affinity:
    affinity = Affinity() if affinity is None else affinity
    affinity.remember(prefixes(prompt, MODEL), instance_id, 0.0)
    return affinity


def test_the_next_turn_of_a_chat_is_known_where_the_last_one_ran() -> None:
    turns = [user("hello"), answer("Good day! " * 20), user("how are you?")]
    affinity = ran(chat(*turns[:1]))

    known = saved(affinity, chat(*turns))

    assert list(known) == [1]
    assert known[1] >= 40, "the answer was made there, so it is held there too"


def test_each_turn_is_known_by_the_longest_beginning() -> None:
    turns = [user("hello"), answer("yes"), user("why?"), answer("so " * 100), user("and?")]
    affinity = ran(chat(*turns[:1]), 1)
    ran(chat(*turns[:3]), 2, affinity)

    known = saved(affinity, chat(*turns))

    assert known[2] > known[1] > 0


def test_an_edited_last_message_finds_what_stays() -> None:
    affinity = ran(chat(user("a"), answer("b"), user("c"), answer("d"), user("e")))

    assert list(saved(affinity, chat(user("a"), answer("b"), user("c"), answer("d"), user("other")))) == [1]


def test_what_all_conversations_share_draws_none_of_them() -> None:
    system: dict[str, object] = {"role": "system", "content": LONG}
    tools: tuple[dict[str, object], ...] = ({"type": "function", "function": {"name": "f"}},)
    affinity = ran(chat(system, user("one"), tools=tools))

    assert saved(affinity, chat(system, user("two"), tools=tools)) == {}
    assert saved(affinity, chat(system, user("one"), answer("x"), user("on"), tools=tools)) != {}


def test_a_short_first_message_is_no_conversation_but_a_long_one_is_worth_returning_to() -> None:
    affinity = ran(chat(user("hi")))
    ran(chat(user(LONG)), 2, affinity)

    assert saved(affinity, chat(user("hi"))) == {}
    assert list(saved(affinity, chat(user(LONG)))) == [2]


@pytest.mark.parametrize(
    "other",
    [
        ChatPrompt((user("a"), answer("b"), user("c")), ({"type": "function"},)),
        ChatPrompt((user("a"), answer("b"), user("c")), (), {"enable_thinking": False}),
        ChatPrompt((user("A"), answer("b"), user("c"))),
    ],
)
def test_tools_options_and_text_all_count(other: ChatPrompt) -> None:
    affinity = ran(chat(user("a")))

    assert saved(affinity, chat(user("a"), answer("b"), user("c"))) != {}
    assert saved(affinity, other) == {}


def test_another_model_knows_nothing_of_it() -> None:
    assert saved(ran(chat(user("a"))), chat(user("a"), answer("b"), user("c")), model="def") == {}


def test_the_order_of_keys_does_not_matter() -> None:
    affinity = ran(chat({"role": "user", "content": "a"}))

    assert saved(affinity, chat({"content": "a", "role": "user"}, answer("b"), user("c"))) != {}


@pytest.mark.parametrize(
    ("first", "second", "other"),
    [
        (TextPrompt("x" * 5000), TextPrompt("x" * 5000 + "y"), TextPrompt("y" + "x" * 5000)),
        (TokenPrompt(tuple(range(3000))), TokenPrompt(tuple(range(4000))), TokenPrompt(tuple(range(1, 3000)))),
    ],
)
def test_text_and_tokens_are_known_by_blocks(first: Prompt, second: Prompt, other: Prompt) -> None:
    affinity = ran(first)

    assert saved(affinity, second)[1] >= 1000
    assert saved(affinity, other) == {}


def test_only_the_last_holders_are_remembered_and_a_failed_one_is_forgotten() -> None:
    prompt = chat(user(LONG))
    affinity = Affinity()
    for instance_id in range(HOLDERS_MAX + 3):
        ran(prompt, instance_id, affinity)
    assert sorted(saved(affinity, prompt)) == list(range(3, HOLDERS_MAX + 3))

    for instance_id in range(HOLDERS_MAX + 3):
        affinity.forget(instance_id)
    assert (saved(affinity, prompt), len(affinity)) == ({}, 0)


def test_an_old_memory_counts_for_nothing() -> None:
    affinity = ran(chat(user(LONG)))

    assert saved(affinity, chat(user(LONG)), REMEMBER_SECONDS - 1) != {}
    assert saved(affinity, chat(user(LONG)), REMEMBER_SECONDS) == {}


def test_a_hundred_thousand_prompts_leave_a_bounded_map() -> None:
    """C12 (prod-stack#687)."""
    affinity, sample = Affinity(), Affinity()
    for number in range(100_000):
        ran(chat(user(f"prompt {number}")), number % 7, affinity)
    assert len(affinity) == REMEMBERED_MAX

    tracemalloc.start()
    try:
        for number in range(1000):
            ran(chat(user(f"prompt {number}")), number % 7, sample)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / len(sample) * REMEMBERED_MAX < 8_000_000


def test_a_long_conversation_costs_a_bounded_number_of_hashes() -> None:
    found = prefixes(chat(*(user(f"{n}") for n in range(1000))), MODEL)

    assert (len(found.known), len(found.remembered)) == (PREFIXES_MAX, 3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=6)


@settings(max_examples=50)
@given(MESSAGES, MESSAGES)
def test_any_json_has_beginnings_and_a_longer_prompt_has_those_of_a_shorter(
    messages: list[dict[str, object]], more: list[dict[str, object]]
) -> None:
    short = prefixes(ChatPrompt(tuple(messages)), MODEL)
    long = prefixes(ChatPrompt((*messages, *more)), MODEL)

    assert [p.hash for p in long.known][: len(short.known)] == [p.hash for p in short.known]
    assert {p.hash for p in short.known} >= set(short.remembered)


@given(st.text(st.characters(exclude_categories=()), max_size=3000))
def test_any_text_has_beginnings(text: str) -> None:
    found = prefixes(TextPrompt(text), MODEL)

    assert bool(found.known) == bool(text)
