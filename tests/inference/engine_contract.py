"""What every engine must keep to, whatever it computes with: subclass EngineContract and give it an `engine` fixture.

An engine may be shared by the tests of a class: each leaves it without rows. Its context must hold CONTEXT tokens.
"""

from collections.abc import Sequence

import pytest

from inference.requests import ChatPrompt, Sampling, TextPrompt, TokenPrompt
from inference.runner.engine import Engine, RequestError, Row, Sampled

CONTEXT = 512
STEPS_MAX = 2000
TEXT = "Fish swim in a shoal, and no fish leads it."
OTHER_TEXT = "What is the capital of France?"
GREEDY = Sampling(seed=0, temperature=0)
SEEDED = Sampling(seed=17, temperature=1.0)
PENALIZED = Sampling(seed=5, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)
SAMPLINGS = (GREEDY, SEEDED, PENALIZED, Sampling(seed=3, temperature=0.9, top_p=0.9, top_k=20, min_p=0.01))


def row(  # noqa: PLR0917 - the shorthand of many tests
    engine: Engine,
    request_id: str,
    text: str = TEXT,
    sampling: Sampling = GREEDY,
    count: int = 12,
    generated: Sequence[int] = (),
    top_logprobs: int | None = None,
) -> Row:
    """A row of this engine's tokens."""
    return Row(
        request_id=request_id,
        prompt_ids=engine.tokenize(TextPrompt(text)),
        generated=tuple(generated),
        token_count_max=count,
        sampling=sampling,
        top_logprobs=top_logprobs,
    )


def run_steps(engine: Engine, live: set[str], steps_max: int = STEPS_MAX) -> dict[str, list[Sampled]]:
    """Step until all `live` rows have ended, or so often; what was sampled, by row. Checks what must hold in each step."""
    sampled: dict[str, list[Sampled]] = {request_id: [] for request_id in live}
    live = set(live)
    for _ in range(steps_max):
        if not live:
            break
        result = engine.step()
        assert not result.failed
        ids = [token.request_id for token in result.sampled]
        assert len(ids) == len(set(ids)), "at most one token a row and step"
        assert set(ids) <= live, "a row that is gone gives no tokens"
        for request_id, done, total in result.prefilled:
            assert request_id in live
            assert 0 <= done <= total
        for token in result.sampled:
            assert token.last or not token.stop, "a stop token is the last one"
            sampled[token.request_id].append(token)
            if token.last:
                live.discard(token.request_id)
    return sampled


def run_rows(engine: Engine, *rows: Row) -> list[list[int]]:
    """Insert these rows together and run them to their ends; each one's answer, without the stop token."""
    for each in rows:
        engine.check(each)
        cached = engine.insert(each)
        assert 0 <= cached < len(each.prompt_ids), "the last prompt token is always evaluated"
    sampled = run_steps(engine, {each.request_id for each in rows})
    for each in rows:
        tokens = sampled[each.request_id]
        assert tokens[-1].last, "every row ends"
        assert tokens[-1].stop or len(tokens) == each.token_count_max
    return [answer(sampled[each.request_id]) for each in rows]


def answer(tokens: list[Sampled]) -> list[int]:
    """The ids that belong to the answer."""
    return [token.token_id for token in tokens if not token.stop]


