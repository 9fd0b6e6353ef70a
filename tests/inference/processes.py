"""Seeing real processes end, also those that are not our children."""

import os
import time
from collections.abc import Mapping

import psutil

LAUNCH_ENVIRONMENT: Mapping[str, str] = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
GONE_CHECK_SECONDS = 0.01
GONE_CHECKS_MAX = 2000


def is_gone(pid: int) -> bool:
    """Whether there is no such process any more, but for one that its parent has not reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> bool:
    """Block until the process has ended; False where it lives on past a generous bound.

    It looks again and again: nothing tells of the end of another's child, least of all of one that nobody reaps.
    """
    for _ in range(GONE_CHECKS_MAX):
        if is_gone(pid):
            return True
        time.sleep(GONE_CHECK_SECONDS)
    return False
