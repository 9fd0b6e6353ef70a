"""The commands as their users type them."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.option_values import cluster_key
from node.options import OPTIONS
from tests.e2e.node_process import NODE, SECONDS_MAX, NodeProcess, clean_environment, node
from tests.fake_model import make_fake

# What makes a start slow, and what a short command has no use for.
HEAVY = {
    "aiohttp",
    "asyncio",
    "cryptography",
    "huggingface_hub",
    "libp2p",
    "mlx",
    "numpy",
    "rich",
    "structlog",
    "transformers",
    "trio",
}


def run(directory: Path, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command and what it said."""
    (directory / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [NODE, *arguments],
        stdin=subprocess.DEVNULL if stdin is None else None,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(directory),
        timeout=SECONDS_MAX,
    )


def test_key_prints_a_key_and_nothing_else(tmp_path: Path) -> None:
    keys = [run(tmp_path, "key") for _ in range(2)]

    assert [key.returncode for key in keys] == [0, 0]
    assert keys[0].stdout != keys[1].stdout
    for key in keys:
        assert len(cluster_key(key.stdout.removesuffix("\n"))) * 8 == 256
        assert key.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["strat"], ["no command 'strat'", "did you mean start or status?"]),
        (["zzz"], ["no command 'zzz'", "node --help"]),
        (["start", "--max-wating", "3"], ["no option --max-wating", "--max-waiting"]),
        (["start", "--max-wating=3"], ["no option --max-wating", "--max-waiting"]),
        (["start", "extra"], ["'extra'"]),
        (["start", "--max-waiting"], ["--max-waiting", "expected one argument"]),
        (["start", "--max-waiting", "many"], ["--max-waiting", "'many'"]),
        (["start", "--cluster-key", "abcd"], ["--cluster-key", "`node key`"]),
        (["start", "--api", "0.0.0.0:0"], ["--api", "--api-key"]),
        (["chat", "--temperature", "hot", "hi"], ["--temperature", "'hot'"]),
        (["chat", "--max-tokens", "0", "hi"], ["--max-tokens", "'0'"]),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    done = run(tmp_path, *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert [part for part in parts if part not in done.stderr] == []


def test_no_command_shows_what_there_is(tmp_path: Path) -> None:
    bare, asked = run(tmp_path), run(tmp_path, "--help")

    assert (bare.returncode, asked.returncode) == (2, 0)
    assert bare.stderr == asked.stdout
    assert "node start" in asked.stdout


def test_the_help_of_start_has_every_option(tmp_path: Path) -> None:
    text = run(tmp_path, "start", "--help").stdout

    assert [option.name for option in OPTIONS if f"--{option.name}" not in text] == []
    assert "%%" not in text


@pytest.mark.parametrize("command", [[NODE], [str(Path(NODE).with_name("shoal"))], [sys.executable, "-m", "node"]])
def test_one_program_under_three_names(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, cwd=tmp_path)

    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("arguments", [["key"], ["--help"], ["chat", "hi"], ["status"], ["dump"]])
def test_short_commands_import_little(tmp_path: Path, arguments: list[str]) -> None:
    program = f"import sys, node.cli\ntry:\n    node.cli.main({arguments!r})\nexcept SystemExit:\n    pass\n"
    program += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=clean_environment(tmp_path)
    )

    assert set(done.stderr.split()) & HEAVY == set()


def test_a_fault_in_shoal_is_one_line_and_a_traceback_on_demand(tmp_path: Path) -> None:
    program = "import sys, secrets, node.cli\nsecrets.token_hex = lambda _: 1 / 0\nsys.exit(node.cli.main(sys.argv[1:]))"
    short, long = (
        subprocess.run([sys.executable, "-c", program, *flags, "key"], capture_output=True, text=True, check=False)
        for flags in ([], ["--debug"])
    )

    assert short.returncode == 1
    assert short.stderr == "node: a fault in shoal itself: ZeroDivisionError: division by zero; --debug shows where\n"
    assert "Traceback" in long.stderr


def test_output_that_nobody_reads_any_more_is_no_fault(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"{NODE}" start --help | true; "{NODE}" key >&-'],
        capture_output=True, text=True, check=False, env=clean_environment(tmp_path),
    )  # fmt: skip

    assert done.stderr == ""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    directory = tmp_path_factory.mktemp("chat")
    model = make_fake(directory / "fake", stop_one_in=0, step_seconds=0.005)
    with node(directory, "--model", str(model)) as process:
        assert process.chat(max_tokens=1)[0] == 200
        yield process


