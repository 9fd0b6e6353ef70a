"""The frames of the sync stream: what they cost, and what is refused."""

import random

import msgspec
import pytest

from node.records import SCHEMA, TASK, VERDICT, Executor, TaskHeader, Terminal, Verdict
from p2p import replica
from p2p.core import Core
from p2p.effects import Close, Effect
from p2p.lattice import ALIVE, Generation, Standing
from p2p.sync_wire import (
    FRAME_BYTES_MAX,
    MESSAGES,
    NIL,
    VALUE_BYTES_MAX,
    Ack,
    Change,
    Delta,
    Hello,
    Part,
    Ping,
    Root,
    Row,
    Summary,
    node16,
)
from tests.p2p.fuzz import CLUSTER, NODE, PEER, THIRD, body, fuzz, greet, samples, target

LIFE = Standing(Generation(1_790_000_000, 1 << 60), 0, ALIVE)


def closes(effects: list[Effect]) -> list[Close]:
    return [effect for effect in effects if isinstance(effect, Close)]


def test_sizes_of_the_frames_that_an_idle_cluster_sends() -> None:
    assert len(body(Ping(1 << 20))) <= 8
    assert len(body(Ack(1 << 20))) <= 8
    assert len(body(Root(bytes(8)))) <= 12


def test_size_of_a_task_header_of_two_ranks() -> None:
    header = TaskHeader(0, 1 << 60, (Executor(1 << 60, 1), Executor(1 << 61, 1)), 1000, 500, 600)
    one = Change(TASK, 1, 70_000, msgspec.Raw(msgspec.msgpack.encode(header)))

    assert len(msgspec.msgpack.encode(one)) <= 52


def test_a_node_is_named_by_a_hash_of_its_peer_id() -> None:
    assert len(node16("12D3KooWabc")) == 16
    assert node16("12D3KooWabc") != node16("12D3KooWabd")


def test_every_message_comes_back_as_it_was_sent() -> None:
    chance = random.Random(1)
    for message in [message for _ in range(50) for message in samples(chance, noise=False)]:
        decoded = MESSAGES.decode(body(message))
        assert body(decoded) == body(message)
        assert type(decoded) is type(message)


def delta(*changes: Change, node: bytes = THIRD, upto: int = 9) -> bytes:
    return body(Delta([], [Part(node, LIFE, 0, upto, 0, False, list(changes))]))


GOOD = Change(TASK, 1, 7, msgspec.Raw(msgspec.msgpack.encode(TaskHeader(0, 1, (Executor(1, 1),), 1, 1, 1))))


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(delta(GOOD, Change(TASK, 1, 8, msgspec.Raw(b"\x01"))), id="value of another type"),
        pytest.param(delta(GOOD, Change(TASK, 1, "x", GOOD.value)), id="name of another type"),
        pytest.param(delta(GOOD, Change(VERDICT, 1, 7, msgspec.Raw(b"\x92\x09\xa0"))), id="value out of range"),
        pytest.param(
            delta(GOOD, Change(200, 1, 7, msgspec.Raw(msgspec.msgpack.encode(bytes(VALUE_BYTES_MAX))))), id="too long"
        ),
        pytest.param(delta(GOOD, GOOD), id="one record twice"),
        pytest.param(delta(GOOD, Change(200, 99, 7, msgspec.Raw(NIL))), id="version above the end"),
        pytest.param(delta(GOOD)[:-1], id="cut off"),
        pytest.param(delta(GOOD, node=b"short"), id="name of a node too short"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"\x92\x63\x01", id="unknown frame"),
        pytest.param(body(Summary(1, True, [Row(THIRD, LIFE, 1)] * 2)), id="member twice"),
    ],
)
def test_a_bad_frame_ends_its_stream_and_nothing_of_it_is_applied(bad: bytes) -> None:
    core = target(random.Random(1))
    before = core.replica.root

    effects = core.handle(PEER, bad, 0.0)

    assert [close.fault for close in closes(effects)] == [True]
    assert (core.replica.root, core.violations.bad_frame, list(core.links)) == (before, 1, [])
    assert core.handle(PEER, delta(GOOD), 0.0) == []


