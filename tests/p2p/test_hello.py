"""The rule that leaves one connection for each pair, and what a hello may hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.hello import (
    HELLO_CODEC,
    SIMULTANEOUS_SECONDS,
    TOGETHER_SECONDS,
    Decision,
    Hello,
    OtherLife,
    decides,
    hello,
    keep,
    outlives,
    precedes,
)
from p2p.ids import node_id_of
from p2p.stream import Peer
from p2p.transport import Versions
from p2p.wire import HEADER_BYTES, ProtocolViolation

BOOT, OTHER_BOOT = b"b" * 8, b"c" * 8


def peer(boot: bytes = BOOT, since: float = 100.0, began: float = 50.0) -> Peer:
    return Peer(node_id_of(bytes(32)), boot, 1, (), "10.0.0.1:1", True, 1, since, began)


@pytest.mark.parametrize(
    ("existing", "now", "kept"),
    [
        (None, 100.0, True),
        (peer(), 100.1, False),  # the other half of a simultaneous dial
        (peer(), 100.0 + SIMULTANEOUS_SECONDS + 0.1, True),  # the peer lost it, or would not dial
        (peer(OTHER_BOOT, began=90.0), 100.1, True),  # of a younger life, which has to stop
        (peer(OTHER_BOOT, began=10.0), 100.1, False),  # of an older life, which came meanwhile
    ],
)
def test_which_connection_is_kept(existing: Peer | None, now: float, kept: bool) -> None:
    assert keep(existing, peer(since=now)) is kept


began = st.floats(0, 5)


@given(began, st.binary(min_size=8, max_size=8), began, st.binary(min_size=8, max_size=8))
def test_of_two_lives_of_a_node_exactly_one_stays(one: float, boot: bytes, other: float, other_boot: bytes) -> None:
    stays = precedes(one, boot, other, other_boot), precedes(other, other_boot, one, boot)

    assert sum(stays) == (boot != other_boot or abs(one - other) >= TOGETHER_SECONDS)
    assert outlives(peer(boot, began=one), peer(other_boot, began=other)) == (stays[0] and boot != other_boot)


def test_two_lives_that_started_together_are_told_apart_by_their_boots() -> None:
    """Whatever the delays of whoever judges."""
    assert all(precedes(10.0 + error, BOOT, 10.0, OTHER_BOOT) for error in (-0.4, 0.0, 0.4))


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_one_of_two_nodes_decides(one: bytes, other: bytes) -> None:
    ids = node_id_of(one), node_id_of(other)

    assert decides(*ids) + decides(*reversed(ids)) == (0 if one == other else 1)


versions = st.builds(lambda lowest, span: Versions(lowest, lowest + span), st.integers(0, 9), st.integers(0, 4))


@given(versions, versions)
def test_both_ends_agree_on_the_version(ours: Versions, theirs: Versions) -> None:
    agreed = ours.agreed(theirs)

    assert agreed == theirs.agreed(ours)
    common = set(range(ours.lowest, ours.highest + 1)) & set(range(theirs.lowest, theirs.highest + 1))
    assert agreed == max(common, default=None)


def test_a_hello_holds_what_fits() -> None:
    said = hello(BOOT, ("/ip4/1.2.3.4/tcp/1", "x" * 500, *(f"/ip4/10.0.0.{last}/tcp/1" for last in range(40))), Versions(1, 2))

    assert len(said.addresses) == 16
    assert said.addresses[:2] == ("/ip4/1.2.3.4/tcp/1", "/ip4/10.0.0.0/tcp/1")
    assert HELLO_CODEC.decode(HELLO_CODEC.encode(said)[HEADER_BYTES:]) == said
    for message in (Decision(True), OtherLife(False)):
        assert HELLO_CODEC.decode(HELLO_CODEC.encode(message)[HEADER_BYTES:]) == message


def test_a_hello_tells_how_long_its_process_has_run_and_whom_it_knows() -> None:
    said = hello(BOOT, (), Versions(1, 1), uptime_seconds=12.3456, holds=peer(OTHER_BOOT))

    assert (said.uptime, said.holds) == (12345, OTHER_BOOT)
    assert hello(BOOT, (), Versions(1, 1), uptime_seconds=-1.0) == Hello(1, 1, BOOT)


@pytest.mark.parametrize("boot", [b"", b"short", b"much too long"])
def test_a_hello_that_makes_no_sense_is_refused(boot: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        HELLO_CODEC.decode(HELLO_CODEC.encode(Hello(1, 1, boot))[HEADER_BYTES:])


def test_a_later_version_may_append_to_the_hello() -> None:
    body = HELLO_CODEC.encode(Hello(1, 7, BOOT, ("a",)))[HEADER_BYTES:]
    assert body[0] == 0x97  # a msgpack array of seven
    longer = b"\x98" + body[1:] + b"\xa3new"

    assert HELLO_CODEC.decode(longer) == Hello(1, 7, BOOT, ("a",))
