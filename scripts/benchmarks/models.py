"""The real model of the measurements, fetched on first use."""

import os
from pathlib import Path

import platformdirs
import trio

from inference.model_store import ModelStore
from inference.models import Model

REAL_MODEL = "smollm2:135m"
THREADS = os.cpu_count() or 1


def real_model() -> Model:
    """SmolLM2-135M-Instruct, in the user's own models directory."""
    store = ModelStore(Path(platformdirs.user_cache_dir("shoal")) / "models", os.environ)
    return trio.run(store.resolve, REAL_MODEL, lambda _progress: None)
