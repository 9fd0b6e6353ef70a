"""Choosing tokens: against an independent numpy version, and draws that depend on seed, number and token alone."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from inference.requests import Sampling
from inference.runner.engine import Row
from tests.inference.mlx_engines import chooser

import mlx.core as mx  # isort: skip - after the BLAS
from inference.runner.mlx_sampling import NUCLEUS_TOKENS_MAX, draw, draw_key, token_logprob  # isort: skip - imports MLX

VOCABULARY = 40
Floats = NDArray[np.float64]

logits = st.lists(st.floats(-8, 8, width=16), min_size=VOCABULARY, max_size=VOCABULARY, unique=True)
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=12).map(tuple)


def row(sampling: Sampling, prompt_ids: tuple[int, ...] = (1,), generated: tuple[int, ...] = (), top: int | None = None) -> Row:
    return Row(
        request_id="r", prompt_ids=prompt_ids, generated=generated, token_count_max=9, sampling=sampling, top_logprobs=top
    )


def log_softmax(values: Floats) -> Floats:
    total: float = np.logaddexp.reduce(values)
    return values - total


def array(values: Floats) -> mx.array:
    return mx.array(values.astype(np.float32))[None]


def kept_tokens(logprobs: Floats, sampling: Sampling) -> set[int]:
    """What the filters leave, written down as the documentation says it."""
    scaled = log_softmax(logprobs / sampling.temperature)
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = [token for token in order if math.exp(scaled[token] - scaled[order[0]]) >= sampling.min_p]
    kept = kept[: sampling.top_k] if sampling.top_k else kept
    total = sum(math.exp(scaled[token]) for token in kept)
    nucleus: set[int] = set()
    mass = 0.0
    for token in kept:
        if mass >= sampling.top_p * total and nucleus:
            break
        nucleus.add(token)
        mass += math.exp(scaled[token])
    return nucleus


@settings(deadline=None)
@given(
    values=logits,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, VOCABULARY, VOCABULARY + 5]),
    min_p=st.sampled_from([0.0, 0.07, 1.0]),
)
def test_draws_are_among_what_the_filters_leave(
    values: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    sampling = Sampling(seed=1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    logprobs = log_softmax(np.array(values))
    kept = kept_tokens(logprobs, sampling)
    drawn = {drawn_token(array(logprobs), sampling, number) for number in range(12)}
    # A token exactly on the border of a filter may fall on either side.
    border = kept_tokens(logprobs, replace(sampling, top_p=min(1.0, top_p * 1.001), min_p=min_p * 0.999))
    assert drawn <= kept | border
    if len(kept | border) == 1:
        assert drawn == kept


def drawn_token(logprobs: mx.array, sampling: Sampling, number: int) -> int:
    (token,) = np.asarray(draw(logprobs, sampling, draw_key(1, number)))
    return int(token)


def test_draws_follow_the_probabilities() -> None:
    """5,000 draws against their expected counts: chi-square below its 99.99 % quantile, with fixed seeds."""
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logprobs = array(np.log(probabilities))
    count = 5_000
    drawn = [draw(logprobs, Sampling(seed=7), draw_key(7, number)) for number in range(count)]
    counts = np.bincount(np.asarray(mx.concatenate(drawn)), minlength=5)
    chi_square = float(((counts - count * probabilities) ** 2 / (count * probabilities)).sum())
    assert chi_square < 23.5  # 4 degrees of freedom


@settings(deadline=None)
@given(values=logits, seed=st.integers(0, (1 << 63) - 1), number=st.integers(0, 1 << 40))
def test_filters_that_leave_everything_change_no_draw(values: list[float], seed: int, number: int) -> None:
    """The noise belongs to the token, not to its place among the candidates."""
    logprobs, key = array(log_softmax(np.array(values))), draw_key(seed, number)
    plain = draw(logprobs, Sampling(seed=seed), key).tolist()
    for sampling in (
        Sampling(seed=seed, top_k=VOCABULARY),
        Sampling(seed=seed, top_p=0.9999999),
        Sampling(seed=seed, min_p=1e-30),
    ):
        assert draw(logprobs, sampling, key).tolist() == plain


def test_keys_of_different_draws_differ() -> None:
    keys = {np.asarray(draw_key(seed, number)).tobytes() for seed in (0, 1, (1 << 63) - 1) for number in range(500)}
    assert len(keys) == 1500


def test_a_nucleus_of_a_large_vocabulary_is_looked_for_among_the_likeliest() -> None:
    values = np.linspace(0, -1, NUCLEUS_TOKENS_MAX * 3)
    np.random.default_rng(0).shuffle(values)
    likeliest = set(np.argsort(-values)[:NUCLEUS_TOKENS_MAX].tolist())
    logprobs = array(log_softmax(values))
    for number in range(5):
        assert drawn_token(logprobs, Sampling(seed=1, top_p=0.99), number) in likeliest


@settings(deadline=None)
@given(
    values=logits,
    prompt=tokens.filter(bool),
    generated=tokens,
    later=tokens,
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    presence=st.sampled_from([0.0, 1.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.4]),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5, width=16), max_size=3),
)
def test_penalties_count_prompt_and_generated_tokens_as_they_come(
    *,
    values: list[float],
    prompt: tuple[int, ...],
    generated: tuple[int, ...],
    later: tuple[int, ...],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    sampling = Sampling(
        seed=1,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    processors = chooser(row(sampling, prompt, generated), VOCABULARY).processors
    history = [*prompt, *generated]
    for newest in (None, *later):
        if newest is not None:
            history.append(newest)
        got = array(np.array(values))
        for processor in processors:
            got = processor(mx.array(history), got)
        expected = penalized(np.array(values), len(prompt), history, sampling)
        np.testing.assert_allclose(np.asarray(got[0]), expected, rtol=1e-5, atol=1e-5)


def penalized(values: Floats, prompt_count: int, history: list[int], sampling: Sampling) -> Floats:
    values = values.copy()
    for token, change in sampling.logit_bias:
        values[token] += change
    for token in set(history):
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(history[prompt_count:]):
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * history[prompt_count:].count(token)
    return values


def test_rows_without_penalties_cost_no_processor_and_greedy_ones_share_their_sampler() -> None:
    greedy = [chooser(row(Sampling(seed=seed, temperature=0)), VOCABULARY) for seed in range(2)]
    assert greedy[0].sampler is greedy[1].sampler
    assert [each.processors for each in (*greedy, chooser(row(Sampling(seed=1)), VOCABULARY))] == [()] * 3


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_name_the_likeliest_first(top: int) -> None:
    values = log_softmax(np.random.default_rng(3).normal(0, 3, 10))
    told = token_logprob(mx.array(values), 4, top, lambda ids: str(ids[0]))
    order = np.argsort(-values)[:top].tolist()
    assert told.logprob == pytest.approx(values[4], abs=1e-5)
    assert [(token, text) for token, text, _ in told.top] == [(token, str(token)) for token in order]
    assert [value for _, _, value in told.top] == pytest.approx([values[token] for token in order], abs=1e-5)


def test_an_impossible_token_has_a_logprob_that_json_knows() -> None:
    told = token_logprob(mx.array([0.0, -math.inf]), 1, 2, lambda _: "")
    assert told.logprob == told.top[1][2] == -9999.0
