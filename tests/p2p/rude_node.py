"""A peer that holds the cluster's key and keeps to nothing else: the handshake as it should be, then whatever a test sends."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import trio

from p2p.addresses import parse_address
from p2p.hello import Decision, Hello, hello
from p2p.identity import Identity
from p2p.libp2p_handshake import HANDSHAKE_BYTES_MAX, Secured, secure, security
from p2p.libp2p_mending import MendedYamux
from p2p.libp2p_sealed import SocketBytes
from p2p.tcp import connect
from p2p.transport import OUR_VERSIONS, Transport
from tests.p2p.transport_lab import CLUSTER, new_identity


async def shake_hands(target: Transport, identity: Identity | None = None) -> Secured:
    """As far as Noise goes; no hello yet."""
    identity = identity or new_identity()
    address = parse_address(target.addresses[0])
    socket = SocketBytes(await connect(address.host, address.port), HANDSHAKE_BYTES_MAX, lambda: None)
    return await secure(security(identity, CLUSTER), socket, dialled=True, expected=address.node_id)


@asynccontextmanager
async def rude_node(target: Transport) -> AsyncIterator[tuple[Secured, MendedYamux]]:
    """A connection that counts, with its streams to be misused. The muxer writes and reads; `Secured` writes beside it."""
    identity = new_identity()
    secured = await shake_hands(target, identity)
    await secured.send(hello(secrets.token_bytes(8), (), OUR_VERSIONS))
    assert isinstance(await secured.receive(), Hello)
    if identity.node_id < target.node_id:
        await secured.send(Decision(True))
    else:
        assert await secured.receive() == Decision(True)
    secured.socket.allowance = None
    muxer = MendedYamux(secured.session, secured.socket)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.run_writer)
        nursery.start_soon(muxer.start)
        while identity.node_id not in target.peers:
            await target.wait_past(target.revision)
        try:
            yield secured, muxer
        finally:
            muxer.sever("the test is over")
            nursery.cancel_scope.cancel()


async def write_raw(secured: Secured, plain: bytes) -> None:
    """Enciphered as it should be, whatever it is."""
    with suppress(Exception):
        await secured.session.conn.write_msg(plain)
