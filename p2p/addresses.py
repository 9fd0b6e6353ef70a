"""Where nodes are dialled: `host:port` and multiaddrs as one value, the order in which to try, and what to tell others.

Pure. A multiaddr here is one of TCP (multiformats, multiaddr): `/ip4/10.0.0.7/tcp/4701`, `/dns/nas.local/tcp/4701`, each
optionally followed by `/p2p/<peer id>`.
"""

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from p2p.ids import NodeId, public_key_of

ADDRESS_CHARACTERS_MAX = 400
PORT_MAX = 65535
RESOLVED_MAX = 8  # of one name; further addresses are not tried

Family = Literal["any", "ip4", "ip6"]

_NAME = re.compile(r"(?=.{1,253}\.?$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")
_NAME_KINDS: dict[str, Family] = {"dns": "any", "dns4": "ip4", "dns6": "ip6"}
_KINDS_OF_NAMES: dict[Family, str] = {family: kind for kind, family in _NAME_KINDS.items()}


class AddressError(ValueError):
    """The text is no address that can be dialled or listened on; `str()` is one sentence that shows it."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host (an IP address, without brackets, or a name), a port, and the id of the node expected there, if known."""

    host: str
    port: int
    node_id: NodeId | None = None
    family: Family = "any"  # of a name: what it is resolved to

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as an IP address; none for a name."""
        return _ip(self.host)

    def __str__(self) -> str:
        """`host:port`, as people write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def multiaddr(self) -> str:
        """The multiaddr, with the node's id where it is known."""
        ip = self.ip
        kind = _KINDS_OF_NAMES[self.family] if ip is None else f"ip{ip.version}"
        tail = f"/p2p/{self.node_id}" if self.node_id else ""
        return f"/{kind}/{self.host}/tcp/{self.port}{tail}"


def parse_address(text: str) -> Address:
    """The address in `host:port`, `[IPv6]:port` or a TCP multiaddr. A port of 0 is for listening only, and taken here.

    Raises: AddressError.
    """
    text = text.strip()
    if len(text) > ADDRESS_CHARACTERS_MAX:
        raise AddressError(f"{text[:40]!r}... is no address: it is too long")
    return _parse_multiaddr(text) if text.startswith("/") else _parse_host_port(text)


def _parse_host_port(text: str) -> Address:
    host, separator, port = text.rpartition(":")
    if not separator:
        raise AddressError(f"{text!r} is no address: it needs a port, as in 192.168.1.20:4701")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if _ip(host) is None or ":" not in host:
            raise AddressError(f"{text!r} is no address: within brackets stands an IPv6 address")
    elif ":" in host:
        raise AddressError(f"{text!r} is no address: an IPv6 address stands in brackets, as in [fd00::7]:4701")
    return Address(_host(host, text), _port(port, text))


def _parse_multiaddr(text: str) -> Address:
    parts = text.strip("/").split("/")
    if len(parts) not in {4, 6} or parts[2] != "tcp":
        raise AddressError(f"{text!r} is no address of this kind: /ip4/192.168.1.20/tcp/4701 or the like, over TCP only")
    kind, host, _, port = parts[:4]
    node_id = None
    if len(parts) == 6:
        node_id = _node_id(parts[4], parts[5], text)
    if kind in _NAME_KINDS:
        return Address(_host(host, text), _port(port, text), node_id, _NAME_KINDS[kind])
    ip = _ip(host)
    if kind not in {"ip4", "ip6"} or ip is None or kind != f"ip{ip.version}":
        raise AddressError(f"{text!r} is no address: {kind} and {host} don't fit")
    return Address(str(ip), _port(port, text), node_id)


def _node_id(kind: str, text: str, whole: str) -> NodeId:
    if kind in {"p2p", "ipfs"}:  # the latter is the former's old name
        with contextlib.suppress(ValueError):
            public_key_of(text)
            return NodeId(text)
    raise AddressError(f"{whole!r} does not end in /p2p/ and a node's id")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _host(host: str, text: str) -> str:
    ip = _ip(host)
    if ip is not None:
        return str(ip)
    if not _NAME.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
        raise AddressError(f"{text!r} is no address: {host!r} is neither a name nor an IP address")
    return host


def _port(port: str, text: str) -> int:
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= PORT_MAX):
        raise AddressError(f"{text!r} is no address: {port!r} is no port")
    return int(port)


def dial_order(hosts: Iterable[str]) -> tuple[str, ...]:
    """What a name was resolved to, in the order to try: once each, families in turn (RFC 8305, 4), `RESOLVED_MAX` at most."""
    unique = dict.fromkeys(hosts)
    first = [host for host in unique if ":" not in host]
    second = [host for host in unique if ":" in host]
    mixed: list[str] = []
    for index in range(max(len(first), len(second))):
        mixed += first[index : index + 1] + second[index : index + 1]
    return tuple(mixed[:RESOLVED_MAX])


def advertised(listening: Sequence[Address], interfaces: Sequence[str], node_id: NodeId) -> tuple[str, ...]:
    """The multiaddrs to tell others: for a wildcard those of the interfaces, most widely reachable first, loopback last.

    Link-local IPv6 addresses are left out: they need a zone, which means nothing elsewhere.
    """
    found: dict[str, int] = {}
    for address in listening:
        ip = address.ip
        assert ip is not None, "listening is on IP addresses"
        hosts = interfaces if ip.is_unspecified else (address.host,)
        for host in hosts:
            candidate = _ip(host)
            if candidate is None or candidate.version != ip.version:
                continue
            if candidate.version == 6 and candidate.is_link_local:
                continue
            found.setdefault(Address(str(candidate), address.port, node_id).multiaddr, _reach(candidate))
    return tuple(sorted(found, key=lambda text: (found[text], text)))


def _reach(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    """0 for an address of a network, 1 for one of a link (two devices on one cable), 2 for this device alone."""
    if ip.is_loopback:
        return 2
    return 1 if ip.is_link_local else 0
