"""The runner's core: admits requests, lets the engine step, and says what its tokens mean.

Pure: deterministic given its engine. Between two steps it takes commands (`submit`, `cancel`); `step` lets the engine do one
round; `report` is the frame of all that happened since the last one. A request is admitted or refused at once: there is no
queue here, waiting is the home's affair.

Usage is counted as OpenAI-compatible servers do it: `completion_tokens` are the generated tokens of all attempts, those of a
stop string included, the stop token not; a request that ends by length has exactly `max_tokens`.
"""

import msgspec

from inference.requests import (
    Accepted,
    ChatPrompt,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    Load,
    Prefilled,
    Prompt,
    Refused,
    Request,
    TextPrompt,
    TokenLogprob,
    Tokens,
    Usage,
)
from inference.runner.engine import Engine, RequestError, Row, Sampled
from inference.runner.text import AnswerText
from inference.runner_protocol import EngineInfo, Step

ERROR_CHARACTERS_MAX = 300


class _Live:
    """An admitted request."""

    __slots__ = ("cached", "completion_count", "kv_bytes", "prompt_count", "text")

    def __init__(self, text: AnswerText, prompt_count: int, completion_count: int, kv_bytes: int) -> None:
        self.text = text
        self.prompt_count = prompt_count
        self.completion_count = completion_count
        self.kv_bytes = kv_bytes
        self.cached = 0

    def usage(self) -> Usage:
        return Usage(self.prompt_count, self.completion_count, self.cached)


