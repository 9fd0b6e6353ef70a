"""What a model is, once it lies on this device's disk, and what can be said while it is on its way there."""

import errno
from pathlib import Path
from typing import Literal

from msgspec import Struct

# The architecture of a directory that the fake engine serves: a config and nothing else.
FAKE_ARCHITECTURE = "fake"
# What an OSError says when there is no room left.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# As many digits of a model's hash as people are shown.
SHORT_HASH_DIGITS = 12

Stage = Literal["waiting", "fetching", "converting", "hashing"]
SourceKind = Literal["alias", "repository", "directory", "gguf"]


class Model(Struct, frozen=True, kw_only=True):
    """A model on disk, in mlx-lm's format.

    Its identity is `model_hash`, made from weights, tokenizer, chat template and config; names point to it. Two hashes under
    one name are two models.
    """

    model_hash: str  # 64 hex digits of SHA-256
    name: str  # as people ask for it: alias, repository id, or base name of a local path
    path: Path  # the directory
    architecture: str  # mlx-lm's model_type
    parameters: int  # number of weights, quantized ones counted singly
    weight_bytes: int  # of the weight files
    layers: int
    context_length: int  # tokens, as the model's config says
    quantization: str  # "4-bit", "8-bit", ..., or the dtype: "f16", "bf16", "f32"; of a fake model "none"


class StoredModel(Struct, frozen=True, kw_only=True):
    """A model that this device knows, as `node models` lists it."""

    model: Model
    kind: SourceKind
    source: str  # the alias, the repository id with its revision, or the absolute path
    disk_bytes: int  # all of the model's files
    current: bool  # whether the name leads here now; an older revision of the same name does not
    problem: str | None = None  # why it would have to be fetched, converted or hashed anew, in a few words


class Progress(Struct, frozen=True, tag="progress"):
    """How far a model is on its way to disk."""

    stage: Stage
    done: int = 0  # bytes
    total: int | None = None  # bytes, where they are known
    note: str = ""  # a few words more for people: a file's name, what is waited for


class ModelError(Exception):
    """A model can't be had; `str()` is one sentence for the person who asked for it."""


class ModelNotFoundError(ModelError):
    """No such alias, repository, revision, directory or file."""


class ModelAccessError(ModelError):
    """The hub does not give this model to this user: it is gated, private, or the token is bad."""


class ModelNetworkError(ModelError):
    """It is not on this device and could not be fetched."""


class ModelDiskError(ModelError):
    """The disk is full, or can't be read or written."""


class ModelUnsupportedError(ModelError):
    """A format, type, architecture or tokenizer that is not known here; guessing would corrupt it."""


class ModelDamagedError(ModelError):
    """Files that are incomplete, truncated or not what they claim to be."""
