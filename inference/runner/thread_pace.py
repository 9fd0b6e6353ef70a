"""How many threads BLAS should use: all of them on a quiet machine, one where others want the cores.

OpenBLAS waits for its slowest thread at every matrix, two hundred times a token. A thread that has to share its core is often
the slowest by milliseconds, so two threads on two busy cores decode at a third of what one does; on quiet cores they win by a
fifth. Nobody can know which it is but by trying, and it changes with what else the machine does.

Pure: step times in, a number of threads out.
"""

PROBE_AFTER_MIN = 24  # steps; on a quiet machine a probe costs a fifth of a step
PROBE_AFTER_MAX = 384  # where the other number was far off, it is tried less and less often
FAR_OFF = 1.5
SMOOTHING = 0.3  # weight of the newest measurement


class ThreadPace:
    """Chooses between one thread and `threads_max` for one kind of step (decode steps of about as many rows, say)."""

    def __init__(self, threads_max: int) -> None:
        self._best, self._other = threads_max, 1
        self._seconds: float | None = None  # of a step with the best number, smoothed
        self._decided_at = 0.0  # that, when the number was chosen
        self._until_probe = 1
        self._probe_after = PROBE_AFTER_MIN
        self._probing = False

    @property
    def threads(self) -> int:
        """For the next step."""
        return self._other if self._probing else self._best

    def observe(self, seconds: float) -> None:
        """Take in how long the step took that was done with `threads`, for one unit of its work."""
        if self._best == self._other:
            return
        if self._probing:
            self._decide(seconds)
            return
        old = self._seconds
        self._seconds = new = seconds if old is None else old + SMOOTHING * (seconds - old)
        self._until_probe -= 1
        changed = self._decided_at > 0 and not 1 / FAR_OFF < new / self._decided_at < FAR_OFF
        self._probing = changed or self._until_probe <= 0

    def _decide(self, probed: float) -> None:
        """After a probe: keep or change, and say when to probe again."""
        assert self._seconds is not None
        far_off = probed > FAR_OFF * self._seconds
        self._probe_after = min(2 * self._probe_after, PROBE_AFTER_MAX) if far_off else PROBE_AFTER_MIN
        if probed < self._seconds:
            self._best, self._other = self._other, self._best
            self._seconds = probed
        self._probing = False
        self._decided_at = self._seconds
        self._until_probe = self._probe_after
