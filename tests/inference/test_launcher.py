"""What a runner process is given of its node's environment."""

import sysconfig
from pathlib import Path

import pytest

from inference import launcher
from inference.launcher import ROOT, runner_environment
from tests.fake_model import load_command

COMMAND = load_command(Path("/models/fake"))


def test_nothing_secret_and_nothing_meant_for_the_node_is_passed_on() -> None:
    base = {"SHOAL_CLUSTER_KEY": "x", "SHOAL_API_KEY": "y", "HF_TOKEN": "z", "AWS_SECRET_ACCESS_KEY": "k", "PYTHONSTARTUP": "f"}
    environment = runner_environment(COMMAND, base)
    assert not environment.keys() & base.keys()


def test_what_leads_to_libraries_devices_and_caches_is_passed_on() -> None:
    base = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "CUDA_VISIBLE_DEVICES": "1", "TMPDIR": "/var/tmp", "LC_ALL": "C"}
    environment = runner_environment(COMMAND, base)
    assert base.items() <= environment.items()


def test_our_own_settings_win() -> None:
    environment = runner_environment(COMMAND, {"MLX_DISABLE_COMPILE": "0", "PYTHONPATH": "/elsewhere"})
    assert environment["MLX_DISABLE_COMPILE"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OPENBLAS_NUM_THREADS"] == str(COMMAND.threads)
    assert environment["PYTHONPATH"].split(":") == [str(ROOT), "/elsewhere"]


def test_an_installed_package_is_found_without_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "ROOT", Path(sysconfig.get_path("purelib")).resolve())
    assert "PYTHONPATH" not in runner_environment(COMMAND, {})
