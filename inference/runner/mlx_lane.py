"""Lanes: what turns rows into tokens. The only file that knows how mlx-lm batches.

A `BatchLane` runs many rows at once through mlx-lm's BatchGenerator. A `SingleLane` runs one, with nothing but the model and
its own caches: for models of which a batch is not what single requests give, for a row that must be watched alone, and as the
measure that batches are checked against.

Both are one token ahead: a step starts the evaluation of the next token before it waits for this one.
"""

import copy
from collections import deque
from typing import Any, Literal, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from inference.runner.mlx_prefix import Kv
from inference.runner.mlx_sampling import Chooser

Model = Any  # what mlx-lm builds, an mlx.nn.Module: tokens [rows, length], cache -> logits [rows, length, vocabulary]

PREFILL_ROWS_MAX = 8  # prompts that are evaluated side by side, where all of them fit into one step
LONG_PREFILL_ROWS_MAX = 2  # else: padding and attention to the longest's KV would eat up what more rows gain
PREFILL_CHUNK_MAX = 1 << 16  # a step's piece of a prompt is evaluated at once: its size is the engine's to choose


class Job(NamedTuple):
    """A row as a lane sees it: `past` is what `kv` stands for, `rest` (at least one token) comes after it."""

    request_id: str
    past: list[int]
    rest: list[int]
    kv: Kv | None
    token_count_max: int
    chooser: Chooser


class Kept(NamedTuple):
    """KV that a row leaves behind, not evaluated yet (see `evaluate`), and the tokens that it stands for."""

    tokens: list[int]
    kv: Kv


class Drawn(NamedTuple):
    """A row's next token with the log-probabilities [vocabulary] it was chosen by, and why the row ended with it, if so."""

    request_id: str
    token_id: int
    logprobs: mx.array
    reason: Literal["stop", "length"] | None
    kept: Kept | None


class LaneStep(NamedTuple):
    """What a step did: for prompts, tokens done of how many; new tokens; prompt tokens evaluated now, with padding.

    `boundaries` are KVs of prompts evaluated up to their last token, of models whose KV can't be cut back to that afterwards.
    """

    evaluated: list[tuple[str, int, int]]
    drawn: list[Drawn]
    prefill_tokens: int = 0
    boundaries: tuple[Kept, ...] = ()


class Lane(Protocol):
    """Rows on their way. After an exception from `step` a lane is of no more use."""

    def insert(self, job: Job) -> None:
        """Take a row on."""

    def remove(self, request_id: str) -> Kept | None:
        """Drop a row; what it had evaluated, where there is any."""

    def step(self, prefill_tokens: int) -> LaneStep:
        """A token for each row that has its prompt, and so many prompt tokens, all rows and padding together."""

    def close(self) -> None:
        """Free what is held."""


