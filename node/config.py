"""The configuration of a node, merged from four sources and checked.

A flag beats the environment (`SHOAL_<NAME>`), which beats `config.toml` in the data directory, which beats the default. An
empty variable counts as not set. In the file `max-waiting` and `max_waiting` are the same key, and relative paths start from
the data directory. The options themselves are the table in `node.options`.

`load` is pure; `read` at the end is the edge that looks at the environment and the disk.
"""

import os
import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from node import option_values as values
from node.option_values import Address, LogFormat, LogLevel
from node.options import BY_NAME, DEFAULT_API, OPTIONS, Option

FILE_NAME = "config.toml"
FILE_BYTES_MAX = 1 << 20

FlagValue = str | bool | Sequence[str]


class ConfigError(Exception):
    """The configuration can't be used; `str()` is one sentence that names option, source and value."""


@dataclass(frozen=True)
class Defaults:
    """What the device says of itself where no option does."""

    data_dir: Path
    models_dir: Path
    host_name: str
    home: Path


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole, checked configuration. Sizes are bytes, times are seconds."""

    data_dir: Path
    models_dir: Path
    name: str
    cluster: str
    cluster_key: bytes | None = field(repr=False)
    listen: Address
    join: tuple[str, ...]
    discovery: bool
    api: tuple[Address, ...]  # empty: no HTTP
    api_is_default: bool  # an address family that the device lacks may then be left out
    api_keys: tuple[str, ...] = field(repr=False)
    insecure_api: bool
    model: str | None  # None: starts without one
    aliases: tuple[tuple[str, str], ...]  # alias, model
    max_running: int | None  # None: by memory
    max_waiting: int
    task_timeout_seconds: float
    idle_unload_seconds: float
    context: int | None  # None: min(model's, 8192)
    max_disk_bytes: int | None  # None: no limit
    max_memory_bytes: int | None  # None: a share of the device's; 0: runs nothing, ever
    drain_timeout_seconds: float
    log_format: LogFormat
    log_level: LogLevel


@dataclass(frozen=True)
class _Given:
    """The texts that one source gives for an option, and what a message calls the option there."""

    texts: tuple[str, ...]
    rank: int  # 0 flag, 1 environment, 2 file, 3 default
    origin: str
    base: Path | None = None  # where relative paths start; None: where the process is


def load(
    flags: Mapping[str, FlagValue],
    environ: Mapping[str, str],
    file_text: str,
    defaults: Defaults,
    read_key_file: Callable[[Path], str],
) -> Config:
    """Merge the sources and check every value and the rules between them.

    `flags` maps option fields (`max_waiting`) to what was given, `file_text` is what config.toml holds. A cluster key file,
    if one is named, is read through `read_key_file`.

    Raises: ConfigError.
    """
    data_dir = locate_data_dir(flags, environ, defaults)
    given = _collect(flags, environ, file_text, data_dir)
    parsed = {name: _parse(BY_NAME[name], source, defaults.home) for name, source in given.items()}
    key = _cluster_key(given, parsed, read_key_file)
    listen: Address = parsed.get("listen") or Address("127.0.0.1" if key is None else "0.0.0.0", 0)  # noqa: S104 - with a key
    config = Config(
        data_dir=data_dir,
        models_dir=parsed.get("models-dir", defaults.models_dir),
        name=parsed.get("name", defaults.host_name),
        cluster=parsed["cluster"],
        cluster_key=key,
        listen=listen,
        join=parsed.get("join", ()),
        discovery=parsed.get("discovery", not listen.is_loopback),
        api=_api_addresses(given.get("api"), parsed.get("api")),
        api_is_default="api" not in given,
        api_keys=parsed.get("api-key", ()),
        insecure_api=parsed["insecure-api"],
        model=_model(given["model"], parsed),
        aliases=_aliases(given.get("alias"), parsed.get("alias", ())),
        max_running=parsed.get("max-running"),
        max_waiting=parsed["max-waiting"],
        task_timeout_seconds=parsed["task-timeout"],
        idle_unload_seconds=parsed["idle-unload"],
        context=parsed.get("context"),
        max_disk_bytes=parsed.get("max-disk"),
        max_memory_bytes=parsed.get("max-memory"),
        drain_timeout_seconds=parsed["drain-timeout"],
        log_format=parsed["log-format"],
        log_level=parsed["log-level"],
    )
    _check_open_api(config, given.get("api"))
    return config


def locate_data_dir(flags: Mapping[str, FlagValue], environ: Mapping[str, str], defaults: Defaults) -> Path:
    """The data directory: it has to be known before the file in it can be read.

    Raises: ConfigError.
    """
    option = BY_NAME["data-dir"]
    source = _from_flags(option, flags) or _from_environment(option, environ)
    path: Path = defaults.data_dir if source is None else _parse(option, source, defaults.home)
    return path


def _collect(flags: Mapping[str, FlagValue], environ: Mapping[str, str], file_text: str, data_dir: Path) -> dict[str, _Given]:
    """For each option the highest source that has it."""
    in_file = _from_file(file_text, data_dir)
    given: dict[str, _Given] = {}
    for option in OPTIONS:
        source = _from_flags(option, flags) or _from_environment(option, environ) or in_file.get(option.name)
        if source is None and option.default is not None:
            source = _Given((option.default,), 3, f"the default of --{option.name}")
        if source is not None:
            given[option.name] = source
    return given


def _from_flags(option: Option, flags: Mapping[str, FlagValue]) -> _Given | None:
    value = flags.get(option.field)
    if value is None:
        return None
    if isinstance(value, bool):
        return _Given(("true" if value else "false",), 0, f"--{option.name}")
    return _Given((value,) if isinstance(value, str) else tuple(value), 0, f"--{option.name}")


def _from_environment(option: Option, environ: Mapping[str, str]) -> _Given | None:
    text = environ.get(option.variable, "")
    if not text.strip():
        return None
    parts = tuple(part.strip() for part in text.split(",") if part.strip()) if option.repeatable else (text,)
    return _Given(parts, 1, option.variable)


def _from_file(text: str, data_dir: Path) -> dict[str, _Given]:
    """The file's keys; each must be an option's, and each value text, a number or a truth value, or a list where it repeats."""
    path = data_dir / FILE_NAME
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    found: dict[str, _Given] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in BY_NAME:
            raise ConfigError(f"unknown key {key!r} in {path}{_near(name)}")
        if name == "data-dir":
            raise ConfigError(f"{key!r} can't be set in {path}, since that file is found by it")
        if name in found:
            raise ConfigError(f"{key!r} is set twice in {path}")
        items = value if isinstance(value, list) and BY_NAME[name].repeatable else [value]
        if not all(isinstance(item, str | int | float) for item in items):
            raise ConfigError(f"{key!r} in {path} is neither text nor a number nor true or false")
        texts = tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)
        found[name] = _Given(texts, 2, f"{key!r} in {path}", data_dir)
    return found


def _near(name: str) -> str:
    import difflib  # noqa: PLC0415 - only a mistake needs it

    near = difflib.get_close_matches(name, BY_NAME, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parse(option: Option, source: _Given, home: Path) -> Any:  # noqa: ANN401 - each option has its own type
    """The option's value: a tuple where it repeats.

    Raises: ConfigError, naming option, source and (unless secret) value.
    """
    parsed = []
    for text in source.texts:
        try:
            value = option.parse(text)
        except ValueError as error:
            shown = "<secret>" if option.secret else repr(text)
            raise ConfigError(f"{source.origin}: {shown} {error}") from None
        parsed.append(_resolve(text, source.base, home) if option.parse is values.path else value)
    return tuple(parsed) if option.repeatable else parsed[-1]


def _resolve(text: str, base: Path | None, home: Path) -> Path:
    path = home / text[1:].lstrip("/") if text == "~" or text.startswith("~/") else Path(text)
    return path if base is None else base / path


def _cluster_key(given: Mapping[str, _Given], parsed: Mapping[str, Any], read_key_file: Callable[[Path], str]) -> bytes | None:
    """The key itself or what its file holds; of both, the one from the higher source."""
    key, file = given.get("cluster-key"), given.get("cluster-key-file")
    if key is not None and file is not None and key.rank == file.rank:
        raise ConfigError(f"{key.origin} and {file.origin} are both given: only one of them can hold")
    if file is None or (key is not None and key.rank < file.rank):
        return parsed.get("cluster-key")
    path: Path = parsed["cluster-key-file"]
    try:
        return values.cluster_key(read_key_file(path).strip())
    except OSError as error:
        raise ConfigError(f"{file.origin}: {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file.origin}: {path} is no text file") from None
    except ValueError as error:
        raise ConfigError(f"{file.origin}: what {path} holds {error}") from None


def _api_addresses(source: _Given | None, parsed: tuple[Address | None, ...] | None) -> tuple[Address, ...]:
    if source is None or not parsed:
        return DEFAULT_API
    addresses = tuple(dict.fromkeys(address for address in parsed if address is not None))
    if addresses and None in parsed:
        raise ConfigError(f"{source.origin}: 'none' can't stand beside an address")
    return addresses


def _model(source: _Given, parsed: Mapping[str, Any]) -> str | None:
    """The model to run: none on a node that never runs one, unless somebody asked for one all the same."""
    name: str = parsed["model"]
    if name.lower() == "none":
        return None
    if parsed.get("max-memory") != 0:
        return name
    if source.rank < 3:
        raise ConfigError(f"{source.origin}: {name!r} can't run with max-memory 0")
    return None


def _aliases(source: _Given | None, pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    unique = tuple(dict.fromkeys(pairs))
    for alias in {alias for alias, _ in unique}:
        models = [model for name, model in unique if name == alias]
        if len(models) > 1 and source is not None:
            raise ConfigError(f"{source.origin}: {alias!r} can't stand for both {models[0]!r} and {models[1]!r}")
    return unique


def _check_open_api(config: Config, source: _Given | None) -> None:
    """Whoever reaches the API can spend this device's power: beyond loopback it needs a key, or an explicit waiver."""
    exposed = [address for address in config.api if not address.is_loopback]
    if exposed and not config.api_keys and not config.insecure_api:
        origin = source.origin if source else "--api"
        raise ConfigError(f"{origin}: '{exposed[0]}' is open to others, so give --api-key KEY too (or --insecure-api)")


