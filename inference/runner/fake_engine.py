"""An engine that computes nothing and forgets nothing, for every test and benchmark that is not about MLX.

Its next token is a hash of all earlier ids, the seed, the number of the draw and the penalties: a history that is wrong
anywhere shows in the next token. At temperature 0 neither seed nor draw number counts, as with a real model. Each answer is
the same whatever else runs. Pure: pace and faults come in as a callback for each step.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from inference.requests import ChatPrompt, Prompt, Sampling, TextPrompt, TokenLogprob
from inference.runner import fake_vocabulary as vocabulary
from inference.runner.engine import RequestError, Row, Sampled, StepResult
from inference.runner.prefix_memory import PrefixMemory
from inference.runner_protocol import EngineInfo

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: consecutive numbers land far apart
_OTHER_ODD = 0xD6E8FEB86659FD93

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong: once, at a phase or at the n-th step."""

    kind: Literal["exit", "abort", "kill", "hang", "print", "modules", "raise"]
    at: Literal["loading", "warming_up", "step"]
    step: Positive = 1


class FakeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the `fake` object in a model directory's config.json may say."""

    load_seconds: Seconds = 0.0
    warm_up_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0  # how long a step takes; 0: as fast as it goes
    prefill_tokens: Positive = 512  # a step, all rows together
    answer_tokens: int | None = None  # the stop token comes after exactly so many; None: by chance
    stop_one_in: int = 64  # the chance of a stop token, where nothing else decides; 0: never
    running_max: Positive = 64
    kv_bytes_per_token: Positive = 1024
    kv_step: Positive = 16
    kv_bytes_max: Positive | None = None  # None: running_max requests of a whole context
    cache_bytes_max: int = 1 << 22  # of the prefix cache
    weight_bytes: int = 1 << 20
    load_error: str | None = None  # loading fails with this sentence
    template_error: str | None = None  # rendering fails with this sentence
    fail_marker: str | None = None  # a request fails in the step in which its prompt, holding this text, is evaluated
    faults: tuple[Fault, ...] = ()


def mixed(state: int, number: int) -> int:
    """A 64-bit state with one more number in it."""
    return ((state ^ (number + 1)) * _ODD + _OTHER_ODD) & _MASK


def history(token_ids: Sequence[int], state: int = _OTHER_ODD) -> int:
    """The state after these ids."""
    for token_id in token_ids:
        state = ((state ^ (token_id + 1)) * _ODD + _OTHER_ODD) & _MASK
    return state


def request_key(sampling: Sampling) -> int:
    """What of the parameters goes into every draw."""
    seed = sampling.seed if sampling.temperature > 0 else 0
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias)
    return history(msgspec.msgpack.encode(penalties), mixed(_ODD, seed))


def drawn(state: int, key: int, draw: int) -> int:
    """64 bits for the draw after a history; `draw` is the number of generated tokens, 0 at temperature 0 with no penalty."""
    value = state ^ key ^ (draw * _OTHER_ODD & _MASK)
    value = ((value ^ (value >> 32)) * _ODD) & _MASK
    return value ^ (value >> 29)


def token_of(value: int, last_id: int, generated: int, settings: FakeSettings) -> int:
    """The token that a draw means after `last_id` and so many generated ones."""
    if generated == settings.answer_tokens:
        return vocabulary.STOP
    following = vocabulary.FOLLOWING.get(last_id)
    if following is not None:
        return following
    if settings.answer_tokens is None and settings.stop_one_in and value % settings.stop_one_in == 0:
        return vocabulary.STOP
    return vocabulary.FIRST[(value >> 20) % len(vocabulary.FIRST)]


def counts_draws(sampling: Sampling) -> bool:
    """Whether a draw depends on how many tokens came before: not for a greedy choice without penalties."""
    return sampling.temperature > 0 or bool(sampling.presence_penalty or sampling.frequency_penalty)


class _Live:
    """A row at work: the hash of the ids evaluated so far, and where it stands."""

    __slots__ = ("count", "counts_draws", "evaluated", "ids", "key", "left", "row", "state", "to_evaluate")

    def __init__(self, row: Row, cached: int) -> None:
        self.row = row
        self.ids = [*row.prompt_ids, *row.generated]
        self.to_evaluate = len(self.ids)
        self.evaluated = cached
        self.state = history(self.ids[:cached])
        self.key = request_key(row.sampling)
        self.counts_draws = counts_draws(row.sampling)
        self.count = len(row.generated)
        self.left = row.token_count_max


