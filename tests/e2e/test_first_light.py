"""The whole of it with the real model: one command, one question over HTTP, the right answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from inference.models import Model
from tests.e2e.node_process import NodeProcess, left_running, node, text_of
from tests.real_model import ALIAS, models_dir, smollm2

__all__ = ["smollm2"]

QUESTION = "What is the capital of France? Answer with one word."
LOADING_SECONDS_MAX = 300  # on a machine that has much else to do

pytestmark = [pytest.mark.model, pytest.mark.timeout(LOADING_SECONDS_MAX + 60)]


@pytest.fixture(scope="module")
def process(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node as `node start` makes it, with the model on disk."""
    assert smollm2.path.is_dir()
    directory = tmp_path_factory.mktemp("node")
    with node(directory, "--models-dir", str(models_dir())) as process:
        process.wait_for(f"{ALIAS} is ready", seconds=LOADING_SECONDS_MAX)
        yield process
        assert process.stop() == 0
        assert left_running(directory) == []


def test_the_capital_of_france(process: NodeProcess) -> None:
    status, document = process.chat(QUESTION, max_tokens=20)
    with process.stream(QUESTION, max_tokens=20) as events:
        streamed = list(events)

    assert (status, document["model"]) == (200, ALIAS)
    answer = document["choices"][0]["message"]["content"]
    assert "Paris" in answer
    assert text_of(streamed) == answer
    assert streamed[-1] is None
    assert document["choices"][0]["finish_reason"] == "stop"


def test_a_runner_killed_in_mid_stream_is_an_error_and_the_next_request_has_a_new_runner(process: NodeProcess) -> None:
    with process.stream("Count from one to a hundred.", max_tokens=500) as events:
        next(events)
        next(events)
        (runner,) = process.runners()
        runner.kill()
        rest = list(events)

    assert rest[-1] is None
    assert rest[-2] is not None
    assert rest[-2]["error"]["code"] == "runner_crashed"
    status: int = 503
    document: dict[str, Any] = {}
    while status == 503:  # the new one may take longer to load than a request waits
        status, document = process.chat(QUESTION, max_tokens=20)
    assert status == 200
    assert "Paris" in document["choices"][0]["message"]["content"]
    (successor,) = process.runners()
    assert successor.pid != runner.pid
