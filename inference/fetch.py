"""`python -m inference.fetch`: fetches and converts one model in a process, whose memory goes back and which can be killed.

Its stdin brings one Fetch; its stdout gets the reports and nothing else, whatever a library prints. When stdin ends it kills
its whole process group, pip included: whoever started it has to make it a group's leader.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from inference.acquire import acquire
from inference.fetch_protocol import FETCH_REPORTS, FETCHES, Fetched, FetchReport, as_report
from inference.model_entries import ModelsDir, encode_entry
from inference.models import ModelError, Progress
from p2p.wire import HEADER_BYTES, ProtocolViolation

PROGRESS_SECONDS_MIN = 0.1  # between two reports of the same stage


class Reports:
    """Writes reports, progress not more often than people can see."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last: tuple[str, float] = ("", 0.0)
        self._lock = threading.Lock()

    def send(self, report: FetchReport) -> None:
        """Write one report. A node that is gone is seen at stdin."""
        frame = memoryview(FETCH_REPORTS.encode(report))
        with self._lock:
            while frame:
                frame = frame[os.write(self._descriptor, frame) :]

    def progress(self, progress: Progress) -> None:
        """Write progress, unless the same stage was reported just now; a stage's end always is."""
        stage, at = self._last
        now = time.monotonic()
        if progress.stage != stage or progress.note or progress.done == progress.total or now - at >= PROGRESS_SECONDS_MIN:
            self._last = (progress.stage, now)
            self.send(progress)


def main() -> int:
    """Take the one order, carry it out, report. Returns the exit status: 0 unless it was not asked properly."""
    reports = Reports(os.dup(1))
    os.dup2(2, 1)
    header = sys.stdin.buffer.read(HEADER_BYTES)
    try:
        order = FETCHES.decode(sys.stdin.buffer.read(FETCHES.length(header)))
    except ProtocolViolation as error:
        sys.stderr.write(f"fetch: {error}\n")
        return 2
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        entry = acquire(order.source, ModelsDir(Path(order.models_dir)), reports.progress, refresh=order.refresh)
    except ModelError as error:
        reports.send(as_report(error))
    else:
        reports.send(Fetched(encode_entry(entry)))
    return 0


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
