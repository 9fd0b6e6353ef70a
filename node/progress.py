"""How a model comes to this device, shown while it does: one line that changes on a terminal, and log lines.

`ProgressLine` stands between everything that writes to a terminal and the terminal, so that a log line never lands in the
middle of the line that changes.
"""

import contextlib
from typing import TextIO

import structlog

from node.local_runners import Down, LocalInstance, OnItsWay, Up

CLEAR_LINE = "\r\x1b[K"
SHARES_LOGGED = 4  # without a terminal, progress is logged at each quarter

_log = structlog.get_logger("models")


class ProgressLine:
    """A text stream, on a terminal with a last line that comes and goes. Writes of others clear it first."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = False
        self.on_terminal = _is_terminal(stream)

    def show(self, text: str) -> None:
        """Put a text there in place of the last one; nothing where there is no terminal."""
        if self.on_terminal:
            self._shown = True
            self._put(CLEAR_LINE + text)

    def clear(self) -> None:
        """Take it away."""
        if self._shown:
            self._shown = False
            self._put(CLEAR_LINE)

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that went away takes nothing with it
            self._stream.write(text)
            self._stream.flush()

    def write(self, text: str) -> int:
        """As any stream."""
        self.clear()
        return self._stream.write(text)

    def flush(self) -> None:
        """As any stream."""
        self._stream.flush()

    def isatty(self) -> bool:
        """As any stream."""
        return self.on_terminal


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


class ModelProgress:
    """Shows how an instance gets ready; called after each of its changes."""

    def __init__(self, instance: LocalInstance, line: ProgressLine) -> None:
        self._instance = instance
        self._line = line
        self._logged: tuple[str, int] = ("", 0)
        instance.on_change.append(self.update)

    def update(self) -> None:
        """Show the phase as it is now."""
        name, phase = self._instance.name, self._instance.phase
        if not isinstance(phase, OnItsWay):
            self._line.clear()
            if isinstance(phase, Up) and self._logged[0] != "ready":
                self._logged = ("ready", 0)
                _log.info(f"{name} is ready", context=self._instance.context)
            elif isinstance(phase, Down):
                self._logged = ("", 0)
            return
        share = SHARES_LOGGED * phase.done // phase.total if phase.total else 0
        if self._logged[0] != phase.stage or (not self._line.on_terminal and self._logged[1] != share):
            self._logged = (phase.stage, share)
            _log.info(f"{name} is {phase.text}")
        self._line.show(f"{name} is {phase.text}")
