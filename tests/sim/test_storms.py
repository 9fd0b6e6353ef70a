"""Whole runs with faults of every kind; one seed gives one run, to the byte."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.sim import mutations
from tests.sim.model import Broken
from tests.sim.storms import Report, run_storm

ROOT = Path(__file__).parents[2]


def test_storms_end_in_equal_replicas_and_everybody_alive() -> None:
    faults: Counter[str] = Counter()
    for seed in (0, 1, 2, 4, 5, 7, 8, 9, 12, 16, 17, 18, 24, 45, 48, 57):
        faults.update(run_storm(seed).faults)

    for fault in (
        "lost",
        "duplicated",
        "reordered",
        "one-way cut",
        "partition",
        "crash",
        "silent crash",
        "freeze",
        "clock jump",
    ):
        assert faults[fault], fault
    assert faults["restart"]
    assert faults["restart without disk"]


def test_a_storm_over_an_overlay() -> None:
    report = run_storm(13)

    assert report.size > 64


def test_a_seed_gives_the_same_run_in_another_process_whatever_its_hash_seed() -> None:
    here = run_storm(4)
    for hash_seed in ("0", "4711"):
        run = subprocess.run(
            [sys.executable, "-m", "tests.sim", "--seed", "4"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
        )
        assert msgspec.json.decode(run.stdout, type=Report) == here


def test_a_failing_seed_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.sim import __main__ as command

    def fail(seed: int) -> Report:
        raise Broken("on purpose")

    monkeypatch.setattr(command, "run_storm", fail)
    monkeypatch.setattr(sys, "argv", ["sim", "--seeds", "3..4"])

    assert command.main() == 1
    assert "scripts/sim --seed 4" in capsys.readouterr().out


def test_storms_find_a_broken_rule_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mutations.alive_beats_dead(monkeypatch)

    with pytest.raises(Broken):
        [run_storm(seed) for seed in (1, 7, 17, 18)]
