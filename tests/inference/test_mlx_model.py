"""The real model through the MLX engine: known right answers, and batches that say what single requests say."""

from collections.abc import Iterator

import pytest

from inference.models import Model
from inference.requests import ChatPrompt, Sampling, TextPrompt
from inference.runner.engine import Row
from tests.inference.engine_contract import run_rows
from tests.inference.mlx_engines import MlxEngine, engine_for

pytestmark = pytest.mark.model

MEMORY_BYTES = 3 << 30
NASTY = (
    "Hello, world!",
    "  leading and trailing  ",
    "日本語とэмодзи 😀👨‍👩‍👧 é e\N{COMBINING ACUTE ACCENT}",
    "def f(x):\n\treturn x ** 2  # 1234567890\r\n",
    "\N{ZERO WIDTH SPACE}\N{NO-BREAK SPACE}\x00\x7f",
)


@pytest.fixture(scope="module")
def engine(smollm2: Model) -> Iterator[MlxEngine]:
    engine = engine_for(smollm2.path, memory_bytes=MEMORY_BYTES)
    yield engine
    engine.close()


def ask(engine: MlxEngine, request_id: str, question: str, sampling: Sampling, count: int = 12) -> Row:
    return Row(
        request_id=request_id,
        prompt_ids=engine.tokenize(ChatPrompt(({"role": "user", "content": question},))),
        generated=(),
        token_count_max=count,
        sampling=sampling,
        top_logprobs=None,
    )


def test_it_is_batched_and_runs_dense_in_f32(engine: MlxEngine) -> None:
    info = engine.info
    assert (info.batched, info.dtype, info.device) == (True, "float32", "cpu")
    assert info.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, width, f32
    assert info.running_max >= 8


def test_its_greedy_answer_is_known(engine: MlxEngine) -> None:
    (answer,) = run_rows(engine, ask(engine, "a", "What is the capital of France?", Sampling(seed=0, temperature=0)))
    assert engine.decode(answer) == "The capital of France is Paris."


def test_rows_together_answer_as_alone(engine: MlxEngine) -> None:
    questions = ("What is the capital of France?", "Name a colour.", "Write one line about the sea, please, and a fish in it.")
    samplings = (Sampling(seed=0, temperature=0), Sampling(seed=1), Sampling(seed=2, temperature=0.8, top_p=0.9, top_k=50))
    rows = [ask(engine, f"r{n}", questions[n], samplings[n]) for n in range(3)]
    together = run_rows(engine, *rows)
    engine.trim_cache(0)
    assert [run_rows(engine, each)[0] for each in rows] == together


@pytest.mark.parametrize("text", NASTY)
def test_its_tokenizer_makes_the_round_trip(engine: MlxEngine, text: str) -> None:
    assert engine.decode(engine.tokenize(TextPrompt(text))) == text
