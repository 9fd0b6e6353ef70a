"""Dividing the memory, and the pace of prefill."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inference.runner import mlx_memory
from inference.runner.engine import LoadError
from inference.runner.mlx_memory import PROCESS_BYTES, ModelShape, batch_bytes, plan, row_bytes
from inference.runner.mlx_pace import STEP_SECONDS_MAX, PrefillPace

MIB = 1 << 20
SMOLLM2 = ModelShape(
    weight_bytes=513 * MIB,
    kv_bytes_per_token=46080,
    kv_bytes_fixed=0,
    layers=30,
    attention_heads=9,
    hidden=2112,
    vocabulary=49152,
    context=8192,
    item_bytes=4,
    scores_kept=True,
)
shapes = st.builds(
    ModelShape,
    weight_bytes=st.integers(1, 1 << 36),
    kv_bytes_per_token=st.integers(0, 1 << 20),
    kv_bytes_fixed=st.integers(0, 1 << 24),
    layers=st.integers(1, 100),
    attention_heads=st.integers(1, 128),
    hidden=st.integers(64, 1 << 16),
    vocabulary=st.integers(256, 1 << 18),
    context=st.integers(1, 1 << 20),
    item_bytes=st.sampled_from([2, 4]),
    scores_kept=st.booleans(),
)


@given(
    shape=shapes,
    memory_bytes=st.integers(1, 1 << 38),
    context=st.integers(1, 1 << 20),
    running_max=st.none() | st.integers(1, 200),
)
def test_all_that_a_plan_promises_fits(shape: ModelShape, memory_bytes: int, context: int, running_max: int | None) -> None:
    try:
        budget = plan(shape, memory_bytes, context, running_max)
    except LoadError:
        return
    assert 1 <= budget.context <= min(context, shape.context)
    assert 1 <= budget.running_max <= (running_max or mlx_memory.RUNNING_MAX)
    assert mlx_memory.PREFILL_TOKENS_MIN <= budget.prefill_tokens_max <= mlx_memory.PREFILL_TOKENS_MAX
    assert PROCESS_BYTES + shape.weight_bytes + budget.work_bytes + budget.kv_bytes_max <= memory_bytes
    assert batch_bytes(shape, [budget.context] * budget.running_max) <= budget.kv_bytes_max


def test_a_batch_is_as_long_as_its_longest_row() -> None:
    assert batch_bytes(SMOLLM2, [10, 300, 20]) == 3 * row_bytes(SMOLLM2, 300) == 3 * 512 * 46080
    assert batch_bytes(SMOLLM2, []) == 0


def test_a_device_with_plenty_takes_what_is_asked_for() -> None:
    budget = plan(SMOLLM2, 17 << 30, 8192, None)
    assert (budget.context, budget.running_max) == (8192, mlx_memory.RUNNING_MAX)
    assert plan(SMOLLM2, 64 << 30, 8192, 50).running_max == 50


def test_little_memory_costs_rows_first_and_context_then() -> None:
    small = plan(SMOLLM2, 3 << 30, 8192, None)
    assert small.context == 8192
    assert 1 < small.running_max < 8
    least = plan(SMOLLM2, 900 * MIB, 8192, None)
    assert least.running_max == 1
    assert 256 <= least.context < 8192


def test_what_can_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(LoadError, match=r"needs 513 MiB for its weights, .* may use 600 MiB"):
        plan(SMOLLM2, 600 * MIB, 8192, None)
    with pytest.raises(LoadError, match=r"needs 16.0 GiB for its weights"):
        plan(replace(SMOLLM2, weight_bytes=16 << 30), 8 << 30, 8192, None)


@given(
    rate=st.floats(1, 1e6),
    steps=st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e3), st.floats(0, 1e3)), max_size=20),
)
def test_a_pace_keeps_its_bounds(rate: float, steps: list[tuple[int, float, float]]) -> None:
    pace = PrefillPace(rate, 16, 2048)
    for tokens, seconds, decode_seconds in steps:
        assert 16 <= pace.tokens <= 2048
        pace.observe(tokens, seconds, decode_seconds)
    assert 16 <= pace.tokens <= 2048


@pytest.mark.parametrize("start", [16, 2000])
@pytest.mark.parametrize(("decode_seconds", "expected"), [(0.0, 100), (0.05, 75), (0.3, 75), (2.0, 500)])
def test_a_pace_finds_how_much_fits_into_a_step(start: int, decode_seconds: float, expected: int) -> None:
    """Each token takes 2 ms: what decoding leaves of 200 ms, but at least half of its own time."""
    pace = PrefillPace(start / (STEP_SECONDS_MAX * 0.8), 16, 2048)
    for _ in range(8):
        pace.observe(pace.tokens, decode_seconds + 0.002 * pace.tokens, decode_seconds)
    assert abs(pace.tokens - expected) <= 1


def test_the_end_of_a_prompt_says_nothing_about_the_pace() -> None:
    pace = PrefillPace(1000, 16, 2048)
    before = pace.tokens
    pace.observe(3, 0.001, 0.0)
    assert pace.tokens == before
