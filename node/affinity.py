"""Which instances hold the beginning of a prompt in their cache, as far as this home has seen it: a bounded map.

A home may have no tokenizer, so beginnings are known by hashes of text: of a conversation, one at the end of each message; of
plain text and of token ids, one at each doubling of the length. What every conversation shares, the leading system messages and
the tools, is no beginning of its own: each instance soon holds it, and it must not draw all conversations to one of them.
"""

import json
from array import array
from hashlib import blake2b

from msgspec import Struct

from inference.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt

BYTES_PER_TOKEN = 4  # of ordinary text; only weighs what a cached beginning saves
PREFIXES_MAX = 64  # looked up for one prompt: the longest ones
REMEMBERED_MAX = 16_384  # beginnings that a home remembers: some megabytes
HOLDERS_MAX = 4  # instances remembered for one beginning, the last ones
REMEMBER_SECONDS = 900.0  # a cache that nobody used for longer is likely gone
# A first message that was seen before draws its request to where it ran only if it is long: many conversations begin with "hi".
FIRST_MESSAGE_TOKENS_MIN = 256
BLOCK_BYTES_FIRST = 512
BLOCK_IDS_FIRST = 128
_HASH_BYTES = 8
_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode
_SHARED_ROLES = ("system", "developer")


class Prefix(Struct, frozen=True, gc=False):
    """A beginning of a prompt; `tokens` estimates what of the prompt need not be evaluated where it was run before."""

    hash: int
    tokens: int


class Prefixes(Struct, frozen=True):
    """Beginnings of one prompt, the shortest first, and those of them that are remembered once an instance has taken it."""

    known: tuple[Prefix, ...] = ()
    remembered: tuple[int, ...] = ()
    tokens_min: int = 0  # a match that saves less is none


def prefixes(prompt: Prompt, model_hash: str) -> Prefixes:
    """The beginnings of a prompt for a model."""
    match prompt:
        case ChatPrompt():
            return _of_messages(prompt, model_hash)
        case TextPrompt(text):
            return _of_blocks(text.encode("utf-8", "surrogatepass"), BLOCK_BYTES_FIRST, BYTES_PER_TOKEN, model_hash)
        case TokenPrompt(ids):
            encoded = array("i", ids)
            return _of_blocks(encoded.tobytes(), BLOCK_IDS_FIRST * encoded.itemsize, encoded.itemsize, model_hash)


def canonical(value: object) -> bytes:
    """One encoding for equal JSON values, whatever the order of their keys; also of text with lone surrogates."""
    return _encode(value).encode("utf-8", "surrogatepass")


def _of_messages(prompt: ChatPrompt, model_hash: str) -> Prefixes:
    state = blake2b(model_hash.encode() + b"\0" + canonical([prompt.tools, prompt.template_options]), digest_size=_HASH_BYTES)
    encoded = [canonical(message) for message in prompt.messages]
    roles = [message.get("role") for message in prompt.messages]
    size = 0
    found: list[Prefix] = []
    own = False  # whether anything yet is this conversation's own
    for place, text in enumerate(encoded):
        state.update(b"%d:" % len(text) + text)
        size += len(text)
        own = own or roles[place] not in _SHARED_ROLES
        if own:
            # The answer to what was seen was made where it was seen, so it is in that cache too.
            answer = encoded[place + 1] if "assistant" in roles[place + 1 : place + 2] else b""
            found.append(Prefix(_number(state.copy().digest()), (size + len(answer)) // BYTES_PER_TOKEN))
    # The whole, what stays when its last message is edited, and its first message.
    remembered = {prefix.hash: None for prefix in (*found[:1], *found[-2:])}
    return Prefixes(tuple(found[-PREFIXES_MAX:]), tuple(remembered), 0 if "assistant" in roles else FIRST_MESSAGE_TOKENS_MIN)


def _of_blocks(data: bytes, first: int, bytes_per_token: int, model_hash: str) -> Prefixes:
    state = blake2b(model_hash.encode() + b"\0", digest_size=_HASH_BYTES)
    found: list[Prefix] = []
    begin, end = 0, first
    while begin < len(data):
        end = min(end, len(data))
        state.update(data[begin:end])
        found.append(Prefix(_number(state.copy().digest()), end // bytes_per_token))
        begin, end = end, 2 * end
    kept = tuple(found[-PREFIXES_MAX:])
    return Prefixes(kept, tuple(prefix.hash for prefix in kept))


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big")


class _Holders(Struct):
    """The instances that hold a beginning, the last one first, and when that was seen last."""

    instances: tuple[int, ...]
    seen: float


class Affinity:
    """A home's memory of which instances ran what. The least lately seen beginnings are forgotten first."""

    def __init__(self) -> None:
        self._holders: dict[int, _Holders] = {}  # by hash, the last seen at the end

    def __len__(self) -> int:
        return len(self._holders)

    def remember(self, beginnings: Prefixes, instance_id: int, now: float) -> None:
        """An instance has taken this prompt."""
        for number in beginnings.remembered:
            before = self._holders.pop(number, None)
            others = () if before is None else tuple(other for other in before.instances if other != instance_id)
            self._holders[number] = _Holders((instance_id, *others)[:HOLDERS_MAX], now)
        while len(self._holders) > REMEMBERED_MAX:
            del self._holders[next(iter(self._holders))]

    def saved_tokens(self, beginnings: Prefixes, now: float) -> dict[int, int]:
        """By instance: how many tokens of this prompt it likely holds already; only those that hold any worth counting."""
        saved: dict[int, int] = {}
        for prefix in reversed(beginnings.known):
            if prefix.tokens < beginnings.tokens_min:
                break
            holders = self._holders.get(prefix.hash)
            if holders is not None and now - holders.seen < REMEMBER_SECONDS:
                for instance_id in holders.instances:
                    saved.setdefault(instance_id, prefix.tokens)
        return saved

    def forget(self, instance_id: int) -> None:
        """Its cache is gone, or can't be counted on."""
        for number, holders in list(self._holders.items()):
            if instance_id in holders.instances:
                holders.instances = tuple(other for other in holders.instances if other != instance_id)
                if not holders.instances:
                    del self._holders[number]
