"""Nodes with nothing but a transport, over libp2p on loopback or in memory, for tests that must hold for both."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.cluster_key import Cluster, cluster, new_key
from p2p.identity import Identity
from p2p.memory_transport import MemoryNetwork, open_network
from p2p.stream import Peer, Stream, StreamProtocol
from p2p.transport import OUR_VERSIONS, Transport, Unreachable, Versions
from p2p.wire import FrameCodec

Kind = Literal["memory", "libp2p"]

both = pytest.mark.parametrize("kind", ["memory", "libp2p"])

CLUSTER = cluster("home", new_key())
ECHO = StreamProtocol[str]("/test/echo/1", FrameCodec(str, 4 << 20))
SINK = StreamProtocol[bytes]("/test/sink/1", FrameCodec(bytes, 4 << 20))


def new_identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate())


class MemoryLab:
    kind: Kind = "memory"

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network

    def node(
        self,
        identity: Identity | None = None,
        cluster: Cluster = CLUSTER,
        versions: Versions = OUR_VERSIONS,
        boot: bytes | None = None,
    ) -> AbstractAsyncContextManager[Transport]:
        node_id = (identity or new_identity()).node_id
        return self.network.open_transport(node_id, cluster, versions=versions, boot=boot)


class Libp2pLab:
    kind: Kind = "libp2p"

    def node(
        self,
        identity: Identity | None = None,
        cluster: Cluster = CLUSTER,
        versions: Versions = OUR_VERSIONS,
        boot: bytes | None = None,
    ) -> AbstractAsyncContextManager[Transport]:
        from p2p.libp2p_transport import open_transport

        return open_transport(identity or new_identity(), ["127.0.0.1:0"], cluster, versions=versions, boot=boot)


@asynccontextmanager
async def open_lab(kind: Kind) -> AsyncIterator[MemoryLab | Libp2pLab]:
    if kind == "libp2p":
        yield Libp2pLab()
        return
    async with open_network() as network:
        network.set_latency(0.001)
        yield MemoryLab(network)


async def serve_echo(stream: Stream[str]) -> None:
    async for message in stream:
        await stream.send(message)


async def connect(one: Transport, other: Transport) -> Peer:
    """Connect two nodes and wait until both know."""
    peer = await one.dial(other.addresses[0])
    assert not isinstance(peer, Unreachable), peer
    while one.node_id not in other.peers:
        await other.wait_past(other.revision)
    return peer


@asynccontextmanager
async def open_pair(kind: Kind) -> AsyncIterator[tuple[Transport, Transport]]:
    """Two connected nodes; the second serves ECHO. An echo stream between them still works at the end."""
    async with open_lab(kind) as lab, lab.node() as one, lab.node() as other:
        other.serve(ECHO, serve_echo)
        await connect(one, other)
        yield one, other
        assert await echo(one, other, "still here") == "still here"


async def echo(one: Transport, other: Transport, text: str) -> str:
    async with await one.open(other.node_id, ECHO) as stream:
        await stream.send(text)
        return await stream.receive()


def narrow(transport: Transport) -> None:
    """Make the sockets of a libp2p transport's connections hold little, as they do between slow devices."""
    for connection in transport._connections.values():  # type: ignore[attr-defined]  # the implementation's own
        stream = connection.muxer._socket.stream
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)


async def until_gone(transport: Transport, peer: Transport) -> None:
    while peer.node_id in transport.peers:
        await transport.wait_past(transport.revision)


class Gate:
    """Lets what a served stream does wait for the test, and the test for it."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        self.open = trio.Event()
        self.done = trio.Event()
        self.error: BaseException | None = None
        self.received: list[object] = []


def gated(gate: Gate, act: Callable[[Stream[bytes]], Awaitable[None]]) -> Callable[[Stream[bytes]], Awaitable[None]]:
    """Serve a stream by `act` once the gate is open, and keep how it ended."""

    async def serve(stream: Stream[bytes]) -> None:
        gate.reached.set()
        try:
            await gate.open.wait()
            await act(stream)
        except BaseException as error:
            gate.error = error
            raise
        finally:
            gate.done.set()

    return serve


async def read_all(stream: Stream[bytes]) -> list[bytes]:
    return [message async for message in stream]


async def stay(_stream: Stream[bytes]) -> None:
    await trio.sleep_forever()