def test_one_bad_part_refuses_its_frame_whole() -> None:
    core = target(random.Random(1))
    good, bad = Part(THIRD, LIFE, 0, 1, 0, False, [GOOD]), Part(PEER, LIFE, 5, 1, 0, False, [])

    effects = core.handle(PEER, body(Delta([], [good, bad])), 0.0)

    assert closes(effects)
    assert THIRD not in core.replica.members


def test_other_streams_do_not_notice() -> None:
    core = target(random.Random(1))
    core.connected(THIRD, 0.0)
    core.handle(THIRD, body(Hello(1, 1, CLUSTER, THIRD, LIFE, None)), 0.0)

    core.handle(PEER, b"\xc1", 0.0)

    assert list(core.links) == [THIRD]
    assert not closes(core.handle(THIRD, body(Ping(1)), 0.0))


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(2, 3, CLUSTER, PEER, LIFE, None), "speaks protocol 2..3"),
        (Hello(1, 1, b"c" * 16, PEER, LIFE, None), "another cluster"),
        (Hello(1, 1, CLUSTER, THIRD, LIFE, None), "under a name"),
    ],
)
def test_a_greeting_that_does_not_fit_ends_the_stream_with_a_reason(hello: Hello, reason: str) -> None:
    core = Core(NODE, Generation(1, 1), cluster=CLUSTER, schema=SCHEMA, chance=random.Random(1))
    core.connected(PEER, 0.0)

    effects = core.handle(PEER, body(hello), 0.0)

    assert reason in closes(effects)[0].reason
    assert core.violations.bad_hello == 1
    assert list(core.replica.members) == [NODE]


def test_records_of_unknown_kinds_are_kept_and_passed_on_as_they_came() -> None:
    core = target(random.Random(1))
    strange = msgspec.msgpack.encode({"future": [1, 2.5, None]})
    core.handle(PEER, delta(Change(250, 1, "x", msgspec.Raw(strange))), 0.0)

    part, _, _ = core.replica.part(THIRD, 0, 10_000)

    assert [(change.kind, change.name, bytes(change.value)) for change in part.changes] == [(250, "x", strange)]


def test_fields_that_a_newer_node_added_are_kept() -> None:
    core = target(random.Random(1))
    newer = msgspec.msgpack.encode([int(Terminal.COMPLETE), "", "a field of tomorrow"])
    core.handle(PEER, delta(Change(VERDICT, 1, 7, msgspec.Raw(newer))), 0.0)

    record = core.replica.members[THIRD].namespace.records[VERDICT, 7]

    assert record.content == Verdict(Terminal.COMPLETE)
    assert record.value == newer


def test_a_peer_can_not_write_this_nodes_records() -> None:
    core = target(random.Random(1))
    core.handle(PEER, body(Delta([], [Part(NODE, core.me.standing, 1, 9, 0, False, [GOOD])])), 0.0)

    assert list(core.me.namespace.records) == [(200, 1)]


def test_frames_before_the_greeting_are_not_read() -> None:
    core = Core(NODE, Generation(1, 1), cluster=CLUSTER, schema=SCHEMA, chance=random.Random(1))
    core.connected(PEER, 0.0)

    core.handle(PEER, delta(GOOD), 0.0)

    assert (core.violations.not_greeted, list(core.replica.members)) == (1, [NODE])
    greet(core)


def test_what_others_make_a_node_hold_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MEMBERS_MAX", 30)
    monkeypatch.setattr(replica, "REPLICA_WEIGHT_MAX", 100)

    counts = fuzz(20_000, seed=2)

    assert counts["most members"] == 30
    assert 50 < counts["most bytes"] <= 100


def test_a_node_survives_frames_of_any_kind() -> None:
    counts = fuzz(20_000, seed=1)

    assert counts["refused"] > 5_000
    assert FRAME_BYTES_MAX == 262_144
