"""What this device has to give: memory and processor cores, as far as this process may use them."""

import contextlib
import os
import platform
import resource
from pathlib import Path

import psutil

MEMORY_SHARE = 0.75  # of the device's, where no option says how much

FILES_WANTED = 8192

_CGROUPS = Path("/sys/fs/cgroup")


def device_memory_bytes(cgroups: Path = _CGROUPS) -> int:
    """The memory of the device, or of the container that the node runs in."""
    limits = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroup versions 2 and 1
        text = _read(cgroups / name)
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def runner_memory_bytes(max_memory_bytes: int | None, device_bytes: int) -> int:
    """What runners may use on a device with so much memory."""
    return int(device_bytes * MEMORY_SHARE) if max_memory_bytes is None else max_memory_bytes


def device_name() -> str:
    """What this device is, in a few words for people: `Darwin arm64, 10 cores`."""
    return f"{platform.system()} {platform.machine()}, {core_count()} cores"


def core_count(cgroups: Path = _CGROUPS) -> int:
    """Physical cores that this process may use: two threads of one core only stand in each other's way in a BLAS."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed, _quota(cgroups)))


def raise_file_limit() -> None:
    """Let this process have as many open files as it may: some systems give 256, and each client takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _quota(cgroups: Path) -> int:
    """The cores' worth of time that a container is limited to, rounded up."""
    quota, _, period = _read(cgroups / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, -(-int(quota) // int(period)))
    return 1 << 16


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
