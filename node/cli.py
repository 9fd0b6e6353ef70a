"""The command line: `node`, also called `shoal` and `python -m node`.

Exit status 0: done; 1: the operation failed, with a one-line reason on stderr; 2: wrong usage. A traceback is only shown with
--debug. Each command's code is imported when it runs, so that the short ones start at once.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from node.config import ConfigError, FlagValue, read
from node.errors import CommandError, UsageError
from node.options import BY_NAME, OPTIONS, Option

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as shells say it for SIGINT

DESCRIPTION = "Serve language models from all your computers together, with no master among them."
EPILOG = """\
Start here:
  node start                      serve a small model at http://127.0.0.1:52416/v1
  node chat "Hello"               talk to it, from a second terminal

`node COMMAND --help` tells what a command takes. Each option of `node start` may also be set by an environment variable
(--max-waiting: SHOAL_MAX_WAITING) or in config.toml in the data directory (max-waiting = 32); a flag beats the variable,
which beats the file.
"""

Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Command:
    """One command: what it takes and what it does."""

    name: str
    help: str
    define: Callable[[argparse.ArgumentParser], None]
    run: Run


def flags_of(arguments: argparse.Namespace) -> dict[str, FlagValue]:
    """The options of the table that were given as flags, for `node.config`."""
    return {option.field: value for option in OPTIONS if (value := getattr(arguments, option.field, None)) is not None}


def add_option(parser: argparse._ActionsContainer, option: Option) -> None:
    """Have a parser take an option of the table. Values stay text: they are checked where all sources meet."""
    text = option.help
    if default := option.default_help or option.default:
        text += f" (default: {default})"
    flag = f"--{option.name}"
    if option.negatable:
        parser.add_argument(flag, dest=option.field, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif option.switch:
        parser.add_argument(flag, dest=option.field, action="store_true", default=None, help=text)
    else:
        action = "append" if option.repeatable else "store"
        parser.add_argument(flag, dest=option.field, action=action, metavar=option.metavar, default=None, help=text)


def _define_start(parser: argparse.ArgumentParser) -> None:
    for option in OPTIONS:
        add_option(parser, option)


def _start(arguments: argparse.Namespace) -> int:
    config = read(flags_of(arguments))  # before a second's worth of imports: a bad value is told at once
    from node.start import start  # noqa: PLC0415 - other commands do without

    start(config)
    return EXIT_DONE


def _define_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="what to say; without it, a session (or what is piped in)")
    parser.add_argument(
        "--api", dest="url", metavar="URL", help="the node to talk to (default: the one on this data directory)"
    )
    parser.add_argument("--model", dest="chat_model", metavar="MODEL", help="which of its models (default: the only one)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told beforehand")
    parser.add_argument("--max-tokens", metavar="N", type=_positive, help="the answer's longest length (default: the context)")
    parser.add_argument("--temperature", metavar="T", type=_temperature, help="0 to 2; 0: always the likeliest word")
    parser.add_argument("--json", action="store_true", help="print the whole completion as one JSON document")
    add_option(parser, BY_NAME["api-key"])
    add_option(parser, BY_NAME["data-dir"])


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 2:
        raise ValueError
    return number


_positive.__name__ = "number"  # argparse: "invalid number value"
_temperature.__name__ = "temperature"


def _chat(arguments: argparse.Namespace) -> int:
    from node.cli_chat import chat  # noqa: PLC0415 - other commands do without

    return chat(arguments, flags_of(arguments))


def _define_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api", dest="url", metavar="URL", help="the node to ask what is loaded (default: this data directory's)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    for name in ("api-key", "models-dir", "data-dir"):
        add_option(parser, BY_NAME[name])


def _models(arguments: argparse.Namespace) -> int:
    from node.cli_models import models  # noqa: PLC0415 - other commands do without
    from node.data_dir import running_node  # noqa: PLC0415 - other commands do without

    config = read(flags_of(arguments))
    node = running_node(config.data_dir)
    url = arguments.url or (node.api if node is not None else None)
    return models(config.models_dir, url, arguments.json, config.api_keys[0] if config.api_keys else None)


def _define_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_name", metavar="MODEL", help="smollm2:135m, org/name of Hugging Face, ./directory or ./file.gguf"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    for name in ("models-dir", "data-dir"):
        add_option(parser, BY_NAME[name])


def _pull(arguments: argparse.Namespace) -> int:
    from node.cli_models import pull  # noqa: PLC0415 - other commands do without

    return pull(arguments.model_name, read(flags_of(arguments)).models_dir, arguments.json)


def _define_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api", dest="url", metavar="URL", help="the node to ask (default: the one on this data directory)")
    parser.add_argument("--json", action="store_true", help="print one JSON document: GET /cluster/state")
    for name in ("api-key", "data-dir"):
        add_option(parser, BY_NAME[name])


def _status(arguments: argparse.Namespace) -> int:
    from node.cli_cluster import status  # noqa: PLC0415 - other commands do without

    return status(arguments, flags_of(arguments))


def _define_dump(parser: argparse.ArgumentParser) -> None:
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--watch", action="store_true", help="print changes as they come; with --json one document a line")
    ways.add_argument("--diff", metavar="URL", help="compare with the replica of the node at URL; exits 1 where they differ")
    ways.add_argument("--peer", metavar="MULTIADDR", help="ask a peer over the p2p network, with no HTTP in between")
    parser.add_argument("--api", dest="url", metavar="URL", help="the node to ask (default: the one on this data directory)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    for name in ("api-key", "cluster", "cluster-key", "cluster-key-file", "data-dir"):
        add_option(parser, BY_NAME[name])


def _dump(arguments: argparse.Namespace) -> int:
    from node.cli_cluster import dump  # noqa: PLC0415 - other commands do without

    return dump(arguments, flags_of(arguments))


def _define_key(_parser: argparse.ArgumentParser) -> None:
    pass


def _key(_arguments: argparse.Namespace) -> int:
    import secrets  # noqa: PLC0415 - other commands do without

    print(secrets.token_hex(32))
    return EXIT_DONE


COMMANDS: tuple[Command, ...] = (
    Command("start", "run this device's node until Ctrl-C or SIGTERM", _define_start, _start),
    Command("status", "show the nodes, instances, runners and tasks of the cluster", _define_status, _status),
    Command("chat", "chat from the terminal", _define_chat, _chat),
    Command("models", "list the models on this device, and which of them are loaded", _define_models, _models),
    Command("pull", "fetch a model to this device", _define_pull, _pull),
    Command("dump", "show the raw replicated state, compare it, or watch it change", _define_dump, _dump),
    Command("key", "print a new cluster key of 256 bits", _define_key, _key),
)


class _Parser(argparse.ArgumentParser):
    """argparse with near names for what it does not know, and one line in place of its usage text."""

    def error(self, message: str) -> NoReturn:
        word = message.partition("invalid choice: '")[2].partition("'")[0]
        self.fail(f"no command {word!r}" if word else message, word, [command.name for command in COMMANDS])

    def fail(self, message: str, word: str, known: Sequence[str]) -> NoReturn:
        """Exit for wrong usage; the nearest of what is known to `word` is named."""
        import difflib  # noqa: PLC0415 - other commands do without

        near = difflib.get_close_matches(word, known, 2) if word else []
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; see `{self.prog} --help`"
        print(f"{self.prog}: {message}{hint}", file=sys.stderr)
        sys.exit(EXIT_USAGE)

    def refuse(self, unknown: str) -> NoReturn:
        """Exit for an argument that this command does not take."""
        known = [flag for action in self._actions for flag in action.option_strings]
        self.fail(f"no option {unknown}" if unknown.startswith("-") else f"one word too many: {unknown!r}", unknown, known)


def make_parser() -> _Parser:
    """The parser of the whole command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="node", description=DESCRIPTION, epilog=EPILOG, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.help, description=f"{command.help[0].upper()}{command.help[1:]}.", allow_abbrev=False
        )
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
        command.define(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        taker: _Parser = getattr(arguments, "parser", parser)
        taker.refuse(unknown[0].partition("=")[0])
    if arguments.version:
        return _print_version()
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    return _guarded(arguments)


def _guarded(arguments: argparse.Namespace) -> int:
    """Run a command and tell its failure in one line."""
    try:
        status: int = arguments.run(arguments)
        if sys.stdout is not None:  # as it is where it was closed
            sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except Exception as error:
        if arguments.debug:
            raise
        print(f"node: {_sentence(error)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | UsageError) else EXIT_FAILED
    return status


def _sentence(error: Exception) -> str:
    if isinstance(error, CommandError | UsageError | ConfigError):
        return str(error)
    return f"a fault in shoal itself: {type(error).__name__}: {error}; --debug shows where".replace("\n", " ")


def _print_version() -> int:
    from importlib.metadata import version  # noqa: PLC0415 - other commands do without

    print(f"shoal {version('shoal')}")
    return EXIT_DONE
