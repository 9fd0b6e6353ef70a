"""The MLX engine over tiny random models: the contract of all engines, and what is its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.requests import Sampling
from inference.runner.engine import RequestError, Row
from tests.inference.engine_contract import GREEDY, OTHER_TEXT, SEEDED, TEXT, EngineContract, row, run_rows, run_steps
from tests.inference.mlx_engines import MlxEngine, engine_for
from tests.inference.tiny_models import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxEngine]:
    engine = engine_for(make_tiny(tmp_path_factory.mktemp("tiny")))
    yield engine
    engine.close()


@pytest.fixture
def engine(tiny: MlxEngine) -> MlxEngine:
    tiny.trim_cache(0)
    return tiny


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, tiny: MlxEngine) -> MlxEngine:
        return tiny


def reference(model: Path, prompt_ids: tuple[int, ...], count: int) -> list[int]:
    """A greedy answer by mlx-lm's own plain loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    loaded, _ = load_model(model)
    return [token for token, _ in generate_step(mx.array(prompt_ids), loaded, max_tokens=count)]


@pytest.mark.parametrize(("family", "batched"), [("llama", True), ("qwen2", True), ("qwen3", True), ("gemma2", False)])
def test_greedy_answers_are_those_of_mlx_lm(tmp_path: Path, family: str, batched: bool) -> None:
    """gemma2 goes wrong in mlx-lm's batches: the check at loading finds that, and it runs one row at a time."""
    model = make_tiny(tmp_path, family, eos_token_id=300)  # no such token: answers end by length
    engine = engine_for(model)
    assert engine.info.batched is batched
    assert (engine.info.running_max == 1) is not batched

    for text in (TEXT, OTHER_TEXT * 20):
        asked = row(engine, "a", text, count=24)
        assert run_rows(engine, asked)[0][:24] == reference(model, asked.prompt_ids, 24)


def test_rows_that_come_together_with_prompts_of_many_lengths_answer_as_alone(engine: MlxEngine) -> None:
    """More prompts than are evaluated side by side, shorter and longer than a step's piece."""
    rows = [row(engine, f"r{n}", TEXT * (1 + 7 * (n % 4)) + str(n), SEEDED, count=6) for n in range(12)]
    alone = [run_rows(engine, each)[0] for each in rows]
    engine.trim_cache(0)
    assert run_rows(engine, *rows) == alone


def test_prompt_progress_grows_to_all_of_it(engine: MlxEngine) -> None:
    asked = row(engine, "a", TEXT * 20, count=2, generated=(5, 6, 7))
    engine.insert(asked)
    reports: list[tuple[int, int]] = []
    ended = False
    while not ended:
        result = engine.step()
        reports += [(done, total) for _, done, total in result.prefilled]
        ended = any(sampled.last for sampled in result.sampled)
    total = len(asked.prompt_ids) + 3
    assert [total for _, total in reports] == [total] * len(reports)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert reports[-1] == (total, total)


def test_a_second_turn_needs_only_what_is_new(engine: MlxEngine) -> None:
    """Question and answer of the first turn come from the cache, as far as the second one's prompt repeats them."""
    first = row(engine, "first", TEXT * 4, count=30)
    answer = run_rows(engine, first)[0]
    prompt = (*first.prompt_ids, *answer, *row(engine, "", OTHER_TEXT).prompt_ids)
    second = plain_row("second", prompt, sampling=SEEDED)

    assert engine.insert(second) >= len(first.prompt_ids) + len(answer)
    warm = tokens_of(engine, "second")

    engine.trim_cache(0)
    assert engine.insert(second) == 0
    assert tokens_of(engine, "second") == warm


def test_interleaved_conversations_with_a_common_beginning_disturb_neither(engine: MlxEngine) -> None:
    """Both go on from one entry of the cache, in turn and at once, and it stays as it was."""
    common = row(engine, "", TEXT * 6).prompt_ids
    prompts = [(*common, *row(engine, "", text).prompt_ids) for text in (OTHER_TEXT, TEXT)]
    rows = [plain_row(f"r{n}", prompt, sampling=SEEDED) for n, prompt in enumerate(prompts)]
    alone = []
    for each in rows:
        engine.trim_cache(0)
        alone.append(run_rows(engine, each)[0])
    engine.trim_cache(0)
    run_rows(engine, plain_row("common", common))

    for each, expected in zip(rows * 2, alone * 2, strict=True):
        assert run_rows(engine, each)[0] == expected
    engine.trim_cache(0)
    run_rows(engine, plain_row("common", common))
    assert [engine.insert(each) for each in rows] == [len(common), len(common)]
    together = run_steps(engine, {"r0", "r1"})
    assert [[token.token_id for token in together[each.request_id] if not token.stop] for each in rows] == alone


def test_what_a_cancelled_row_had_evaluated_is_not_lost(engine: MlxEngine) -> None:
    asked = row(engine, "a", TEXT * 20, count=8)
    expected = run_rows(engine, asked)[0]
    engine.trim_cache(0)
    engine.insert(asked)
    done = 0
    while done < 100:
        ((_, done, _),) = engine.step().prefilled
    engine.remove("a")
    assert engine.cache_bytes() >= done * engine.info.kv_bytes_per_token

    assert engine.insert(asked) == done
    assert [token.token_id for token in run_steps(engine, {"a"})["a"] if not token.stop] == expected


