"""Warming up: whether a batch is what single requests are, and how fast the model is here."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from inference.runner.mlx_lane import BatchLane, Job, Lane, Model, SingleLane
from inference.runner.mlx_sampling import Chooser

PROMPT_TOKENS = (5, 19, 9)  # of the rows compared: different lengths, so that each is padded
ANSWER_TOKENS = 4
LATE_AFTER = 2  # the last row comes when the others have as many tokens
PREFILL_TOKENS = 16  # of one step: the longer prompts take several
MEASURED_TOKENS = 64
# How far log-probabilities may be apart: rounding, that is. A wrong mask or position is off by a tenth and more.
TOLERANCE_F32 = 1e-3
TOLERANCE_16_BIT = 0.5
LOGPROB_MIN = -20.0  # less likely tokens are not compared
STEPS_MAX = 1000


@dataclass(frozen=True)
class Speed:
    """Measured once, alone: tokens a second."""

    prefill: float
    decode: float


class _Forced:
    """A sampler that takes given tokens, whatever the model says, and keeps what it said."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.logprobs: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        token = self._tokens[len(self.logprobs) % len(self._tokens)]
        self.logprobs.append(logprobs[0])
        return mx.array([token], dtype=mx.uint32)


def batch_is_right(model: Model, vocabulary: int) -> bool:
    """Whether rows in a batch get what they get alone."""
    apart = difference(model, vocabulary)
    allowed = TOLERANCE_F32 if model(mx.array([[0]])).dtype == mx.float32 else TOLERANCE_16_BIT
    if apart > allowed:
        sys.stderr.write(f"one request at a time: in a batch this model's log-probabilities are off by {apart:.2g}\n")
    return apart <= allowed


def difference(model: Model, vocabulary: int) -> float:
    """How far log-probabilities of rows in a batch are from those of the same rows alone; infinite where a batch raises.

    Each row's tokens are given, so that a near tie can't send the two different ways.
    """
    prompts = [[(31 * i * i + 7 * row + 3) % vocabulary for i in range(length)] for row, length in enumerate(PROMPT_TOKENS)]
    batched = [_Forced(prompt) for prompt in prompts]
    lane = BatchLane(model, frozenset(), len(prompts))
    try:
        _run(lane, [_job(row, prompt, batched[row]) for row, prompt in enumerate(prompts)])
    except Exception as error:  # noqa: BLE001 - any failure says the same: no batches with this model
        sys.stderr.write(f"the model can't be batched: {type(error).__name__}: {error}\n")
        return float("inf")
    finally:
        lane.close()
    return max(_apart(_alone(model, prompt), mx.stack(batched[row].logprobs)) for row, prompt in enumerate(prompts))


def _alone(model: Model, prompt: list[int]) -> mx.array:
    """Log-probabilities of a row's tokens, one [vocabulary] for each choice, from one evaluation of all of it."""
    given = [*prompt, *prompt[:ANSWER_TOKENS]]
    logits: mx.array = model(mx.array([given]), cache=make_prompt_cache(model))[0, len(prompt) - 1 :]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _apart(one: mx.array, other: mx.array) -> float:
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    return float(np.asarray(mx.max(mx.where(one > LOGPROB_MIN, mx.abs(one - other), 0.0))))


def _job(row: int, prompt: list[int], sampler: _Forced) -> Job:
    return Job(str(row), [], prompt, None, ANSWER_TOKENS, Chooser("check", sampler))


def _run(lane: Lane, jobs: list[Job]) -> None:
    """Run them to their ends; the last one comes in the middle of the others."""
    *early, late = jobs
    for job in early:
        lane.insert(job)
    counts = dict.fromkeys((job.request_id for job in jobs), 0)
    waiting = True
    for _ in range(STEPS_MAX):
        for drawn in lane.step(PREFILL_TOKENS).drawn:
            counts[drawn.request_id] += 1
        if waiting and max(counts.values()) >= LATE_AFTER:
            lane.insert(late)
            waiting = False
        if min(counts.values()) == ANSWER_TOKENS:
            return
    raise RuntimeError("the rows of a batch don't end")


def measure(model: Model, vocabulary: int) -> Speed:
    """Evaluate a prompt and a few tokens after it, with a clock."""
    sampler = _Forced([1])
    lane = SingleLane(model, frozenset())
    prompt = [i % vocabulary for i in range(MEASURED_TOKENS + 1)]
    lane.insert(Job("measured", [], prompt, None, ANSWER_TOKENS + 1, Chooser("check", sampler)))
    prefill, *decode = _step_seconds(lane)
    decode = decode[2:]  # the first one starts the pipeline
    lane.close()
    return Speed(MEASURED_TOKENS / prefill, len(decode) / sum(decode))


def _step_seconds(lane: Lane) -> Iterator[float]:
    for _ in range(ANSWER_TOKENS + 2):
        started = time.perf_counter()
        lane.step(MEASURED_TOKENS)
        yield time.perf_counter() - started
