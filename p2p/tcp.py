"""TCP connections: names resolved, one address connected, failures in words."""

import errno
import socket as sockets
from collections.abc import Awaitable, Callable, Sequence

import trio

from p2p.addresses import Address, AddressError, dial_order, parse_address
from p2p.transport import ListenFailed, Unreachable

_FAMILIES = {"any": sockets.AF_UNSPEC, "ip4": sockets.AF_INET, "ip6": sockets.AF_INET6}
_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL}

_NO_CAPACITY = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
NO_CAPACITY_SECONDS = 0.1  # before the next try, when there is no room for one connection more


async def bind(addresses: Sequence[str]) -> list[trio.SocketListener]:
    """Sockets that listen on `host:port`s or multiaddrs; a port of 0 picks one.

    Raises: ListenFailed.
    """
    listeners: list[trio.SocketListener] = []
    complete = False
    text = ""
    try:
        for text in addresses:
            address = parse_address(text)
            listeners += await trio.open_tcp_listeners(address.port, host=address.host)
        complete = True
    except AddressError as error:
        raise ListenFailed(f"can't listen: {error}") from None
    except OSError as error:
        raise ListenFailed(f"can't listen on {text}: {(error.strerror or str(error)).lower()}") from None
    finally:
        if not complete:
            for listener in listeners:
                listener.socket.close()
    return listeners


async def accept(
    listener: trio.SocketListener, nursery: trio.Nursery, take: Callable[[trio.SocketStream], Awaitable[None]]
) -> None:
    """Have every connection that comes taken, in a trio task of its own, until cancelled; then the listener is closed.

    Unlike `trio.serve_listeners` it leaves the connection to whoever took it, who may keep it beyond that task.
    """
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _NO_CAPACITY:
                    raise
                await trio.sleep(NO_CAPACITY_SECONDS)
            else:
                nursery.start_soon(take, stream)


async def resolve(address: Address) -> tuple[str, ...]:
    """The IP addresses of a host in the order to try them; none where its name has none."""
    if address.ip is not None:
        return (address.host,)
    try:
        found = await trio.socket.getaddrinfo(
            address.host, address.port, family=_FAMILIES[address.family], type=sockets.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        return ()
    return dial_order(str(entry[4][0]) for entry in found)


async def connect(host: str, port: int) -> trio.SocketStream:
    """A connection to an IP address.

    Raises: OSError.
    """
    socket = trio.socket.socket(sockets.AF_INET6 if ":" in host else sockets.AF_INET, sockets.SOCK_STREAM)
    connected = False
    try:
        await socket.connect((host, port))
        connected = True
    finally:
        if not connected:
            socket.close()
    return trio.SocketStream(socket)


def why_not_connected(error: OSError) -> Unreachable:
    """The failure for people."""
    if error.errno == errno.ECONNREFUSED:
        return Unreachable("connection refused", refused=True)
    if error.errno in _NO_ROUTE:
        return Unreachable("no route to it")
    return Unreachable((error.strerror or str(error)).lower())


def remote_of(stream: trio.SocketStream) -> str:
    """The far end's `host:port`; empty where the connection is gone already."""
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return ""
    return str(Address(host, port))
