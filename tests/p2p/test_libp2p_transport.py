"""The transport over the network: strangers, death and freezes of real processes, and what importing it costs."""
# ruff: noqa: ASYNC110, ASYNC220 - counters have no event to wait for; starting a process takes a millisecond

import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from p2p.addresses import parse_address
from p2p.cluster_key import Cluster, cluster, new_key
from p2p.hello import HELLO_CODEC, Decision, Hello, hello
from p2p.libp2p_handshake import Secured
from p2p.libp2p_mending import MendedYamux
from p2p.libp2p_transport import HALF_OPEN_MAX
from p2p.stream import StreamBroken
from p2p.transport import DIAL_SECONDS, OUR_VERSIONS, Transport, Unreachable
from tests.p2p.rude_node import rude_node, shake_hands, write_raw
from tests.p2p.transport_lab import ECHO, SINK, connect, echo, narrow, new_identity, open_lab, open_pair, serve_echo
from tests.p2p.transport_process import TICKS

KEY = new_key()
HOME = cluster("home", KEY)


@asynccontextmanager
async def other_process() -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """A node in another process, and its address."""
    command = [sys.executable, "-m", "tests.p2p.transport_process", "home", KEY]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process, (await trio.to_thread.run_sync(process.stdout.readline)).strip()
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate(timeout=10)


async def test_a_peer_that_is_killed_or_frozen() -> None:
    """Its sudden death is seen within a moment. Frozen it stays connected, holds up nobody, and is dropped without its help."""
    async with open_lab("libp2p") as lab, lab.node(cluster=HOME) as one, other_process() as (process, address):
        peer = await one.dial(address)
        assert not isinstance(peer, Unreachable), peer
        ticks = await one.open(peer.node_id, TICKS)
        assert [await ticks.receive() for _ in range(3)] == [0, 1, 2]

        process.send_signal(signal.SIGSTOP)
        with trio.move_on_after(0.3):
            while True:
                await ticks.receive()
        assert peer.node_id in one.peers
        with pytest.raises(StreamBroken, match=r"did not open a /test/echo/1 stream"), trio.move_on_after(20):
            await one.open(peer.node_id, ECHO)
        with trio.fail_after(1):
            await one.drop(peer.node_id)
            await ticks.aclose()
        process.send_signal(signal.SIGCONT)

        again = await one.dial(address)
        assert not isinstance(again, Unreachable), again
        ticks = await one.open(again.node_id, TICKS)
        assert await ticks.receive() == 0
        process.kill()
        with pytest.raises(StreamBroken, match="connection"):  # noqa: PT012 - as many as were on their way
            while True:
                await ticks.receive()
        while one.peers:
            await one.wait_past(one.revision)
        await ticks.aclose()
        await trio.to_thread.run_sync(process.wait)
        assert await one.dial(address) == Unreachable("connection refused", refused=True)


async def raw(transport: Transport) -> trio.SocketStream:
    address = parse_address(transport.addresses[0])
    return await trio.open_tcp_stream(address.host, address.port)


