"""The MLX engine: rows become tokens by continuous batching, with a prefix cache over finished and cancelled rows.

Rows run in a shared batch. Where choosing a token raises, the row at fault is known and fails alone; the batch, of no more use
then, is built anew from what each other row has given out so far, and goes on with the same tokens, since a draw depends on
seed and number alone. Where nobody knows which row is at fault, each goes on in a lane of its own, and only those fail that
raise there.
"""

import math
import sys
import time
import traceback
from collections.abc import Sequence

from inference.requests import Prompt, TokenLogprob
from inference.runner import mlx_check, mlx_memory
from inference.runner.blas import set_threads
from inference.runner.engine import RequestError, Row, Sampled, StepResult
from inference.runner.mlx_lane import BatchLane, Drawn, Job, Kept, Lane, LaneStep, SingleLane, evaluate
from inference.runner.mlx_load import Loaded
from inference.runner.mlx_pace import PrefillPace
from inference.runner.mlx_prefix import PrefixCache
from inference.runner.mlx_sampling import Chooser, ChooserFactory, RowFault, chooser, token_logprob
from inference.runner.mlx_text import Text
from inference.runner.thread_pace import ThreadPace
from inference.runner_protocol import EngineInfo


class _Live:
    """A row at work: where it runs, and all that it takes to start it anew."""

    __slots__ = ("chooser", "evaluated", "given", "lane", "row", "total")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.given = list(row.generated)  # tokens of earlier attempts and those given out
        self.total = len(row.prompt_ids) + len(row.generated) + row.token_count_max
        self.evaluated = 0  # prompt tokens, as last reported
        self.lane: Lane
        self.chooser: Chooser

    def standing(self) -> Row:
        """The row as one would ask for what is left of it."""
        row = self.row
        return Row(
            request_id=row.request_id,
            prompt_ids=row.prompt_ids,
            generated=tuple(self.given),
            token_count_max=row.token_count_max - (len(self.given) - len(row.generated)),
            sampling=row.sampling,
            top_logprobs=row.top_logprobs,
        )