def test_a_prompt_that_is_known_as_a_whole_still_evaluates_its_last_token(engine: MlxEngine) -> None:
    asked = row(engine, "a", TEXT * 2, SEEDED)
    first = run_rows(engine, asked)
    assert engine.insert(asked) == len(asked.prompt_ids) - 1
    assert tokens_of(engine, "a") == first[0]


def make_family(directory: Path, **config: object) -> Path:
    """A tiny random model of a family that needs mlx-lm itself to know its weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    make_tiny(directory, eos_token_id=300)
    path = directory / "config.json"
    settings = {**json.loads(path.read_text()), **config}
    mx.random.seed(3)
    model_class, arguments = _get_classes(settings)
    model = model_class(arguments.from_dict(settings))
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    weights = {name: value * (4 if value.ndim > 1 else 1) for name, value in parameters.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    path.write_text(json.dumps(settings))
    return directory


UNCUTTABLE: dict[str, dict[str, object]] = {
    "recurrent states": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "sliding windows": {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
    },
}


@pytest.mark.parametrize("kind", UNCUTTABLE)
def test_kv_that_can_not_be_cut_is_reused_at_its_boundaries(tmp_path: Path, kind: str) -> None:
    """A prompt's end is such a boundary: the next turn goes on from there though it tells the answer in other words."""
    model = make_family(tmp_path, **UNCUTTABLE[kind])
    engine = engine_for(model)
    first = row(engine, "first", TEXT * 3, count=24)
    answer = run_rows(engine, first)[0]
    assert answer == reference(model, first.prompt_ids, 24)

    other = plain_row("other", (*first.prompt_ids, 7, 8, 9), sampling=SEEDED)
    same = plain_row("same", (*first.prompt_ids, *answer, 7, 8, 9), sampling=SEEDED)
    shorter = plain_row("shorter", first.prompt_ids[:-30], sampling=SEEDED)
    assert engine.insert(shorter) == 0
    assert engine.insert(other) == len(first.prompt_ids) - 1
    assert engine.insert(same) == len(first.prompt_ids) + len(answer)
    warm = run_steps(engine, {"shorter", "other", "same"})
    for each in (shorter, other, same):
        engine.trim_cache(0)
        assert run_rows(engine, each)[0] == [token.token_id for token in warm[each.request_id]]


def test_every_stop_token_of_the_config_files_ends_an_answer(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, eos_token_id=300)
    free = engine_for(model)
    answer = run_rows(free, row(free, "a", count=12))[0]
    (model / "generation_config.json").write_text(f'{{"eos_token_id": [2, {answer[4]}]}}')
    engine = engine_for(model)
    engine.insert(row(engine, "a", count=12))
    sampled = run_steps(engine, {"a"})["a"]
    assert [token.token_id for token in sampled] == answer[: answer.index(answer[4]) + 1]
    assert [token.stop for token in sampled] == [False] * (len(sampled) - 1) + [True]


def test_logprobs_are_the_models_own_whatever_changes_the_choice(engine: MlxEngine) -> None:
    """Before bias and penalties: a token that a bias forces keeps its small probability."""
    forced = Sampling(seed=1, temperature=0, logit_bias=((77, 100.0),))
    engine.insert(row(engine, "plain", count=1, top_logprobs=20))
    engine.insert(row(engine, "forced", sampling=forced, count=1, top_logprobs=20))
    sampled = run_steps(engine, {"plain", "forced"})
    plain, biased = sampled["plain"][0].logprob, sampled["forced"][0].logprob
    assert plain is not None
    assert biased is not None
    assert biased.token_id == 77
    assert biased.logprob < plain.logprob
    assert [(token, text) for token, text, _ in biased.top] == [(token, text) for token, text, _ in plain.top]
    assert [value for _, _, value in biased.top] == pytest.approx([value for _, _, value in plain.top], abs=1e-4)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(seed=1, logit_bias=((259, 1.0),)), "logit_bias"),
        (Sampling(seed=1, logit_bias=((3, float("nan")),)), "logit_bias"),
        (Sampling(seed=1, temperature=float("nan")), "temperature"),
        (Sampling(seed=1, min_p=float("nan")), "min_p"),
        (Sampling(seed=1, repetition_penalty=float("inf")), "repetition_penalty"),
    ],
)
def test_a_row_that_can_not_be_honoured_is_refused(engine: MlxEngine, sampling: Sampling, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.check(row(engine, "a", sampling=sampling))
    assert (caught.value.code, caught.value.param) == ("invalid_parameter", param)


def plain_row(request_id: str, prompt_ids: tuple[int, ...], count: int = 12, sampling: Sampling = GREEDY) -> Row:
    """A row of these very tokens."""
    return Row(
        request_id=request_id,
        prompt_ids=prompt_ids,
        generated=(),
        token_count_max=count,
        sampling=sampling,
        top_logprobs=None,
    )


def tokens_of(engine: MlxEngine, request_id: str) -> list[int]:
    """The rest of a row's answer, without its stop token."""
    return [token.token_id for token in run_steps(engine, {request_id})[request_id] if not token.stop]
