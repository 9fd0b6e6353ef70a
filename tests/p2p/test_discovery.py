"""Discovery: nodes of a cluster find each other over loopback, those of another do not, and no network is no harm."""

import errno
import shutil
import socket
import subprocess
import sys

import pytest
import trio
from zeroconf import ServiceInfo

from p2p.discovery import announced, discover, read_announcement, service_type
from p2p.ids import NodeId, node_id_of

NODES = [node_id_of(bytes([number]) * 32) for number in range(4)]
FIND_SECONDS = 20.0


def multicast_works() -> bool:
    """Whether a datagram to a multicast group comes back over loopback here."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        try:
            loopback = socket.inet_aton("127.0.0.1")
            receiver.bind(("", 0))
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("224.0.0.251") + loopback)
            receiver.settimeout(1)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, loopback)
            sender.sendto(b"?", ("224.0.0.251", receiver.getsockname()[1]))
            return receiver.recv(1) == b"?"
        except OSError:
            return False


@pytest.mark.skipif(not multicast_works(), reason="no multicast over loopback here")
async def test_nodes_of_a_cluster_find_each_other_and_no_others() -> None:
    found: dict[NodeId, set[NodeId]] = {node: set() for node in NODES[:3]}
    where: dict[NodeId, tuple[str, ...]] = {}
    met = trio.Event()
    stalls = [0.0]

    async with trio.open_nursery() as nursery:

        async def watch_the_loop() -> None:
            while True:
                before = trio.current_time()
                await trio.sleep(0.01)
                stalls.append(trio.current_time() - before - 0.01)

        def start(node_id: NodeId, tag: str, port: int) -> None:
            def take(other: NodeId, addresses: tuple[str, ...]) -> None:
                found[node_id].add(other)
                where[other] = addresses
                if NODES[1] in found[NODES[0]] and NODES[0] in found[NODES[1]]:
                    met.set()

            nursery.start_soon(discover, tag, node_id, lambda: (f"/ip4/127.0.0.1/tcp/{port}",), take)

        nursery.start_soon(watch_the_loop)
        start(NODES[0], "aaaaaaaa", 4701)
        start(NODES[1], "aaaaaaaa", 4702)
        start(NODES[2], "bbbbbbbb", 4703)
        with trio.fail_after(FIND_SECONDS):
            await met.wait()
        nursery.cancel_scope.cancel()

    assert where[NODES[1]] == (f"/ip4/127.0.0.1/tcp/4702/p2p/{NODES[1]}",)
    assert NODES[2] not in found[NODES[0]] | found[NODES[1]]
    assert not found[NODES[2]]


@pytest.mark.skipif(not multicast_works(), reason="no multicast over loopback here")
async def test_a_node_hears_of_a_copy_of_itself_and_not_of_itself() -> None:
    """A21 (exo#1332): two processes with one identity and nobody else on the network."""
    ports = (4711, 4712)
    found: dict[int, set[tuple[str, ...]]] = {port: set() for port in ports}
    met = trio.Event()
    async with trio.open_nursery() as nursery:

        def start(port: int) -> None:
            def take(other: NodeId, addresses: tuple[str, ...]) -> None:
                assert other == NODES[0]
                found[port].add(addresses)
                if all(found.values()):
                    met.set()

            nursery.start_soon(discover, "cccccccc", NODES[0], lambda: (f"/ip4/127.0.0.1/tcp/{port}",), take)

        for port in ports:
            start(port)
        with trio.fail_after(FIND_SECONDS):
            await met.wait()
        nursery.cancel_scope.cancel()

    for port, other in (ports, ports[::-1]):
        assert found[port] == {(f"/ip4/127.0.0.1/tcp/{other}/p2p/{NODES[0]}",)}


async def test_a_network_without_multicast_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As zeroconf fails where there is no route: the node goes on, and the next addresses are tried."""
    tries = []

    def fail(*_arguments: object, **_named: object) -> None:
        tries.append(1)
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("p2p.discovery.Zeroconf", fail)
    with trio.move_on_after(0.5) as scope:
        await discover("aaaaaaaa", NODES[0], lambda: ("/ip4/127.0.0.1/tcp/1",), lambda _node, _addresses: None)

    assert scope.cancelled_caught
    assert tries == [1]


@pytest.mark.skipif(not shutil.which("unshare"), reason="no network namespaces here")
def test_no_network_at_all_is_no_harm() -> None:
    """In a namespace whose only interface is down."""
    code = """
import trio
from p2p.discovery import discover
from p2p.ids import node_id_of
async def main():
    with trio.move_on_after(3):
        await discover("aaaaaaaa", node_id_of(bytes(32)), lambda: ("/ip4/127.0.0.1/tcp/1",), lambda *found: None)
    print("went on")
trio.run(main)
"""
    done = subprocess.run(
        ["unshare", "--net", "--map-root-user", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unshare" in done.stderr:
        pytest.skip("network namespaces are not allowed here")

    assert "went on" in done.stdout
    assert "Traceback" not in done.stderr
    assert "discovery on the local network is not possible now" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("addresses", "hosts", "port"),
    [
        ((), (), 0),
        (("/ip4/127.0.0.1/tcp/5",), ("127.0.0.1",), 5),
        (
            ("/ip4/10.0.0.7/tcp/5", "/ip4/169.254.1.1/tcp/5", "/ip4/127.0.0.1/tcp/5", "/ip6/fd00::1/tcp/5"),
            ("10.0.0.7", "169.254.1.1"),
            5,
        ),
        (("/ip6/fd00::1/tcp/5",), (), 0),
    ],
)
def test_what_is_announced(addresses: tuple[str, ...], hosts: tuple[str, ...], port: int) -> None:
    assert announced(addresses) == (hosts, port)


def test_a_service_type_is_one_that_dns_allows() -> None:
    assert service_type("0a1b2c3d") == "_shoal-0a1b2c3d._tcp.local."
    assert len("shoal-0a1b2c3d") <= 15  # RFC 6763, section 7.2


@pytest.mark.parametrize("properties", [{}, {"id": ""}, {"id": "me"}, {"id": b"\xff\xfe"}, {"id": "Qm" + "x" * 44}])
def test_an_announcement_that_makes_no_sense_is_none(properties: dict[str | bytes, str | bytes | None]) -> None:
    kind = service_type("aaaaaaaa")
    info = ServiceInfo(kind, f"x.{kind}", port=1, properties=properties, addresses=[b"\x0a\0\0\1"])

    assert read_announcement(info) is None


def test_an_announcement_is_read_back() -> None:
    kind = service_type("aaaaaaaa")
    info = ServiceInfo(kind, f"x.{kind}", port=7, properties={"id": NODES[0]}, addresses=[b"\x0a\0\0\1", b"\x0a\0\0\2"])

    assert read_announcement(info) == (NODES[0], (f"/ip4/10.0.0.1/tcp/7/p2p/{NODES[0]}", f"/ip4/10.0.0.2/tcp/7/p2p/{NODES[0]}"))
