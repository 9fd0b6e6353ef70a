"""`node chat`: one answer, or a session at the terminal."""

import argparse
import contextlib
import json
import sys
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from node.api_client import client_of
from node.chat_client import ChatClient, ChatOptions, Message
from node.config import FlagValue, read
from node.errors import CommandError, UsageError

PROMPT_CHARACTERS_MAX = 16 << 20
EXIT_INTERRUPTED = 130

# A model may write escape sequences, which a terminal would obey.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def chat(arguments: argparse.Namespace, flags: Mapping[str, FlagValue]) -> int:
    """Run the command; returns the exit status.

    Raises: CommandError, ConfigError, UsageError.
    """
    client = ChatClient(client_of(arguments.url, read(flags)))
    options = ChatOptions(arguments.chat_model, _parameters(arguments))
    history: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # other commands do without
    prompt = _prompt(arguments.prompt)
    if prompt is None:
        if arguments.json:
            raise UsageError("--json prints one completion, so it needs a PROMPT")
        return _session(client, options, history)
    history.append({"role": "user", "content": prompt})
    if arguments.json:
        print(json.dumps(client.complete(history, options), ensure_ascii=False, indent=2))
        return 0
    try:
        _answer(client, options, history)
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    return 0


def _parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    return {name: value for name, value in given.items() if value is not None}


def _prompt(words: list[str]) -> str | None:
    """What was given or piped in; None asks for a session.

    Raises: UsageError where that is nothing.
    """
    if words:
        prompt = " ".join(words)
    elif sys.stdin is None or sys.stdin.isatty():
        return None
    else:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # other commands do without
        prompt = sys.stdin.read(PROMPT_CHARACTERS_MAX).strip()
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    return prompt


def _session(client: ChatClient, options: ChatOptions, history: list[Message]) -> int:
    """Questions and answers until the end of input. Ctrl-C cancels an answer, and ends the session at the prompt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - gives `input` editing and history
    print("Ctrl-C stops an answer, Ctrl-D ends the session.", file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not prompt.strip():
            continue
        history.append({"role": "user", "content": prompt})
        try:
            _answer(client, options, history)
        except CommandError as error:  # the session outlives one refused request
            print(f"node: {error}", file=sys.stderr)
            history.pop()
        except KeyboardInterrupt:
            print()


def _answer(client: ChatClient, options: ChatOptions, history: list[Message]) -> None:
    """Print the answer as it comes and add it to the history, also where it is interrupted; without any, drop the question.

    Raises: CommandError, KeyboardInterrupt.
    """
    clean = sys.stdout.isatty()
    said: list[str] = []
    pieces = _Pieces(client.stream(history, options))
    try:
        for text in pieces:
            said.append(text)
            sys.stdout.write(text.translate(_CONTROLS) if clean else text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if said:
            history.append({"role": "assistant", "content": "".join(said)})
        else:
            history.pop()
        raise
    except CommandError:
        if said:
            print()
        raise
    finally:
        pieces.close()
    print()
    history.append({"role": "assistant", "content": "".join(said)})
    if pieces.reason == "length":
        print("(the answer was cut off at its longest length)", file=sys.stderr)


class _Pieces:
    """A stream of text whose value at its end is kept."""

    def __init__(self, stream: Generator[str, None, str | None]) -> None:
        self._stream = stream
        self.reason: str | None = None

    def __iter__(self) -> Iterator[str]:
        self.reason = yield from self._stream

    def close(self) -> None:
        """Cancel what still runs."""
        self._stream.close()
