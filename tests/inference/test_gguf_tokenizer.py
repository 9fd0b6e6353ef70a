"""The converted tokenizer: that of the real model against an encoder written from the definition, and the table's switches."""

import itertools
import json
import unicodedata
from pathlib import Path

import pytest
import regex  # type: ignore[import-untyped]  # has no annotations
from tokenizers import Tokenizer

from inference.gguf import GgufFile
from inference.gguf_tokenizer import PRE_TOKENIZERS, convert_tokenizer
from inference.models import Model
from tests.inference.gguf_files import Array, tiny_gguf, tiny_tokens

TEXTS = [
    "Hello, world!",
    "In 2024 there were 1234567 of them; 3.14159 too.",
    "  two  spaces,\n\nnew lines\t\ttabs   ",
    "I'm, you're, they'll, it's — naïve café",
    "漢字とかな 한국어 العربية हिन्दी",
    "🎉👩‍👩‍👧 e\u0301 \u200b zero width",
    "def f(x):\n    return x**2  # ok\n",
    "",
]
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _byte_symbols() -> dict[int, str]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _encode(text: str, vocabulary: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Byte-level BPE as defined: digits alone, GPT-2's pattern, then always the merge of lowest rank."""
    symbols, ids = _byte_symbols(), []
    for piece in regex.split(r"(\p{N})", text):
        for word in GPT2.findall(piece):
            parts = [symbols[byte] for byte in word.encode()]
            while pairs := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]:
                _, at = min(pairs)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            ids += [vocabulary[part] for part in parts]
    return ids


@pytest.mark.model
def test_the_real_tokenizer_encodes_by_the_definition_and_decodes_back(smollm2: Model) -> None:
    content = json.loads((smollm2.path / "tokenizer.json").read_text("utf-8"))
    ranks = {tuple(merge): rank for rank, merge in enumerate(content["model"]["merges"])}
    tokenizer = Tokenizer.from_file(str(smollm2.path / "tokenizer.json"))

    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == _encode(text, content["model"]["vocab"], ranks)
        assert tokenizer.decode(ids) == text


@pytest.mark.model
def test_the_real_tokenizer_keeps_special_tokens_whole(smollm2: Model) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.path / "tokenizer.json"))

    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids

    assert (ids[0], ids[-1], len(ids)) == (1, 2, 5)
    assert tokenizer.decode([1, 2]) == ""


def _tokenizer(directory: Path, **metadata: object) -> Tokenizer:
    gguf = tiny_gguf()
    gguf.metadata |= {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    with GgufFile(gguf.write(directory / "x.gguf")) as file:
        return Tokenizer.from_str(convert_tokenizer(file.metadata, "x.gguf")[0])


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_each_known_pre_tokenizer_gives_text_back(pre: str, tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, pre=pre)

    for text in TEXTS:
        given = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].composed else text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False).removeprefix("<|im_start|>") == given


def test_a_bos_token_is_set_where_the_file_says_so_or_the_family_does(tmp_path: Path) -> None:
    assert _tokenizer(tmp_path, pre="smollm").encode("a").tokens == ["a"]
    assert _tokenizer(tmp_path, pre="smollm", add_bos_token=True).encode("a").tokens == ["<|im_start|>", "a"]
    assert _tokenizer(tmp_path, pre="llama-bpe").encode("a").tokens == ["<|im_start|>", "a"]
    assert _tokenizer(tmp_path, pre="llama-bpe", add_bos_token=False).encode("a").tokens == ["a"]


def test_llama_3_takes_a_word_that_is_a_token_whole(tmp_path: Path) -> None:
    """Here "hello" is a token that no merge of "o" leads to."""
    merges = Array(8, ["h e", "l l", "he ll"])

    assert _tokenizer(tmp_path, pre="qwen2", merges=merges).encode("hello").tokens == ["hell", "o"]
    assert _tokenizer(tmp_path, pre="llama-bpe", merges=merges, add_bos_token=False).encode("hello").tokens == ["hello"]


def test_digits_are_split_as_the_family_does(tmp_path: Path) -> None:
    def pieces(pre: str) -> list[str]:
        pre_tokenizer = _tokenizer(tmp_path, pre=pre).pre_tokenizer
        return [piece for piece, _ in pre_tokenizer.pre_tokenize_str("12345")]

    assert pieces("gpt-2") == ["12345"]
    assert pieces("llama-bpe") == ["123", "45"]
    assert pieces("smollm") == pieces("qwen2") == ["1", "2", "3", "4", "5"]


def test_user_defined_tokens_stay_whole_and_are_printed(tmp_path: Path) -> None:
    types = [1] * len(tiny_tokens())
    types[0], types[1] = 4, 3  # <|endoftext|> user-defined, <|im_start|> control
    tokenizer = _tokenizer(tmp_path, token_type=Array(5, types))
    ids = tokenizer.encode("<|endoftext|>a<|im_start|>").ids

    assert (ids[0], ids[-1], len(ids)) == (0, 1, 3)
    assert tokenizer.decode(ids) == "<|endoftext|>a"
