"""A replica asked for over the p2p network, by whoever has the cluster's key and by nobody else."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from node.dump_stream import (
    ASK_SECONDS,
    DUMP,
    TELL_SECONDS,
    TELLING_MAX,
    DumpFailed,
    DumpFrame,
    DumpTeller,
    ask,
    ask_as_stranger,
    cluster_of,
)
from node.replica_dump import DumpedMember, DumpHead, ReplicaDump
from p2p.cluster_key import cluster, new_key
from p2p.dialler import Dialler
from p2p.stream import Stream
from tests.node.cluster_replica import home
from tests.node.test_config import config
from tests.p2p.transport_lab import CLUSTER, Kind, both, open_lab

Serve = Callable[[Stream[DumpFrame]], Awaitable[None]]


@both
async def test_a_peer_tells_its_whole_replica(kind: Kind) -> None:
    dump = home().dump()
    async with open_lab(kind) as lab, lab.node() as told, lab.node() as asker:
        told.serve(DUMP, DumpTeller(lambda: dump).serve)

        assert await ask(asker, told.addresses[0]) == dump
        assert await ask(asker, told.addresses[0]) == dump


async def test_who_asks_becomes_no_target_and_no_member() -> None:
    """Over libp2p, as `node dump --peer` does it."""
    dump = home().dump()
    async with open_lab("libp2p") as lab, lab.node() as told, trio.open_nursery() as nursery:
        dialler = Dialler(told)
        nursery.start_soon(dialler.run)
        told.serve(DUMP, DumpTeller(lambda: dump).serve)
        assert await ask_as_stranger(told.addresses[0], CLUSTER) == dump
        while told.peers:
            await told.wait_past(told.revision)

        assert dialler._nodes == {}
        assert dialler.unreached == ()
        nursery.cancel_scope.cancel()


async def test_without_the_key_nothing_is_told() -> None:
    calls: list[None] = []

    def take() -> ReplicaDump:
        calls.append(None)
        return home().dump()

    async with open_lab("libp2p") as lab, lab.node() as told:
        told.serve(DUMP, DumpTeller(take).serve)
        for stranger in (cluster("home", new_key()), cluster("home", None), cluster("other", None)):
            with pytest.raises(DumpFailed, match=r"can't be reached: .*cluster name or key differs"):
                await ask_as_stranger(told.addresses[0], stranger)

    assert calls == []


async def test_who_can_not_be_reached_is_said_in_one_sentence() -> None:
    with pytest.raises(DumpFailed, match=r"^127\.0\.0\.1:9 can't be reached: connection refused$"):
        await ask_as_stranger("127.0.0.1:9", CLUSTER)
    with pytest.raises(DumpFailed, match="is no address"):
        await ask_as_stranger("nonsense", CLUSTER)


HEAD = DumpHead("x", b"12345678", 1, 0, {})


def member() -> DumpedMember:
    return home().dump().members[0]


async def no_head(stream: Stream[DumpFrame]) -> None:
    await stream.send(member())


async def two_heads(stream: Stream[DumpFrame]) -> None:
    await stream.send(HEAD)
    await stream.send(HEAD)


async def too_few(stream: Stream[DumpFrame]) -> None:
    await stream.send(HEAD)


async def too_many(stream: Stream[DumpFrame]) -> None:
    await stream.send(HEAD)
    await stream.send(member())
    await stream.send(member())


async def breaking(stream: Stream[DumpFrame]) -> None:
    await stream.send(HEAD)
    stream.reset()


async def silent(_stream: Stream[DumpFrame]) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (no_head, "began without a head"),
        (two_heads, "has two heads"),
        (too_few, "it ended early"),
        (too_many, "more of it than a replica has"),
        (breaking, "broke off"),
        (silent, f"within {ASK_SECONDS:g} seconds"),
        (None, "does not show its replica"),
    ],
    ids=["no-head", "two-heads", "too-few", "too-many", "breaking", "silent", "refused"],
)
async def test_what_is_no_dump(serve: Serve | None, reason: str, autojump_clock: MockClock) -> None:
    async with open_lab("memory") as lab, lab.node() as told, lab.node() as asker:
        if serve is not None:
            told.serve(DUMP, serve)
        with pytest.raises(DumpFailed, match=reason):
            await ask(asker, told.addresses[0])
        assert told.counters.failures == 0


async def test_those_who_ask_and_do_not_read_hold_up_others_for_a_while_only(autojump_clock: MockClock) -> None:
    takes: list[float] = []
    dump = home().dump()
    big = ReplicaDump(dump.head, dump.members * 5000)

    def take() -> ReplicaDump:
        takes.append(trio.current_time())
        return big if len(takes) <= TELLING_MAX else dump

    async with open_lab("memory") as lab, lab.node() as told, lab.node() as asker:
        told.serve(DUMP, DumpTeller(take).serve)
        start = trio.current_time()
        await asker.dial(told.addresses[0])
        idle = [await asker.open(told.node_id, DUMP) for _ in range(TELLING_MAX)]
        await wait_all_tasks_blocked()
        assert len(takes) == TELLING_MAX
        assert await ask(asker, told.addresses[0]) == dump
        assert takes[-1] - start == pytest.approx(TELL_SECONDS, abs=1)
        for stream in idle:
            stream.reset()


def test_the_cluster_is_what_the_configuration_says() -> None:
    key = new_key()

    assert cluster_of(config(cluster="home", cluster_key=key.upper())) == cluster("home", key)
    assert cluster_of(config()) == cluster("default", None)
