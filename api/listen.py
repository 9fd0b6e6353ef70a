"""Sockets to listen on, and how they are named to people."""

import errno
import ipaddress
import socket
from collections.abc import Sequence

# How often a port that was free on one address and taken on the next is thrown away for another.
PORT_ATTEMPTS_MAX = 20

# Connections that the kernel keeps for us until they are accepted.
BACKLOG = 512

_MISSING_FAMILY = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT}


class ListenError(OSError):
    """An address can't be listened on; `str()` is one sentence that says why and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


def listen(addresses: Sequence[tuple[str, int]], *, families_optional: bool = True) -> tuple[socket.socket, ...]:
    """Listening sockets for the addresses, in order; those with port 0 share one number where they can.

    With `families_optional` an IPv6 address is left out on a device without IPv6, as long as another address is there.

    Raises: ListenError.
    """
    for attempt in range(PORT_ATTEMPTS_MAX):
        sockets: list[socket.socket] = []
        try:
            for host, port in addresses:
                wanted = port or (sockets[0].getsockname()[1] if sockets and addresses[0][1] == 0 else 0)
                try:
                    sockets.append(_bind(host, wanted))
                except OSError as error:
                    if error.errno in _MISSING_FAMILY and families_optional and ":" in host and len(addresses) > 1:
                        continue
                    if error.errno == errno.EADDRINUSE and port == 0 and attempt < PORT_ATTEMPTS_MAX - 1:
                        raise _PortTaken from None
                    raise ListenError(_reason(host, port, error)) from None
        except _PortTaken:
            _close_all(sockets)
        except BaseException:
            _close_all(sockets)
            raise
        else:
            if not sockets:
                raise ListenError("There is no address for the HTTP API to listen on; give another one with --api HOST:PORT.")
            return tuple(sockets)
    raise AssertionError("the last attempt returns or raises")


class _PortTaken(Exception):
    """The number that the first address picked is taken on another."""


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(BACKLOG)  # where two have bound the same address, only here the second fails
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for bound in sockets:
        bound.close()


def _reason(host: str, port: int, error: OSError) -> str:
    where = authority(host, port)
    if isinstance(error, socket.gaierror):
        return f"The name in the API address {where} can't be resolved: {error.strerror}."
    if error.errno == errno.EADDRINUSE:
        return f"The API address {where} is already in use; stop what listens there or choose another with --api HOST:PORT."
    if error.errno == errno.EACCES:
        return f"Listening on the API address {where} is not allowed; choose a port above 1023 with --api HOST:PORT."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"The API address {where} does not belong to this device; choose another with --api HOST:PORT."
    return f"The API can't listen on {where}: {error.strerror}."


def authority(host: str, port: int) -> str:
    """`HOST:PORT` as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def urls(sockets: Sequence[socket.socket]) -> tuple[str, ...]:
    """Where clients on this device find them."""
    return tuple(f"http://{authority(*bound.getsockname()[:2])}" for bound in sockets)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this device only; of names only `localhost` is known to."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
