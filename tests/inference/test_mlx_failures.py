"""A row whose token can't be chosen fails alone, and the others' answers are what they would have been."""

from collections.abc import Callable, Iterator

import pytest

from inference.requests import Sampling
from inference.runner.engine import Row
from tests.inference.engine_contract import GREEDY, OTHER_TEXT, PENALIZED, SEEDED, TEXT, row, run_rows
from tests.inference.mlx_engines import Chooser, MlxEngine, chooser, command, load_weights
from tests.inference.tiny_models import make_tiny

Spoil = Callable[[Chooser], Chooser]


class Faults:
    """A table of choosers: the row called `bad` gets a spoilt one."""

    def __init__(self) -> None:
        self.spoil: Spoil = lambda sound: sound

    def __call__(self, asked: Row, vocabulary: int) -> Chooser:
        sound = chooser(asked, vocabulary)
        return self.spoil(sound) if asked.request_id == "bad" else sound


@pytest.fixture(scope="module")
def faults() -> Faults:
    return Faults()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[MlxEngine]:
    model = make_tiny(tmp_path_factory.mktemp("tiny"), eos_token_id=300)
    engine = MlxEngine(load_weights(command(model), True, lambda _done, _total: None), faults)
    yield engine
    engine.close()


def raising_sampler(after: int, error: Exception) -> Spoil:
    """Spoils the choice after so many good ones."""

    def spoil(sound: Chooser) -> Chooser:
        calls = 0

        def sampler(logprobs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            nonlocal calls
            calls += 1
            if calls > after:
                raise error
            return sound.sampler(logprobs)

        return Chooser("bad", sampler)

    return spoil


def raising_processor(sound: Chooser) -> Chooser:
    """Spoils the first choice, before the sampler."""

    def processor(_tokens, _logits):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        raise KeyError("no such table")

    return Chooser("bad", sound.sampler, (processor,))


def two_tokens(sound: Chooser) -> Chooser:
    """Chooses more tokens than there are rows: the batch goes wrong later, somewhere inside of the model."""

    def sampler(logprobs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        import mlx.core as mx

        return mx.concatenate([sound.sampler(logprobs)] * 2)

    return Chooser("bad", sampler)


@pytest.mark.parametrize(
    "spoil",
    [raising_sampler(0, ValueError("no")), raising_sampler(3, LookupError("no")), raising_processor, two_tokens],
    ids=["first choice", "fourth choice", "processor", "unknown culprit"],
)
def test_the_row_at_fault_fails_alone(engine: MlxEngine, faults: Faults, spoil: Spoil) -> None:
    samplings = (GREEDY, SEEDED, PENALIZED, Sampling(seed=3, temperature=0.9, top_p=0.9))
    others = [row(engine, f"r{n}", text, samplings[n], count=16) for n, text in enumerate((TEXT, OTHER_TEXT, "a", TEXT * 9))]
    alone = [run_rows(engine, each)[0] for each in others]
    engine.trim_cache(0)
    faults.spoil = spoil

    for each in (*others[:2], row(engine, "bad", "bad", SEEDED, count=16), *others[2:]):
        engine.insert(each)
    answers: dict[str, list[int]] = {each.request_id: [] for each in others}
    failures: list[tuple[str, str]] = []
    ended = 0
    while ended < len(others):
        result = engine.step()
        failures += result.failed
        for token in result.sampled:
            if token.request_id != "bad":
                answers[token.request_id].append(token.token_id)
                ended += token.last

    assert [request_id for request_id, _ in failures] == ["bad"]
    assert list(answers.values()) == alone
    assert engine.step().sampled == ()
    faults.spoil = lambda sound: sound
    assert run_rows(engine, others[1])[0] == alone[1], "the engine is as good as new"


def test_a_row_that_fails_by_itself_says_why(engine: MlxEngine, faults: Faults) -> None:
    faults.spoil = raising_sampler(0, ValueError("no such luck"))
    engine.insert(row(engine, "bad"))
    failures: list[tuple[str, str]] = []
    while not failures:
        failures += engine.step().failed
    faults.spoil = lambda sound: sound
    assert failures == [("bad", "The engine failed on this request: ValueError: no such luck")]


def test_rows_that_come_after_a_failure_of_unknown_origin_share_a_batch_again(engine: MlxEngine, faults: Faults) -> None:
    late = [row(engine, f"late{n}", OTHER_TEXT * (n + 1), SEEDED) for n in range(2)]
    alone = [run_rows(engine, each)[0] for each in late]
    faults.spoil = two_tokens
    engine.insert(row(engine, "good", count=40))
    engine.insert(row(engine, "bad", OTHER_TEXT, count=40))
    while not engine.step().failed:
        pass
    faults.spoil = lambda sound: sound
    engine.remove("good")
    assert run_rows(engine, *late) == alone
