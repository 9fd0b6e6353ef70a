"""What is logged reaches stderr in the chosen form, bound to the node."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from node import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raising = root.handlers, root.level, logging.raiseExceptions
    yield
    root.handlers, root.level, logging.raiseExceptions = handlers, level, raising
    structlog.reset_defaults()


def test_json_lines_are_for_machines() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", "12D3KooWabcdefgh", stream)

    structlog.get_logger().info("runner ready", runner="r1")
    structlog.get_logger().debug("not shown")
    logging.getLogger("some.library").warning("careful with %s", "that")

    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["level"], line["node"]) for line in lines] == [
        ("runner ready", "info", "12D3KooWabcdefgh"),
        ("careful with that", "warning", "12D3KooWabcdefgh"),
    ]
    assert lines[0]["runner"] == "r1"
    assert lines[0]["timestamp"].endswith("Z")


def test_console_lines_are_for_people() -> None:
    stream = io.StringIO()
    logs.configure("console", "debug", "12D3KooWabcdefgh", stream)

    structlog.get_logger().debug("runner ready", runner="r1")

    line = stream.getvalue()
    assert "runner ready" in line
    assert "runner=r1" in line
    assert "node=abcdefgh" in line
    assert "\x1b" not in line


def test_an_exception_is_one_json_line() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", "12D3KooW", stream)

    try:
        1 / 0  # noqa: B018 - it is to raise
    except ZeroDivisionError:
        structlog.get_logger().exception("our mistake")

    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["exception"][0]["exc_type"] == "ZeroDivisionError"


def test_a_stderr_that_is_gone_stops_nothing() -> None:
    stream = io.StringIO()
    logs.configure("console", "info", "12D3KooW", stream)
    stream.close()

    structlog.get_logger().info("into the void")
