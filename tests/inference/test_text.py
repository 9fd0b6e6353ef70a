"""Text from tokens, against oracles that see everything at once."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inference.runner.text import WINDOW_GROWTH, WINDOW_TOKENS_MAX, AnswerText, Detokenizer, StopMatcher

Decode = Callable[[Sequence[int]], str]

# Vocabularies of a few pieces each, so that every neighbourhood occurs.
BYTE_PIECES = [
    b"a", b" b", b"\xe2\x82\xac", b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xac c", b"\xf0\x9f", b"\x98\x80", b"\xff",
    b"\xc3", b"\xa9", b" ", b"\n\n", b"", b"x\xf0", b"\xef\xbf\xbd",
]  # fmt: skip
WORD_PIECES = ["▁", "▁▁", "▁the", "s", "▁a", "\n", "é", "", "▁b", "."]


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer."""
    return b"".join(BYTE_PIECES[i] for i in ids).decode("utf-8", "replace")


def decode_strip_one(ids: Sequence[int]) -> str:
    """A SentencePiece tokenizer: one leading space is taken off."""
    return "".join(WORD_PIECES[i] for i in ids).replace("▁", " ").removeprefix(" ")


def decode_strip_all(ids: Sequence[int]) -> str:
    """One that takes off all leading spaces."""
    return "".join(WORD_PIECES[i] for i in ids).replace("▁", " ").lstrip(" ")


def decode_add_one(ids: Sequence[int]) -> str:
    """One that puts a space before whatever it decodes."""
    return " " + "".join(WORD_PIECES[i] for i in ids).replace("▁", " ") if ids else ""


def decode_words(ids: Sequence[int]) -> str:
    """One that joins whole words by spaces, as WordPiece does."""
    return " ".join(f"w{i}" for i in ids)


def decode_fallback(ids: Sequence[int]) -> str:
    """SentencePiece's byte fallback: a run of bytes that is no valid text becomes one U+FFFD a byte, whatever is in it."""
    text, run = "", b""
    for i in [*ids, -1]:
        piece = BYTE_PIECES[i] if i >= 0 else b"."
        if i >= 0 and len(piece) == 1 and piece[0] >= 0x80:
            run += piece
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\N{REPLACEMENT CHARACTER}" * len(run)
        run = b""
        text += piece.decode("utf-8", "replace") if i >= 0 else ""
    return text


DECODERS: dict[str, tuple[Decode, int]] = {
    "bytes": (decode_bytes, len(BYTE_PIECES)),
    "strip one": (decode_strip_one, len(WORD_PIECES)),
    "strip all": (decode_strip_all, len(WORD_PIECES)),
    "add one": (decode_add_one, len(WORD_PIECES)),
    "words": (decode_words, 5),
}


def pieces_of(decode: Decode, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.add((token_id,)) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_the_pieces_together_are_the_text_of_all_ids(name: str, data: st.DataObject) -> None:
    decode, size = DECODERS[name]
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=200))
    assert "".join(pieces_of(decode, ids)) == decode(ids)


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_long_runs_of_one_token_are_no_trouble(name: str, data: st.DataObject) -> None:
    decode, size = DECODERS[name]
    runs = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 2 * WINDOW_TOKENS_MAX)), max_size=5))
    ids = [3 if decode is not decode_bytes else 0, *(token_id for token_id, count in runs for _ in range(count))]
    assert "".join(pieces_of(decode, ids)) == decode(ids)


