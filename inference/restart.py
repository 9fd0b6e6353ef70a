"""When a runner that crashed is started again: a growing delay, and a budget of crashes per window of time.

Pure: the crashes so far and `now` in, a delay or the end of patience out.
"""

from msgspec import Struct


class RestartPolicy(Struct, frozen=True, kw_only=True):
    """How patient a supervisor is. With these numbers a runner that dies at once is given up after some nine seconds."""

    crashes_max: int = 5  # so many within the window, and it stays down
    window_seconds: float = 60.0
    delay_first_seconds: float = 0.1  # one crash costs the next request little
    delay_factor: float = 4.0
    delay_max_seconds: float = 30.0


class Crash(Struct, frozen=True):
    """One end of a runner that nobody asked for."""

    at: float  # seconds, on the clock that `now` is read from
    was_ready: bool  # whether this spawn ever got as far as ready


def counted(policy: RestartPolicy, crashes: tuple[Crash, ...], now: float) -> tuple[Crash, ...]:
    """The crashes that weigh on the next decision, oldest first; all others may be forgotten.

    Those of the window count, and so does the unbroken run of spawns that never got ready, up to now: a model that takes
    minutes to load and crashes every time would never fill a window.
    """
    kept = [crash for crash in crashes if now - crash.at < policy.window_seconds]
    run = 0
    for crash in reversed(crashes):
        if crash.was_ready:
            break
        run += 1
    tail = max(len(kept), run)
    return crashes[len(crashes) - min(tail, policy.crashes_max) :]


def restart_delay(policy: RestartPolicy, crashes: tuple[Crash, ...], now: float) -> float | None:
    """Seconds to wait before the next spawn, or None when it is to stay down; `crashes` ends with the latest one."""
    assert crashes, "nothing has crashed"
    count = len(counted(policy, crashes, now))
    if count >= policy.crashes_max:
        return None
    return min(policy.delay_first_seconds * policy.delay_factor ** max(0, count - 1), policy.delay_max_seconds)
