"""The progress of one fetch: a bar on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from inference.models import Progress

LINE_SECONDS = 5.0  # between two lines of the same stage, without a terminal


def line(name: str, progress: Progress) -> str:
    """What is going on, in words."""
    text = f"{name}: {progress.stage}"
    if progress.note:
        return f"{text}, {progress.note}"
    if progress.total:
        return f"{text}, {decimal(progress.done)} of {decimal(progress.total)}"
    return f"{text}, {decimal(progress.done)}" if progress.done else text


class PullProgress:
    """Shows progress on a stream; `now` is a clock in seconds."""

    def __init__(self, name: str, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._name, self._stream, self._now = name, stream, now
        self._stage: tuple[str, str] = ("", "")
        self._told = -LINE_SECONDS
        self._task: TaskID | None = None
        self._bar: Bar | None = None
        if stream.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(file=stream), transient=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show it."""
        changed = (progress.stage, progress.note) != self._stage
        self._stage = (progress.stage, progress.note)
        if self._bar is not None:
            self._update_bar(self._bar, progress, changed=changed)
        elif changed or self._now() - self._told >= LINE_SECONDS:
            self._told = self._now()
            self._stream.write(line(self._name, progress) + "\n")
            self._stream.flush()

    def _update_bar(self, bar: Bar, progress: Progress, *, changed: bool) -> None:
        if changed:
            if self._task is not None:
                bar.remove_task(self._task)  # each stage has a speed of its own
            text = f"{self._name}: {progress.stage}" + (f", {progress.note}" if progress.note else "")
            self._task = bar.add_task(text, total=progress.total)
        assert self._task is not None
        bar.update(self._task, completed=progress.done, total=progress.total)
