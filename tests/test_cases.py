"""Every public report of what breaks in clusters has a test that names it by its letter and where it was told."""

import re
from pathlib import Path

ROWS = (
    [f"A{number}" for number in (1, 3, 4, 5, 7, 8, 9, 10, 11, 12, 14, 16, 17, 18, 20, 21, 22)]
    + [f"B{number}" for number in (1, 2, 5, 9)]
    + [f"C{number}" for number in (1, 3, 5, 7, 8, 12, 13, 15, 16, 17, 18, 19)]
)
TOLD = re.compile(r"\b([A-Z]\d+)(?: \([a-zA-Z]|: )")  # in a docstring
NAMED = re.compile(r"def test_((?:[a-z]\d+_)+)")


def test_each_report_is_named_by_a_test() -> None:
    found: set[str] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        text = path.read_text()
        found.update(TOLD.findall(text))
        found.update(row.upper() for rows in NAMED.findall(text) for row in rows.strip("_").split("_"))
    assert [row for row in ROWS if row not in found] == []
