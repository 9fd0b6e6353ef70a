"""py-libp2p's faults that concern us: each is seen in the bare library (in a process of its own) and not in the transport.

What the bare library does is in `bare_libp2p`. If an upgrade mends one of these its test fails, and what was built around the
fault can go.
"""
# ruff: noqa: ANN401, ASYNC110 - untyped lines from another process; counters have no event to wait for

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2p.addresses import parse_address
from p2p.libp2p_handshake import security
from p2p.libp2p_transport import open_transport
from p2p.stream import Peer, Stream, StreamBroken
from p2p.transport import DIAL_SECONDS, ITSELF, ListenFailed, Transport, Unreachable
from tests.p2p.rude_node import rude_node
from tests.p2p.transport_lab import (
    CLUSTER,
    ECHO,
    SINK,
    Gate,
    connect,
    echo,
    narrow,
    new_identity,
    open_lab,
    open_pair,
    serve_echo,
)

BARE_SECONDS_MAX = 90


class Bare:
    """The bare library's process; what it says is read when it is asked for, so that both run at the same time."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.p2p.bare_libp2p"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._seen: dict[str, Any] = {}

    def saw(self, scenario: str) -> Any:
        assert self.process.stdout is not None
        while scenario not in self._seen:
            line = self.process.stdout.readline()
            assert line, f"the bare library's process ended before {scenario}"
            name, seen = json.loads(line)
            self._seen[name] = seen
        return self._seen[scenario]


@pytest.fixture(scope="module")
def bare() -> Iterator[Bare]:
    bare = Bare()
    try:
        yield bare
    finally:
        bare.process.kill()
        bare.process.communicate(timeout=BARE_SECONDS_MAX)


async def stay(_stream: Stream[bytes]) -> None:
    await trio.sleep_forever()


async def fail_with(error: Exception, stream: Stream[bytes]) -> None:
    await stream.receive()
    raise error


async def test_an_exception_in_a_handler_ends_the_host(bare: Bare) -> None:
    async with open_pair("libp2p") as (rude, victim), open_lab("libp2p") as lab, lab.node() as innocent:
        await connect(innocent, victim)
        for error in (ValueError("of this handler alone"), ExceptionGroup("several", [KeyError(), OSError()])):
            victim.serve(SINK, lambda stream, error=error: fail_with(error, stream))  # type: ignore[misc]  # a default binds the loop variable
            async with await rude.open(victim.node_id, SINK) as stream:
                await stream.send(b"x")
                with pytest.raises(StreamBroken):
                    await stream.receive()
        assert await echo(innocent, victim, "works") == "works"

    assert bare.saw("exception_in_a_handler") == "broken"


async def test_bad_text_in_a_negotiation_ends_the_host(bare: Bare) -> None:
    async with open_pair("libp2p") as (_, victim), rude_node(victim) as (_, muxer):
        for junk in (
            b"\x13/multistream/1.0.0\n\x05\xff\xfe\xfd\xfc\n",
            b"\xff" * 40,
            b"\0" * 5000,
            b"\x13/multistream/1.0.0\n\x03ls",
        ):
            stream = await muxer.open_stream()
            await stream.write(junk)
            if junk.endswith(b"ls"):
                await stream.reset()
        while victim.counters.streams_refused < 4:
            await trio.sleep(0.001)
        assert not muxer.broken_because

    assert bare.saw("bad_text_in_a_negotiation") == "broken"


async def test_the_end_of_a_stream_in_a_handler_leaves_a_connection_that_is_none(bare: Bare) -> None:
    async def naive(stream: Stream[bytes]) -> None:
        while True:
            await stream.send(await stream.receive())

    async with open_pair("libp2p") as (one, other):
        other.serve(SINK, naive)
        for _ in range(3):
            stream = await one.open(other.node_id, SINK)
            await stream.send(b"x")
            assert await stream.receive() == b"x"
            stream.reset()
        assert await echo(one, other, "works") == "works"
        assert other.counters.failures == 0

    assert bare.saw("end_of_a_stream_in_a_handler") == {"connected": True, "works": False}


async def test_cancelled_writes_break_the_connection(bare: Bare) -> None:
    async with open_pair("libp2p") as (one, other):
        connection = one.peers[other.node_id].connection

        async def sink(stream: Stream[bytes]) -> None:
            async for _ in stream:
                pass

        other.serve(SINK, sink)
        for number in range(60):
            with trio.move_on_after(random.Random(number).uniform(0.002, 0.02)):
                async with await one.open(other.node_id, SINK) as stream:
                    while True:
                        await stream.send(b"q" * 500_000)
            if number % 10 == 9:
                assert await echo(one, other, "works") == "works"
        assert one.peers[other.node_id].connection == connection

    seen = bare.saw("cancelled_writes")
    assert not seen["works"]
    assert seen["cancels"] <= 50


async def test_load_both_ways_stops_for_ever(bare: Bare) -> None:
    bulks, messages, opens = 4, 20, 40

    async def sink(stream: Stream[bytes]) -> None:
        assert len([message async for message in stream]) == messages

    async def bulk(source: Transport, target: Transport) -> None:
        async with await source.open(target.node_id, SINK) as stream:
            for _ in range(messages):
                await stream.send(b"q" * 100_000)

    async def open_streams(source: Transport, target: Transport) -> None:
        for number in range(opens):
            assert await echo(source, target, str(number)) == str(number)

    async with open_pair("libp2p") as (one, other), trio.open_nursery() as nursery:
        one.serve(ECHO, serve_echo)
        narrow(one)
        narrow(other)
        for source, target in ((one, other), (other, one)):
            target.serve(SINK, sink)
            for _ in range(bulks):
                nursery.start_soon(bulk, source, target)
            nursery.start_soon(open_streams, source, target)

    assert bare.saw("load_both_ways") != {"moves": True}


async def test_inbound_connections_over_a_life_are_counted_and_not_given_back(bare: Bare) -> None:
    async with open_lab("libp2p") as lab, lab.node() as one, lab.node() as other:
        other.serve(ECHO, serve_echo)
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(40):
            await connect(one, other)
            await one.drop(other.node_id)
            while other.peers:
                await other.wait_past(other.revision)
        await connect(one, other)
        assert await echo(one, other, "works") == "works"
        await one.drop(other.node_id)
        with trio.fail_after(5):
            while trio.lowlevel.current_statistics().tasks_living > tasks:
                await trio.sleep(0.01)

    seen = bare.saw("inbound_connections_over_a_life")
    assert seen["taken"] < 12
    assert seen["open"] == 0


async def test_plain_text_is_taken_by_default(bare: Bare) -> None:
    assert set(security(new_identity(), CLUSTER).transports) == {"/noise"}
    async with open_lab("libp2p") as lab, lab.node() as one:
        address = parse_address(one.addresses[0])
        stream = await trio.open_tcp_stream(address.host, address.port)
        await stream.send_all(b"\x13/multistream/1.0.0\n\x11/plaintext/2.0.0\n")
        answer = b""
        with trio.move_on_after(DIAL_SECONDS + 1):
            while b"na\n" not in answer:
                answer += await stream.receive_some()
        assert answer == b"\x13/multistream/1.0.0\n\x03na\n"
        await stream.aclose()

    assert "/plaintext/2.0.0" in bare.saw("security_by_default")


class TwoAddresses(trio.abc.HostnameResolver):
    """A name server that knows one name: a dead address, and a good one."""

    async def getaddrinfo(self, host: Any, port: Any, *_options: Any, **_named: Any) -> Any:
        assert host in {"nas", b"nas"}
        return [(2, 1, 6, "", (address, port)) for address in ("127.0.0.7", "127.0.0.1")]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


async def test_one_address_of_many_is_dialled(bare: Bare) -> None:
    trio.socket.set_custom_hostname_resolver(TwoAddresses())
    async with open_lab("libp2p") as lab, lab.node() as one, lab.node() as other:
        port = parse_address(other.addresses[0]).port
        assert await one.dial(f"nas:{port + 1 if port < 65535 else 1}") == Unreachable("connection refused", refused=True)
        peer = await one.dial(f"nas:{port}")
        assert isinstance(peer, Peer)
        assert peer.node_id == other.node_id

    assert bare.saw("dead_address_before_a_good_one") == {"first": False, "then": False}


async def test_two_nodes_share_a_port_and_one_that_is_taken_is_no_error(bare: Bare) -> None:
    async with open_lab("libp2p") as lab, lab.node() as one:
        taken = parse_address(one.addresses[0])
        with pytest.raises(ListenFailed, match=f"can't listen on {taken}: .*address already in use"):
            async with open_transport(new_identity(), ["127.0.0.1:0", str(taken)], CLUSTER):
                pass
        with pytest.raises(ListenFailed, match="needs a port"):
            async with open_transport(new_identity(), ["nonsense"], CLUSTER):
                pass

    assert bare.saw("two_nodes_on_one_port") == {"listening": 2}
    assert bare.saw("a_port_that_is_taken") == "no error"


async def test_a_wildcard_is_told_to_others(bare: Bare) -> None:
    async with open_transport(new_identity(), ["0.0.0.0:0"], CLUSTER) as one:
        assert one.addresses
        assert not any("0.0.0.0" in address for address in one.addresses)

    (told,) = bare.saw("addresses_of_a_wildcard")
    assert told.startswith("/ip4/0.0.0.0/")


async def test_a_node_dials_itself(bare: Bare) -> None:
    async with open_lab("libp2p") as lab, lab.node() as one:
        assert await one.dial(one.addresses[0].partition("/p2p/")[0]) == ITSELF
        assert not one.peers

    assert bare.saw("dialling_oneself") is True


@pytest.fixture
def fast_clock() -> MockClock:
    """Time passes 20 times as fast as it should."""
    return MockClock(rate=20.0)


async def test_a_reader_that_is_slow_is_taken_for_broken(bare: Bare, fast_clock: MockClock) -> None:
    gate = Gate()

    async def late(stream: Stream[bytes]) -> None:
        await trio.sleep(12)
        gate.received.extend([message async for message in stream])
        gate.done.set()

    async with open_pair("libp2p") as (one, other):
        other.serve(SINK, late)
        async with await one.open(other.node_id, SINK) as stream:
            for _ in range(40):
                await stream.send(b"m" * 50_000)
            await stream.close_send()
            await gate.done.wait()

    assert len(gate.received) == 40
    assert bare.saw("a_reader_that_is_slow") == "StreamReset"


async def test_ends_of_all_kinds_look_alike(bare: Bare) -> None:
    async def leave(stream: Stream[bytes]) -> None:
        await stream.receive()

    async def stop(stream: Stream[bytes]) -> None:
        await stream.receive()
        stream.reset()

    async def die(stream: Stream[bytes]) -> None:
        await stream.receive()
        await other.drop(one.node_id)

    async with open_lab("libp2p") as lab, lab.node() as one, lab.node() as other:
        seen = []
        await connect(one, other)
        for act in (leave, stop, die):
            other.serve(SINK, act)
            async with await one.open(other.node_id, SINK) as stream:
                try:
                    await stream.send(b"now")
                    await stream.receive()
                except (trio.EndOfChannel, StreamBroken) as error:
                    seen.append(str(error))
        assert seen == [
            "",
            "the /test/sink/1 stream broke: reset by the peer",
            "the /test/sink/1 stream broke: the peer closed the connection",
        ]

    assert bare.saw("ends_of_a_stream") == ["StreamEOF"] * 3


async def test_what_is_unread_has_no_bound(fast_clock: MockClock) -> None:
    """The bare library keeps whatever a peer sends: `Yamux.handle_incoming` warns that the window is exceeded and goes on."""
    async with open_pair("libp2p") as (_, victim):
        victim.serve(SINK, stay)
        async with rude_node(victim) as (_, muxer):
            stream = await muxer.open_stream()
            await stream.write(b"\x13/multistream/1.0.0\n\x0d/test/sink/1\n")
            sent = 0
            while not muxer.broken_because and sent < 200 << 20:
                stream.send_window = 1 << 30
                with suppress(Exception):
                    await muxer.outbox.room()
                    muxer.put_data(stream, b"x" * 60_000)
                sent += 60_000
            assert muxer.broken_because
            assert sent < 100 << 20
