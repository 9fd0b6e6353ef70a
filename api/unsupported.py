"""Parameters that are known, to OpenAI or to the usual extensions of its dialect, but can't be honoured yet. Pure.

Each would change the answer, so that leaving it out in silence would give the sender something else than was asked for: it is
refused by name, unless its value asks for what happens anyway. null does so everywhere.
"""

from collections.abc import Iterable, Mapping

from api.errors import unsupported
from inference.requests import Json

_NOTHING: tuple[Json, ...] = ()

IN_BODY: Mapping[str, tuple[Json, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": _NOTHING,
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": _NOTHING,
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "structured_outputs": _NOTHING,
    "grammar": ("",),
    "json_schema": ({},),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "draft_model": _NOTHING,
    "adapters": _NOTHING,
}
IN_STREAM_OPTIONS: Mapping[str, tuple[Json, ...]] = {
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}
IN_MESSAGE: Mapping[str, tuple[Json, ...]] = {"tool_calls": ([],), "function_call": _NOTHING, "audio": _NOTHING}


def refuse_known(given: Mapping[str, Json] | None, neutral: Mapping[str, tuple[Json, ...]], prefix: str = "") -> None:
    """Let pass what asks for nothing and what nobody knows.

    Raises: ApiError (400 `unsupported_parameter`) with `prefix` before the key's name.
    """
    for key, value in (given or {}).items():
        if value is not None and key in neutral and not _is_one_of(value, neutral[key]):
            raise unsupported(f"{prefix}{key}", "this value of it can't be honoured")


def _is_one_of(value: Json, values: Iterable[Json]) -> bool:
    """Equality as JSON has it, where true is not 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)