class FakeEngine:
    """See the module; `before_step` is called with each step's number and may sleep, raise, or not return at all."""

    def __init__(self, settings: FakeSettings, context: int, running_max: int, before_step: Callable[[int], None]) -> None:
        self._settings = settings
        self._before_step = before_step
        self._steps = 0
        self._rows: dict[str, _Live] = {}
        self._prefilling: dict[str, _Live] = {}
        self._memory = PrefixMemory(settings.kv_bytes_per_token, settings.kv_step, settings.cache_bytes_max)
        self._info = EngineInfo(
            device="fake",
            dtype="none",
            batched=True,
            context=context,
            running_max=running_max,
            kv_bytes_per_token=settings.kv_bytes_per_token,
            kv_bytes_max=settings.kv_bytes_max or self._memory.size(context) * running_max,
            kv_step=settings.kv_step,
            weight_bytes=settings.weight_bytes,
            token_characters_max=vocabulary.TOKEN_CHARACTERS_MAX,
            tokens_per_second=round(1 / settings.step_seconds) if settings.step_seconds else 0,
        )

    @property
    def info(self) -> EngineInfo:
        """What it is and what it can take on."""
        return self._info

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """One id a byte; messages as role, text, stop token, and the assistant's role at the end.

        Raises: RequestError.
        """
        if isinstance(prompt, TextPrompt):
            return vocabulary.encode(prompt.text)
        if isinstance(prompt, ChatPrompt):
            return self._render(prompt)
        if max(prompt.ids) >= vocabulary.SIZE:
            raise RequestError("invalid_parameter", f"Token ids of this model are below {vocabulary.SIZE}.", "prompt")
        return prompt.ids

    def _render(self, prompt: ChatPrompt) -> tuple[int, ...]:
        if self._settings.template_error is not None:
            raise RequestError("template_error", self._settings.template_error, "messages")
        ids: list[int] = []
        if prompt.tools or prompt.template_options:
            ids += [vocabulary.TOOL, *msgspec.json.encode((prompt.tools, prompt.template_options)), vocabulary.STOP]
        for message in prompt.messages:
            role = vocabulary.ROLES.get(str(message.get("role")))
            if role is None:
                raise RequestError("template_error", f"The chat template knows no role {message.get('role')!r}.", "messages")
            ids += [role, *vocabulary.encode(str(message.get("content", ""))), vocabulary.STOP]
        return (*ids, vocabulary.ASSISTANT)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens left out."""
        return vocabulary.decode(token_ids)

    def check(self, row: Row) -> None:
        """Refuse ids that are no tokens.

        Raises: RequestError.
        """
        for param, ids in (("logit_bias", [token_id for token_id, _ in row.sampling.logit_bias]), ("generated", row.generated)):
            if ids and max(ids) >= vocabulary.SIZE:
                raise RequestError("invalid_parameter", f"Token ids of this model are below {vocabulary.SIZE}.", param)

    def insert(self, row: Row) -> int:
        """Take a row on."""
        assert row.request_id not in self._rows
        assert row.prompt_ids
        assert row.token_count_max > 0
        cached = self._memory.longest(row.prompt_ids)
        self._rows[row.request_id] = self._prefilling[row.request_id] = _Live(row, cached)
        return cached

    def remove(self, request_id: str) -> None:
        """Drop a row; what it had evaluated is remembered."""
        live = self._rows.pop(request_id, None)
        if live is not None:
            self._prefilling.pop(request_id, None)
            self._memory.add(tuple(live.ids[: live.evaluated]))

    def step(self) -> StepResult:
        """Evaluate a piece of the prompts, oldest first, then draw a token for every row whose prompt is done."""
        self._steps += 1
        self._before_step(self._steps)
        prefilled, failed = self._prefill() if self._prefilling else ((), ())
        sampled = [self._draw(live) for live in self._rows.values() if live.evaluated >= live.to_evaluate]
        for token in sampled:
            if token.last:
                self.remove(token.request_id)
        return StepResult(prefilled, tuple(sampled), failed)

    def _prefill(self) -> tuple[tuple[tuple[str, int, int], ...], tuple[tuple[str, str], ...]]:
        budget = self._settings.prefill_tokens
        prefilled, failed = [], []
        for request_id, live in list(self._prefilling.items()):
            if budget == 0:
                break
            if self._is_marked(live):
                failed.append((request_id, "The fake engine fails this request, as its prompt asks for."))
                del self._rows[request_id], self._prefilling[request_id]
                continue
            end = min(live.to_evaluate, live.evaluated + budget)
            budget -= end - live.evaluated
            live.state = history(live.ids[live.evaluated : end], live.state)
            live.evaluated = end
            prefilled.append((request_id, end, live.to_evaluate))
            if end == live.to_evaluate:
                del self._prefilling[request_id]
        return tuple(prefilled), tuple(failed)

    def _is_marked(self, live: _Live) -> bool:
        marker = self._settings.fail_marker
        return marker is not None and marker in vocabulary.decode(live.row.prompt_ids)

    def _draw(self, live: _Live) -> Sampled:
        ids = live.ids
        value = drawn(live.state, live.key, live.count if live.counts_draws else 0)
        token_id = token_of(value, ids[-1] if live.count else -1, live.count, self._settings)
        row = live.row
        logprob = None if row.top_logprobs is None else _logprob(value, token_id, row.top_logprobs)
        if token_id == vocabulary.STOP:
            return Sampled(row.request_id, token_id, True, True, logprob)
        ids.append(token_id)
        live.state = ((live.state ^ (token_id + 1)) * _ODD + _OTHER_ODD) & _MASK
        live.evaluated += 1
        live.count += 1
        live.left -= 1
        return Sampled(row.request_id, token_id, False, live.left == 0, logprob)

    def cache_bytes(self) -> int:
        """What the prefix cache would hold."""
        return self._memory.bytes

    def trim_cache(self, bytes_max: int) -> None:
        """Forget prefixes, least recently used first."""
        self._memory.trim(bytes_max)

    def close(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self._prefilling.clear()
        self._memory.trim(0)


def _logprob(value: int, token_id: int, top: int) -> TokenLogprob:
    """A plausible one: the token itself is the likeliest, the others fall off behind it."""
    first = -(value % 1000) / 1000
    others = ((value + rank) % vocabulary.SIZE for rank in range(1, top))
    ids = [token_id, *others][:top]
    ranked = tuple((other, vocabulary.decode([other]), first - rank / 4) for rank, other in enumerate(ids))
    return TokenLogprob(token_id, vocabulary.decode([token_id]), first, ranked)
