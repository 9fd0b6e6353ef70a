"""What clients call a model, and which one they get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.names import ServedName, Unknown, resolve, short_forms

SMOL = ServedName("smollm2:135m")
LLAMA = ServedName("mlx-community/Llama-3.2-1B-Instruct-4bit")
LLAMA_3B = ServedName("mlx-community/Llama-3.2-3B-Instruct-4bit")
LOCAL = ServedName("tiny", spellings=("./models/tiny",))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, "smollm2:135m"),
        ("", "smollm2:135m"),
        ("smollm2:135m", "smollm2:135m"),
        ("SmolLM2:135M", "smollm2:135m"),
        ("smollm2", "smollm2:135m"),
        ("default", "smollm2:135m"),
        ("gpt-4o", "smollm2:135m"),
        ("GPT-4o", "smollm2:135m"),
    ],
)
def test_one_model_by_many_names(asked: str | None, expected: str) -> None:
    assert resolve(asked, [SMOL], {"gpt-4o": "smollm2"}) == expected


def test_short_forms_and_spellings() -> None:
    served = [SMOL, LLAMA, LOCAL]

    assert resolve("Llama-3.2-1B-Instruct-4bit", served, {}) == LLAMA.name
    assert resolve("./models/tiny", served, {}) == "tiny"
    assert resolve("default", served, {}) == SMOL.name


def test_an_alias_may_take_the_place_of_any_name() -> None:
    assert resolve("smollm2", [SMOL, LLAMA], {"smollm2": LLAMA.name}) == LLAMA.name
    assert resolve("gpt-4o", [SMOL], {"gpt-4o": "default"}) == SMOL.name


def test_a_model_called_default_is_found_by_its_name() -> None:
    assert resolve("default", [SMOL, ServedName("default")], {}) == "default"


@pytest.mark.parametrize(
    ("asked", "served", "parts"),
    [
        ("gpt-4o", [SMOL], ["'gpt-4o' is not served here", "served here: 'smollm2:135m'"]),
        ("smolm2:135m", [SMOL], ["did you mean 'smollm2:135m'?"]),
        ("x", [], ["No model is served"]),
        (None, [SMOL, LLAMA], ["names no model", "'smollm2:135m'", LLAMA.name]),
        ("other", [SMOL], ["'other' stands for the model 'absent'"]),
        ("tiny", [ServedName("a/tiny"), ServedName("b/tiny")], ["'tiny' fits several", "'a/tiny', 'b/tiny'"]),
    ],
)
def test_who_is_not_meant(asked: str | None, served: list[ServedName], parts: list[str]) -> None:
    answer = resolve(asked, served, {"other": "absent"})

    assert isinstance(answer, Unknown)
    assert [part for part in parts if part not in answer.message] == []


names = st.text("abAB:/@-", min_size=1, max_size=8)


@given(st.lists(names, min_size=1, max_size=4, unique=True), st.dictionaries(names, names, max_size=3), names)
def test_whoever_is_found_is_served_and_an_exact_name_without_alias_is_found(
    served: list[str], aliases: dict[str, str], asked: str
) -> None:
    models = [ServedName(name) for name in served]
    answer = resolve(asked, models, aliases)

    assert isinstance(answer, Unknown) or answer in served
    if asked in served and asked.casefold() not in {alias.casefold() for alias in aliases}:
        assert answer == asked


@given(names)
def test_a_short_form_is_part_of_its_name(name: str) -> None:
    assert all(form in name.casefold() for form in short_forms(name))
