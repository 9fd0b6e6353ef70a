"""The wish to stop, as the operating system tells it: Ctrl-C, SIGTERM, a terminal that closes.

Handlers are there from the first moment of a start, before trio runs, so that no signal finds the process half set up. The
first wish asks for an orderly end, the second for an end at once, a third ends the process where it stands (its runners see
the end of their stdin).
"""

import contextlib
import os
import signal
from types import FrameType

import trio

EXIT_AT_ONCE = 3  # so many wishes, and the process ends without another word


class StopSignals:
    """Counts the wishes to stop; trio tasks wait for the first and the second."""

    def __init__(self) -> None:
        self._count = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self._events: list[tuple[int, trio.Event]] = []

    def install(self) -> None:
        """Take over SIGINT and SIGTERM, and SIGHUP unless it is ignored on purpose (nohup). Main thread only."""
        # SIGINT also where it was ignored, as for the background jobs of a shell: whoever sends it to a server means it.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._received)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._received)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= EXIT_AT_ONCE:
            os._exit(128 + number)
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake)

    def _wake(self) -> None:
        for count, event in self._events:
            if self._count >= count:
                event.set()

    @property
    def count(self) -> int:
        """Wishes so far."""
        return self._count

    async def wait(self, count: int) -> None:
        """trio: wait until there were `count` wishes, at once if there were."""
        self._token = trio.lowlevel.current_trio_token()
        entry = (count, trio.Event())
        self._events.append(entry)
        self._wake()
        try:
            await entry[1].wait()
        finally:
            self._events.remove(entry)
