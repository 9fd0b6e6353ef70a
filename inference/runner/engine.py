"""The contract between the runner's core and an engine: tokens only, no text rules, no admission.

The core decides which requests run and what their tokens mean (stop strings, half characters, finish reasons, usage); an
engine turns rows into tokens, one step at a time, on one thread. `tests/inference/engine_contract.py` is run over every
engine.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from inference.requests import ErrorCode, Prompt, Sampling, TokenLogprob
from inference.runner_protocol import EngineInfo, LoadModel


class RequestError(Exception):
    """A request that can't be run as it is; it fails alone. `str()` is one sentence for its sender."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.param = param


class LoadError(Exception):
    """The model can't be loaded here; `str()` is one sentence that says why."""


class Row(Struct, frozen=True, kw_only=True):
    """An admitted request as an engine sees it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    generated: tuple[int, ...]  # of earlier attempts: history for the model, the penalties and the draw number
    token_count_max: int  # how many more it may generate, at least 1
    sampling: Sampling
    top_logprobs: int | None


class Sampled(Struct, frozen=True):
    """One more token of a row; after `last` (a stop token, or the row's maximum) the row is gone from the engine."""

    request_id: str
    token_id: int
    stop: bool  # a stop token: it ends the answer and is no part of it
    last: bool
    logprob: TokenLogprob | None


class StepResult(Struct, frozen=True):
    """What one step did. A row in `failed` is gone from the engine; all others are as if it had never been there."""

    prefilled: tuple[tuple[str, int, int], ...] = ()  # request id, tokens done, of how many
    sampled: tuple[Sampled, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()  # request id, one sentence


class Engine(Protocol):
    """One loaded model. All calls come from the thread that made it."""

    @property
    def info(self) -> EngineInfo:
        """What it is and what it can take on."""

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, through the chat template for messages.

        Raises: RequestError (`template_error`, `invalid_parameter`).
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens left out, U+FFFD for bytes that make no character (yet)."""

    def check(self, row: Row) -> None:
        """Refuse a row that this engine can't honour, before it is inserted.

        Raises: RequestError (`invalid_parameter`).
        """

    def insert(self, row: Row) -> int:
        """Take a row on; returns how many prompt tokens come from the prefix cache."""

    def remove(self, request_id: str) -> None:
        """Drop a row between two steps, whatever it is doing; unknown ids are ignored."""

    def step(self) -> StepResult:
        """One round: at most one token a row, and one piece of prefill (a fraction of a second's worth)."""

    def cache_bytes(self) -> int:
        """What the prefix cache holds."""

    def trim_cache(self, bytes_max: int) -> None:
        """Let the prefix cache go down to that many bytes, least recently used first."""

    def close(self) -> None:
        """Free what is held."""


EngineFactory = Callable[[LoadModel, Callable[[int, int], None]], Engine]
"""Loads an engine: the command, and a callback for bytes loaded of how many; once that says all of all, warming up begins
(self-check, measuring), and what the factory returns is ready. Raises LoadError."""
