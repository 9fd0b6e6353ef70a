"""From token ids to the text that a client may see: whole characters, and nothing of a stop string.

Pure. Three parts, each usable alone: `Detokenizer` turns ids into text as it becomes certain, `StopMatcher` holds back what
may yet become a stop string, `AnswerText` is both for one request, continuations included.
"""

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has four bytes at most and a token at least one, so three tokens may be waiting for their last byte.
INCOMPLETE_TOKENS_MAX = 3

# The window is cut back whenever it has grown by so many tokens, to one of the kept lengths whose text lines up.
WINDOW_GROWTH = 16
WINDOW_KEPT = (4, 5, 6, 7, 8)
WINDOW_TOKENS_MAX = 64


class Detokenizer:
    """The text of a growing list of token ids, given out piece by piece; the pieces together are `decode` of all ids.

    That needs a `decode` whose text only grows with more ids, but for a tail of U+FFFD while a character is incomplete. What
    it does with a space at the very beginning (SentencePiece strips one, others add one) does no harm: only the last few
    tokens are decoded for each new one, but the window always begins with text, and is moved only where its text lines up.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that are given out
        self._cut_at = WINDOW_GROWTH

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens."""
        window = self._window
        window.extend(token_ids)
        text = self._decode(window)
        given = self._given
        certain = len(text) if not text.endswith(REPLACEMENT) else self._certain(text)
        if certain > given:
            self._given = certain
        if len(window) >= self._cut_at:
            self._cut(text)
        return text[given:certain]

    def finish(self) -> str:
        """The rest, an incomplete character as `decode` shows it."""
        text = self._decode(self._window)
        given, self._given = self._given, max(self._given, len(text))
        return text[given:]

    def _certain(self, text: str) -> int:
        """How many characters of a text that ends with U+FFFD can't change any more."""
        before = len(text.rstrip(REPLACEMENT))
        for count in range(1, INCOMPLETE_TOKENS_MAX + 1):
            if not self._decode(self._window[:-count]).endswith(REPLACEMENT):
                return before
        # Bytes that make no character: all but the last few are what they are.
        return max(before, len(text) - INCOMPLETE_TOKENS_MAX)

    def _cut(self, text: str) -> None:
        """Make the window short again, if a shorter one gives the end of the same text."""
        held = len(text) - self._given
        for kept in WINDOW_KEPT:
            tail = self._decode(self._window[-kept:])
            visible = tail.lstrip()
            if len(tail) > held and visible and visible[0] != REPLACEMENT and text.endswith(visible):
                return self._move(self._window[-kept:], len(tail) - held)
        if len(self._window) < WINDOW_TOKENS_MAX:
            self._cut_at = len(self._window) + WINDOW_GROWTH
            return None
        window = self._thinned()
        return self._move(window, max(0, len(self._decode(window)) - held))

    def _thinned(self) -> list[int]:
        """The window without the inside of a long run: of spaces, of tokens without text, of bytes that make no character.

        It begins with a token that has text even when it comes first, so that the run does not move to where a tokenizer may
        treat it differently; tokens that add nothing behind that one go first, so that a character waiting for its end stays.
        """
        inside, end = self._window[:-WINDOW_GROWTH], self._window[-WINDOW_GROWTH:]
        for position in reversed(range(len(inside))):
            first = inside[position]
            anchor = self._decode([first])
            if anchor and anchor[0] != REPLACEMENT:
                kept = [
                    other for other in inside[position + 1 :] if self._decode([other]) or self._decode([first, other]) != anchor
                ]
                return [first, *kept[-WINDOW_GROWTH:], *end]
        return inside[: INCOMPLETE_TOKENS_MAX + 1] + end

    def _move(self, window: list[int], given: int) -> None:
        self._window = window
        self._given = given
        self._cut_at = len(window) + WINDOW_GROWTH


class _Node:
    """A state of the matcher: some beginning of a stop string, the longest that the text ends with."""

    __slots__ = ("depth", "fallback", "following", "match")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.following: dict[str, _Node] = {}
        self.fallback: _Node | None = None  # the longest shorter beginning that this one ends with
        self.match = 0  # length of the longest stop string that ends here


class StopMatcher:
    """Finds the first stop string to be complete in a text that comes in pieces (Aho-Corasick: all stop strings at once).

    The first to be complete, of those that end together the longest: where the text is cut into pieces then makes no
    difference, and no text is waited for. Held back is only the longest end of the text that is the beginning of a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string is everywhere"
        self._root = _Node(0)
        for string in stop:
            self._insert(string)
        self._link()
        self._state = self._root
        self._held = ""
        self.found = False

    def _insert(self, string: str) -> None:
        node = self._root
        for depth, character in enumerate(string, 1):
            node = node.following.setdefault(character, _Node(depth))
        node.match = len(string)

    def _link(self) -> None:
        """Set the fall-backs, breadth first: each is shorter than its node, so it is linked before."""
        row = [self._root]
        while row:
            row = [self._linked(node, character) for node in row for character in node.following]

    def _linked(self, parent: _Node, character: str) -> _Node:
        node = parent.following[character]
        shorter = parent.fallback
        while shorter is not None and character not in shorter.following:
            shorter = shorter.fallback
        node.fallback = self._root if shorter is None else shorter.following[character]
        node.match = node.match or node.fallback.match
        return node

    def feed(self, text: str) -> str:
        """The text that can be given out now. After a match (`found`) that is the rest before it, and nothing any more."""
        if self.found:
            return ""
        state = self._state
        for position, character in enumerate(text, 1):
            following = state.following.get(character)
            while following is None and state.fallback is not None:
                state = state.fallback
                following = state.following.get(character)
            state = self._root if following is None else following
            if state.match:
                self.found = True
                seen = self._held + text[:position]
                self._held = ""
                return seen[: len(seen) - state.match]
        self._state = state
        seen = self._held + text
        certain = len(seen) - state.depth
        self._held = seen[certain:]
        return seen[:certain]

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one answer, as far as it may be given out.

    A continuation begins with the ids of earlier attempts and the count of characters that the client has been given: their
    text is gone through again, so that a stop string across the break is found, and only what the client lacks is given out.
    """

    def __init__(self, decode: Decode, stop: Sequence[str], generated: Sequence[int] = (), given_characters: int = 0) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stop) if stop else None
        self._skip = given_characters
        self._pending = self._through(self._detokenizer.add(generated)) if generated else ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the answer is at its end."""
        return self._matcher is not None and self._matcher.found

    def add(self, token_id: int) -> str:
        """The text to be given out with this token."""
        text = self._detokenizer.add((token_id,))
        if self._matcher is None and not self._skip and not self._pending:
            return text
        return self._taken(self._through(text))

    def finish(self) -> str:
        """The text to be given out at the end of the answer: what was held back, unless a stop string was found."""
        text = self._through(self._detokenizer.finish())
        if self._matcher is not None:
            text += self._unskipped(self._matcher.finish())
        return self._taken(text)

    def _through(self, text: str) -> str:
        return self._unskipped(text if self._matcher is None else self._matcher.feed(text))

    def _unskipped(self, text: str) -> str:
        skip = min(self._skip, len(text))
        self._skip -= skip
        return text[skip:]

    def _taken(self, text: str) -> str:
        """Text of earlier tokens that the client lacks goes before."""
        text, self._pending = self._pending + text, ""
        return text
