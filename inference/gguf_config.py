"""config.json of a GGUF file's model, and the tensors that such a model has.

Pure but for the reading of one small tensor. Only families that differ from one another in names are known; any variant that
would compute something else (experts, windows, scaled positions of another kind) is refused by name.
"""

import math
from typing import Any

import numpy as np

from inference.gguf import GgufFile, Value
from inference.models import ModelDamagedError, ModelUnsupportedError

# ggml's names are mlx-lm's.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# More than any model has; bounds what a claimed number can cost.
LAYERS_MAX = 1000
ROPE_FACTORS = "rope_freqs.weight"

Config = dict[str, Any]


def convert_config(gguf: GgufFile) -> Config:
    """config.json as mlx-lm wants it, quantization aside.

    Raises: ModelUnsupportedError, ModelDamagedError.
    """
    metadata, file_name = gguf.metadata, gguf.path.name
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelUnsupportedError(
            f"{file_name} has the architecture {_brief(architecture)}, which can't be converted; "
            f"these can: {', '.join(ARCHITECTURES)}."
        )
    _refuse_variants(metadata, str(architecture), file_name)
    read = _Numbers(metadata, str(architecture), file_name)
    heads, hidden = read.whole("attention.head_count"), read.whole("embedding_length")
    head_size = read.whole("attention.key_length", hidden // heads)
    config: Config = {
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": read.whole("block_count"),
        "intermediate_size": read.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.whole("attention.head_count_kv", heads),
        "head_dim": head_size,
        # An f32 in the file: the shortest decimal that reads back as the same f32 is what the author wrote.
        "rms_norm_eps": _shortest(read.real("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(read.real("rope.freq_base", 10_000.0)),
        "max_position_embeddings": read.whole("context_length"),
        "vocab_size": len(_tokens(metadata, file_name)),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }
    _check_sizes(config, read, file_name)
    if ROPE_FACTORS in gguf.tensors:
        config["rope_scaling"] = _llama3_scaling(gguf, config)
    return config | _special_ids(metadata)


def _check_sizes(config: Config, read: "_Numbers", file_name: str) -> None:
    layers, heads, head_size = config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]
    if layers > LAYERS_MAX:
        raise ModelDamagedError(f"{file_name} claims to have {layers} layers.")
    if head_size % 2 or heads % config["num_key_value_heads"]:
        raise ModelDamagedError(f"{file_name} has {heads} heads of {head_size}, which can't be.")
    if {read.whole(key, head_size) for key in ("rope.dimension_count", "attention.value_length")} != {head_size}:
        raise ModelUnsupportedError(
            f"{file_name} rotates only part of its heads or has values of another size, which can't be converted."
        )


def _tokens(metadata: dict[str, Value], file_name: str) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelDamagedError(f"{file_name} has no tokens.")
    return tokens


class _Numbers:
    """The numbers that the metadata holds for an architecture, checked."""

    def __init__(self, metadata: dict[str, Value], architecture: str, file_name: str) -> None:
        self._metadata, self._architecture, self._file_name = metadata, architecture, file_name

    def real(self, key: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ModelDamagedError(
                f"{self._file_name} has {self._architecture}.{key} = {_brief(value)}, a positive number is needed."
            )
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.real(key, default)
        if value != int(value) or value >= 1 << 31:
            raise ModelDamagedError(
                f"{self._file_name} has {self._architecture}.{key} = {_brief(value)}, a whole number is needed."
            )
        return int(value)


def _brief(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _refuse_variants(metadata: dict[str, Value], architecture: str, file_name: str) -> None:
    variants = {
        f"{architecture}.expert_count": "is a mixture of experts",
        f"{architecture}.attention.sliding_window": "uses a sliding attention window",
        "split.count": "is one part of several",
    }
    for key, what in variants.items():
        if isinstance(value := metadata.get(key, 0), int) and value > (1 if key == "split.count" else 0):
            raise ModelUnsupportedError(f"{file_name} {what}, which can't be converted.")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or f"{architecture}.rope.scale_linear" in metadata:
        raise ModelUnsupportedError(f"{file_name} scales its rotary positions ({_brief(scaling)}), which can't be converted.")


def _special_ids(metadata: dict[str, Value]) -> Config:
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    ids: Config = {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id")}
    if unique:
        ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return {key: value for key, value in ids.items() if value is not None}


def _llama3_scaling(gguf: GgufFile, config: Config) -> Config:
    """Llama 3's rotary scaling, which the file gives as a factor for each frequency and mlx-lm takes as its four parameters.

    The factor of the lowest frequency is the scaling itself; with the other three as published the rest must come out alike.
    """
    tensor = gguf.tensors[ROPE_FACTORS]
    pairs = config["head_dim"] // 2
    if config["model_type"] != "llama" or tensor.type.name != "F32" or tensor.shape != (pairs,):
        raise ModelUnsupportedError(f"{gguf.path.name} scales its rotary positions in a way that can't be converted.")
    factors = next(gguf.slabs(tensor, 1)).reshape(-1).view("<f4")
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors[-1]),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turns = 8192 * config["rope_theta"] ** (-np.arange(pairs) / pairs) / (2 * np.pi)
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    if not np.allclose(factors, 1 / ((1 - smooth) / scaling["factor"] + smooth), rtol=1e-4):
        raise ModelUnsupportedError(f"{gguf.path.name} scales its rotary positions in a way that can't be converted.")
    return scaling


def expected_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Names (ggml's) and shapes of the tensors of a model with this config."""
    architecture, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head_size = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_size, config["num_key_value_heads"] * head_size
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    vectors = {"attn_norm": hidden, "ffn_norm": hidden}
    if architecture == "qwen3":
        vectors |= {"attn_q_norm": head_size, "attn_k_norm": head_size}
    biased = ["attn_q", "attn_k", "attn_v"] if architecture == "qwen2" or config["attention_bias"] else []
    if architecture == "llama":
        biased += (["attn_output"] if config["attention_bias"] else []) + (
            ["ffn_gate", "ffn_up", "ffn_down"] if config["mlp_bias"] else []
        )
    layer: dict[str, tuple[int, ...]] = {f"{part}.weight": shape for part, shape in matrices.items()}
    layer |= {f"{part}.weight": (size,) for part, size in vectors.items()}
    layer |= {f"{part}.bias": matrices[part][:1] for part in biased}
    top: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden), "output_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        top["output.weight"] = (config["vocab_size"], hidden)
    layers = range(config["num_hidden_layers"])
    return top | {f"blk.{number}.{name}": shape for number in layers for name, shape in layer.items()}
