"""The MLX engine over tiny random models: the contract of all engines, and what is its own."""

from collections.abc import Iterator

import pytest

from tests.inference.engine_contract import EngineContract
from tests.inference.mlx_engines import MlxEngine, engine_for
from tests.inference.tiny_models import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxEngine]:
    engine = engine_for(make_tiny(tmp_path_factory.mktemp("tiny")))
    yield engine
    engine.close()


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, tiny: MlxEngine) -> MlxEngine:
        return tiny
