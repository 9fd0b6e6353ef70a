"""Models from the Hugging Face hub, into the hub's own cache, through huggingface_hub. Blocking; runs in the fetching process.

HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE hold, as for every program. huggingface_hub (2.4) begins a file anew when its
process was killed, so large files are fetched here, resumed by Range, and laid into its cache under the documented name (their
etag); it then does the rest and finds them there.

Cache layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from inference.hub_download import RESUMED_BYTES_MAX, RESUMED_BYTES_MIN, Download, Tally
from inference.model_directory import WEIGHTS_PATTERN, read_directory
from inference.models import (
    DISK_FULL,
    ModelAccessError,
    ModelDiskError,
    ModelError,
    ModelNetworkError,
    ModelNotFoundError,
    ModelUnsupportedError,
)

# What mlx-lm reads of a repository, less its code, which is never run here.
WANTED = ["*.json", "model*.safetensors", "tokenizer.model", "spiece.model", "*.tiktoken", "*.txt", "*.jinja"]
FILES_AT_ONCE = 4

Report = Callable[[int, int], None]


def fetch(identity: str, report: Report, *, refresh: bool) -> Path:
    """The snapshot of `org/name` or `org/name@revision`, complete, in the hub's cache; `report` gets bytes done and in all.

    A complete snapshot that is there is used as it is; with `refresh` the hub is asked first for a newer one, and what is
    there is used if the hub can't be reached.

    Raises: ModelError.
    """
    repository, _, revision = identity.partition("@")
    with _hub_errors(identity):
        if not refresh and (path := _cached(repository, revision or None)) is not None:
            return path
        return _snapshot(repository, revision or None, report)


def _cached(repository: str, revision: str | None) -> Path | None:
    try:
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=WANTED, local_files_only=True))
        read_directory(path)  # other programs leave snapshots of a few files there
    except (LocalEntryNotFoundError, ModelError, FileNotFoundError):
        return None
    return path


def _snapshot(repository: str, revision: str | None, report: Report) -> Path:
    wanted: dict[str, Any] = {"repo_id": repository, "revision": revision, "allow_patterns": WANTED}
    try:
        listed = snapshot_download(**wanted, dry_run=True)
    except DryRunError:
        # The hub can't be reached: what is in the cache, or the reason why there is nothing.
        return Path(snapshot_download(**wanted))
    _check_format(repository, {file.filename for file in listed})
    missing = [file for file in listed if file.will_download]
    tally = Tally(sum(file.file_size or 0 for file in missing), report)
    large = [file for file in missing if RESUMED_BYTES_MIN <= (file.file_size or 0) <= RESUMED_BYTES_MAX]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        # `map` raises the first failure, but the pool would still work off the rest: tell them to stop.
        try:
            list(pool.map(lambda file: Download(repository, file, tally).run(), large))
        except BaseException:
            tally.stopped = True
            raise
    path = Path(snapshot_download(**wanted))
    report(tally.total, tally.total)
    return path


def _check_format(repository: str, names: set[str]) -> None:
    """Refuse before anything is fetched what could not be loaded."""
    if "config.json" not in names or not any(fnmatch(name, WEIGHTS_PATTERN) for name in names):
        raise ModelUnsupportedError(
            f"{repository} has no model in mlx-lm's format, with a config.json and {WEIGHTS_PATTERN}; "
            "of a repository of GGUF files, download one and name it by its path."
        )


@contextmanager
def _hub_errors(identity: str) -> Iterator[None]:
    """What the hub's library raises, as one sentence."""
    try:
        yield
    except HFValidationError as error:
        raise ModelNotFoundError(f"{identity!r} is no name of a repository.") from error
    except HfHubHTTPError as error:
        raise _http_error(identity, error, error.response.status_code) from error
    except LocalEntryNotFoundError as error:
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise _http_error(identity, cause, cause.response.status_code) from error
        raise _no_network(identity, cause) from error
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise _no_network(identity, error) from error
    except OSError as error:
        if error.errno in DISK_FULL:
            raise ModelDiskError(f"The disk of the hub's cache is full: {identity} could not be fetched.") from error
        if error.errno is not None:
            raise ModelDiskError(f"The hub's cache can't be read or written: {error}.") from error
        raise ModelNetworkError(f"{identity} could not be fetched: {_first_line(error)}") from error


def _no_network(identity: str, cause: BaseException | None) -> ModelNetworkError:
    if isinstance(cause, OfflineModeIsEnabled):
        return ModelNetworkError(f"{identity} is not complete on this device and HF_HUB_OFFLINE forbids to fetch it.")
    return ModelNetworkError(f"{identity} is not complete on this device and {constants.ENDPOINT} can't be reached.")


def _http_error(identity: str, error: Exception, status: int) -> ModelError:
    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        page = f"{hub}/{identity.partition('@')[0]}"
        return ModelAccessError(f"{identity} is gated: ask for access at {page} and give a token of yours as HF_TOKEN.")
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(
            f"{identity.partition('@')[0]} has no revision {identity.partition('@')[2] or 'main'} on {hub}."
        )
    here = f"; the directory of that name is written ./{identity}" if Path(identity).is_dir() else ""
    if status == 404:
        return ModelNotFoundError(f"There is no repository {identity} on {hub}, or it is private{here}.")
    if status in {401, 403}:
        return ModelAccessError(
            f"{hub} has no {identity} for you ({status}): it doesn't exist, or needs a token (HF_TOKEN){here}."
        )
    return ModelNetworkError(f"{identity} could not be fetched: {hub} answered {status}.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
