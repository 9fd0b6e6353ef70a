"""The files that decide know no clock, no chance, no network: what they import says so."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = [
    *(f"p2p/{name}.py" for name in ("lattice", "namespace", "replica", "sync_wire", "sync", "links", "effects", "settings")),
    *(f"p2p/{name}.py" for name in ("suspicion", "probes", "membership", "overlay", "core", "wire")),
    *(f"node/{name}.py" for name in ("records", "tasks", "instances", "in_flight", "view")),
    *(f"node/{name}.py" for name in ("documents", "state_document", "replica_dump", "dump_document", "dump_diff")),
    "node/cluster_tables.py",
]
IMPURE = {"trio", "libp2p", "time", "random", "os", "socket", "datetime", "asyncio", "threading", "secrets", "uuid"}


@pytest.mark.parametrize("path", PURE)
def test_a_pure_file_imports_no_clock_no_chance_and_no_io(path: str) -> None:
    imported: set[str] = set()
    for statement in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(statement, ast.Import):
            imported |= {name.name.partition(".")[0] for name in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            imported.add(statement.module.partition(".")[0])

    assert not imported & IMPURE
