"""What kind of name a string is, by its spelling alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.catalogue import (
    CATALOGUE,
    AliasName,
    DirectoryName,
    GgufName,
    ModelName,
    RepositoryName,
    near_names,
    parse_name,
    shown_name,
)
from inference.models import ModelNotFoundError

SMOLLM2 = CATALOGUE["smollm2:135m"]


@pytest.mark.parametrize(
    ("name", "parsed", "shown"),
    [
        ("smollm2:135m", AliasName(SMOLLM2), "smollm2:135m"),
        ("SmolLM2:135M", AliasName(SMOLLM2), "smollm2:135m"),
        ("org/name", RepositoryName("org/name", None), "org/name"),
        (
            "mlx-community/Qwen3-0.6B-4bit",
            RepositoryName("mlx-community/Qwen3-0.6B-4bit", None),
            "mlx-community/Qwen3-0.6B-4bit",
        ),
        ("org/name@v1.0", RepositoryName("org/name", "v1.0"), "org/name@v1.0"),
        ("org/name@refs/pr/3", RepositoryName("org/name", "refs/pr/3"), "org/name@refs/pr/3"),
        ("./org/name", DirectoryName("./org/name"), "name"),
        ("/models/a/", DirectoryName("/models/a/"), "a"),
        ("a/b/c", DirectoryName("a/b/c"), "c"),
        ("~/models/x", DirectoryName("~/models/x"), "x"),
        ("../x", DirectoryName("../x"), "x"),
        ("x.gguf", GgufName("x.gguf"), "x.gguf"),
        ("org/x.GGUF", GgufName("org/x.GGUF"), "x.GGUF"),
    ],
)
def test_a_name_is_what_it_looks_like(name: str, parsed: ModelName, shown: str) -> None:
    assert parse_name(name) == parsed
    assert shown_name(parsed) == shown


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smollm2", "There is no model 'smollm2': did you mean smollm2:135m? a Hugging Face repository"),
        ("smolm2:135", "did you mean smollm2:135m?"),
        ("gpt-5", "There is no model 'gpt-5': the catalogue has smollm2:135m; a Hugging Face repository is written org/name"),
        ("", "There is no model ''"),
        ("a\nb", "unprintable characters"),
        ("x" * 5000, "too long"),
    ],
)
def test_a_wrong_name_gets_one_sentence_with_near_names(name: str, sentence: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        parse_name(name)

    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300


def test_near_names_are_near() -> None:
    known = ["qwen3:4b", "qwen3:8b", "llama3:8b", "smollm2:135m"]

    assert near_names("qwen3:4", known) == "did you mean qwen3:4b or qwen3:8b? "
    assert near_names("zzz", known) == "the catalogue has llama3:8b, qwen3:4b, qwen3:8b, smollm2:135m; "
    assert near_names("zzz", []) == ""


@given(st.text(max_size=60))
def test_every_string_is_a_name_or_refused(name: str) -> None:
    try:
        parsed = parse_name(name)
    except ModelNotFoundError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
        return
    assert shown_name(parsed)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}/[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True))
def test_two_plain_parts_are_a_repository_whatever_lies_in_the_directory(name: str) -> None:
    expected = (RepositoryName,) if ".." not in name and not name.lower().endswith(".gguf") else (DirectoryName, GgufName)

    assert isinstance(parse_name(name), expected)
