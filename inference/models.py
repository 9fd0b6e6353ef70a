"""What a model is, once it lies on this device's disk."""

from pathlib import Path

from msgspec import Struct


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
    quantization: str  # "4-bit", "8-bit", ..., or the dtype: "f16", "bf16", "f32"
