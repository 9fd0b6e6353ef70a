"""Between text and token ids, through a model's own tokenizer and chat template.

Text in a message that looks like a special token becomes one, as in every server of the field: templates are rendered to text
and only then tokenized, and models are trained on that. Whoever puts strangers' text into messages has to mind it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from inference.requests import ChatPrompt, Prompt, TextPrompt
from inference.runner.engine import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Parameters of apply_chat_template itself: they are not for a request to set.
RESERVED_OPTIONS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "self",
    "kwargs",
    "add_generation_prompt",
    "continue_final_message",
}
# What a template, a program of someone else's, may raise on messages that it did not expect.
TEMPLATE_ERRORS = (jinja2.TemplateError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class Text:
    """Tokenizes prompts and decodes answers for one model."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:  # noqa: ANN401 - mlx_lm's TokenizerWrapper is untyped
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        # What transformers wraps around it tidies spaces, which would not be the model's text, and takes ten times as long.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode: Callable[..., str] = tokenizer.decode if backend is None else backend.decode

    @property
    def token_characters_max(self) -> int:
        """The longest token's, or more: a byte-level vocabulary writes one character for each byte."""
        return max(map(len, self._tokenizer.get_vocab()))

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, at least one.

        Raises: RequestError.
        """
        if isinstance(prompt, ChatPrompt):
            ids = self._chat(prompt)
        elif isinstance(prompt, TextPrompt):
            ids = self._encode(prompt.text)
        else:
            ids = list(prompt.ids)
            if max(ids) >= self._vocabulary:
                message = f"Token ids of this model are below {self._vocabulary}."
                raise RequestError("invalid_parameter", message, "prompt")
        if not ids:
            raise RequestError("invalid_parameter", "The prompt is empty: it has no tokens.", "prompt")
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens left out; ids that stand for nothing give no text."""
        known = [token for token in token_ids if 0 <= token < self._vocabulary]
        return self._decode(known, skip_special_tokens=True)

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text))
        except (TypeError, ValueError) as error:  # lone surrogates
            raise RequestError("invalid_parameter", f"The prompt is not valid text: {error}.", "prompt") from error

    def _chat(self, prompt: ChatPrompt) -> list[int]:
        _check_messages(prompt)
        if not self._tokenizer.has_chat_template:
            raise RequestError("template_error", "The model has no chat template.", "messages")
        options = {"add_generation_prompt": True, **prompt.template_options}
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages], tools=list(prompt.tools) or None, tokenize=True, **options
            )
        except TEMPLATE_ERRORS as error:
            message = " ".join(str(error).split()) or type(error).__name__
            raise RequestError("template_error", f"The chat template failed: {message}", "messages") from error
        return list(ids)


def _check_messages(prompt: ChatPrompt) -> None:
    for i, message in enumerate(prompt.messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError("invalid_parameter", f"messages[{i}].role must be one of {', '.join(ROLES)}.", "messages")
        called = role == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not (called and content is None):
            raise RequestError("invalid_parameter", f"messages[{i}].content must be text.", "messages")
    for name in sorted(RESERVED_OPTIONS & prompt.template_options.keys()):
        raise RequestError("invalid_parameter", f"The template option {name!r} can't be set by a request.", "template_options")
