"""How a row's next token is chosen, and what is said of its probability.

The order is the field's (that of vLLM): from the model's logits on,

    logit_bias, repetition_penalty (over prompt and generated tokens), presence and frequency penalties (over generated ones),
    temperature, min_p, top_k, top_p (of what min_p and top_k left), and one draw among what is left.

At temperature 0 the likeliest token is taken and the filters have no say. Logprobs are the model's own, before all of this.

The n-th generated token is drawn with noise made of (seed, n) and its token id alone, by the Gumbel-max trick: the noise does
not depend on which tokens the filters left, nor on what else is in the batch. Rows are one step ahead of what is known: the
newest token is an array that is not evaluated yet, so nothing here may look at a value.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import ParamSpec

import mlx.core as mx
import numpy as np

from inference.requests import Sampling, TokenLogprob
from inference.runner.engine import Row

NUCLEUS_TOKENS_MAX = 4096  # top_p without top_k looks at so many of the likeliest tokens; sorting a whole vocabulary takes 5 ms
LOGPROB_MIN = -9999.0  # instead of minus infinity, which JSON does not know

P = ParamSpec("P")
Sampler = Callable[[mx.array], mx.array]  # log-probabilities [1, vocabulary] -> token [1]
Processor = Callable[[mx.array, mx.array], mx.array]  # tokens so far, logits [1, vocabulary] -> logits


class RowFault(Exception):
    """Choosing a token raised for this row: it is at fault, and no other."""

    def __init__(self, request_id: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.request_id = request_id


def greedy(logprobs: mx.array) -> mx.array:
    """The likeliest token. One function for all rows, so that a batch of them is one call."""
    return mx.argmax(logprobs, axis=-1)


class Chooser:
    """What a batch needs to choose the tokens of one row, each exactly once and in order.

    Whatever its sampler or a processor raises comes out as a RowFault.
    """

    def __init__(
        self,
        request_id: str,
        sampler: Sampler = greedy,
        processors: tuple[Processor, ...] = (),
        raw: "deque[mx.array] | None" = None,
    ) -> None:
        self.sampler = sampler if sampler is greedy else _blaming(request_id, sampler)
        self.processors = tuple(_blaming(request_id, processor) for processor in processors)
        self._raw = raw

    def own_logprobs(self, logprobs: mx.array) -> mx.array:
        """The model's own log-probabilities for the oldest choice not yet asked for; `logprobs` are those after processors."""
        return logprobs if self._raw is None else self._raw.popleft()


ChooserFactory = Callable[[Row, int], Chooser]


def chooser(row: Row, vocabulary: int) -> Chooser:
    """The chooser of a row, at the draw where the row stands."""
    sampling = row.sampling
    sampler = greedy if sampling.temperature == 0 else _Draws(row)
    if not _has_processing(sampling):
        return Chooser(row.request_id, sampler)
    raw: deque[mx.array] | None = None if row.top_logprobs is None else deque()
    return Chooser(row.request_id, sampler, (_Penalties(row, vocabulary, raw),), raw)


def draw_key(seed: int, number: int) -> mx.array:
    """The key of one draw."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=8).digest()
    return mx.array(np.frombuffer(digest, dtype=np.uint32))


def draw(logprobs: mx.array, sampling: Sampling, key: mx.array) -> mx.array:
    """One token [1] from log-probabilities [1, vocabulary], with the noise that `key` gives."""
    noise = mx.random.uniform(shape=logprobs.shape, key=key)
    values = logprobs.astype(mx.float32) * (1.0 / sampling.temperature)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return mx.argmax(_at_least(values, sampling.min_p) + _gumbel(noise), axis=-1)
    ids, values = _candidates(values, sampling)
    place = mx.argmax(values + _gumbel(mx.take_along_axis(noise, ids, axis=-1)), axis=-1, keepdims=True)
    return mx.take_along_axis(ids, place, axis=-1)[:, 0]


def _candidates(values: mx.array, sampling: Sampling) -> tuple[mx.array, mx.array]:
    """The ids that top_k and top_p leave, likeliest first, with their values; minus infinity for those left out."""
    vocabulary = values.shape[-1]
    count = min(vocabulary, sampling.top_k or NUCLEUS_TOKENS_MAX)
    everything = sampling.top_k == 0 and sampling.min_p == 0
    total = mx.logsumexp(values, axis=-1, keepdims=True) if everything else None
    ids = mx.arange(vocabulary, dtype=mx.uint32)[None]
    if count < vocabulary:
        ids = mx.argpartition(-values, kth=count - 1, axis=-1)[:, :count]
        values = mx.take_along_axis(values, ids, axis=-1)
    values = _at_least(values, sampling.min_p)
    if sampling.top_p == 1:
        return ids, values
    order = mx.argsort(-values, axis=-1)
    ids, values = mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)
    if total is None:
        total = mx.logsumexp(values, axis=-1, keepdims=True)
    probabilities = mx.exp(values - total)
    before = mx.cumsum(probabilities, axis=-1, inclusive=False)
    return ids, mx.where(before < sampling.top_p, values, -mx.inf)


def _at_least(values: mx.array, min_p: float) -> mx.array:
    """Without the tokens that are less than `min_p` times as likely as the likeliest."""
    if min_p == 0:
        return values
    return mx.where(values < mx.max(values, axis=-1, keepdims=True) + math.log(min_p), -mx.inf, values)


def _gumbel(noise: mx.array) -> mx.array:
    return -mx.log(-mx.log(mx.maximum(noise, 1e-30)))


class _Draws:
    """A row's sampler: each call is the next draw."""

    def __init__(self, row: Row) -> None:
        self._sampling = row.sampling
        self._number = len(row.generated)

    def __call__(self, logprobs: mx.array) -> mx.array:
        token = draw(logprobs, self._sampling, draw_key(self._sampling.seed, self._number))
        self._number += 1
        return token