def read(flags: Mapping[str, FlagValue]) -> Config:
    """The configuration of this process: its flags, its environment, and the file in the data directory.

    Raises: ConfigError.
    """
    import platformdirs  # noqa: PLC0415 - commands that need no configuration start without it

    defaults = Defaults(
        data_dir=Path(platformdirs.user_data_dir("shoal", appauthor=False)),
        models_dir=Path(platformdirs.user_cache_dir("shoal", appauthor=False)) / "models",
        host_name=socket.gethostname()[: values.NAME_CHARACTERS_MAX] or "node",
        home=Path(os.environ.get("HOME") or "/"),
    )
    path = locate_data_dir(flags, os.environ, defaults) / FILE_NAME
    config = load(flags, os.environ, _read_text(path), defaults, lambda key_file: key_file.read_text("utf-8"))
    # Runners and locks must mean the same place whatever becomes of the working directory.
    return replace(config, data_dir=config.data_dir.absolute(), models_dir=config.models_dir.absolute())


def process_environment() -> Mapping[str, str]:
    """The environment of this process, for what passes it on to children."""
    return os.environ


def _read_text(path: Path) -> str:
    """The file's text, or none where there is no file."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"{path} is longer than {FILE_BYTES_MAX} bytes")
        return data.decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8 text") from None