@given(st.lists(st.sampled_from([[0], [3, 4, 5], [2], [11, 12], [13]]), max_size=60))
def test_byte_fallback_gives_no_character_before_it_is_whole(characters: list[list[int]]) -> None:
    ids = [token_id for character in characters for token_id in character]
    pieces = pieces_of(decode_fallback, ids)
    assert "".join(pieces) == decode_fallback(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(st.lists(st.integers(0, len(BYTE_PIECES) - 1), max_size=60), st.data())
def test_it_makes_no_difference_how_many_ids_come_at_once(ids: list[int], data: st.DataObject) -> None:
    detokenizer, text, start = Detokenizer(decode_bytes), "", 0
    while start < len(ids):
        count = data.draw(st.integers(1, 30))
        text += detokenizer.add(ids[start : start + count])
        start += count
    assert text + detokenizer.finish() == decode_bytes(ids)


def test_text_comes_as_soon_as_its_character_is_whole() -> None:
    assert pieces_of(decode_bytes, [0, 3, 4, 5, 1]) == ["a", "", "", "€", " b", ""]
    assert pieces_of(decode_bytes, [0, 16, 0]) == ["a", "x", "\N{REPLACEMENT CHARACTER}a", ""]


def test_an_incomplete_tail_is_given_out_at_the_end_as_decode_gives_it() -> None:
    assert pieces_of(decode_bytes, [0, 8]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_costs_the_decoding_of_a_bounded_window(name: str) -> None:
    decode, size = DECODERS[name]
    longest = calls = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal longest, calls
        longest, calls = max(longest, len(ids)), calls + 1
        return decode(ids)

    for ids in ([i % size for i in range(3000)], [size - 1] * 3000, [0] * 3000, [10 % size] * 3000):
        calls = 0
        pieces_of(counting, ids)
        assert longest <= WINDOW_TOKENS_MAX + WINDOW_GROWTH
        assert calls <= 8 * len(ids)


STOP = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string to be complete, of those that end together the longest."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(st.lists(st.text("abc", max_size=6), max_size=20), STOP)
@example(["abab", "c"], ["ababc", "bab"])
def test_the_first_stop_string_is_found_however_the_text_is_cut(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    text = "".join([matcher.feed(piece) for piece in pieces])
    if not matcher.found:
        text += matcher.finish()
    assert (text, matcher.found) == first_stop("".join(pieces), stop)
    if matcher.found:
        assert matcher.feed("abcabc") == matcher.finish() == ""


@given(st.text("abc", max_size=30), STOP)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    given_out = matcher.feed(text)
    if matcher.found:
        return
    beginnings = {string[:length] for string in stop for length in range(1, len(string))}
    held = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
    assert given_out == text[: len(text) - held]


def test_held_back_text_is_given_out_at_the_end() -> None:
    matcher = StopMatcher(["ZZZ"])
    assert matcher.feed("fuZZ") == "fu"
    assert matcher.finish() == "ZZ"


def answered(ids: Sequence[int], stop: Sequence[str]) -> tuple[list[str], bool]:
    """The pieces of an answer that nothing interrupts; after a stop string no more ids are added."""
    text = AnswerText(decode_bytes, stop)
    pieces = []
    for token_id in ids:
        pieces.append(text.add(token_id))
        if text.stopped:
            return pieces, True
    return [*pieces, text.finish()], False


BYTE_STOP = st.lists(st.sampled_from(["a", "aa", "€a", "a b", "é", " c", "b\n", "\n\n€", "€€"]), max_size=3)
BYTE_IDS = st.lists(st.integers(0, len(BYTE_PIECES) - 1), min_size=1, max_size=60)


@given(BYTE_IDS, BYTE_STOP)
def test_an_answer_is_the_text_before_the_first_stop_string(ids: list[int], stop: list[str]) -> None:
    pieces, stopped = answered(ids, stop)
    if not stopped:
        assert ("".join(pieces), False) == first_stop(decode_bytes(ids), stop)
    else:
        assert ("".join(pieces), True) == first_stop(decode_bytes(ids[: len(pieces)]), stop)


@given(BYTE_IDS, BYTE_STOP, st.data())
def test_a_continuation_leaves_no_gap_and_repeats_nothing(ids: list[int], stop: list[str], data: st.DataObject) -> None:
    pieces, stopped = answered(ids, stop)
    taken = len(pieces) if stopped else len(ids)
    split = data.draw(st.integers(0, taken), label="tokens before the break")
    before = "".join(pieces[:split])
    given_characters = data.draw(st.integers(0, len(before)), label="characters that reached the client")
    text = AnswerText(decode_bytes, stop, ids[:split], given_characters)
    rest = ""
    for token_id in ids[split:taken]:
        assert not text.stopped
        rest += text.add(token_id)
    assert text.stopped == stopped
    rest += text.finish()
    assert before[:given_characters] + rest == "".join(pieces)


def test_a_stop_string_across_the_break_is_found() -> None:
    text = AnswerText(decode_bytes, ["a b"], [0], 0)
    assert not text.stopped
    assert text.add(1) == ""
    assert text.stopped
