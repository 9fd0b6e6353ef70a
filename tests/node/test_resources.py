"""A container's limits count, not only the machine's."""

from pathlib import Path

import psutil

from node.resources import core_count, device_memory_bytes, runner_memory_bytes


def test_a_container_limit_is_the_memory(tmp_path: Path) -> None:
    assert device_memory_bytes(tmp_path) == psutil.virtual_memory().total

    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory_bytes(tmp_path) == psutil.virtual_memory().total

    (tmp_path / "memory.max").write_text("268435456\n")
    assert device_memory_bytes(tmp_path) == 256 << 20


def test_three_quarters_are_for_runners_unless_said_otherwise() -> None:
    assert runner_memory_bytes(None, 8 << 30) == 6 << 30
    assert runner_memory_bytes(512 << 20, 8 << 30) == 512 << 20


def test_a_quota_bounds_the_cores(tmp_path: Path) -> None:
    assert core_count(tmp_path) >= 1

    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert core_count(tmp_path) == 1