class MlxEngine:
    """See the module, and `inference.runner.engine.Engine` for the contract."""

    def __init__(self, loaded: Loaded, choosers: ChooserFactory = chooser) -> None:
        self._loaded = loaded
        self._choosers = choosers
        self._text = Text(loaded.tokenizer, loaded.shape.vocabulary)
        self._rows: dict[str, _Live] = {}
        self._lanes: list[Lane] = []
        self._shared: Lane | None = None
        set_threads(1)  # what is measured and checked here takes no longer for it, and on a busy machine far less
        batched = loaded.budget.running_max > 1 and mlx_check.batch_is_right(loaded.model, loaded.shape.vocabulary)
        self.speed = mlx_check.measure(loaded.model, loaded.shape.vocabulary)
        budget = loaded.budget
        self._pace = PrefillPace(self.speed.prefill, mlx_memory.PREFILL_TOKENS_MIN, budget.prefill_tokens_max)
        self._threads: dict[tuple[bool, int], ThreadPace] = {}
        self._decode_seconds = 1 / self.speed.decode  # of the last step without prompts
        self._prefix = PrefixCache()
        self._info = EngineInfo(
            device=loaded.device,
            dtype=loaded.dtype,
            batched=batched,
            context=budget.context,
            running_max=budget.running_max if batched else 1,
            kv_bytes_per_token=loaded.shape.kv_bytes_per_token,
            kv_bytes_max=budget.kv_bytes_max,
            kv_step=mlx_memory.KV_BLOCK_TOKENS,
            weight_bytes=loaded.shape.weight_bytes,
            token_characters_max=self._text.token_characters_max,
            tokens_per_second=round(self.speed.decode),
        )

    @property
    def info(self) -> EngineInfo:
        """What it is and what it can take on."""
        return self._info

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids.

        Raises: RequestError.
        """
        return self._text.tokenize(prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens left out."""
        return self._text.decode(token_ids)

    def check(self, row: Row) -> None:
        """Refuse ids that are no tokens and numbers that are none.

        Raises: RequestError.
        """
        vocabulary, sampling = self._loaded.shape.vocabulary, row.sampling
        biased = [token_id for token_id, _ in sampling.logit_bias]
        for param, ids in (("logit_bias", biased), ("prompt", row.prompt_ids), ("generated", row.generated)):
            if any(not 0 <= token_id < vocabulary for token_id in ids):
                raise RequestError("invalid_parameter", f"Token ids of this model are below {vocabulary}.", param)
        for param in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(sampling, param)):
                raise RequestError("invalid_parameter", f"{param} is not a finite number.", param)
        if not all(math.isfinite(value) for _, value in sampling.logit_bias):
            raise RequestError("invalid_parameter", "A logit_bias is not a finite number.", "logit_bias")

    def insert(self, row: Row) -> int:
        """Take a row on; returns how many prompt tokens come from the prefix cache."""
        assert row.request_id not in self._rows
        assert len(self._rows) < self._info.running_max
        live = _Live(row)
        self._rows[row.request_id] = live
        self._yield_prefixes()
        return min(self._start(live, self._shared_lane()), len(row.prompt_ids) - 1)

    def _yield_prefixes(self) -> None:
        """The prefix cache has what the rows, padded to the longest as they are in a batch, can't come to need."""
        self._prefix.trim(self._room([live.total for live in self._rows.values()]))

    def _room(self, tokens: list[int]) -> int:
        """Bytes of the KV budget that rows of so many tokens leave."""
        return max(0, self._info.kv_bytes_max - mlx_memory.batch_bytes(self._loaded.shape, tokens))

    def _shared_lane(self) -> Lane:
        if self._shared is None:
            self._shared = self._lane(batched=self._info.batched)
        return self._shared

    def _lane(self, *, batched: bool) -> Lane:
        model, stop_ids = self._loaded.model, self._loaded.stop_ids
        lane = BatchLane(model, stop_ids, self._info.running_max) if batched else SingleLane(model, stop_ids)
        self._lanes.append(lane)
        return lane

    def _start(self, live: _Live, lane: Lane) -> int:
        """Put a row into a lane, at the point where it stands; returns how many tokens need not be evaluated."""
        row = live.standing()
        tokens = [*row.prompt_ids, *row.generated]
        kv, cached = self._prefix.fetch(tokens)
        live.lane, live.chooser = lane, self._choosers(row, self._loaded.shape.vocabulary)
        lane.insert(Job(row.request_id, tokens[:cached], tokens[cached:], kv, row.token_count_max, live.chooser))
        return cached

    def remove(self, request_id: str) -> None:
        """Drop a row between two steps; what it had evaluated goes to the prefix cache."""
        live = self._rows.get(request_id)
        if live is not None:
            self._end(request_id, live.lane.remove(request_id))
            self._drop_unused_lanes()

    def _end(self, request_id: str, kept: Kept | None) -> None:
        """Forget a row that its lane has let go of."""
        if kept is not None:
            self._keep(kept)
        del self._rows[request_id]
        self._yield_prefixes()

    def _keep(self, kept: Kept) -> None:
        """Put a KV into the prefix cache. While it is copied, those of all rows are there."""
        room = self._room([len(live.row.prompt_ids) + len(live.given) for live in self._rows.values()])
        self._prefix.store(kept.tokens, kept.kv, room, evaluate)

    def _drop_unused_lanes(self) -> None:
        used = {id(live.lane) for live in self._rows.values()} | {id(self._shared)}
        for lane in [lane for lane in self._lanes if id(lane) not in used]:
            self._lanes.remove(lane)
            lane.close()

    def step(self) -> StepResult:
        """One round of every lane; a lane that raises costs its row at fault, and the others nothing but time."""
        threads = self._thread_pace()
        set_threads(threads.threads)
        started = time.perf_counter()
        prefilled: list[tuple[str, int, int]] = []
        sampled: list[Sampled] = []
        failed: list[tuple[str, str]] = []
        tokens = 0
        for lane in list(self._lanes):
            try:
                step = lane.step(self._pace.tokens)
            except Exception as error:  # noqa: BLE001 - whatever MLX or a model raises, the rows not at fault go on
                failed += self._recover(lane, error)
                continue
            tokens += step.prefill_tokens
            prefilled += self._reported(step)
            for kept in step.boundaries:
                self._keep(kept)
            sampled += [self._sampled(drawn) for drawn in step.drawn]
        self._drop_unused_lanes()
        self._learn(threads, tokens, len(sampled), time.perf_counter() - started)
        return StepResult(tuple(prefilled), tuple(sampled), tuple(failed))

    def _thread_pace(self) -> ThreadPace:
        """How many threads gain is another matter for pieces of prompts than for tokens, and for more rows than for one."""
        prefilling = any(len(live.given) == len(live.row.generated) for live in self._rows.values())
        return self._threads.setdefault((prefilling, len(self._rows).bit_length()), ThreadPace(self._loaded.threads))

    def _learn(self, threads: ThreadPace, prefill_tokens: int, sampled: int, seconds: float) -> None:
        if prefill_tokens:
            self._pace.observe(prefill_tokens, seconds, self._decode_seconds if sampled else 0.0)
        elif sampled:
            self._decode_seconds = seconds
        if prefill_tokens or sampled:
            threads.observe(seconds / max(1, prefill_tokens))

    def _reported(self, step: LaneStep) -> list[tuple[str, int, int]]:
        """What is new of a prompt's progress: a row started anew evaluates its prompt a second time."""
        reports = []
        for request_id, done, total in step.evaluated:
            live = self._rows[request_id]
            if live.evaluated < done and len(live.given) == len(live.row.generated):
                live.evaluated = done
                reports.append((request_id, done, total))
        return reports

    def _sampled(self, drawn: Drawn) -> Sampled:
        live = self._rows[drawn.request_id]
        logprob: TokenLogprob | None = None
        own = live.chooser.own_logprobs(drawn.logprobs)
        if live.row.top_logprobs is not None:
            logprob = token_logprob(own, drawn.token_id, live.row.top_logprobs, self.decode)
        live.given.append(drawn.token_id)
        if drawn.reason is not None:
            self._end(drawn.request_id, drawn.kept)
        return Sampled(drawn.request_id, drawn.token_id, drawn.reason == "stop", drawn.reason is not None, logprob)

    def _recover(self, lane: Lane, error: Exception) -> list[tuple[str, str]]:
        """Start the lane's rows anew without the one at fault; where that is not known, each by itself."""
        sys.stderr.write("".join(traceback.format_exception(error)))
        rows = [live for live in self._rows.values() if live.lane is lane]
        self._lanes.remove(lane)
        lane.close()
        if self._shared is lane:
            self._shared = None
        guilty = error.request_id if isinstance(error, RowFault) else rows[0].row.request_id if len(rows) == 1 else None
        failed = []
        for live in rows:
            if live.row.request_id == guilty:
                del self._rows[guilty]
                failed.append((guilty, f"The engine failed on this request: {error}"))
            else:
                self._start(live, self._lane(batched=False) if guilty is None else self._shared_lane())
        return failed

    def cache_bytes(self) -> int:
        """What the prefix cache holds."""
        return self._prefix.bytes

    def trim_cache(self, bytes_max: int) -> None:
        """Let the prefix cache go down to that many bytes."""
        self._prefix.trim(bytes_max)

    def close(self) -> None:
        """Free what is held."""
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        self._shared = None
        self._rows.clear()
        self._prefix.trim(0)
