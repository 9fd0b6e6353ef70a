"""`node start`: puts a node together, runs it, and takes it apart. The composition root: it alone may import everything.

In order: data directory and its lock, identity key, the API's port, the ready lines and `node.json`; the model
comes meanwhile. At the end, however that comes about: requests end or are ended, the API closes, runners stop, `node.json`
goes, and the lock last.
"""

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import NamedTuple

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
from node.cluster_service import Cluster
from node.config import Config, process_environment
from node.data_dir import IDENTITY_FILE, DataDirError, NodeFile, locked_data_dir, write_node_file
from node.disk_models import DiskModels
from node.dump_stream import DUMP, DumpTeller
from node.ended_tasks import LOOKUP
from node.errors import CommandError
from node.local_runners import Down, LocalInstance, LocalRunners, RunnerSettings, open_local_runners
from node.membership import Membership, alone, open_membership
from node.node import Node, NodeSettings
from node.peer_executors import PeerExecutors
from node.progress import ModelProgress, ProgressLine
from node.resources import device_memory_bytes, device_name, raise_file_limit
from node.stop_signals import StopSignals
from p2p.gossip import IdentityClash
from p2p.identity import Identity, IdentityError, load_or_create
from p2p.transport import ListenFailed, Transport

JOINING_SECONDS = 5.0  # within which a node that was just started has met the others, if there are any

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

    failures: list[str] = []
    async with open_local_runners(RunnerSettings.of(config), store.resolve, launch) as runners:
        instance_id, started = secrets.randbits(63), None
        if config.model is not None:  # first of all: it takes longest
            started = runners.start(f"{instance_id:016x}", config.model, time.time())
            ModelProgress(started, line)
        try:
            async with open_membership(config, identity, time.time()) as membership, trio.open_nursery() as nursery:
                node, cluster = _assemble(config, membership, runners, store, nursery)
                nursery.start_soon(membership.gossip.run)
                if started is not None:
                    node.adopt(instance_id, started, pinned=True)
                nursery.start_soon(node.reconciler.run)
                await _live(_Life(config, node, cluster, membership, started, failures, stop))
                await _stop_runners(runners, stop)
                await membership.gossip.leave()
                nursery.cancel_scope.cancel()
        except* (ListenFailed, IdentityClash) as group:
            failures.append(_sentence(group))
    return failures[0] if failures else None


def _sentence(error: BaseException) -> str:
    """What one of the expected failures says, out of the groups in which nurseries raise it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def _assemble(
    config: Config, membership: Membership, runners: LocalRunners, store: ModelStore, nursery: trio.Nursery
) -> tuple[Node, Cluster]:
    """The node, ready to serve its peers."""
    disk = DiskModels(store)
    executors = PeerExecutors(membership.transport, nursery)
    node = Node(
        membership.transport.node_id,
        config.name,
        NodeSettings.of(config, device_memory_bytes(), device_name(), version("shoal")),
        facts=membership.gossip,
        runners=runners,
        executors=executors,
        nursery=nursery,
        joining_seconds=JOINING_SECONDS if config.join or config.discovery else 0.0,
        addresses=lambda: membership.transport.addresses,
        models=lambda: disk.models,
    )
    disk.on_change.append(node.reconciler.publish)
    nursery.start_soon(disk.run)
    nursery.start_soon(executors.run)
    cluster = Cluster(node, membership)
    nursery.start_soon(_touch, cluster, membership.transport)
    membership.transport.serve(DUMP, DumpTeller(cluster.dump).serve)
    membership.transport.serve(LOOKUP, cluster.ended.serve)
    return node, cluster


async def _touch(cluster: Cluster, transport: Transport) -> None:
    """Who is connected, and who can't be reached, is a part of what is shown."""
    revision = transport.revision
    while True:
        revision = await transport.wait_past(revision)
        cluster.touch()


class _Life(NamedTuple):
    """What a running node consists of."""

    config: Config
    node: Node
    cluster: Cluster
    membership: Membership
    started: LocalInstance | None
    failures: list[str]
    stop: StopSignals


async def _live(life: _Life) -> None:
    """From the doors' opening to their closing."""
    config, node, transport = life.config, life.node, life.membership.transport
    doors = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        try:
            urls = await _open_doors(life, doors, nursery)
            _write_node_file(life, urls)
        except (ListenError, DataDirError) as error:
            life.failures.append(str(error))
        else:
            _announce(config, node.node_id, urls, transport.addresses)
            nursery.start_soon(_keep_node_file, life, urls)
            await _serve_until_end(life)
        doors.cancel()
        nursery.cancel_scope.cancel()


def _write_node_file(life: _Life, urls: tuple[str, ...]) -> None:
    addresses = list(life.membership.transport.addresses)
    file = NodeFile(os.getpid(), life.node.node_id, urls[0] if urls else None, addresses)
    write_node_file(life.config.data_dir, file)


async def _keep_node_file(life: _Life, urls: tuple[str, ...]) -> None:
    """Addresses change with the device's networks."""
    transport = life.membership.transport
    while True:
        addresses, revision = transport.addresses, transport.revision
        while transport.addresses == addresses:
            revision = await transport.wait_past(revision)
        with contextlib.suppress(DataDirError):
            _write_node_file(life, urls)


async def _open_doors(life: _Life, doors: trio.CancelScope, nursery: trio.Nursery) -> tuple[str, ...]:
    """Serve HTTP, where it is wanted, until `doors` is cancelled; returns its URLs, IPv4 first.

    Raises: ListenError.
    """
    config = life.config
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
            await serve(life.node, settings, cluster=life.cluster, task_status=task_status)

    urls: tuple[str, ...] = await nursery.start(run)
    return tuple(sorted(urls, key=lambda url: "[" in url))


def _announce(config: Config, node_id: str, urls: tuple[str, ...], p2p: tuple[str, ...]) -> None:
    """The lines that say that the node is up, for people and for programs that started it."""
    lines = [f"node {node_id} ready", *(f"api {url}" for url in urls), *(f"p2p {address}" for address in p2p)]
    with contextlib.suppress(OSError, ValueError):  # nobody has to read them
        print("\n".join(lines), flush=True)  # noqa: T201 - this is the command's output
    _log.info("node is up", name=config.name, api=" ".join(urls) or "none", data_dir=str(config.data_dir))
    hint = alone(config)
    if hint is not None:
        _log.info(hint)


async def _serve_until_end(life: _Life) -> None:
    """Take requests until told to stop, then let what runs end; or until its own model can't be run."""
    async with trio.open_nursery() as nursery:

        async def watch(instance: LocalInstance) -> None:
            phase = await instance.settled()
            if isinstance(phase, Down):  # later on, the others are served; but a node whose own model never ran is no use
                life.failures.append(phase.reason)
                nursery.cancel_scope.cancel()

        if life.started is not None:
            nursery.start_soon(watch, life.started)
        await life.stop.wait(1)
        nursery.cancel_scope.cancel()
    if life.failures:
        return
    _log.info(_stopping(life.node.in_flight, life.config.drain_timeout_seconds))
    with trio.move_on_after(life.config.drain_timeout_seconds):
        await _hurried(life.node.drain, life.stop)


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
