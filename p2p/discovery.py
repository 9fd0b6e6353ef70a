"""Nodes of this cluster on the local network, found by mDNS (RFC 6762, 6763) without a word of configuration.

All that is zeroconf's runs in threads: starting takes it more than a second, and its callbacks block. No network, or one
without multicast, costs a line in the log and nothing else; it is tried again, as it is whenever the device's addresses change.
Nodes are announced under the cluster's tag, so clusters don't even see each other. Whether a node that was found still lives is
the business of connections: what is found is only ever somewhere to dial.
"""

import ipaddress
import secrets
from collections.abc import Callable, Sequence

import structlog
import trio
from zeroconf import Error, IPVersion, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

from p2p.addresses import Address, parse_address
from p2p.ids import NodeId, public_key_of

LOOK_SECONDS = 5.0  # between looks at the device's addresses
RETRY_SECONDS = 30.0  # after mDNS could not start
RESOLVE_MILLISECONDS = 2000  # for the addresses of one node
FOUND_MAX = 256  # waiting to be taken in; more are dropped, and announced again by their nodes

Found = Callable[[NodeId, tuple[str, ...]], None]

_log = structlog.get_logger("p2p")


def service_type(cluster_tag: str) -> str:
    """What the nodes of a cluster are announced as; `cluster_tag` is `Cluster.tag`."""
    return f"_shoal-{cluster_tag}._tcp.local."


def announced(addresses: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The IPv4 addresses and the port to announce, of a transport's addresses: loopback only where there is nothing else."""
    parsed = [address for address in map(parse_address, addresses) if address.ip is not None and address.ip.version == 4]
    abroad = [address for address in parsed if address.ip is not None and not address.ip.is_loopback] or parsed
    return tuple(dict.fromkeys(address.host for address in abroad)), abroad[0].port if abroad else 0


async def discover(cluster_tag: str, node_id: NodeId, addresses: Callable[[], Sequence[str]], found: Found) -> None:
    """Announce this node and report others, until cancelled.

    `addresses()` is where this node can be dialled; `found` is called in this trio task's thread with an id and multiaddrs.
    """
    token = trio.lowlevel.current_trio_token()
    send, receive = trio.open_memory_channel[tuple[NodeId, tuple[str, ...]]](FOUND_MAX)

    def report(other: NodeId, where: tuple[str, ...]) -> None:
        def put() -> None:
            try:
                send.send_nowait((other, where))
            except trio.WouldBlock:
                _log.debug("discovery found more than was taken in", peer=other)

        try:
            token.run_sync_soon(put)
        except trio.RunFinishedError:
            return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_announce, cluster_tag, node_id, addresses, report)
        async for other, where in receive:
            found(other, where)


async def _announce(cluster_tag: str, node_id: NodeId, addresses: Callable[[], Sequence[str]], report: Found) -> None:
    """Keep an announcement of the addresses that the device has now."""
    running: _Announcement | None = None
    told = False
    try:
        while True:
            hosts, port = announced(addresses())
            if running is not None and (hosts, port) != (running.hosts, running.port):
                await trio.to_thread.run_sync(running.stop)
                running = None
            if running is None and hosts:
                announcement = _Announcement(cluster_tag, node_id, hosts, port, report)
                try:
                    await trio.to_thread.run_sync(announcement.start)
                    running = announcement
                    told = False
                except (OSError, RuntimeError, Error) as error:
                    await trio.to_thread.run_sync(announcement.stop)
                    if not told:
                        _log.warning("discovery on the local network is not possible now", why=str(error))
                    told = True
            await trio.sleep(LOOK_SECONDS if running is not None or not hosts else RETRY_SECONDS)
    finally:
        if running is not None:
            with trio.CancelScope(shield=True):  # a quarter of a second, for the goodbye
                await trio.to_thread.run_sync(running.stop)


class _Announcement(ServiceListener):
    """An announcement of this node at some addresses, and the browser for others. `start` and `stop` block."""

    def __init__(self, cluster_tag: str, node_id: NodeId, hosts: tuple[str, ...], port: int, report: Found) -> None:
        self.hosts = hosts
        self.port = port
        self._type = service_type(cluster_tag)
        self._node_id = node_id
        self._report = report
        self._zeroconf: Zeroconf | None = None

    def start(self) -> None:
        """Raises: OSError, RuntimeError, zeroconf.Error where there is no network for it."""
        zeroconf = self._zeroconf = Zeroconf(interfaces=list(self.hosts), ip_version=IPVersion.V4Only)
        # Two processes with one identity must not share a name, else their addresses would be mixed up.
        label = f"{self._node_id[-20:]}-{secrets.token_hex(4)}".lower()
        packed = [ipaddress.ip_address(host).packed for host in self.hosts]
        info = ServiceInfo(
            self._type,
            f"{label}.{self._type}",
            port=self.port,
            properties={"id": self._node_id},
            server=f"{label}.local.",
            addresses=packed,
        )
        zeroconf.register_service(info, allow_name_change=True)
        ServiceBrowser(zeroconf, self._type, listener=self)

    def stop(self) -> None:
        """Say goodbye and end zeroconf's threads."""
        if self._zeroconf is not None:
            self._zeroconf.close()
            self._zeroconf = None

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """A node, in zeroconf's thread."""
        try:
            info = zc.get_service_info(type_, name, timeout=RESOLVE_MILLISECONDS)
        except (OSError, RuntimeError, Error):
            return
        if info is not None:
            found = read_announcement(info)
            own = {Address(host, self.port, self._node_id).multiaddr for host in self.hosts}
            if found is not None and not own.issuperset(found[1]):  # also another process with this node's identity
                self._report(*found)

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """A node whose addresses changed."""
        self.add_service(zc, type_, name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """A node that said goodbye; its connection tells."""


def read_announcement(info: ServiceInfo) -> tuple[NodeId, tuple[str, ...]] | None:
    """The node that an announcement is of, and where to dial it; none where it makes no sense, as anybody can make it."""
    try:
        text = (info.properties.get(b"id") or b"").decode()
        public_key_of(text)
        node_id = NodeId(text)
        hosts = info.parsed_addresses(IPVersion.V4Only)
        return node_id, tuple(Address(host, info.port or 0, node_id).multiaddr for host in hosts)
    except ValueError:
        return None
