"""`node start`: puts a node together, runs it, and takes it apart. The composition root: it alone may import everything.

In order: data directory and its lock, identity key, the API's port, the ready lines and `node.json`; the model
comes meanwhile. At the end, however that comes about: requests end or are ended, the API closes, runners stop, `node.json`
goes, and the lock last.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable

import structlog
import trio

from api.app import serve
from api.listen import ListenError
from api.settings import ApiSettings
from inference.launcher import launch_runner
from inference.model_store import ModelStore
from inference.runner_protocol import LoadModel
from inference.runner_state import RunnerProcess
from node import logs
from node.config import Config, process_environment
from node.data_dir import IDENTITY_FILE, DataDirError, NodeFile, locked_data_dir, write_node_file
from node.errors import CommandError
from node.local_runners import Down, LocalInstance, LocalRunners, RunnerSettings, open_local_runners
from node.node import Node, NodeSettings
from node.progress import ModelProgress, ProgressLine
from node.resources import raise_file_limit
from node.stop_signals import StopSignals
from p2p.identity import Identity, IdentityError, load_or_create

_log = structlog.get_logger("node")


def start(config: Config) -> None:
    """Run a node until it is told to stop.

    Raises: CommandError for whatever keeps a node from starting, or its model from being run.
    """
    _open_standard_descriptors()
    stop = StopSignals()
    stop.install()
    line = ProgressLine(sys.stderr)
    try:
        with locked_data_dir(config.data_dir):
            identity = load_or_create(config.data_dir / IDENTITY_FILE)
            logs.configure(config.log_format, config.log_level, identity.node_id, line)
            raise_file_limit()
            failure = trio.run(_run, config, identity, stop, line)
    except (DataDirError, IdentityError) as error:
        raise CommandError(str(error)) from None
    finally:
        line.clear()
    if failure is not None:
        raise CommandError(failure)


def _open_standard_descriptors() -> None:
    """With stdin, stdout or stderr closed, the next socket would become it, and a stray print would go to a peer."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False)


async def _run(config: Config, identity: Identity, stop: StopSignals, line: ProgressLine) -> str | None:
    """The node's life; returns why it had to end, None where it was told to."""
    store = ModelStore(config.models_dir, process_environment())

    async def launch(command: LoadModel) -> RunnerProcess:
        return await launch_runner(command, environment=process_environment())

    async with (
        trio.open_nursery() as nursery,
        open_local_runners(RunnerSettings.of(config), store.resolve, launch) as runners,
    ):
        node = Node(identity.node_id, config.name, NodeSettings.of(config), runners, nursery)
        doors = trio.CancelScope()
        try:
            urls = await _open_doors(node, config, doors, nursery)
            write_node_file(config.data_dir, NodeFile(os.getpid(), node.node_id, urls[0] if urls else None, []))
        except (ListenError, DataDirError) as error:
            failure: str | None = str(error)
        else:
            _announce(config, node.node_id, urls)
            failure = await _serve_until_end(node, config, stop, line)
        doors.cancel()
        await _stop_runners(runners, stop)
        nursery.cancel_scope.cancel()
    return failure


async def _open_doors(node: Node, config: Config, doors: trio.CancelScope, nursery: trio.Nursery) -> tuple[str, ...]:
    """Serve HTTP, where it is wanted, until `doors` is cancelled; returns its URLs, IPv4 first.

    Raises: ListenError.
    """
    if not config.api:
        return ()
    settings = ApiSettings(
        addresses=tuple((address.host, address.port) for address in config.api),
        families_optional=config.api_is_default,
        api_keys=config.api_keys,
        insecure=config.insecure_api,
        host_names=(socket.gethostname(), config.name),
    )

    async def run(*, task_status: trio.TaskStatus[tuple[str, ...]]) -> None:
        with doors:
            await serve(node, settings, task_status=task_status)

    urls: tuple[str, ...] = await nursery.start(run)
    return tuple(sorted(urls, key=lambda url: "[" in url))


def _announce(config: Config, node_id: str, urls: tuple[str, ...]) -> None:
    """The lines that say that the node is up, for people and for programs that started it."""
    lines = [f"node {node_id} ready", *(f"api {url}" for url in urls)]
    with contextlib.suppress(OSError, ValueError):  # nobody has to read them
        print("\n".join(lines), flush=True)  # noqa: T201 - this is the command's output
    _log.info("node is up", name=config.name, api=" ".join(urls) or "none", data_dir=str(config.data_dir))


async def _serve_until_end(node: Node, config: Config, stop: StopSignals, line: ProgressLine) -> str | None:
    """Run the model and take requests until told to stop, then let what runs end; returns why that was not to be."""
    failures: list[str] = []
    async with trio.open_nursery() as nursery:

        async def watch(instance: LocalInstance) -> None:
            phase = await instance.settled()
            if isinstance(phase, Down):  # later on, the others are served; but a node whose own model never ran is no use
                failures.append(phase.reason)
                nursery.cancel_scope.cancel()

        if config.model is not None:
            instance = node.run_model(config.model)
            ModelProgress(instance, line)
            nursery.start_soon(watch, instance)
        await stop.wait(1)
        nursery.cancel_scope.cancel()
    if failures:
        return failures[0]
    _log.info(_stopping(node.in_flight, config.drain_timeout_seconds))
    with trio.move_on_after(config.drain_timeout_seconds):
        await _hurried(node.drain, stop)
    return None


def _stopping(in_flight: int, seconds_max: float) -> str:
    if in_flight == 0:
        return "stopping"
    return f"stopping: {in_flight} running requests have {seconds_max:g} seconds; Ctrl-C again stops at once"


async def _hurried(orderly: Callable[[], Awaitable[None]], stop: StopSignals) -> None:
    """Do something, or leave off at the second wish to stop."""
    async with trio.open_nursery() as nursery:

        async def hurry() -> None:
            await stop.wait(2)
            nursery.cancel_scope.cancel()

        nursery.start_soon(hurry)
        await orderly()
        nursery.cancel_scope.cancel()


async def _stop_runners(runners: LocalRunners, stop: StopSignals) -> None:
    """With some grace, or with none from the second wish to stop on."""
    async with trio.open_nursery() as nursery:

        async def hurry() -> None:
            await stop.wait(2)
            await runners.stop(grace=0)

        nursery.start_soon(hurry)
        await runners.stop()
        nursery.cancel_scope.cancel()
