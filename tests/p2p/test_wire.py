"""Frames: any cut of the bytes gives the same messages, and bad bytes only ever are a violation."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.runner_protocol import COMMANDS, REPORTS
from p2p.wire import HEADER_BYTES, FrameCodec, ProtocolViolation

CAP = 200


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    number: int
    text: str = ""


class Data(msgspec.Struct, frozen=True, tag="data"):
    body: bytes
    parts: tuple[int, ...] = ()


Message = Ping | Data
CODEC: FrameCodec[Message] = FrameCodec(Message, CAP)

MESSAGES = st.lists(
    st.one_of(
        st.builds(Ping, st.integers(-(1 << 63), (1 << 64) - 1), st.text(max_size=20)),
        st.builds(Data, st.binary(max_size=60), st.lists(st.integers(0, 300), max_size=10).map(tuple)),
    ),
    max_size=8,
)


@given(MESSAGES, st.data())
def test_any_cut_gives_the_same_messages(messages: list[Message], data: st.DataObject) -> None:
    stream = b"".join(CODEC.encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, received = CODEC.reader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += list(reader.feed(stream[start:end]))
    assert received == messages
    assert not reader.midway


@given(MESSAGES.filter(bool))
def test_a_stream_that_ends_in_a_frame_is_midway(messages: list[Message]) -> None:
    stream = b"".join(CODEC.encode(message) for message in messages)
    reader = CODEC.reader()
    assert list(reader.feed(stream[:-1])) == messages[:-1]
    assert reader.midway


@given(st.binary(max_size=400))
def test_bad_bytes_are_a_violation_and_nothing_else(data: bytes) -> None:
    with contextlib.suppress(ProtocolViolation):
        for message in CODEC.reader().feed(data):
            assert isinstance(message, Ping | Data)


@given(st.sampled_from([COMMANDS, REPORTS]), st.binary(min_size=1, max_size=300))
def test_bad_bodies_are_violations_of_the_runner_protocol_too(codec: FrameCodec[object], body: bytes) -> None:
    try:
        codec.decode(body)
    except ProtocolViolation:
        return
    assert codec.decode(body) == codec.decode(codec.encode(codec.decode(body))[HEADER_BYTES:])


def test_messages_before_a_violation_are_given_out() -> None:
    messages = CODEC.reader().feed(CODEC.encode(Ping(1)) + b"\x00\x00\x00\x01\xc1")
    assert next(messages) == Ping(1)
    with pytest.raises(ProtocolViolation):
        next(messages)


@pytest.mark.parametrize("length", [0, CAP + 1, (1 << 32) - 1])
def test_a_length_outside_the_cap_is_refused_before_its_bytes_come(length: int) -> None:
    with pytest.raises(ProtocolViolation, match=str(length)):
        list(CODEC.reader().feed(length.to_bytes(HEADER_BYTES, "big")))


def test_the_cap_is_the_same_on_both_sides() -> None:
    room = CAP - len(CODEC.encode(Data(b""))) + HEADER_BYTES
    bodies = [b"x" * size for size in range(room - 3, room + 3)]
    fitting = [body for body in bodies if len(msgspec.msgpack.encode(Data(body))) <= CAP]
    assert 0 < len(fitting) < len(bodies)
    for body in bodies:
        if body in fitting:
            assert list(CODEC.reader().feed(CODEC.encode(Data(body)))) == [Data(body)]
        else:
            with pytest.raises(ValueError, match=str(CAP)):
                CODEC.encode(Data(body))


def test_deep_nesting_is_a_violation() -> None:
    codec: FrameCodec[object] = FrameCodec(object, 1 << 20)
    with pytest.raises(ProtocolViolation):
        codec.decode(b"\x91" * 100_000)


@pytest.mark.parametrize(
    "message",
    [
        Ping("one"),  # type: ignore[arg-type]  # what the types forbid
        Ping(1 << 70),
        Ping(1, "\ud800"),
        Data(b"", (object(),)),  # type: ignore[arg-type]  # what the types forbid
        Data(b"x" * CAP),
    ],
)
def test_what_the_other_end_would_not_take_is_seen_before_it_is_sent(message: Message) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        CODEC.encode_checked(message)
    assert len(str(caught.value).splitlines()) == 1


def test_deep_nesting_is_seen_before_it_is_sent() -> None:
    codec: FrameCodec[object] = FrameCodec(object, 1 << 20)
    nested: object = 1
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ValueError, match=r"."):
        codec.encode_checked(nested)


@given(MESSAGES)
def test_checked_frames_are_the_same_frames(messages: list[Message]) -> None:
    assert [CODEC.encode_checked(message) for message in messages] == [CODEC.encode(message) for message in messages]


def test_values_out_of_range_are_violations() -> None:
    for body in (
        {"type": "ping", "number": "one"},
        {"type": "ping"},
        {"type": "pong", "number": 1},
        {"type": "data", "body": 1},
    ):
        with pytest.raises(ProtocolViolation):
            CODEC.decode(msgspec.msgpack.encode(body))
