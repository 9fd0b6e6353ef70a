"""How a model on its way is shown, on a terminal and in logs."""

import io
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from inference.models import Progress
from inference.requests import Load
from inference.runner_state import RunnerState
from node.local_runners import Down, LocalInstance, OnItsWay, Phase, RunnerSettings, Up, phase_of
from node.progress import CLEAR_LINE, ModelProgress, ProgressLine

SETTINGS = RunnerSettings(context=None, running_max=None, memory_bytes=1, threads=1, blas_cache=Path("/blas"))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def state(status: str, **fields: object) -> RunnerState:
    return RunnerState(runner_id="r", status=status, since=0.0, **fields)  # type: ignore[arg-type]  # fields of several types


@pytest.mark.parametrize(
    ("progress", "runner", "failure", "phase"),
    [
        (None, None, None, OnItsWay("being looked for")),
        (Progress("fetching"), None, None, OnItsWay("being fetched")),
        (Progress("fetching", 34, 100), None, None, OnItsWay("being fetched", 34, 100)),
        (Progress("converting", 1, 2), None, None, OnItsWay("being converted", 1, 2)),
        (Progress("waiting"), None, None, OnItsWay("being prepared by another process")),
        (None, state("idle"), None, OnItsWay("being started")),
        (None, state("loading", done=3, total=4), None, OnItsWay("being loaded", 3, 4)),
        (None, state("warming_up"), None, OnItsWay("warming up")),
        (None, state("ready", load=Load(0, 8, 0, 99)), None, Up(0, 8, 0)),
        (None, state("running", load=Load(3, 8, 7, 99)), None, Up(3, 5, 7)),
        (None, state("failed", reason="It was killed."), None, OnItsWay("being started again after a crash")),
        (None, state("failed", reason="It was killed."), "It was killed too often.", Down("It was killed too often.")),
        (None, state("shutting_down"), None, Down("The runner was stopped.")),
        (Progress("fetching"), None, "There is no such model.", Down("There is no such model.")),
    ],
)
def test_phases(progress: Progress | None, runner: RunnerState | None, failure: str | None, phase: Phase) -> None:
    assert phase_of(progress, runner, failure) == phase


def test_a_share_is_never_above_the_whole() -> None:
    assert OnItsWay("being fetched", 34, 100).text == "being fetched (34 %)"
    assert OnItsWay("being fetched", 120, 100).text == "being fetched (100 %)"
    assert OnItsWay("being fetched", 5, 0).text == "being fetched"


def fetch(instance: LocalInstance, *shares: int) -> None:
    for share in shares:
        instance.progress = Progress("fetching", share, 100)
        for callback in instance.on_change:
            callback()


def test_on_a_terminal_one_line_changes_and_one_is_logged() -> None:
    stream = Terminal()
    instance = LocalInstance("i", "smollm2:135m", SETTINGS, 0.0)
    ModelProgress(instance, ProgressLine(stream))

    with capture_logs() as logged:
        fetch(instance, 0, 20, 40, 60, 80)

    assert stream.getvalue().split(CLEAR_LINE)[-1] == "smollm2:135m is being fetched (80 %)"
    assert "\n" not in stream.getvalue()
    assert [line["event"] for line in logged] == ["smollm2:135m is being fetched (0 %)"]


def test_without_a_terminal_every_quarter_is_logged() -> None:
    stream = io.StringIO()
    instance = LocalInstance("i", "smollm2:135m", SETTINGS, 0.0)
    ModelProgress(instance, ProgressLine(stream))

    with capture_logs() as logged:
        fetch(instance, *range(0, 101, 5))

    assert stream.getvalue() == ""
    shares = [int(line["event"].partition("(")[2].partition(" ")[0]) for line in logged]
    assert shares == [0, 25, 50, 75, 100]


def test_a_log_line_never_lands_in_the_line_that_changes() -> None:
    stream = Terminal()
    line = ProgressLine(stream)
    line.show("50 %")
    line.write("a log line\n")
    line.write("another\n")
    line.clear()

    assert stream.getvalue() == f"{CLEAR_LINE}50 %{CLEAR_LINE}a log line\nanother\n"


def test_a_closed_stream_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()

    assert not ProgressLine(stream).on_terminal


def test_a_terminal_that_goes_away_takes_nothing_with_it() -> None:
    stream = Terminal()
    line = ProgressLine(stream)
    line.show("50 %")
    stream.close()

    line.show("60 %")
    line.clear()


def test_a_name_is_shown_before_the_model_is_there() -> None:
    names = {asked: LocalInstance("i", asked, SETTINGS, 0.0).name for asked in ("SMOLLM2:135M", "org/name", "/a/b/c", "what?")}

    assert names == {"SMOLLM2:135M": "smollm2:135m", "org/name": "org/name", "/a/b/c": "c", "what?": "what?"}
