"""Frames that no honest node sends: noise, cut and bent frames of real ones, and well-formed nonsense."""

import random
from collections import Counter

import msgspec
from msgspec import Raw

from node.records import SCHEMA
from p2p import replica
from p2p.core import Core
from p2p.effects import Close
from p2p.lattice import ALIVE, DEAD, Generation, Standing
from p2p.sync_wire import (
    BUCKETS,
    MEMBERS_MAX,
    MESSAGES,
    Ack,
    Buckets,
    Change,
    Claim,
    Delta,
    Hello,
    Message,
    Nack,
    Part,
    Ping,
    PingRequest,
    Root,
    Row,
    Rumour,
    Summary,
)
from p2p.wire import HEADER_BYTES

PEER, NODE, THIRD = b"p" * 16, b"n" * 16, b"t" * 16
CLUSTER = bytes(16)


def target(chance: random.Random) -> Core:
    """A node with one greeted peer and some records."""
    core = Core(NODE, Generation(5, 5), cluster=CLUSTER, schema=SCHEMA, chance=chance)
    core.start(0.0)
    greet(core)
    core.write(200, 1, "x", 0.0)
    return core


def greet(core: Core) -> None:
    """Open the peer's stream."""
    core.connected(PEER, 0.0)
    core.handle(PEER, body(Hello(1, 1, CLUSTER, PEER, Standing(Generation(1, 1), 0, ALIVE), None)), 0.0)


def body(message: Message) -> bytes:
    """A frame without its length."""
    return MESSAGES.encode(message)[HEADER_BYTES:]


def samples(chance: random.Random, *, noise: bool = True) -> list[Message]:
    """One message of each kind, with numbers around every bound; with `noise` values may be no msgpack at all."""

    def number() -> int:
        return chance.choice((0, 1, 2, 5, 6, 1 << 31, (1 << 53) - 1, chance.randrange(1 << 40)))

    node = chance.choice((PEER, NODE, THIRD, chance.randbytes(16)))
    generation = Generation(min(number(), 1 << 53), number())
    standing = Standing(generation, min(number(), (1 << 32) - 1), chance.choice((ALIVE, DEAD)))
    sequence = min(number(), (1 << 32) - 1)
    values = [b"\xc0", b"\x01", b"\x90", b"\x92\x01\xa0"] + [chance.randbytes(chance.randrange(1, 20))] * noise
    names = (1, "a", (1, 2), (1, 2, 3, 4))
    changes = [
        Change(chance.choice((1, 2, 3, 6, 200)), 1 + chance.randrange(3), chance.choice(names), Raw(chance.choice(values)))
        for _ in range(chance.randrange(4))
    ]
    part = Part(node, standing, number(), number(), number(), chance.random() < 0.5, changes)
    small = Part(node, standing, 0, 9, 0, False, changes)
    return [
        Hello(1, 1, CLUSTER, node, standing, Claim(generation, 0, False, ALIVE, False)),
        Root(chance.randbytes(8)),
        Buckets(chance.randbytes(8 * BUCKETS)),
        Summary(chance.getrandbits(BUCKETS), chance.random() < 0.5, [Row(node, standing, number())]),
        Delta([Rumour(node, standing, THIRD, chance.random() < 0.5)], [part, small]),
        Delta([], [small]),
        Ping(sequence, standing),
        Ack(sequence, standing),
        PingRequest(sequence, node),
        Nack(sequence),
    ]


def bend(frame: bytes, chance: random.Random) -> bytes:
    """A frame with something wrong in it."""
    kind = chance.randrange(5)
    if kind == 0:
        return frame[: chance.randrange(len(frame) + 1)]
    if kind == 1:
        at = chance.randrange(len(frame))
        return frame[:at] + bytes([chance.randrange(256)]) + frame[at + 1 :]
    if kind == 2:
        at = chance.randrange(len(frame))
        return frame[:at] + chance.randbytes(chance.randrange(9)) + frame[at:]
    if kind == 3:
        return chance.randbytes(chance.randrange(64))
    return msgspec.msgpack.encode([chance.randrange(12), [chance.randrange(9)] * chance.randrange(9)])


def check_caps(core: Core) -> None:
    """What is held of others is counted rightly and below its caps."""
    others = [member for member in core.replica.members.values() if member is not core.me]
    assert len(core.replica.members) <= MEMBERS_MAX
    assert core.replica.weight == sum(member.namespace.weight for member in others) <= replica.REPLICA_WEIGHT_MAX
    assert len(core.replica.graves) <= replica.GRAVES_MAX
    assert all(member.namespace.flaw() is None for member in others)


def fuzz(frames: int, seed: int) -> Counter[str]:
    """Throw frames at a node; it must live, keep its own records, and stay small.

    Raises: AssertionError, with the frame's number, where it doesn't.
    """
    chance = random.Random(seed)
    core = target(chance)
    counts: Counter[str] = Counter()
    pool: list[bytes] = []
    for number in range(frames):
        if not pool:
            pool = [body(message) for message in samples(chance)]
            chance.shuffle(pool)
        frame = pool.pop()
        if chance.random() < 0.7:
            frame = bend(frame, chance)
        before = None if number % 64 else (core.replica.root, dict(core.me.namespace.records))
        effects = core.handle(PEER, frame, 0.0)
        counts["frames"] += 1
        if any(isinstance(effect, Close) for effect in effects):
            counts["refused"] += 1
            if before is not None:
                assert before == (core.replica.root, core.me.namespace.records), f"frame {number} was refused but not whole"
            greet(core)
        if number % 20_000 == 19_999:
            counts["most members"] = max(counts["most members"], len(core.replica.members))
            counts["most bytes"] = max(counts["most bytes"], core.replica.weight)
            check_caps(core)
            assert core.me.namespace.records.keys() == {(200, 1)}, f"a peer wrote into this node's records by frame {number}"
            core = target(chance)
    return counts
