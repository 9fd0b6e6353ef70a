"""Which served model a client means by a name. Pure."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

NEAR_NAMES_MAX = 3
DEFAULT_NAME = "default"


class ServedName(Struct, frozen=True):
    """A served model's name, and other spellings that mean it (as it was asked for at start: a path, say)."""

    name: str
    spellings: tuple[str, ...] = ()


class Unknown(Struct, frozen=True):
    """No served model is meant; `message` is one sentence for whoever asked."""

    message: str


def resolve(asked: str | None, served: Sequence[ServedName], aliases: Mapping[str, str]) -> str | Unknown:
    """The served model that is meant: by its name, an alias, `default` (the first), or a short form that only one of them has.

    Names are compared as written first, then without regard to case. No name at all means the only model served.
    """
    if not served:
        return Unknown("No model is served here.")
    if not asked:
        if len(served) == 1:
            return served[0].name
        return Unknown(f"The request names no model, and several are served here: {_listed(model.name for model in served)}.")
    target = aliases.get(asked) or {alias.casefold(): model for alias, model in aliases.items()}.get(asked.casefold(), asked)
    found = _among(target, served)
    if not found and target.casefold() == DEFAULT_NAME:
        return served[0].name
    if len(found) == 1:
        return found[0]
    if found:
        return Unknown(f"The name {target!r} fits several models here: {_listed(found)}.")
    if target != asked:
        return Unknown(f"{asked!r} stands for the model {target!r}, which is not served here.")
    return Unknown(f"The model {asked!r} is not served here; {_suggestion(asked, served, aliases)}")


def _among(asked: str, served: Sequence[ServedName]) -> list[str]:
    """The served models that a name fits, by the strictest rule under which it fits any."""
    folded = asked.casefold()
    for fits in (
        lambda model: asked in (model.name, *model.spellings),
        lambda model: folded == model.name.casefold(),
        lambda model: folded in short_forms(model.name),
    ):
        if found := [model.name for model in served if fits(model)]:
            return found
    return []


def short_forms(name: str) -> set[str]:
    """Shorter ways to write a name, without regard to case: no revision, no organisation, no size tag."""
    whole = name.casefold()
    plain = whole.partition("@")[0]
    return {plain, plain.rpartition("/")[2], plain.partition(":")[0]} - {"", whole}


def _suggestion(asked: str, served: Sequence[ServedName], aliases: Mapping[str, str]) -> str:
    names = {name.casefold(): name for name in (*(model.name for model in served), *aliases)}
    near = [names[match] for match in difflib.get_close_matches(asked.casefold(), names, NEAR_NAMES_MAX)]
    return f"did you mean {_listed(near, ' or ')}?" if near else f"served here: {_listed(names.values())}."


def _listed(names: Iterable[str], separator: str = ", ") -> str:
    return separator.join(map(repr, names))