def _has_processing(sampling: Sampling) -> bool:
    return bool(
        sampling.logit_bias or sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    )


class _Penalties:
    """A row's logits processor. Counts of tokens are arrays that grow with the batch, one token a call."""

    def __init__(self, row: Row, vocabulary: int, raw: "deque[mx.array] | None") -> None:
        sampling = row.sampling
        self._sampling = sampling
        self._raw = raw
        self._newest_is_counted = True  # the first call's newest token belongs to the history
        self._seen = _counts((*row.prompt_ids, *row.generated), vocabulary) if sampling.repetition_penalty != 1 else None
        additive = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._generated = _counts(row.generated, vocabulary) if additive else None
        self._bias = _bias(sampling, vocabulary) if sampling.logit_bias else None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._raw is not None:
            self._raw.append((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0])
        self._count(tokens[-1:])
        sampling = self._sampling
        values = logits.astype(mx.float32)
        if self._bias is not None:
            values = values + self._bias
        if self._seen is not None:
            penalty = sampling.repetition_penalty
            values = mx.where(self._seen > 0, mx.where(values > 0, values / penalty, values * penalty), values)
        if self._generated is not None:
            values = values - sampling.frequency_penalty * self._generated - sampling.presence_penalty * (self._generated > 0)
        return values.astype(logits.dtype)

    def _count(self, newest: mx.array) -> None:
        if self._newest_is_counted:
            self._newest_is_counted = False
            return
        if self._seen is not None:
            self._seen = self._seen.at[newest].add(1)
        if self._generated is not None:
            self._generated = self._generated.at[newest].add(1)


def _counts(token_ids: Sequence[int], vocabulary: int) -> mx.array:
    counts = np.bincount(np.asarray(token_ids, dtype=np.int64), minlength=vocabulary)
    return mx.array(counts.astype(np.float32))


def _bias(sampling: Sampling, vocabulary: int) -> mx.array:
    bias = np.zeros(vocabulary, dtype=np.float32)
    for token_id, value in sampling.logit_bias:
        bias[token_id] += value
    return mx.array(bias)


def _blaming(request_id: str, choose: Callable[P, mx.array]) -> Callable[P, mx.array]:
    def guarded(*args: P.args, **kwargs: P.kwargs) -> mx.array:
        try:
            return choose(*args, **kwargs)
        except Exception as error:
            raise RowFault(request_id, error) from error

    return guarded


def token_logprob(logprobs: mx.array, token_id: int, top: int, decode: Callable[[Sequence[int]], str]) -> TokenLogprob:
    """What is said of a token: its log-probability, and the `top` likeliest in its place."""
    values = np.maximum(np.asarray(logprobs.astype(mx.float32)), LOGPROB_MIN)
    likeliest: list[int] = []
    if top:
        some = np.argpartition(-values, min(top, len(values)) - 1)[:top]
        likeliest = sorted(some.tolist(), key=lambda other: (-values[other], other))
    return TokenLogprob(
        token_id,
        decode([token_id]),
        float(values[token_id]),
        tuple((other, decode([other]), float(values[other])) for other in likeliest),
    )