GARBAGE = {
    "zeros": b"\0" * 65536,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random": secrets.token_bytes(200_000),
    "negotiation and garbage": b"\x13/multistream/1.0.0\n" + secrets.token_bytes(5000),
    "a line without end": b"\xff\xff\xff\xff\x0f" + b"x" * 100_000,
    "bad text": b"\x13/multistream/1.0.0\n\x05\xff\xfe\xfd\xfc\n",
    "noise that is none": b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\x00\x20" + b"n" * 32 + b"\xff\xff" + b"x" * 65535,
    "an empty noise message": b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\x00\x00" * 1000,
    "nothing": b"",
    "half a line": b"\x13/multi",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_ends_its_own_connection(garbage: bytes) -> None:
    async with open_pair("libp2p") as (_, victim):
        for _ in range(3):
            stream = await raw(victim)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(garbage)
            await stream.aclose()
        while victim.counters.handshakes_refused < 3:
            await trio.sleep(0.001)
        assert len(victim.peers) == 1


async def test_silence_is_given_up_and_makes_room_for_others() -> None:
    """More silent connections than may be half open, and a node dials in all the same."""
    async with open_lab("libp2p") as lab, lab.node() as victim, lab.node() as one:
        silent = [await raw(victim) for _ in range(HALF_OPEN_MAX + 20)]
        while victim.counters.handshakes_evicted < 20:
            await trio.sleep(0.001)

        for _ in range(50):  # turns of the loop, for those that were given up to go
            await trio.lowlevel.checkpoint()
        assert len(victim._half_open) <= HALF_OPEN_MAX  # type: ignore[attr-defined]  # the implementation's own
        with trio.fail_after(DIAL_SECONDS):
            await connect(one, victim)

        for stream in silent:
            await stream.aclose()
        with trio.fail_after(2 * DIAL_SECONDS):
            while victim.counters.handshakes_refused < HALF_OPEN_MAX + 20:
                await trio.sleep(0.001)
        assert list(victim.peers) == [one.node_id]


async def test_who_takes_a_connection_and_says_nothing_is_given_up() -> None:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with open_lab("libp2p") as lab, lab.node() as one, listener:
        port = listener.socket.getsockname()[1]
        outcome = await one.dial(f"127.0.0.1:{port}")
        assert outcome == Unreachable("it took the connection and said nothing for 3 s")


async def test_who_answers_garbage_is_no_node() -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 500)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with open_lab("libp2p") as lab, lab.node() as one, trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, listeners)
        outcome = await one.dial(f"127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        assert outcome == Unreachable("no node of this kind: it failed the handshake")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("theirs", [cluster("home", new_key()), cluster("other", KEY), cluster("home", None)])
async def test_another_cluster_is_refused_in_a_moment(theirs: Cluster) -> None:
    async with open_lab("libp2p") as lab, lab.node(cluster=HOME) as one, lab.node(cluster=theirs) as other:
        start = trio.current_time()
        outcome = await one.dial(other.addresses[0])
        assert isinstance(outcome, Unreachable)
        assert "another cluster" in outcome.reason
        assert trio.current_time() - start < DIAL_SECONDS / 2


async def say_nothing(secured: Secured) -> None:
    await trio.sleep_forever()


async def say_garbage(secured: Secured) -> None:
    await write_raw(secured, b"garbage")


async def say_what_is_not_enciphered(secured: Secured) -> None:
    await secured.socket.write(b"\x00\x05hello")


async def say_an_empty_message(secured: Secured) -> None:
    await secured.socket.write(b"\x00\x00")


async def say_too_much(secured: Secured) -> None:
    await write_raw(secured, HELLO_CODEC.encode(hello(b"8 bytes.", (), OUR_VERSIONS)) * 2)


async def decide_first(secured: Secured) -> None:
    await secured.send(Decision(True))


async def stop_after_the_hello(secured: Secured) -> None:
    await secured.send(hello(b"8 bytes.", (), OUR_VERSIONS))
    assert isinstance(await secured.receive(), Hello)
    await write_raw(secured, b"\x00\x00\x00\x02\x92\xc3")


@pytest.mark.parametrize(
    "act",
    [
        say_garbage,
        say_what_is_not_enciphered,
        say_an_empty_message,
        say_too_much,
        decide_first,
        stop_after_the_hello,
        say_nothing,
    ],
)
async def test_half_a_greeting_counts_as_none(act: Callable[[Secured], Awaitable[None]]) -> None:
    """From one who holds the key, at every place where it can stop or go wrong."""
    async with open_pair("libp2p") as (one, victim):
        identity = new_identity()
        while identity.node_id < victim.node_id:  # so that the victim decides only what is left to it
            identity = new_identity()
        secured = await shake_hands(victim, identity)
        with trio.move_on_after(0.2):
            await act(secured)
        secured.socket.cut()
        while identity.node_id in victim.peers:
            await victim.wait_past(victim.revision)
        assert list(victim.peers) == [one.node_id]


async def test_any_bytes_may_open_a_stream() -> None:
    """Whatever a peer sends instead of a protocol's name, that stream is reset and no other notices."""
    dice = random.Random(5)
    greeting = b"\x13/multistream/1.0.0\n"
    async with open_pair("libp2p") as (_, victim), rude_node(victim) as (_, muxer):
        count = 150
        for number in range(count):
            junk = dice.randbytes(dice.randrange(200))
            line = bytes([len(junk) & 127]) + junk
            stream = await muxer.open_stream()
            await stream.write((junk, greeting + junk, greeting + line, greeting + b"\x05/a/1\n" + junk)[number % 4])
            await stream.reset()
        while victim.counters.streams_refused < count:
            await trio.sleep(0.001)
        assert not muxer.broken_because


async def too_long_a_frame(secured: Secured, muxer: MendedYamux) -> None:
    muxer.outbox.put(bytes([0, 0, 0, 0, 0, 0, 0, 1]) + (1 << 30).to_bytes(4, "big"))


async def frames_of_no_kind(secured: Secured, muxer: MendedYamux) -> None:
    muxer.outbox.put(secrets.token_bytes(60_000))


async def data_for_nobody(secured: Secured, muxer: MendedYamux) -> None:
    for number in range(1000):
        muxer.outbox.put(bytes([0, 0, 0, 0]) + (number * 2 + 9001).to_bytes(4, "big") + (100).to_bytes(4, "big") + bytes(100))


async def streams_opened_and_left(secured: Secured, muxer: MendedYamux) -> None:
    for number in range(2000):
        muxer.outbox.put(bytes([0, 1, 0, 1]) + (number * 2 + 1).to_bytes(4, "big") + bytes(4))


async def pings_without_end(secured: Secured, muxer: MendedYamux) -> None:
    for _ in range(30):
        muxer.outbox.put((bytes([0, 2, 0, 1]) + bytes(8)) * 1000)
        await muxer.outbox.room()


async def noise_that_is_garbage(secured: Secured, muxer: MendedYamux) -> None:
    await secured.socket.write(b"\x01\x00" + bytes(256))


async def half_a_message(secured: Secured, muxer: MendedYamux) -> None:
    await secured.socket.write(b"\xff\xff" + bytes(256))


async def goodbye(secured: Secured, muxer: MendedYamux) -> None:
    muxer.outbox.put(bytes([0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]))


MISUSES = [
    too_long_a_frame,
    frames_of_no_kind,
    data_for_nobody,
    streams_opened_and_left,
    pings_without_end,
    noise_that_is_garbage,
    half_a_message,
    goodbye,
]


@pytest.mark.parametrize("misuse", MISUSES)
async def test_a_peer_with_the_key_can_end_its_own_connection_only(
    misuse: Callable[[Secured, MendedYamux], Awaitable[None]],
) -> None:
    async with open_pair("libp2p") as (one, victim):
        connection = victim.peers[one.node_id].connection
        async with await one.open(victim.node_id, ECHO) as sibling, rude_node(victim) as (secured, muxer):
            with suppress(Exception):
                await misuse(secured, muxer)
                await muxer.outbox.room(below=1)
            for number in range(10):
                await sibling.send(str(number))
                assert await sibling.receive() == str(number)
        while len(victim.peers) > 1:
            await victim.wait_past(victim.revision)
        assert victim.peers[one.node_id].connection == connection
        assert victim.counters.failures == 0


async def test_streams_leave_nothing_behind() -> None:
    async with open_pair("libp2p") as (one, other):
        muxers = [transport._connections[peer].muxer for transport in (one, other) for peer in transport.peers]  # type: ignore[attr-defined]  # the implementation's own
        other.serve(SINK, lambda stream: stream.send(b"unread" * 1000))
        for number in range(300):
            assert await echo(one, other, str(number)) == str(number)
            async with await one.open(other.node_id, SINK) as stream:
                if number % 3 == 0:
                    await stream.receive()
                elif number % 3 == 1:
                    stream.reset()
        with trio.fail_after(5):
            while any(muxer.streams or muxer.stream_buffers or muxer.stream_events for muxer in muxers):
                await trio.sleep(0.001)
        assert all(muxer.stream_backlog_semaphore.value == 256 for muxer in muxers)
        assert not any(muxer._windows or muxer._retired for muxer in muxers)


async def test_nodes_come_and_go_without_leaving_anything_open() -> None:
    async with open_lab("libp2p") as lab, lab.node() as stays:
        stays.serve(ECHO, serve_echo)
        before = None
        for _ in range(12):
            async with lab.node() as guest:
                await connect(guest, stays)
                assert await echo(guest, stays, "hello") == "hello"
            while stays.peers:
                await stays.wait_past(stays.revision)
            now = len(os.listdir("/dev/fd"))
            before = now if before is None else before
            assert now <= before + 1


def test_libp2p_is_imported_only_with_its_transport() -> None:
    """It takes more than a second, which no short command is to pay."""
    modules = "p2p.transport, p2p.memory_transport, p2p.dialler, p2p.cluster_key, p2p.address_book, p2p.identity"
    code = f"import sys, {modules}; sys.exit(any(name.partition('.')[0] in {{'libp2p', 'zeroconf'}} for name in sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_stub_stands_in_for_what_is_not_installed() -> None:
    """And using it is an error, not a wrong result."""
    code = """
import sys
from p2p import fastecdsa_stub
fastecdsa_stub.install(); fastecdsa_stub.install()
import fastecdsa.keys
try:
    fastecdsa.keys.gen_keypair("P256")
except NotImplementedError:
    sys.exit(0)
sys.exit(0 if hasattr(fastecdsa, "__file__") else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def quiet(muxer: MendedYamux) -> None:
    """Wait until nothing has come for a while: half a second after its start a connection measures its round trip."""
    while True:
        with trio.move_on_after(0.8) as scope:
            await muxer.frames.wait_message()
        if scope.cancelled_caught:
            return


async def test_a_peer_is_asked_whether_it_lives() -> None:
    async with open_pair("libp2p") as (one, other):
        muxer = one._connections[other.node_id].muxer  # type: ignore[attr-defined]  # the implementation's own
        await quiet(muxer)

        assert await muxer.answers(5)

        async with rude_node(one) as (_, theirs):
            guest = next(connection for connection in one._connections.values() if connection.muxer is not muxer)  # type: ignore[attr-defined]  # the implementation's own
            await quiet(guest.muxer)
            theirs.outbox.shut()  # it reads, and answers nothing
            assert not await guest.muxer.answers(0.2)
            theirs.sever("the test ends it")
            assert not await guest.muxer.answers(50), "it waits for no answer where the connection ends"


async def test_a_goodbye_while_the_connection_breaks_in_mid_write() -> None:
    async with open_lab("libp2p") as lab, lab.node() as one:
        secured = await shake_hands(one)
        identity = secured.session.local_peer.to_string()
        await secured.send(hello(secrets.token_bytes(8), (), OUR_VERSIONS))
        assert isinstance(await secured.receive(), Hello)
        if identity < one.node_id:
            await secured.send(Decision(True))
        while identity not in one.peers:
            await one.wait_past(one.revision)
        narrow(one)
        muxer = one._connections[one.peers[identity].node_id].muxer  # type: ignore[attr-defined]  # the implementation's own
        for _ in range(100):  # far more than the sockets hold; nobody reads
            muxer.outbox.put(bytes(65_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxer.goodbye)
            await trio.testing.wait_all_tasks_blocked(0.05)

            muxer.sever("the peer went")
        secured.socket.cut()
