"""What py-libp2p does by itself, one scenario after the other, in a process of its own: `python -m tests.p2p.bare_libp2p`.

Prints a line of JSON for each scenario: its name and what was seen. Each takes a few seconds at most.
"""
# ruff: noqa: ANN401, BLE001, E402 - the library is untyped, raises anything, and is imported after its stub

import json
import logging
import random
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import trio

from p2p import fastecdsa_stub

fastecdsa_stub.install()

import libp2p
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr  # type: ignore[import-untyped]  # has no annotations

SCENARIO_SECONDS = 20.0
ECHO = TProtocol("/echo/1")
OTHER = TProtocol("/other/1")

Scenario = Callable[[], Awaitable[object]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def new_host(listen: str = "/ip4/127.0.0.1/tcp/0", **options: Any) -> Any:
    key = create_new_key_pair()
    noise = Noise(key, noise_privkey=create_x25519_key_pair().private_key)
    return libp2p.new_host(
        key_pair=key,
        sec_opt={NOISE_ID: noise},
        muxer_opt={TProtocol(YAMUX_ID): Yamux},
        listen_addrs=[Multiaddr(listen)],
        **options,
    )


async def echo(stream: Any) -> None:
    with suppress(Exception):
        while True:
            await stream.write(await stream.read(1000))


@asynccontextmanager
async def running(host: Any, listen: str = "/ip4/127.0.0.1/tcp/0") -> AsyncIterator[Any]:
    host.set_stream_handler(ECHO, echo)
    host.get_network().retry_config.max_retries = 0
    async with host.run([Multiaddr(listen)]):
        yield host


async def dial(host: Any, target: Any) -> Any:
    """Connect and return the target's id."""
    info = info_from_p2p_addr(target.get_addrs()[0])
    await host.get_network().dial_addr(info.addrs[0], info.peer_id)
    return info.peer_id


async def echoes(host: Any, peer_id: Any, seconds: float = 1.5) -> bool:
    """Whether a new stream to the peer works."""
    with trio.move_on_after(seconds), suppress(Exception):
        stream = await host.new_stream(peer_id, [ECHO])
        await stream.write(b"hello")
        return bool(await stream.read(5) == b"hello")
    return False


async def _innocents_fate(act: Callable[[Any, Any], Awaitable[None]], handler: Callable[[Any], Awaitable[None]] | None) -> str:
    """What becomes of one peer's connection when another one does `act`."""
    fate = "nothing was seen"
    with suppress(BaseException):
        async with running(new_host()) as victim, running(new_host()) as rude, running(new_host()) as innocent:
            if handler is not None:
                victim.set_stream_handler(OTHER, handler)
            peer_id = await dial(innocent, victim)
            await dial(rude, victim)
            assert await echoes(innocent, peer_id)
            with suppress(Exception):
                await act(rude, peer_id)
            await trio.sleep(0.5)
            fate = "works" if await echoes(innocent, peer_id) else "broken"
            raise KeyError  # out of here, whatever the hosts say to it
    return "broken" if fate == "nothing was seen" else fate


@scenario
async def exception_in_a_handler() -> str:
    async def fail(stream: Any) -> None:
        await stream.read(1)
        raise ValueError("of this handler alone")

    async def act(host: Any, peer_id: Any) -> None:
        await (await host.new_stream(peer_id, [OTHER])).write(b"x")

    return await _innocents_fate(act, fail)


@scenario
async def bad_text_in_a_negotiation() -> str:
    async def act(host: Any, peer_id: Any) -> None:
        stream = await host.get_network().new_stream(peer_id)
        await stream.write(b"\x13/multistream/1.0.0\n\x05\xff\xfe\xfd\xfc\n")

    return await _innocents_fate(act, None)


@scenario
async def end_of_a_stream_in_a_handler() -> dict[str, bool]:
    """A handler that lets a plain end of its stream through, as a naive one does."""

    async def naive(stream: Any) -> None:
        while True:
            await stream.write(await stream.read(100))

    async with running(new_host()) as one, running(new_host()) as other:
        one.set_stream_handler(OTHER, naive)
        peer_id = await dial(other, one)
        stream = await other.new_stream(peer_id, [OTHER])
        await stream.write(b"x")
        await stream.read(1)
        await stream.reset()
        await trio.sleep(0.3)
        return {"connected": other.is_peer_connected(peer_id), "works": await echoes(other, peer_id)}


@scenario
async def cancelled_writes() -> dict[str, object]:
    async def sink(stream: Any) -> None:
        with suppress(Exception):
            while True:
                await stream.read(65536)

    async with running(new_host()) as one, running(new_host()) as other:
        one.set_stream_handler(OTHER, sink)
        peer_id = await dial(other, one)
        for number in range(100):
            stream = await other.new_stream(peer_id, [OTHER])
            with trio.move_on_after(random.Random(number).uniform(0.002, 0.02)):
                while True:
                    await stream.write(b"q" * 500_000)
            with trio.move_on_after(1, shield=True), suppress(Exception):
                await stream.reset()
            if not await echoes(other, peer_id):
                return {"works": False, "cancels": number + 1}
        return {"works": True, "cancels": 100}


@scenario
async def load_both_ways() -> dict[str, bool]:
    """Bulk each way while both open streams: whether anything moves in the last second."""
    received = [0, 0]

    async with running(new_host()) as one, running(new_host()) as other, trio.open_nursery() as nursery:
        peer_id = await dial(other, one)

        def sink(index: int) -> Callable[[Any], Awaitable[None]]:
            async def take(stream: Any) -> None:
                with suppress(Exception):
                    while True:
                        received[index] += len(await stream.read(65536))

            return take

        one.set_stream_handler(OTHER, sink(0))
        other.set_stream_handler(OTHER, sink(1))

        async def bulk(host: Any, target: Any) -> None:
            with suppress(Exception):
                stream = await host.new_stream(target, [OTHER])
                while True:
                    await stream.write(b"q" * 200_000)

        async def opens(host: Any, target: Any) -> None:
            while True:
                await echoes(host, target, 60)

        for host, target in ((one, other.get_id()), (other, peer_id)):
            for _ in range(3):
                nursery.start_soon(bulk, host, target)
                nursery.start_soon(opens, host, target)
                nursery.start_soon(opens, host, target)
        moves = True
        for _ in range(6):
            before = list(received)
            await trio.sleep(1)
            moves = received != before
            if not moves:
                break
        nursery.cancel_scope.cancel()
    return {"moves": moves}


@scenario
async def inbound_connections_over_a_life() -> dict[str, int]:
    few = ConnectionConfig(max_connections=12, min_connections=8, low_watermark=8, high_watermark=12)
    async with running(new_host(connection_config=few)) as one, running(new_host()) as other:
        for number in range(12):
            with trio.move_on_after(1.5), suppress(Exception):
                peer_id = await dial(other, one)
                if await echoes(other, peer_id):
                    await other.disconnect(peer_id)
                    await trio.sleep(0.15)
                    continue
            return {"taken": number, "open": len(one.get_network().get_connections())}
        return {"taken": 12, "open": 0}


@scenario
async def security_by_default() -> list[str]:
    host = libp2p.new_host()
    return sorted(str(name) for name in host.get_network().upgrader.security_multistream.transports)


@scenario
async def dead_address_before_a_good_one() -> dict[str, bool]:
    async with running(new_host()) as one, running(new_host()) as other:
        info = info_from_p2p_addr(one.get_addrs()[0])
        seen = {}
        for name, addresses in (("first", [Multiaddr("/ip4/127.0.0.1/tcp/1"), *info.addrs]), ("then", info.addrs)):
            try:
                with trio.fail_after(3):
                    await other.connect(PeerInfo(info.peer_id, addresses))
                seen[name] = True
            except Exception:
                seen[name] = False
        return seen


@scenario
async def two_nodes_on_one_port() -> dict[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}"
    async with running(new_host(listen), listen) as one, running(new_host(listen), listen) as other:
        return {"listening": len(one.get_addrs()) + len(other.get_addrs())}


@scenario
async def a_port_that_is_taken() -> str:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        listen = f"/ip4/127.0.0.1/tcp/{holder.getsockname()[1]}"
        try:
            async with running(new_host(listen), listen):
                return "no error"
        except Exception as error:
            return repr(error)


@scenario
async def addresses_of_a_wildcard() -> list[str]:
    async with running(new_host("/ip4/0.0.0.0/tcp/0"), "/ip4/0.0.0.0/tcp/0") as host:
        return [str(address).partition("/p2p/")[0] for address in host.get_addrs()]


@scenario
async def dialling_oneself() -> bool:
    async with running(new_host()) as host:
        return bool(host.is_peer_connected(await dial(host, host)))


@scenario
async def a_reader_that_is_slow() -> str:
    async def stay(_stream: Any) -> None:
        await trio.sleep(60)

    async with running(new_host()) as one, running(new_host()) as other:
        one.set_stream_handler(OTHER, stay)
        stream = await other.new_stream(await dial(other, one), [OTHER])
        try:
            with trio.fail_after(7):
                while True:
                    await stream.write(b"q" * 65536)
        except trio.TooSlowError:
            return "waits"
        except Exception as error:
            return type(error).__name__


@scenario
async def ends_of_a_stream() -> list[str]:
    """What a reader is told after a clean close, a reset, and its peer's sudden death."""
    hosts: dict[str, Any] = {}

    async def close(stream: Any) -> None:
        await stream.close()

    async def reset(stream: Any) -> None:
        await stream.reset()

    async def die(stream: Any) -> None:
        await stream.muxed_conn.secured_conn.close()

    async with AsyncExitStack() as stack:
        seen = []
        for act in (close, reset, die):
            one = await stack.enter_async_context(running(new_host()))
            hosts[act.__name__] = one
            one.set_stream_handler(OTHER, act)
            other = await stack.enter_async_context(running(new_host()))
            stream = await other.new_stream(await dial(other, one), [OTHER])
            try:
                with trio.fail_after(2):
                    await stream.read(10)
                seen.append("data")
            except (Exception, StreamEOF) as error:
                seen.append(type(error).__name__)
        return seen


async def _bounded(function: Scenario) -> object:
    outcome: object = "no outcome in time"
    with trio.move_on_after(SCENARIO_SECONDS):
        outcome = await function()
    return outcome  # noqa: RET504 - the deadline may come before the last assignment


def main(names: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    for name in names or list(SCENARIOS):
        seen: object = "no outcome in time"
        kept: list[object] = []

        async def run(function: Scenario = SCENARIOS[name], kept: list[object] = kept) -> None:
            kept.append(await _bounded(function))

        try:
            trio.run(run)
            seen = kept[0]
        except BaseException as error:
            seen = kept[0] if kept else f"the host ended: {type(error).__name__}"
        sys.stdout.write(json.dumps([name, seen]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