class BatchLane:
    """Many rows in one batch."""

    def __init__(self, model: Model, stop_ids: frozenset[int], rows_max: int) -> None:
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token] for token in sorted(stop_ids)],
            completion_batch_size=rows_max,
            prefill_batch_size=PREFILL_ROWS_MAX,
            prefill_step_size=PREFILL_CHUNK_MAX,
        )
        self._waiting: deque[Job] = deque()  # for the prompts before them
        self._uids: dict[str, int] = {}
        self._jobs: dict[int, Job] = {}
        self._prefilling: dict[int, int] = {}  # tokens of the rest that are evaluated

    def insert(self, job: Job) -> None:
        """See Lane."""
        self._waiting.append(job)

    def _feed(self, prefill_tokens: int) -> None:
        """Hand the next prompts to the generator, oldest first."""
        while self._waiting and len(self._prefilling) < PREFILL_ROWS_MAX:
            rests = [len(self._jobs[uid].rest) - done for uid, done in self._prefilling.items()]
            rests.append(len(self._waiting[0].rest))
            if len(rests) > LONG_PREFILL_ROWS_MAX and len(rests) * max(rests) > prefill_tokens:
                return
            self._hand_over(self._waiting.popleft())

    def _hand_over(self, job: Job) -> None:
        (uid,) = self._generator.insert(
            [job.rest],
            max_tokens=[job.token_count_max],
            caches=[job.kv],
            all_tokens=[list(job.past)],
            samplers=[job.chooser.sampler],
            logits_processors=[job.chooser.processors],
        )
        self._uids[job.request_id] = uid
        self._jobs[uid] = job._replace(kv=None)  # from here on it is copied into the batch's
        self._prefilling[uid] = 0

    def remove(self, request_id: str) -> Kept | None:
        """See Lane."""
        uid = self._uids.pop(request_id, None)
        if uid is None:
            self._waiting = deque(job for job in self._waiting if job.request_id != request_id)
            return None
        job = self._jobs.pop(uid)
        self._prefilling.pop(uid, None)
        with mx.stream(self._generator.stream):
            kv, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
            return Kept(list(tokens), kv) if len(tokens) > len(job.past) else None

    def step(self, prefill_tokens: int) -> LaneStep:
        """See Lane."""
        self._feed(prefill_tokens)
        self._generator.prefill_step_size = max(1, prefill_tokens // max(1, len(self._prefilling)))
        prompts, tokens = self._generator.next()
        evaluated, longest, count, complete = [], 0, 0, []
        for response in prompts:
            job, (done, total) = self._jobs[response.uid], response.progress
            evaluated.append((job.request_id, len(job.past) + done, len(job.past) + total))
            if response.end_of_prompt:
                self._prefilling.pop(response.uid)
                continue
            longest, count = max(longest, done - self._prefilling[response.uid]), count + 1
            self._prefilling[response.uid] = done
            if response.end_of_segment:
                complete.append(response.uid)
        return LaneStep(evaluated, [self._drawn(response) for response in tokens], longest * count, self._boundaries(complete))

    def _boundaries(self, uids: list[int]) -> tuple[Kept, ...]:
        if not uids:
            return ()
        with mx.stream(self._generator.stream):
            extracted = self._generator.extract_cache(uids).values()
        return tuple(Kept(list(tokens), kv) for kv, tokens in extracted if not can_trim_prompt_cache(kv))

    def _drawn(self, response: Any) -> Drawn:  # noqa: ANN401 - mlx_lm is untyped
        request_id = self._jobs[response.uid].request_id
        kept = None
        if response.finish_reason is not None:
            del self._jobs[response.uid], self._uids[request_id]
            kept = Kept(response.all_tokens, response.prompt_cache)
        return Drawn(request_id, response.token, response.logprobs, response.finish_reason, kept)

    def close(self) -> None:
        """See Lane."""
        self._waiting.clear()
        self._generator.close()


class SingleLane:
    """One row."""

    def __init__(self, model: Model, stop_ids: frozenset[int]) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._job: Job | None = None
        self._kv: Kv = []
        self._tokens: list[int] = []  # what the KV stands for
        self._rest: list[int] = []
        self._count = 0
        self._next: tuple[mx.array, mx.array] | None = None  # token [1] and log-probabilities [vocabulary], on their way

    def insert(self, job: Job) -> None:
        """See Lane."""
        assert self._job is None
        self._job = job
        self._kv = make_prompt_cache(self._model) if job.kv is None else job.kv
        self._tokens, self._rest = list(job.past), list(job.rest)
        self._count = 0

    def remove(self, request_id: str) -> Kept | None:
        """See Lane."""
        assert self._job is not None
        assert self._job.request_id == request_id
        kept = Kept(self._tokens, self._kv) if len(self._tokens) > len(self._job.past) else None
        self._job, self._kv, self._next = None, [], None
        return kept

    def step(self, prefill_tokens: int) -> LaneStep:
        """See Lane."""
        if self._job is None:
            return LaneStep([], [])
        if self._next is not None:
            return LaneStep([], [self._draw(self._job, *self._next)])
        chunk = self._rest[: min(max(1, prefill_tokens), len(self._rest) - 1)]
        if chunk:
            self._model(mx.array([chunk]), cache=self._kv)
            mx.eval([part.state for part in self._kv])
            del self._rest[: len(chunk)]
            self._tokens += chunk
        else:
            self._next = self._choose(self._job.chooser, mx.array(self._rest))
            self._tokens += self._rest
            self._rest = []
        done = len(self._tokens)
        boundaries = self._boundaries() if chunk and len(self._rest) == 1 else ()
        return LaneStep([(self._job.request_id, done, done + len(self._rest))], [], len(chunk), boundaries)

    def _boundaries(self) -> tuple[Kept, ...]:
        return () if can_trim_prompt_cache(self._kv) else (Kept(list(self._tokens), copy.deepcopy(self._kv)),)

    def _choose(self, chooser: Chooser, newest: mx.array) -> tuple[mx.array, mx.array]:
        logits = self._model(newest[None], cache=self._kv)[:, -1, :]
        for processor in chooser.processors:
            logits = processor(newest, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = chooser.sampler(logprobs)
        mx.async_eval(token, logprobs)  # type: ignore[no-untyped-call]  # mlx has no annotations
        return token, logprobs[0]

    def _draw(self, job: Job, token: mx.array, logprobs: mx.array) -> Drawn:
        self._next = self._choose(job.chooser, token)
        (token_id,) = np.asarray(token).tolist()
        self._tokens.append(token_id)
        self._count += 1
        reason: Literal["stop", "length"] | None = None
        if token_id in self._stop_ids:
            reason = "stop"
        elif self._count == job.token_count_max:
            reason = "length"
        kept = None if reason is None else self.remove(job.request_id)
        return Drawn(job.request_id, token_id, logprobs, reason, kept)

    def close(self) -> None:
        """See Lane."""
        self._job, self._kv, self._next = None, [], None


def evaluate(kv: Kv) -> None:
    """Make a KV stand by itself: what a lane leaves is a slice of a whole batch's until then, and keeps all of that alive."""
    mx.eval([part.state for part in kv])