class Core:
    """See the module. One engine, all calls from its thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        info = engine.info
        self._running_max = info.running_max
        self._kv_step = info.kv_step
        self._kv_bytes_per_token = info.kv_bytes_per_token
        self._kv_bytes_max = info.kv_bytes_max
        self._token_characters_max = info.token_characters_max
        # What the whole KV budget can't hold could never be admitted: it bounds the context.
        self._context = min(info.context, _whole_steps_within(info.kv_bytes_max, info.kv_bytes_per_token, info.kv_step))
        self._live: dict[str, _Live] = {}
        self._kv_bytes = 0  # the sum of all live reservations, never above kv_bytes_max
        self._events: list[Event] = []
        self._steps = 0

    @property
    def info(self) -> EngineInfo:
        """What the engine is, with the context that requests can have here."""
        return msgspec.structs.replace(self._engine.info, context=self._context)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._live

    @property
    def load(self) -> Load:
        """What is taken on now."""
        return Load(len(self._live), self._running_max, self._kv_bytes, self._kv_bytes_max)

    def submit(self, request: Request) -> None:
        """Admit, refuse or fail a request."""
        try:
            self._admit(request)
        except RequestError as error:
            self._events.append(Failed(request.request_id, error.code, str(error), error.param))
        except Exception as error:  # noqa: BLE001 - whatever one request makes an engine raise is that request's end alone
            self._engine.remove(request.request_id)
            self._events.append(Failed(request.request_id, "engine_error", f"The engine failed on it: {one_line(error)}."))

    def _admit(self, request: Request) -> None:
        request_id = request.request_id
        if request_id in self._live:
            # Its owner never does that; the first request goes on, whoever sent the second must know.
            raise RequestError("invalid_parameter", f"A request with the id {request_id} is already running here.")
        self._check_characters(request.prompt)
        prompt_ids = self._engine.tokenize(request.prompt)
        max_tokens = self._max_tokens(request, len(prompt_ids))
        remaining = max_tokens - len(request.generated)
        row = Row(
            request_id=request_id,
            prompt_ids=prompt_ids,
            generated=request.generated,
            token_count_max=max(1, remaining),
            sampling=request.sampling,
            top_logprobs=request.top_logprobs,
        )
        self._engine.check(row)
        text = AnswerText(self._engine.decode, request.stop, request.generated, request.given_characters)
        if text.stopped or remaining <= 0:
            self._end_at_once(request, prompt_ids, text)
            return
        kv_bytes = self._kv_needed(len(prompt_ids) + max_tokens)
        if len(self._live) >= self._running_max or self._kv_bytes + kv_bytes > self._kv_bytes_max:
            self._events.append(Refused(request_id, kv_bytes, self.load))
            return
        self._trim_cache(self._kv_bytes + kv_bytes)
        live = _Live(text, len(prompt_ids), len(request.generated), kv_bytes)
        live.cached = self._engine.insert(row)
        self._live[request_id] = live
        self._kv_bytes += kv_bytes
        self._events.append(Accepted(request_id, prompt_ids, live.cached))

    def _check_characters(self, prompt: Prompt) -> None:
        """Refuse what is too long by far without tokenizing it, which would hold up every running stream for seconds.

        Raises: RequestError.
        """
        context, characters = self.info.context, prompt_characters(prompt)
        tokens_min = -(-characters // self._token_characters_max) if self._token_characters_max else 0
        if tokens_min > context:
            raise RequestError(
                "context_length_exceeded",
                f"The context is {context} tokens, and the prompt's {characters} characters are {tokens_min} tokens at least.",
                "messages",
            )

    def _max_tokens(self, request: Request, prompt_count: int) -> int:
        """How many tokens the answer may have, those of earlier attempts counted.

        Raises: RequestError where the context can't hold prompt and answer.
        """
        if prompt_count == 0:
            raise RequestError("invalid_parameter", "The prompt is empty: it has no tokens.", "prompt")
        room = self._context - prompt_count
        wanted = request.max_tokens or 1
        if wanted > room:
            answer = "at least 1 for the answer" if request.max_tokens is None else f"{wanted} for the answer"
            raise RequestError(
                "context_length_exceeded",
                f"The context is {self._context} tokens, but the request asks for {prompt_count + wanted}: "
                f"{prompt_count} in the prompt and {answer}.",
                "max_tokens" if room > 0 else "messages" if isinstance(request.prompt, ChatPrompt) else "prompt",
            )
        return room if request.max_tokens is None else request.max_tokens

    def _end_at_once(self, request: Request, prompt_ids: tuple[int, ...], text: AnswerText) -> None:
        """A continuation whose earlier attempt broke off after the last token: only the end was missing."""
        request_id = request.request_id
        reason: FinishReason = "stop" if text.stopped else "length"
        rest = text.finish()
        self._events.append(Accepted(request_id, prompt_ids))
        if rest:
            self._events.append(Tokens(request_id, (), rest))
        self._events.append(Finished(request_id, reason, Usage(len(prompt_ids), len(request.generated), 0)))

    def _kv_needed(self, tokens: int) -> int:
        return -(-tokens // self._kv_step) * self._kv_step * self._kv_bytes_per_token

    def _trim_cache(self, reserved: int) -> None:
        """The prefix cache has what is not reserved."""
        if self._engine.cache_bytes() > self._kv_bytes_max - reserved:
            self._engine.trim_cache(self._kv_bytes_max - reserved)

    def cancel(self, request_id: str) -> None:
        """End a request, whatever it is doing; text that was held back is not given out. An unknown id is no error."""
        live = self._live.get(request_id)
        if live is not None:
            self._engine.remove(request_id)
            self._end(request_id, live)
            self._events.append(Finished(request_id, "cancelled", live.usage()))

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every request as failed; the engine is not asked any more."""
        self._events.extend(Failed(request_id, code, message) for request_id in self._live)
        self._live.clear()
        self._kv_bytes = 0

    def step(self) -> None:
        """Let the engine do one round. What it raises leaves it in no known state: see `fail_all`."""
        self._steps += 1
        result = self._engine.step()
        events = self._events
        for request_id, done, total in result.prefilled:
            events.append(Prefilled(request_id, done, total))
        for sampled in result.sampled:
            self._take(sampled)
        for request_id, sentence in result.failed:
            self._end(request_id, self._live[request_id])
            events.append(Failed(request_id, "engine_error", sentence))

    def _take(self, sampled: Sampled) -> None:
        """One more token of a request: at most one Tokens event, and its end where it ends."""
        request_id = sampled.request_id
        live = self._live[request_id]
        if sampled.stop:
            rest = live.text.finish()
            if rest:
                self._events.append(Tokens(request_id, (), rest))
            self._finish(request_id, live, "stop")
            return
        live.completion_count += 1
        text = live.text.add(sampled.token_id)
        stopped = live.text.stopped
        if sampled.last and not stopped:
            text += live.text.finish()
        logprobs: tuple[TokenLogprob, ...] = () if sampled.logprob is None else (sampled.logprob,)
        self._events.append(Tokens(request_id, (sampled.token_id,), text, logprobs))
        if stopped and not sampled.last:
            self._engine.remove(request_id)
        if stopped or sampled.last:
            self._finish(request_id, live, "stop" if stopped else "length")

    def _finish(self, request_id: str, live: _Live, reason: FinishReason) -> None:
        self._end(request_id, live)
        self._events.append(Finished(request_id, reason, live.usage()))

    def _end(self, request_id: str, live: _Live) -> None:
        """Give back what was reserved. The engine may have kept the row's KV as a prefix."""
        del self._live[request_id]
        self._kv_bytes -= live.kv_bytes
        assert self._kv_bytes >= 0
        self._trim_cache(self._kv_bytes)

    def report(self) -> Step | None:
        """All events since the last report, with the load after them; None where there are none."""
        if not self._events:
            return None
        step = Step(self._steps, tuple(self._events), self.load)
        self._events.clear()
        return step


def _whole_steps_within(kv_bytes_max: int, kv_bytes_per_token: int, kv_step: int) -> int:
    """How many tokens the whole KV budget holds, in whole steps of a cache's growth."""
    if kv_bytes_per_token == 0:
        return 1 << 53
    return kv_bytes_max // (kv_bytes_per_token * kv_step) * kv_step


def one_line(error: Exception) -> str:
    """An error that nobody foresaw, short enough for a sentence to people."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= ERROR_CHARACTERS_MAX else text[: ERROR_CHARACTERS_MAX - 3] + "..."


def prompt_characters(prompt: Prompt) -> int:
    """How much text a prompt has, whatever a template adds; 0 for token ids."""
    if isinstance(prompt, ChatPrompt):
        return sum(len(content) for message in prompt.messages if isinstance(content := message.get("content"), str))
    return len(prompt.text) if isinstance(prompt, TextPrompt) else 0
