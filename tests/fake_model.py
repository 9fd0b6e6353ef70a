"""Model directories of the fake engine, and what it must answer, computed apart from it."""

import json
from collections.abc import Sequence
from pathlib import Path

from inference.requests import Sampling
from inference.runner import fake_engine, fake_vocabulary
from inference.runner.fake_engine import FakeSettings
from inference.runner_protocol import LoadModel


def make_fake(directory: Path, *, max_position_embeddings: int = 8192, **settings: object) -> Path:
    """Write a model directory of the fake engine; `settings` are the fields of FakeSettings. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "fake", "max_position_embeddings": max_position_embeddings, "fake": settings}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load_command(directory: Path, *, context: int = 8192, running_max: int | None = None) -> LoadModel:
    """The command that loads a fake model."""
    return LoadModel(
        engine="fake",
        model_path=str(directory),
        context=context,
        running_max=running_max,
        memory_bytes=1 << 30,
        threads=1,
        blas_cache=str(directory),
    )


def expected_ids(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    count: int,
    settings: FakeSettings = FakeSettings(),  # noqa: B008 - frozen
) -> tuple[list[int], bool]:
    """The ids that the fake engine must generate, `count` at most, and whether its stop token comes after them.

    Each token is computed from the whole history anew.
    """
    generated: list[int] = []
    while len(generated) < count:
        state = fake_engine.history([*prompt_ids, *generated])
        draw = len(generated) if fake_engine.counts_draws(sampling) else 0
        value = fake_engine.drawn(state, fake_engine.request_key(sampling), draw)
        last_id = generated[-1] if generated else -1
        token_id = fake_engine.token_of(value, last_id, len(generated), settings)
        if token_id == fake_vocabulary.STOP:
            return generated, True
        generated.append(token_id)
    return generated, False


def expected_text(ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Their text, up to the first stop string to be complete."""
    text = fake_vocabulary.decode(ids)
    ends = [(text.index(string) + len(string), -len(string)) for string in stop if string in text]
    if not ends:
        return text
    end, negative_length = min(ends)
    return text[: end + negative_length]
