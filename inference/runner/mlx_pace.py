"""How many prompt tokens a step may evaluate, so that running streams and cancels don't wait long. Pure."""

STEP_SECONDS_MAX = 0.25  # a step with a piece of prefill in it
AIM = 0.8  # of that: the rest is for a piece that takes longer than the last, as the KV grows
# Where decoding alone takes about as long as a step may, prompts get this part of its time on top: else they would never end.
SHARE_MIN = 0.5
CHANGE_MAX = 2.0  # in one step, up; down there is no limit


class PrefillPace:
    """The number of tokens of a step, led by what the last steps took."""

    def __init__(self, tokens_per_second: float, tokens_min: int, tokens_max: int) -> None:
        self._min, self._max = tokens_min, tokens_max
        self.tokens = self._bounded(tokens_per_second * STEP_SECONDS_MAX * AIM)

    def observe(self, tokens: int, seconds: float, decode_seconds: float) -> None:
        """A step evaluated so many prompt tokens (padding included) and took that long; its decoding alone would have taken
        `decode_seconds`.
        """
        if tokens < self.tokens // 2:
            return  # the end of a prompt: too small to tell
        allowed = max(STEP_SECONDS_MAX * AIM - decode_seconds, SHARE_MIN * decode_seconds)
        per_token = max(seconds - decode_seconds, 1e-6) / tokens
        self.tokens = self._bounded(min(allowed / per_token, self.tokens * CHANGE_MAX))

    def _bounded(self, tokens: float) -> int:
        return max(self._min, min(self._max, int(tokens)))
