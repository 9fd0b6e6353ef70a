"""The house rules that no linter knows, and proof that the import contracts bite."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("p2p", "node", "inference", "api")
ENVIRONMENT_READERS = {"node/config.py"}
FORBIDDEN_WORDS = {"manager", "worker", "master", "util", "utils", "helper", "helpers", "common", "shared", "types"}
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--config", "pyproject.toml"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


# Where a forbidden import is put, the import, and the contract that must break.
BREAKS = [
    ("p2p/wire.py", "import inference.requests", "arrows"),
    ("inference/requests.py", "import p2p.identity", "arrows"),
    ("node/config.py", "import api.app", "arrows"),
    ("node/config.py", "import asyncio", "asyncio and aiohttp only in api"),
    ("inference/supervisor.py", "import aiohttp", "asyncio and aiohttp only in api"),
    ("inference/runner/core.py", "import mlx.core", "mlx only in the MLX engine's files"),
    ("p2p/identity.py", "import libp2p", "libp2p only in p2p's edges"),
    ("inference/runner/core.py", "import trio", "a runner process knows neither trio, libp2p nor aiohttp"),
    ("inference/supervisor.py", "import inference.runner.mlx_load", "no mlx in a node process"),
]


@pytest.mark.parametrize(("path", "line", "contract"), BREAKS)
def test_an_import_against_the_arrows_breaks_the_check(tmp_path: Path, path: str, line: str, contract: str) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    target = tmp_path / path
    target.write_text(target.read_text() + f"\n{line}\n")

    done = lint_imports(tmp_path)

    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout


def test_the_environment_is_read_in_one_file_only() -> None:
    readers = {
        relative(path)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv", "environb"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(n.name in {"environ", "getenv"} for n in node.names)
        )
    }

    assert readers <= ENVIRONMENT_READERS


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    parts = {part for path in sources() for part in Path(relative(path)).with_suffix("").parts}

    assert not parts & FORBIDDEN_WORDS


def test_files_and_functions_stay_readable() -> None:
    long_files = [relative(path) for path in sources() if len(path.read_text().splitlines()) > FILE_LINES_MAX]
    long_functions = [
        f"{relative(path)}:{node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= FUNCTION_LINES_MAX
    ]

    assert not long_files
    assert not long_functions


def test_the_development_lock_holds_the_same_versions_as_the_users_lock() -> None:
    def pins(name: str) -> set[str]:
        text = (ROOT / "requirements" / name).read_text()
        return {line.split(" ")[0] for line in text.splitlines() if "==" in line and not line.startswith(" ")}

    assert pins("cpu.lock") <= pins("dev.lock")
