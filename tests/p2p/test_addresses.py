"""Addresses as people and nodes write them, and which are told to others."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.addresses import Address, AddressError, advertised, dial_order, parse_address
from p2p.ids import NodeId, node_id_of

NODE = node_id_of(bytes(32))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.168.1.20:4701", Address("192.168.1.20", 4701)),
        (" nas.local:4701 ", Address("nas.local", 4701)),
        ("my_host-7:1", Address("my_host-7", 1)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:4701", Address("::1", 4701)),
        ("[FD00::0007]:65535", Address("fd00::7", 65535)),
        ("/ip4/10.0.0.7/tcp/4701", Address("10.0.0.7", 4701)),
        (f"/ip6/fd00::7/tcp/4701/p2p/{NODE}", Address("fd00::7", 4701, NODE)),
        (f"/dns/nas.local/tcp/4701/ipfs/{NODE}", Address("nas.local", 4701, NODE)),
        ("/dns4/nas/tcp/80/", Address("nas", 80, None, "ip4")),
        ("/dns6/nas/tcp/80", Address("nas", 80, None, "ip6")),
    ],
)
def test_addresses_that_are_understood(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(address.multiaddr) == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "needs a port"),
        ("nas.local", "needs a port"),
        ("nas:", "'' is no port"),
        (":4701", "'' is neither a name nor an IP address"),
        ("nas:65536", "'65536' is no port"),
        ("nas:-1", "'-1' is no port"),
        ("nas:٣", "is no port"),
        ("::1:4701", "stands in brackets"),
        ("[nas]:4701", "within brackets"),
        ("999.1.1.1:80", "neither a name nor an IP"),
        ("a b:80", "neither a name nor an IP"),
        ("http://nas:80", "stands in brackets"),
        ("/ip4/10.0.0.7/udp/4701/quic-v1", "over TCP only"),
        ("/ip4/10.0.0.7", "over TCP only"),
        ("/ip4/nas/tcp/80", "don't fit"),
        ("/ip6/10.0.0.7/tcp/80", "don't fit"),
        ("/unix/x/tcp/80", "don't fit"),
        ("/ip4/10.0.0.7/tcp/80/p2p/QmNotEd25519", "does not end in /p2p/"),
        (f"/ip4/10.0.0.7/tcp/80/xyz/{NODE}", "does not end in /p2p/"),
        ("x" * 500 + ":80", "too long"),
    ],
)
def test_addresses_that_are_refused_say_why_in_a_sentence(text: str, why: str) -> None:
    with pytest.raises(AddressError) as refusal:
        parse_address(text)
    assert why in str(refusal.value)
    assert len(str(refusal.value)) < 600


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except AddressError:
        return
    assert parse_address(str(address)).port == address.port
    assert parse_address(address.multiaddr) == address


@given(st.ip_addresses(), st.integers(0, 65535), st.none() | st.binary(min_size=32, max_size=32))
def test_every_ip_address_survives_both_spellings(ip: ipaddress.IPv4Address, port: int, key: bytes | None) -> None:
    node_id = None if key is None else node_id_of(key)
    address = Address(str(ip), port, node_id)

    assert parse_address(address.multiaddr) == address
    assert parse_address(str(address)) == Address(str(ip), port)


def test_families_take_turns_and_repetitions_go() -> None:
    hosts = ["10.0.0.1", "10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.3", "fd00::2"]

    assert dial_order(hosts) == ("10.0.0.1", "fd00::1", "10.0.0.2", "fd00::2", "10.0.0.3")
    assert len(dial_order(f"10.0.0.{last}" for last in range(100))) == 8
    assert dial_order([]) == ()


INTERFACES = ("127.0.0.1", "169.254.7.7", "192.168.1.20", "10.8.0.2", "::1", "fe80::1", "fd00::20", "not an ip")


@pytest.mark.parametrize(
    ("listening", "expected"),
    [
        ([Address("127.0.0.1", 1)], ["/ip4/127.0.0.1/tcp/1"]),
        (
            [Address("0.0.0.0", 2)],
            ["/ip4/10.8.0.2/tcp/2", "/ip4/192.168.1.20/tcp/2", "/ip4/169.254.7.7/tcp/2", "/ip4/127.0.0.1/tcp/2"],
        ),
        ([Address("::", 3)], ["/ip6/fd00::20/tcp/3", "/ip6/::1/tcp/3"]),
        ([Address("192.168.1.20", 4), Address("127.0.0.1", 5)], ["/ip4/192.168.1.20/tcp/4", "/ip4/127.0.0.1/tcp/5"]),
    ],
)
def test_what_is_told_to_others_is_never_a_wildcard(listening: list[Address], expected: list[str]) -> None:
    told = advertised(listening, INTERFACES, NodeId(NODE))

    assert list(told) == [f"{address}/p2p/{NODE}" for address in expected]
