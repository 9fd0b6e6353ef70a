"""The fake engine keeps the contract, and its answers are those that are computed apart from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.requests import Sampling, TextPrompt
from inference.runner import fake_vocabulary
from inference.runner.engine import Engine
from inference.runner.fake_engine import FakeEngine, FakeSettings
from inference.runner.prefix_memory import PrefixMemory
from tests.fake_model import expected_ids
from tests.inference.engine_contract import SEEDED, TEXT, EngineContract, row, run_rows, run_steps


def make_engine(**settings: object) -> FakeEngine:
    return FakeEngine(FakeSettings(**settings), 8192, 8, lambda _: None)  # type: ignore[arg-type]  # fields of several types


class TestFakeEngine(EngineContract):
    @pytest.fixture(params=[{"prefill_tokens": 7}, {"stop_one_in": 0}, {"answer_tokens": 6}])
    def engine(self, request: pytest.FixtureRequest) -> Engine:
        return make_engine(**request.param)


@given(
    text=st.text(min_size=1, max_size=20),
    seed=st.integers(0, 1 << 62),
    temperature=st.sampled_from([0.0, 0.7]),
    presence=st.sampled_from([0.0, 0.5]),
    count=st.integers(1, 80),
)
def test_answers_are_those_computed_from_the_whole_history(
    text: str, seed: int, temperature: float, presence: float, count: int
) -> None:
    engine = make_engine()
    sampling = Sampling(seed=seed, temperature=temperature, presence_penalty=presence)
    expected, _ = expected_ids(engine.tokenize(TextPrompt(text)), sampling, count)
    assert run_rows(engine, row(engine, "a", text, sampling, count)) == [expected]


def test_every_part_of_the_history_shows_in_the_next_token() -> None:
    settings = FakeSettings(stop_one_in=0)
    prompt = fake_vocabulary.encode(TEXT)

    def answer_to(ids: tuple[int, ...], sampling: Sampling = SEEDED) -> tuple[int, ...]:
        return tuple(expected_ids(ids, sampling, 8, settings)[0])

    variants = [
        answer_to(prompt),
        answer_to((prompt[0] ^ 1, *prompt[1:])),
        answer_to(prompt[1:]),
        answer_to((*prompt, 65)),
        answer_to(prompt, Sampling(seed=18)),
        answer_to(prompt, Sampling(seed=17, presence_penalty=0.1)),
        answer_to(prompt, Sampling(seed=17, logit_bias=((3, 1.0),))),
    ]
    assert len(set(variants)) == len(variants)


def test_generated_tokens_are_no_prompt() -> None:
    engine = make_engine(stop_one_in=0)
    whole = run_rows(engine, row(engine, "a", sampling=SEEDED, count=20))[0]
    wrong = row(engine, "b", TEXT + engine.decode(whole[:10]), SEEDED, 10)
    assert run_rows(engine, wrong)[0] != whole[10:]


def test_answers_hold_characters_split_over_tokens_and_are_valid_text() -> None:
    engine = make_engine(stop_one_in=0)
    ids = run_rows(engine, row(engine, "a", sampling=SEEDED, count=2000))[0]
    parts = [token_id for token_id in ids if token_id in fake_vocabulary.FOLLOWING]
    assert len(parts) > 100
    assert "\N{REPLACEMENT CHARACTER}" not in engine.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
    assert fake_vocabulary.PAUSE in ids, "a token without text"


def test_the_stop_token_comes_after_exactly_as_many_tokens_as_set() -> None:
    engine = make_engine(answer_tokens=30)
    engine.insert(row(engine, "a", count=100))
    tokens = run_steps(engine, {"a"})["a"]
    assert len(tokens) == 31
    assert tokens[-1].stop


def test_a_marked_request_fails_alone() -> None:
    engine = make_engine(fail_marker="poison")
    engine.insert(row(engine, "good", sampling=SEEDED))
    engine.insert(row(engine, "bad", "some poison"))
    alone = run_rows(make_engine(), row(engine, "good", sampling=SEEDED))[0]
    result = engine.step()
    assert [request_id for request_id, _ in result.failed] == ["bad"]
    tokens = [*result.sampled, *run_steps(engine, {"good"})["good"]]
    assert [token.token_id for token in tokens if not token.stop] == alone


@given(st.text())
def test_encoding_and_decoding_are_inverse(text: str) -> None:
    assert fake_vocabulary.decode(fake_vocabulary.encode(text)) == text.encode("utf-8", "replace").decode()


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=12).map(tuple), max_size=12),
    st.lists(st.integers(0, 3), min_size=1).map(tuple),
)
def test_prefix_memory_finds_the_longest_and_stays_within_its_bytes(
    entries: list[tuple[int, ...]], ids: tuple[int, ...]
) -> None:
    memory = PrefixMemory(10, 4, 100_000)
    for entry in entries:
        memory.add(entry)
    shared = [
        next((n for n, (a, b) in enumerate(zip(entry, ids, strict=False)) if a != b), min(len(entry), len(ids)))
        for entry in entries
    ]
    assert memory.longest(ids) == min(max(shared, default=0), len(ids) - 1)
    memory.trim(memory.bytes // 2)
    assert memory.bytes <= sum(memory.size(len(entry)) for entry in entries) // 2
    memory.trim(0)
    assert memory.bytes == 0
