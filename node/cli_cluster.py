"""`node status` and `node dump`: what a node sees of its cluster, and what lies in its replica."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from node.api_client import ApiClient, client_of
from node.cluster_tables import NUMBER_HEADINGS, EventLines, Section, difference_section, dump_sections, status_sections
from node.config import Config, FlagValue, read
from node.documents import StateDocument, StateEvent
from node.dump_diff import diff, lasting
from node.dump_document import DumpDocument, dump_document
from node.errors import CommandError

EXIT_DONE = 0
STATE_BYTES_MAX = 64 << 20
DUMP_BYTES_MAX = 1 << 30
PIPE_COLUMNS = 1 << 16  # where no terminal sets a width, every row is one line
LOOKS_APART_SECONDS = 2.0  # in which what one replica had must have come to the other

# Names and reasons come from other nodes, and a terminal would obey the escape sequences in them.
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "�")

T = TypeVar("T")


def status(arguments: argparse.Namespace, flags: Mapping[str, FlagValue]) -> int:
    """Run `node status`; returns the exit status.

    Raises: CommandError, ConfigError.
    """
    client = client_of(arguments.url, read(flags))
    body = client.body("/cluster/state", bytes_max=STATE_BYTES_MAX)
    state = _decode(body, StateDocument, client)
    if arguments.json:
        _print_json(body)
    else:
        _print_sections(status_sections(state, time.time()))
        print(f"in flight: {sum(state.in_flight.values())}, digest {state.digest}")
    return EXIT_DONE


def dump(arguments: argparse.Namespace, flags: Mapping[str, FlagValue]) -> int:
    """Run `node dump`; returns the exit status.

    Raises: CommandError, ConfigError.
    """
    config = read(flags)
    if arguments.peer is not None:
        return _show_dump(_of_peer(arguments.peer, config), as_json=arguments.json)
    client = client_of(arguments.url, config)
    if arguments.watch:
        return _watch(client, as_json=arguments.json)
    if arguments.diff is not None:
        return _compare(client, ApiClient(arguments.diff, client.api_key), as_json=arguments.json)
    return _show_dump(_of_node(client), as_json=arguments.json)


def _of_node(client: ApiClient) -> DumpDocument:
    return _decode(client.body("/cluster/dump", bytes_max=DUMP_BYTES_MAX), DumpDocument, client)


def _of_peer(address: str, config: Config) -> DumpDocument:
    """A peer's replica by way of the p2p network, with the cluster's name and key as configured here."""
    import trio  # noqa: PLC0415 - like all that the short way round does not need

    from node import logs  # noqa: PLC0415 - other commands do without
    from node.dump_stream import DumpFailed, ask_as_stranger, cluster_of  # noqa: PLC0415 - other commands do without
    from p2p.cluster_key import ClusterKeyError  # noqa: PLC0415 - other commands do without

    logs.configure("console", "error", "", sys.stderr)
    try:
        return dump_document(trio.run(ask_as_stranger, address, cluster_of(config)))
    except (DumpFailed, ClusterKeyError) as error:
        raise CommandError(str(error)) from None


def _show_dump(document: DumpDocument, *, as_json: bool) -> int:
    if as_json:
        _print_json(msgspec.json.encode(document))
    else:
        _print_sections(dump_sections(document))
        print(f"digest {document.digest}")
    return EXIT_DONE


def _compare(here: ApiClient, there: ApiClient, *, as_json: bool) -> int:
    """Raises: CommandError where the replicas differ."""
    ours, theirs = _of_node(here), _of_node(there)
    found = diff(ours, theirs)
    if found:  # it may be nothing but a change on its way
        time.sleep(LOOKS_APART_SECONDS)
        found = lasting((ours, _of_node(here)), (theirs, _of_node(there)))
    if as_json:
        digests = {"ours": ours.digest, "theirs": theirs.digest}
        _print_json(msgspec.json.encode({"equal": not found, "differences": found, "digests": digests}))
    elif found:
        _print_sections([difference_section(found)])
    else:
        print(f"no difference, digest {ours.digest}")
    if found:
        raise CommandError(f"the replicas of {here.url} and {there.url} differ: {len(found)} differences")
    return EXIT_DONE


def _watch(client: ApiClient, *, as_json: bool) -> int:
    """Print changes until the node stops or Ctrl-C comes.

    Raises: CommandError where the stream ends.
    """
    words = EventLines()
    for _, document in client.events("/cluster/events", bytes_max=STATE_BYTES_MAX):
        if as_json:
            print(json.dumps(document, ensure_ascii=False), flush=True)
            continue
        try:
            event = msgspec.convert(document, StateEvent)
        except msgspec.ValidationError:
            raise _unreadable(client) from None
        now = time.strftime("%H:%M:%S")
        for line in words.lines(event):
            print(f"{now} {line.translate(_CONTROLS)}", flush=True)
    return EXIT_DONE


def _decode(body: bytes, kind: type[T], client: ApiClient) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _unreadable(client) from None


def _unreadable(client: ApiClient) -> CommandError:
    return CommandError(f"{client.url} answered with something else than was asked for: is it a node of this version?")


def _print_json(body: bytes) -> None:
    print(json.dumps(json.loads(body), indent=2, ensure_ascii=False))


def _print_sections(sections: list[Section]) -> None:
    from rich import box  # noqa: PLC0415 - takes as long as all the rest
    from rich.console import Console  # noqa: PLC0415 - other commands do without
    from rich.table import Table  # noqa: PLC0415 - other commands do without
    from rich.text import Text  # noqa: PLC0415 - other commands do without

    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    for section in (section for section in sections if section.rows):
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=section.title, title_justify="left", title_style="bold")
        for heading in section.headings:
            shown.add_column(heading, justify="right" if heading in NUMBER_HEADINGS else "left")
        for row in section.rows:
            shown.add_row(*(Text(cell.translate(_CONTROLS)) for cell in row))
        with console.capture() as drawn:
            console.print(shown)
        print("\n".join(line.rstrip() for line in drawn.get().splitlines()))
