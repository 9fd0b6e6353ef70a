"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json.

Only byte-level BPE ("gpt2") is known, and of its pre-tokenizers, which a GGUF merely names, those in the table below: a wrong
regular expression splits digits or words otherwise than the model was trained on, and nothing would tell.
"""

from typing import Any

import numpy as np
from msgspec import Struct
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from inference.gguf import Value
from inference.models import ModelDamagedError, ModelUnsupportedError

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(Struct, frozen=True):
    """What a name in tokenizer.ggml.pre stands for, as the model's own tokenizer.json has it."""

    pattern: str | None  # None: GPT-2's, which ByteLevel has built in
    single_digits: bool = False  # every digit stands alone, before the pattern
    composed: bool = False  # text is brought to Unicode's NFC
    whole_words: bool = False  # a word that is a token stays one, whatever the merges say
    begins: bool = False  # a text begins with the bos token where the file doesn't say


_GPT2 = PreTokenizer(None)
_LLAMA = PreTokenizer(_LLAMA3, whole_words=True, begins=True)
_QWEN = PreTokenizer(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), composed=True)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(None, single_digits=True),
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
}


def convert_tokenizer(metadata: dict[str, Value], file_name: str) -> tuple[str, dict[str, Any]]:
    """The text of tokenizer.json and the content of tokenizer_config.json, chat template included.

    Raises: ModelUnsupportedError, ModelDamagedError.
    """
    pre = _pre_tokenizer(metadata, file_name)
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(types, np.ndarray):
        raise ModelDamagedError(f"{file_name} has no complete tokenizer.")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise ModelDamagedError(f"{file_name} has a damaged list of tokens.")
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    try:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre.whole_words))
    except Exception as error:  # the library raises this very class
        raise ModelDamagedError(f"{file_name} has merges of tokens that it doesn't have.") from error
    special = _special_tokens(metadata, tokens, file_name)
    _set_up(tokenizer, pre)
    for kind in (_CONTROL, _USER_DEFINED):
        added = [AddedToken(tokens[i], normalized=False, special=kind == _CONTROL) for i in np.flatnonzero(types == kind)]
        tokenizer.add_special_tokens(added) if kind == _CONTROL else tokenizer.add_tokens(added)
    bos = special.get("bos_token")
    if metadata.get("tokenizer.ggml.add_bos_token", pre.begins) and bos is not None:
        template = {"single": f"{bos} $A", "pair": f"{bos} $A {bos} $B", "special_tokens": [(bos, vocabulary[bos])]}
        tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer.to_str(), _config(metadata, special)


def _pre_tokenizer(metadata: dict[str, Value], file_name: str) -> PreTokenizer:
    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelUnsupportedError(
            f"{file_name} has a tokenizer of model {str(kind)[:40]!r}, which can't be converted; only gpt2 can."
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelUnsupportedError(
            f"{file_name} has the pre-tokenizer {str(name)[:40]!r}, which is not known; these are: {', '.join(PRE_TOKENIZERS)}."
        )
    return PRE_TOKENIZERS[name]


def _set_up(tokenizer: Tokenizer, pre: PreTokenizer) -> None:
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    # A plain ByteLevel: by it mlx-lm chooses the streaming detokenizer for byte-level BPE.
    tokenizer.decoder = decoders.ByteLevel()


def _special_tokens(metadata: dict[str, Value], tokens: list[str], file_name: str) -> dict[str, str]:
    """bos_token and its like, by transformers' names."""
    found = {}
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise ModelDamagedError(f"{file_name} has no token of the number that it gives for {theirs}.")
        found[f"{ours}_token"] = tokens[number]
    return found


def _config(metadata: dict[str, Value], special: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(context, int):
        config["model_max_length"] = context
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config
