"""Prompts to token ids and back, through a tiny model's own tokenizer and template."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.requests import ChatPrompt, TextPrompt, TokenPrompt
from inference.runner.engine import RequestError
from tests.inference import mlx_engines  # noqa: F401 - puts a BLAS under MLX, which mlx_lm imports
from tests.inference.tiny_models import make_tiny

from inference.runner.mlx_text import Text  # isort: skip - imports transformers
from mlx_lm.utils import load_tokenizer  # isort: skip - imports MLX

VOCABULARY = 259
Make = Callable[..., Text]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def text(**options: object) -> Text:
        return Text(load_tokenizer(make_tiny(tmp_path, **options)), VOCABULARY)  # type: ignore[arg-type]  # fields of several types

    return text


def user(content: object, **more: object) -> dict[str, object]:
    return {"role": "user", "content": content, **more}


def test_messages_are_rendered_with_the_assistant_to_speak_next(make: Make) -> None:
    text = make()
    ids = text.tokenize(ChatPrompt((user("Hi é"),)))
    assert ids == text.tokenize(TextPrompt("<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"))
    assert ids[0] == 1
    assert text.decode(ids) == "user\nHi é\nassistant\n"


def test_the_template_gets_tools_and_options(make: Make) -> None:
    text = make(chat_template="{{ tools[0]['name'] }}|{{ mood }}|{{ add_generation_prompt }}|{{ messages[0].content }}")
    prompt = ChatPrompt(
        (user("Hi"),), tools=({"name": "clock"},), template_options={"mood": "calm", "add_generation_prompt": False}
    )
    assert text.decode(text.tokenize(prompt)) == "clock|calm|False|Hi"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].nosuch.deeper }}", "nosuch"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% if %}", "Expected"),
    ],
)
def test_what_a_template_raises_is_told(make: Make, template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        make(chat_template=template).tokenize(ChatPrompt((user("Hi"),)))
    assert (caught.value.code, caught.value.param) == ("template_error", "messages")
    assert "\n" not in str(caught.value)


def test_a_model_without_a_template_says_so(make: Make) -> None:
    text = make(chat_template=None)
    with pytest.raises(RequestError, match="no chat template") as caught:
        text.tokenize(ChatPrompt((user("Hi"),)))
    assert caught.value.code == "template_error"
    assert text.tokenize(TextPrompt("Hi"))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (ChatPrompt(({"role": "robot", "content": "Hi"},)), "messages"),
        (ChatPrompt(({"content": "Hi"},)), "messages"),
        (ChatPrompt((user(None),)), "messages"),
        (ChatPrompt((user([{"type": "text", "text": "Hi"}]),)), "messages"),
        (ChatPrompt((user("Hi"),), template_options={"chat_template": "{{ 1 }}"}), "template_options"),
        (ChatPrompt((user("Hi"),), template_options={"tokenize": False}), "template_options"),
        (TextPrompt(""), "prompt"),
        (TextPrompt("\ud800"), "prompt"),
        (TokenPrompt((1, VOCABULARY)), "prompt"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(make: Make, prompt: ChatPrompt | TextPrompt | TokenPrompt, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make().tokenize(prompt)
    assert (caught.value.code, caught.value.param) == ("invalid_parameter", param)


def test_an_assistant_that_called_a_tool_may_have_said_nothing(make: Make) -> None:
    text = make(chat_template="{{ messages | length }}")
    called: dict[str, object] = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock"}}]}
    assert text.decode(text.tokenize(ChatPrompt((user("Hi"), called)))) == "2"


def test_decoding_never_fails(make: Make) -> None:
    text = make()

    @given(st.lists(st.integers(-5, VOCABULARY + 5), max_size=20))
    def any_ids(ids: list[int]) -> None:
        assert isinstance(text.decode(ids), str)

    any_ids()
    half = text.tokenize(TextPrompt("é"))[:1]
    assert text.decode(half) == "\N{REPLACEMENT CHARACTER}"
    assert text.decode((0, 1, 2)) == ""
