"""Node ids and the key they come from."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from p2p.durable import write_durably
from p2p.identity import Identity, IdentityError, load_or_create
from p2p.ids import base58_decode, base58_encode, node_id_of, public_key_of

# libp2p imports fastecdsa, which shoal leaves out as it needs a compiler; Ed25519 does not touch it.
LIBP2P_IDS = """
import sys, types
for name, attributes in {
    "fastecdsa": (), "fastecdsa.curve": ("Curve", "P256"), "fastecdsa.keys": ("gen_keypair", "get_public_key"),
    "fastecdsa.point": ("Point",), "fastecdsa.encoding": (), "fastecdsa.encoding.sec1": ("SEC1Encoder",),
    "fastecdsa.encoding.util": ("bytes_to_int", "int_bytelen", "int_to_bytes"),
}.items():
    module = types.ModuleType(name)
    module.__path__ = []
    for attribute in attributes:
        setattr(module, attribute, type(attribute, (), {}))
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.peer.id import ID
for line in sys.stdin:
    print(ID.from_pubkey(Ed25519PublicKey.from_bytes(bytes.fromhex(line))))
"""


def test_ids_are_those_of_libp2p() -> None:
    keys = [Ed25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(20)]

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIBP2P_IDS],
        input="".join(key.hex() + "\n" for key in keys),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.split() == [node_id_of(key) for key in keys], done.stderr


def test_a_known_id() -> None:
    key = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")  # libp2p specifications, peer-ids

    assert node_id_of(key) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
    assert public_key_of("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq") == key


@given(st.binary(min_size=32, max_size=32))
def test_an_id_holds_its_key(key: bytes) -> None:
    assert public_key_of(node_id_of(key)) == key


@given(st.binary(max_size=48))
def test_base58_goes_both_ways(data: bytes) -> None:
    assert base58_decode(base58_encode(data)) == data


@pytest.mark.parametrize("text", ["", "0OIl", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "12D3KooW", "1" * 5000])
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(ValueError, match=r"no node id|not found"):
        public_key_of(text)


def test_a_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    old_mask = os.umask(0)
    try:
        made = load_or_create(path)
    finally:
        os.umask(old_mask)

    assert load_or_create(path).node_id == made.node_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["identity.pem"]


def test_a_key_open_to_others_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    node_id = load_or_create(path).node_id
    path.chmod(0o644)

    assert load_or_create(path).node_id == node_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff" * 40,
        Identity(Ed25519PrivateKey.generate()).to_pem()[:60],
        X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")),
    ],
    ids=["empty", "no text", "cut off", "of another kind", "encrypted"],
)
def test_a_damaged_key_is_refused_by_name_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(content)

    with pytest.raises(IdentityError, match=f"{path} is damaged"):
        load_or_create(path)
    assert path.read_bytes() == content


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=f"{tmp_path} can't be read"):
        load_or_create(tmp_path)
    with pytest.raises(IdentityError, match=r"/proc/identity\.pem can't be written"):
        load_or_create(Path("/proc/identity.pem"))


def test_a_repr_shows_no_secret() -> None:
    identity = Identity(Ed25519PrivateKey.generate())

    assert repr(identity) == f"Identity({identity.node_id})"


def test_a_draft_left_by_a_killed_process_does_no_harm(tmp_path: Path) -> None:
    draft = tmp_path / ".file.new"
    draft.write_bytes(b"half of something much lon")
    draft.chmod(0o666)

    write_durably(tmp_path / "file", b"whole")

    assert (tmp_path / "file").read_bytes() == b"whole"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert not draft.exists()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="No space left"):
        write_durably(path, b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"
