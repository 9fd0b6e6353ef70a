"""The prefix cache over pretended KV that knows which tokens it stands for."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inference.runner.mlx_prefix import PREFIX_TOKENS_MIN, Kv, PrefixCache

PART_BYTES = 10


class Part:
    """One layer's cache that remembers the tokens themselves."""

    def __init__(self, tokens: tuple[int, ...], trimmable: bool = True) -> None:
        self.tokens = tokens
        self.trimmable = trimmable

    @property
    def nbytes(self) -> int:
        return PART_BYTES * len(self.tokens)

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, n: int) -> int:
        self.tokens = self.tokens[: len(self.tokens) - n]
        return n


def nothing(_kv: Kv) -> None:
    """Pretended KV needs no evaluation."""


def store(cache: PrefixCache, tokens: tuple[int, ...], bytes_max: int = 1 << 30, trimmable: bool = True) -> None:
    cache.store(tokens, [Part(tokens, trimmable), Part(tokens, trimmable)], bytes_max, nothing)


ids = st.lists(st.integers(0, 2), min_size=1, max_size=60).map(tuple)


@settings(deadline=None)
@given(stored=st.lists(ids, max_size=8), wanted=ids, trimmable=st.booleans())
def test_what_is_fetched_stands_for_the_longest_known_beginning(
    stored: list[tuple[int, ...]], wanted: tuple[int, ...], trimmable: bool
) -> None:
    cache = PrefixCache()
    for tokens in stored:
        store(cache, tokens, trimmable=trimmable)
    kv, length = cache.fetch(wanted)

    usable = [0]
    for tokens in stored:
        shared = next(
            (n for n, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), min(len(tokens), len(wanted))
        )
        if trimmable and len(tokens) >= PREFIX_TOKENS_MIN:
            usable.append(min(shared, len(wanted) - 1))
        elif not trimmable and shared == len(tokens) < len(wanted) and len(tokens) >= PREFIX_TOKENS_MIN:
            usable.append(shared)
    best = max(usable)
    assert length == (best if best >= PREFIX_TOKENS_MIN else 0)
    assert (kv is None) == (length == 0)
    for part in kv or ():
        assert part.tokens == wanted[:length]


@settings(deadline=None)
@given(stored=st.lists(st.tuples(ids, st.integers(0, 1500)), max_size=12))
def test_its_bytes_stay_within_what_each_store_allows(stored: list[tuple[tuple[int, ...], int]]) -> None:
    cache = PrefixCache()
    before = 0
    for tokens, allowed in stored:
        store(cache, tokens, allowed)
        assert cache.bytes <= max(before, allowed)
        before = cache.bytes
    cache.trim(before // 2)
    assert cache.bytes <= before // 2


def test_what_is_fetched_may_be_changed() -> None:
    cache = PrefixCache()
    tokens = tuple(range(40))
    store(cache, tokens)
    for _ in range(2):
        kv, length = cache.fetch((*tokens, 99))
        assert length == 40
        assert kv is not None
        kv[0].tokens = ()


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache()
    first, second = tuple(range(20)), tuple(range(100, 120))
    store(cache, first)
    store(cache, second)
    cache.fetch((*first, 1))
    cache.trim(cache.bytes - 1)
    assert cache.fetch((*first, 1))[1] == 20
    assert cache.fetch((*second, 1))[1] == 0


def test_a_longer_one_replaces_its_own_beginnings_unless_it_can_not_be_cut() -> None:
    tokens = tuple(range(50))
    for trimmable, entries in ((True, 1), (False, 2)):
        cache = PrefixCache()
        store(cache, tokens[:30], trimmable=trimmable)
        store(cache, tokens, trimmable=trimmable)
        assert cache.bytes == 2 * PART_BYTES * (50 if entries == 1 else 80)


def test_nothing_is_evaluated_where_there_is_no_room() -> None:
    cache = PrefixCache()
    evaluated: list[Kv] = []
    tokens = tuple(range(20))
    cache.store(tokens, [Part(tokens)], PART_BYTES * 20 - 1, evaluated.append)
    assert (evaluated, cache.bytes) == ([], 0)
