"""Whole nodes with clients and faults of every kind; one seed gives one run, to the byte."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.sim.whole_checks import Broken
from tests.sim.whole_faults import KINDS
from tests.sim.whole_storms import WholeReport, run_whole_storm

ROOT = Path(__file__).parents[2]
SHORT_SECONDS = 10.0


def test_every_request_ends_rightly_whatever_goes_wrong_and_nothing_is_left_of_it() -> None:
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in (1, 2, 4, 5, 11, 17, 18, 22, 27):
        report = run_whole_storm(seed, seconds=SHORT_SECONDS)
        faults.update(report.faults)
        outcomes.update(report.outcomes)

    assert set(KINDS) <= set(faults), faults
    assert {"length", "stop", "left", "cancelled", "home died"} <= set(outcomes), outcomes
    assert outcomes["length"] + outcomes["stop"] > sum(outcomes.values()) / 3


def test_a_seed_gives_the_same_run_in_this_process_and_in_another_whatever_its_hash_seed() -> None:
    here = run_whole_storm(17)

    assert run_whole_storm(17) == here
    run = subprocess.run(
        [sys.executable, "-m", "tests.sim", "--whole", "--seed", "17"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    assert msgspec.json.decode(run.stdout, type=WholeReport) == here


def test_a_failing_seed_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.sim import __main__ as command

    def fail(seed: int) -> WholeReport:
        raise Broken("on purpose")

    monkeypatch.setattr(command, "run_whole_storm", fail)
    monkeypatch.setattr(sys, "argv", ["sim", "--whole", "--seeds", "3..4"])

    assert command.main() == 1
    assert "scripts/sim --whole --seed 4" in capsys.readouterr().out
