"""Tiny random models in mlx-lm's format, for every test that needs a model but not its wits; numpy writes one in milliseconds.

Their tokenizer knows the 256 bytes and a few special tokens, so any text round-trips and a token is mostly a byte.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = NDArray[Any]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    # Its attention mask goes wrong for two rows in mlx-lm: the family for which a batch is not what single requests give.
    "gemma2": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}


def tiny_tokenizer() -> Tokenizer:
    """Byte-level, no merges: ids 0..2 are special, then the 256 bytes."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def make_tiny(
    directory: Path,
    architecture: str = "llama",
    seed: int = 0,
    quantize: int | None = None,
    chat_template: str | None = CHATML,
    **config: object,
) -> Path:
    """Write a model that `mlx_lm.load` takes and return its directory (160 kB, 2 layers, 259 tokens, f32).

    `quantize` packs the matrices to 4 or 8 bits in groups of 32; `config` changes sizes, e.g. `num_hidden_layers=4`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    settings: dict[str, Any] = {
        "model_type": architecture,
        **_BASE,
        **_OWN[architecture],
        "vocab_size": tokenizer.get_vocab_size(),
    }
    settings |= {"bos_token_id": 1, "eos_token_id": 2, **config}
    arrays: dict[str, Array] = {}
    random = np.random.default_rng(seed)
    for name, shape in _shapes(settings):
        if len(shape) == 1:
            values = random.uniform(-0.1, 0.1, shape) if name.endswith("bias") or architecture == "gemma2" else np.ones(shape)
            arrays[name] = values.astype(np.float32)
            continue
        # Layers that outweigh the embedding keep a greedy answer from repeating its last token for ever.
        gain = 0.3 if "embed" in name else 3.0
        matrix = random.normal(0, gain * shape[-1] ** -0.5, shape).astype(np.float32)
        arrays |= {name: matrix} if quantize is None else _quantized(name.removesuffix(".weight"), matrix, quantize)
    if quantize is not None:
        settings["quantization"] = {"group_size": 32, "bits": quantize, "mode": "affine"}
    save_file(arrays, directory / "model.safetensors", {"format": "mlx"})
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": dict.fromkeys(arrays, "model.safetensors")}
    )
    _write_json(directory / "config.json", settings)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False}
    template = {} if chat_template is None else {"chat_template": chat_template}
    _write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **template})
    return directory


def make_fake(directory: Path, context: int = 4096, **settings: object) -> Path:
    """Write a directory that the fake engine serves; its settings are those of `inference.runner.fake_engine`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", {"model_type": "fake", "max_position_embeddings": context, **settings})
    return directory


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in norms:
            yield f"{prefix}{norm}.weight", (hidden,)
        for part, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{prefix}self_attn.{part}.weight", (rows, hidden)
            if config["model_type"] == "qwen2":
                yield f"{prefix}self_attn.{part}.bias", (rows,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
        if config["model_type"] == "qwen3":
            yield f"{prefix}self_attn.q_norm.weight", (head,)
            yield f"{prefix}self_attn.k_norm.weight", (head,)
        for part, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
            yield f"{prefix}mlp.{part}.weight", shape


def _quantized(name: str, matrix: Array, bits: int) -> dict[str, Array]:
    """MLX's affine layout: 32/bits values a word, lowest first; one scale and bias a group of 32."""
    groups = matrix.reshape(matrix.shape[0], -1, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scales = (high - low) / (2**bits - 1)
    codes = np.rint((groups - low) / scales).astype(np.uint32).reshape(matrix.shape[0], -1, 32 // bits)
    words = (codes << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return {f"{name}.weight": words, f"{name}.scales": scales[..., 0], f"{name}.biases": low[..., 0]}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), "utf-8")