def chat(process: NodeProcess, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return run(process.directory, "chat", "--data-dir", str(process.data_dir), "--temperature", "0", *arguments, stdin=stdin)


def answer(process: NodeProcess, text: str, max_tokens: int) -> str:
    content = process.chat(text, max_tokens=max_tokens)[1]["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def test_a_prompt(process: NodeProcess) -> None:
    done = chat(process, "--max-tokens", "12", "good", "day")

    assert (done.returncode, done.stdout) == (0, answer(process, "good day", 12) + "\n")
    assert "cut off" in done.stderr


def test_a_prompt_that_is_piped_in(process: NodeProcess) -> None:
    assert chat(process, "--max-tokens", "3", stdin="good day\n").stdout == answer(process, "good day", 3) + "\n"


def test_json_is_the_completion_document(process: NodeProcess) -> None:
    done = chat(process, "--max-tokens", "3", "--json", "--api", process.url, "good day")

    document = json.loads(done.stdout)
    assert document["object"] == "chat.completion"
    assert document["choices"][0]["message"]["content"] == answer(process, "good day", 3)
    assert done.stderr == ""


def test_what_the_model_is_told_beforehand_counts(process: NodeProcess) -> None:
    plain, told = (chat(process, "--max-tokens", "8", *more, "hi") for more in ([], ["--system", "Be brief."]))

    assert plain.stdout != told.stdout


def test_a_model_that_is_not_served_is_one_sentence(process: NodeProcess) -> None:
    done = chat(process, "--model", "fakes", "hi")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("node: ")
    assert "did you mean 'fake'?" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_empty_prompt_is_wrong_usage(process: NodeProcess) -> None:
    assert chat(process, stdin="  \n").returncode == 2


def test_ctrl_c_ends_it_without_a_word(process: NodeProcess) -> None:
    command = [NODE, "chat", "--data-dir", str(process.data_dir), "hi"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(process.directory),
    ) as talking:
        assert talking.stdout is not None
        assert talking.stderr is not None
        assert talking.stdout.read(1)
        talking.send_signal(signal.SIGINT)
        assert talking.stderr.read() == b""
        assert talking.wait(SECONDS_MAX) == 130


def test_a_session_at_a_terminal(process: NodeProcess) -> None:
    with Terminal(process, "chat", "--data-dir", str(process.data_dir), "--temperature", "0") as terminal:
        terminal.expect("> ")
        terminal.type("first\n")
        terminal.expect("first\r\n")
        terminal.expect(answer(process, "first", 8)[:3])
        terminal.type("\x03")  # Ctrl-C: the answer ends, the session goes on
        terminal.expect("> ")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.wait() == 0


def test_models_are_listed_with_what_is_loaded(process: NodeProcess) -> None:
    directories = ["--data-dir", str(process.data_dir), "--models-dir", str(process.directory / "models")]
    other = make_fake(process.directory / "other", answer_tokens=1)

    pulled = run(process.directory, "pull", str(other), "--json", *directories)
    listed = run(process.directory, "models", "--json", *directories)
    shown = run(process.directory, "models", *directories)

    assert json.loads(pulled.stdout)["name"] == "other"
    loaded = {model["name"]: model["loaded"] for model in json.loads(listed.stdout)["models"]}
    assert loaded == {"fake": True, "other": False}
    assert "other" in shown.stdout
    assert [done.returncode for done in (pulled, listed, shown)] == [0, 0, 0]


def test_a_model_that_cannot_be_pulled_is_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, "pull", "nope", "--models-dir", str(tmp_path))

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("node: There is no model 'nope'")


def test_without_a_node_it_says_how_to_get_one(tmp_path: Path) -> None:
    nowhere = run(tmp_path, "chat", "--data-dir", str(tmp_path), "hi")
    elsewhere = run(tmp_path, "chat", "--api", "http://127.0.0.1:1", "hi")
    nonsense = run(tmp_path, "chat", "--api", "ftp://x", "hi")

    assert [done.returncode for done in (nowhere, elsewhere, nonsense)] == [1, 1, 1]
    assert nowhere.stderr == f"node: no node runs on {tmp_path}: start one with `node start`, or name one with --api URL\n"
    assert elsewhere.stderr == "node: no node answers at http://127.0.0.1:1: start one with `node start`\n"
    assert "ftp://x is no URL" in nonsense.stderr


def test_a_key_is_needed_where_the_node_has_one(tmp_path: Path) -> None:
    model = make_fake(tmp_path / "fake", answer_tokens=3)
    with node(tmp_path, "--model", str(model), "--api-key", "sk-right") as process:
        assert process.url
        common = ["chat", "--data-dir", str(process.data_dir)]
        without, wrong, right = (
            run(tmp_path, *common, *more, "hi") for more in ([], ["--api-key", "sk-wrong"], ["--api-key", "sk-right"])
        )

    assert [done.returncode for done in (without, wrong, right)] == [1, 1, 0]
    assert without.stderr.rstrip().endswith("give --api-key KEY")


class Terminal:
    """A command at a terminal of its own, typed at and read as a person would."""

    def __init__(self, process: NodeProcess, *arguments: str) -> None:
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            os.execve(NODE, [NODE, *arguments], {**clean_environment(process.directory), "TERM": "dumb"})
        self._seen = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def expect(self, text: str) -> None:
        """Read until this text has come."""
        end = time.monotonic() + SECONDS_MAX
        while text not in self._seen:
            assert select.select([self._descriptor], [], [], end - time.monotonic())[0], (
                f"{text!r} did not come: {self._seen!r}"
            )
            self._seen += os.read(self._descriptor, 4096).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def wait(self) -> int:
        """The exit status."""
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)
