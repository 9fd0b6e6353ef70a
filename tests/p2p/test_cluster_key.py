"""Clusters: which keys are taken, and that name and key alone make the prologue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.cluster_key import NAME_BYTES_MAX, ClusterKeyError, cluster, key_digest, new_key, strength_bits

names = st.text(min_size=1, max_size=16)


def test_a_new_key_has_256_bits_and_is_taken() -> None:
    key = new_key()

    assert strength_bits(key) == 256
    assert len(key_digest(key)) == 32
    assert new_key() != key


@pytest.mark.parametrize(
    ("key", "bits"),
    [
        ("0123456789abcdef0123456789abcdef", 128),
        ("Zm9vYmFyYmF6cXV4MTIz-_", 132),
        ("correct horse battery staple river moon", 234),
    ],
)
def test_keys_of_128_bits_are_taken(key: str, bits: float) -> None:
    assert strength_bits(key) == pytest.approx(bits, abs=1)
    assert key_digest(f" {key}\n") == key_digest(key)


@pytest.mark.parametrize(
    "key",
    ["", "secret", "0123456789abcdef0123456789abcde", "1234567890" * 3, "a" * 100, "abcabcabc" * 20, "hunter2hunter2hunter2"],
)
def test_a_key_that_can_be_guessed_is_refused_with_what_to_do(key: str) -> None:
    with pytest.raises(ClusterKeyError, match=r"below 128 bits it can be guessed; `node key` makes one") as refusal:
        key_digest(key)
    assert key == "" or key not in str(refusal.value)


def test_an_endless_key_is_refused() -> None:
    with pytest.raises(ClusterKeyError, match="more than 1024"):
        key_digest(new_key() * 20)


@pytest.mark.parametrize("name", ["", "x" * (NAME_BYTES_MAX + 1), "é" * NAME_BYTES_MAX])
def test_a_name_has_bounds(name: str) -> None:
    with pytest.raises(ClusterKeyError, match="name"):
        cluster(name, None)


Parts = tuple[str, str | None]
clusters = st.tuples(names, st.sampled_from([None, "a", "b"]))


@given(clusters, clusters)
def test_clusters_are_the_same_exactly_where_name_and_key_are(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    keys = {None: None, "a": "0f" * 8 + "1e2d3c4b" * 4, "b": "0f" * 8 + "1e2d3c4c" * 4}
    first, second = (cluster(name, keys[key]) for name, key in (one, other))

    assert (first.prologue == second.prologue) == (one == other)
    assert (first.tag == second.tag) == (one == other)
    assert first.prologue.startswith(b"shoal handshake 1")


def test_the_key_is_never_shown() -> None:
    key = new_key()
    home = cluster("home", key)

    assert key not in repr(home)
    assert home.key_digest is not None
    assert home.key_digest.hex() not in repr(home)
    assert len(home.tag) == 8
    assert int(home.tag, 16) >= 0
