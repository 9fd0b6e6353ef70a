"""Which instances a home leaves alone for a while because they failed it.

An instance that fails fast looks idle and would draw all traffic, so a failure bars it: for 1 s, doubling up to 60 s with each
further failure. After that one request goes there on trial. Its first token lifts the bar, its regular end wipes the slate.
An instance that let a request wait in vain for its first token is barred for the whole 60 s at once: each trial there costs a
client that wait.

Every piece of evidence is dated by when its request was sent. What was sent before the last failure says nothing new, so the
ten requests that a crash takes with it are one failure, and an old stream that ends well doesn't speak for new ones.

A client's own mistake is never a failure (`at_fault`). Pure; `now` is passed in.
"""

from msgspec import Struct

from inference.requests import ErrorCode

BAR_SECONDS_FIRST = 1.0
BAR_SECONDS_MAX = 60.0
TRIAL_SECONDS_MAX = 60.0  # a trial of which nothing was heard for so long hinders the next one no more
INSTANCES_MAX = 1024

_AT_FAULT: frozenset[ErrorCode] = frozenset({"engine_error", "runner_crashed"})


def at_fault(code: ErrorCode) -> bool:
    """Whether an error speaks against the instance: not the client's own mistakes, its own deadline, or an orderly stop."""
    return code in _AT_FAULT


class _Record(Struct):
    failures: int = 0
    since: float = 0.0  # the last failure that counted
    until: float = 0.0
    barred: bool = True  # until a first token is seen
    trial: float | None = None  # when the request on trial was sent


class InstanceHealth:
    """What one home has seen of instances that failed it; it knows nothing of the others."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def may_try(self, instance_id: int, now: float) -> bool:
        """Whether a request may go there."""
        record = self._records.get(instance_id)
        if record is None or not record.barred:
            return True
        on_trial = record.trial is not None and now - record.trial < TRIAL_SECONDS_MAX
        return now >= record.until and not on_trial

    def barred_until(self, instance_id: int) -> float:
        """When its bar ends, on the clock of `now`; the past where there is none."""
        record = self._records.get(instance_id)
        return record.until if record is not None and record.barred else float("-inf")

    def sent(self, instance_id: int, now: float) -> None:
        """A request goes there; where it was barred, on trial."""
        record = self._records.get(instance_id)
        if record is not None and record.barred:
            record.trial = now

    def failed(self, instance_id: int, *, sent: float, now: float, stalled: bool = False) -> bool:
        """A request that was sent then has failed by the instance's fault; returns whether that was news.

        `stalled`: it missed its limit for the first token, or for the next one.
        """
        record = self._records.pop(instance_id, None) or _Record(since=float("-inf"))
        self._records[instance_id] = record  # those that failed last are forgotten last
        if sent < record.since:
            return False
        record.failures += 1
        seconds = BAR_SECONDS_MAX if stalled else BAR_SECONDS_FIRST * 2.0 ** min(record.failures - 1, 16)
        record.since = now
        record.until = now + min(seconds, BAR_SECONDS_MAX)
        record.barred = True
        record.trial = None
        while len(self._records) > INSTANCES_MAX:
            del self._records[next(iter(self._records))]
        return True

    def answering(self, instance_id: int, *, sent: float) -> None:
        """The first token of a request sent then has come: others may go there too."""
        record = self._records.get(instance_id)
        if record is not None and sent >= record.since:
            record.barred = False
            record.trial = None

    def served(self, instance_id: int, *, sent: float) -> None:
        """A request sent then has come to its regular end: all is well."""
        record = self._records.get(instance_id)
        if record is not None and sent >= record.since:
            del self._records[instance_id]

    def undecided(self, instance_id: int, *, sent: float) -> None:
        """A request sent then has ended and says nothing of the instance: refused, cancelled, or the client's own mistake."""
        record = self._records.get(instance_id)
        if record is not None and record.trial == sent:
            record.trial = None
