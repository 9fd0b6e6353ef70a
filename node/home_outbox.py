"""What a home has still to say to one head, the most urgent first. Each thing is said as it is by then, not as it was."""

from collections import deque

from node.home_submission import Submission
from node.task_protocol import MODELS_MAX, SECONDS_LEFT_MAX, TASKS_MAX, Cancel, Credit, TaskMessage, Try, Waiting


class HomeOutbox:
    """See the module."""

    def __init__(self) -> None:
        self.levels: dict[str, tuple[int, float]] = {}  # by model hash: how many wait, and since when the first
        self._unsent: dict[Try, Submission] = {}
        self._cancels: deque[Try] = deque()
        self._owed: dict[Try, Submission] = {}  # credit
        self._untold: dict[str, None] = {}  # models whose level has changed

    def submit(self, attempt: Submission) -> None:
        """An attempt is to be sent."""
        self._unsent[attempt.key] = attempt

    def withdraw(self, attempt: Submission) -> None:
        """It is not to be sent any more."""
        self._unsent.pop(attempt.key, None)

    def cancel(self, attempt: Submission) -> None:
        """One that was sent is to end."""
        self._cancels.append(attempt.key)

    def owe(self, attempt: Submission) -> None:
        """Credit is due."""
        self._owed[attempt.key] = attempt

    def set_level(self, model_hash: str, count: int, since: float) -> bool:
        """How many requests of a model wait; whether that is news that can be told."""
        if model_hash not in self.levels and (count == 0 or len(self.levels) >= MODELS_MAX):
            return False
        if count:
            self.levels[model_hash] = count, since
        else:
            del self.levels[model_hash]
        self._untold[model_hash] = None
        return True

    def resumed(self) -> None:
        """There is a new stream, and Resume says what credit and cancels would have said; levels are to be told anew."""
        self._cancels.clear()
        self._owed.clear()
        self._untold = dict.fromkeys(self.levels)

    def next(self, now: float) -> TaskMessage | Submission | None:
        """What to say next, first what makes room at the head; None: nothing. A submission is to be sent as fits its size."""
        if self._owed:
            return Credit(tuple(self._owed.pop(key).credit() for key in list(self._owed)[:TASKS_MAX]))
        if self._cancels:
            key = self._cancels.popleft()
            return Cancel(key.number, key.attempt)
        if self._untold:
            model_hash, _ = self._untold.popitem()
            count, since = self.levels.get(model_hash, (0, now))
            return Waiting(model_hash, count, min(max(0.0, now - since), SECONDS_LEFT_MAX))
        if self._unsent:
            return self._unsent.pop(next(iter(self._unsent)))
        return None