class EngineContract:
    """The suite."""

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError

    def test_info_is_plausible(self, engine: Engine) -> None:
        info = engine.info
        assert info.context >= CONTEXT
        assert info.running_max >= 1
        assert info.kv_bytes_per_token > 0
        assert info.kv_step >= 1
        assert info.kv_bytes_max >= CONTEXT * info.kv_bytes_per_token, "one request fits"

    def test_text_makes_the_round_trip(self, engine: Engine) -> None:
        for text in (TEXT, "日本語 😀 é\n\tdef f():\n", "  two spaces"):
            assert engine.decode(engine.tokenize(TextPrompt(text))) == text

    def test_token_ids_are_taken_as_they_are(self, engine: Engine) -> None:
        ids = engine.tokenize(TextPrompt(TEXT))
        assert engine.tokenize(TokenPrompt(ids)) == ids

    def test_ids_that_are_no_tokens_are_refused(self, engine: Engine) -> None:
        with pytest.raises(RequestError) as caught:
            engine.tokenize(TokenPrompt((1, (1 << 31) - 1)))
        assert caught.value.code == "invalid_parameter"

    def test_messages_go_through_a_template(self, engine: Engine) -> None:
        one = engine.tokenize(ChatPrompt(({"role": "user", "content": TEXT},)))
        two = engine.tokenize(ChatPrompt(({"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."})))
        assert TEXT in engine.decode(one)
        assert one != two

    def test_decoding_nothing_gives_nothing(self, engine: Engine) -> None:
        assert engine.decode(()) == ""

    def test_a_step_without_rows_does_nothing(self, engine: Engine) -> None:
        result = engine.step()
        assert (result.prefilled, result.sampled, result.failed) == ((), (), ())

    @pytest.mark.parametrize("count", [1, 2, 9])
    def test_a_row_ends_at_its_maximum(self, engine: Engine, count: int) -> None:
        assert len(run_rows(engine, row(engine, "a", count=count))[0]) <= count

    @pytest.mark.parametrize("sampling", SAMPLINGS)
    def test_the_same_row_gives_the_same_answer(self, engine: Engine, sampling: Sampling) -> None:
        assert run_rows(engine, row(engine, "a", sampling=sampling)) == run_rows(engine, row(engine, "b", sampling=sampling))

    def test_a_greedy_answer_ignores_the_seed(self, engine: Engine) -> None:
        other = Sampling(seed=99, temperature=0)
        assert run_rows(engine, row(engine, "a", sampling=GREEDY)) == run_rows(engine, row(engine, "b", sampling=other))

    def test_seeds_give_different_answers(self, engine: Engine) -> None:
        rows = [row(engine, f"r{seed}", sampling=Sampling(seed=seed, temperature=1.5), count=24) for seed in range(4)]
        answers = [run_rows(engine, each)[0] for each in rows]
        assert len({tuple(each) for each in answers}) > 1

    def test_an_answer_is_the_same_whatever_else_runs(self, engine: Engine) -> None:
        texts = (TEXT, OTHER_TEXT, TEXT * 3, "a")
        rows = [row(engine, f"r{n}", texts[n], SAMPLINGS[n]) for n in range(4)][: engine.info.running_max]
        alone = [run_rows(engine, each)[0] for each in rows]
        assert run_rows(engine, *rows) == alone

    def test_a_row_that_joins_later_disturbs_nobody(self, engine: Engine) -> None:
        first, second = row(engine, "a", sampling=SEEDED), row(engine, "b", OTHER_TEXT, PENALIZED)
        alone = [run_rows(engine, first)[0], run_rows(engine, second)[0]]
        engine.insert(first)
        before = run_steps(engine, {"a"}, 4)
        engine.insert(second)
        live = {"b"} | ({"a"} if not (before["a"] and before["a"][-1].last) else set())
        after = run_steps(engine, live)
        assert answer(before["a"] + after.get("a", [])) == alone[0]
        assert answer(after["b"]) == alone[1]

    def test_removing_a_row_disturbs_nobody(self, engine: Engine) -> None:
        kept, dropped = row(engine, "kept", sampling=SEEDED), row(engine, "dropped", OTHER_TEXT, count=400)
        alone = run_rows(engine, kept)[0]
        engine.insert(dropped)
        engine.insert(kept)
        before = run_steps(engine, {"kept", "dropped"}, 3)
        engine.remove("dropped")
        engine.remove("dropped")
        engine.remove("never there")
        live = {"kept"} if not (before["kept"] and before["kept"][-1].last) else set()
        assert answer(before["kept"] + run_steps(engine, live).get("kept", [])) == alone
        assert engine.step().sampled == ()

    def test_a_row_can_be_removed_before_its_first_step(self, engine: Engine) -> None:
        engine.insert(row(engine, "a", TEXT * 8))
        engine.remove("a")
        result = engine.step()
        assert (result.prefilled, result.sampled) == ((), ())

    @pytest.mark.parametrize("sampling", SAMPLINGS)
    def test_a_continuation_goes_on_as_if_nothing_had_happened(self, engine: Engine, sampling: Sampling) -> None:
        whole = run_rows(engine, row(engine, "whole", sampling=sampling))[0]
        for split in {1, len(whole) // 2, len(whole) - 1} - {0, len(whole), -1}:
            rest = row(engine, "rest", sampling=sampling, count=12 - split, generated=whole[:split])
            assert run_rows(engine, rest)[0] == whole[split:]

    def test_an_answer_is_the_same_with_and_without_the_prefix_cache(self, engine: Engine) -> None:
        engine.trim_cache(0)
        assert engine.cache_bytes() == 0
        first = run_rows(engine, row(engine, "a", TEXT * 2, SEEDED))
        assert run_rows(engine, row(engine, "b", TEXT * 2, SEEDED)) == first
        longer = row(engine, "c", TEXT * 2 + OTHER_TEXT, SEEDED)
        cached = run_rows(engine, longer)
        engine.trim_cache(0)
        assert run_rows(engine, longer) == cached

    def test_the_prefix_cache_lets_go(self, engine: Engine) -> None:
        run_rows(engine, row(engine, "a"), row(engine, "b", OTHER_TEXT))
        held = engine.cache_bytes()
        engine.trim_cache(held // 2)
        assert engine.cache_bytes() <= held // 2
        engine.trim_cache(0)
        assert engine.cache_bytes() == 0

    @pytest.mark.parametrize("top", [0, 3])
    def test_logprobs_come_where_they_are_asked_for(self, engine: Engine, top: int) -> None:
        engine.insert(row(engine, "with", sampling=SEEDED, count=5, top_logprobs=top))
        engine.insert(row(engine, "without", sampling=SEEDED, count=5))
        sampled = run_steps(engine, {"with", "without"})
        assert answer(sampled["with"]) == answer(sampled["without"]), "asking for them changes nothing"
        assert all(token.logprob is None for token in sampled["without"])
        for token in sampled["with"]:
            if token.stop:
                continue
            assert token.logprob is not None
            assert token.logprob.token_id == token.token_id
            assert token.logprob.logprob <= 0
            likeliest = [logprob for _, _, logprob in token.logprob.top]
            assert len(likeliest) == top
            assert likeliest == sorted(likeliest, reverse=True)

    def test_a_bias_on_no_token_is_refused(self, engine: Engine) -> None:
        biased = row(engine, "a", sampling=Sampling(seed=1, logit_bias=(((1 << 31) - 1, 5.0),)))
        with pytest.raises(RequestError) as caught:
            engine.check(biased)
        assert caught.value.code == "invalid_parameter"
