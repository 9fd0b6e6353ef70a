"""`node start` as a real process: up, down, and all that may keep it from being either."""

import json
import os
import resource
import signal
import socket
import stat
import subprocess
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest

from p2p.ids import public_key_of
from tests.e2e.node_process import NODE, SECONDS_MAX, clean_environment, left_running, node, text_of
from tests.fake_model import make_fake


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model that answers at once."""
    return str(make_fake(tmp_path / "quick", answer_tokens=5))


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """A model whose answers go on until somebody stops them."""
    return str(make_fake(tmp_path / "endless", stop_one_in=0, step_seconds=0.02))


def refused(directory: Path, *options: str, status: int = 1) -> str:
    """The one sentence of a node that can't start."""
    with node(directory, *options) as process:
        assert process.wait() == status, process.log
        assert not process.node_json.exists()
        assert left_running(directory) == []
        said = [line for line in process.log if line.startswith("node: ")]
        assert said == process.log[-1:]
        assert not any("Traceback" in line for line in process.log)
    return said[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_is_up_serves_and_leaves_nothing(tmp_path: Path, model: str, number: signal.Signals) -> None:
    with node(tmp_path, "--model", model) as process:
        url = process.url
        process.wait_for("p2p ", log=False)
        ready, api, p2p = process.lines
        node_id = ready.removeprefix("node ").removesuffix(" ready")
        public_key_of(node_id)
        assert api == f"api {url}"
        address = p2p.removeprefix("p2p ")
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert address.endswith(f"/p2p/{node_id}")
        file = {"pid": process.pid, "node_id": node_id, "api": url, "p2p": [address]}
        assert json.loads(process.node_json.read_text()) == file
        assert process.request("GET", "/healthz")[0] == 200
        status, document = process.chat()
        assert (status, document["usage"]["completion_tokens"]) == (200, 5)
        assert process.request("GET", "/readyz")[0] == 200
        (runner,) = process.runners()
        memory = psutil.Process(process.pid).memory_info().rss

        os.killpg(process.pid, number)  # as a terminal does
        assert process.wait() == 0
        assert not runner.is_running()
        assert not process.node_json.exists()
        assert left_running(tmp_path) == []
        assert len(process.lines) == 3
        assert memory < 200 << 20
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "data" / "identity.pem").stat().st_mode) == 0o600


def test_the_same_data_directory_is_the_same_node(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        with node(tmp_path, "--model", "none", "--api", "none") as process:
            ids.append(process.wait_for("ready", log=False).split()[1])
            assert json.loads(process.node_json.read_text())["api"] is None
            assert process.stop() == 0
            assert len(process.lines) == 2
    assert ids[0] == ids[1]


def test_without_a_model_it_is_up_but_not_ready(tmp_path: Path) -> None:
    with node(tmp_path, "--max-memory", "0") as process:
        status, _, body = process.request("GET", "/readyz")
        assert (status, b"No model" in body) == (503, True)
        status, document = process.chat()
        assert (status, document["error"]["code"]) == (503, "no_route")
        assert process.runners() == []
        assert process.stop() == 0


def test_a_taken_port_is_one_sentence(tmp_path: Path, model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refused(tmp_path, "--model", model, "--api", f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in sentence
    assert "in use" in sentence


def test_a_locked_data_directory_is_one_sentence_and_the_first_node_goes_on(tmp_path: Path, model: str) -> None:
    with node(tmp_path, "--model", model) as first:
        assert first.url
        second = subprocess.run(
            [NODE, "start", "--data-dir", str(first.data_dir), "--api", "127.0.0.1:0", "--model", model],
            capture_output=True, text=True, check=False, env=clean_environment(tmp_path), timeout=SECONDS_MAX,
        )  # fmt: skip
        assert second.returncode == 1
        assert second.stdout == ""
        assert str(first.data_dir) in second.stderr
        assert str(first.pid) in second.stderr
        assert first.node_json.exists()
        assert first.chat()[0] == 200
        assert first.stop() == 0


@pytest.mark.parametrize("name", ["nope", "./no/such/directory", "no-such-file.gguf"])
def test_a_model_that_does_not_exist_is_one_sentence(tmp_path: Path, name: str) -> None:
    assert Path(name).name in refused(tmp_path, "--model", name)


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    broken = make_fake(tmp_path / "broken", load_error="The weights make no sense.")

    assert refused(tmp_path, "--model", str(broken)) == "node: The weights make no sense."


def test_a_model_that_crashes_its_runner_again_and_again_is_one_sentence(tmp_path: Path) -> None:
    faults = [{"kind": "abort", "at": "loading"}]
    deadly = make_fake(tmp_path / "deadly", faults=faults)

    assert "SIGABRT" in refused(tmp_path, "--model", str(deadly))


def test_a_data_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path, model: str) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "below"

    sentence = refused(tmp_path, "--model", model, "--data-dir", str(directory))

    assert sentence == f"node: the data directory {directory} can't be written: Not a directory"


def test_a_models_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path, model: str) -> None:
    (tmp_path / "file").touch()

    assert str(tmp_path / "file") in refused(tmp_path, "--model", model, "--models-dir", str(tmp_path / "file" / "below"))


def test_a_disk_that_takes_nothing_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [NODE, "start", "--data-dir", str(tmp_path / "data"), "--model", "none", "--api", "127.0.0.1:0"],
        capture_output=True, text=True, check=False, env=clean_environment(tmp_path), timeout=SECONDS_MAX,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"node: the data directory {tmp_path / 'data'} can't be written: File too large\n"


def test_a_damaged_identity_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "identity.pem").write_text("nonsense")

    assert str(tmp_path / "data" / "identity.pem") in refused(tmp_path, "--model", "none")


def test_a_bad_configuration_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.toml").write_text("max-wating = 3\n")

    assert "'max-wating'" in refused(tmp_path, "--model", "none", status=2)


def test_the_file_and_the_environment_count(tmp_path: Path, model: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.toml").write_text(f'model = "{model}"\nalias = ["gpt-4o=default"]\n')

    with node(tmp_path, environ={"SHOAL_CONTEXT": "64"}) as process:
        assert process.chat(model="gpt-4o")[0] == 200
        status, document = process.chat("x" * 100)
        assert (status, document["error"]["code"]) == (400, "context_length_exceeded")


def test_what_runs_may_end_and_new_work_is_refused(tmp_path: Path) -> None:
    slow = make_fake(tmp_path / "slow", answer_tokens=60, step_seconds=0.05)
    with node(tmp_path, "--model", str(slow)) as process, process.stream() as events:
        first = next(events)
        process.signal(signal.SIGTERM)
        process.wait_for("stopping")
        status, document = process.chat()
        rest = list(events)

        assert (status, document["error"]["code"]) == (503, "no_route")
        assert rest[-1] is None
        assert rest[-2] is not None
        assert rest[-2]["choices"][0]["finish_reason"] == "stop"
        assert len(text_of([first, *rest])) > 60 / 4
        assert process.wait() == 0
        assert left_running(tmp_path) == []


def test_no_longer_than_the_drain_timeout(tmp_path: Path, endless: str) -> None:
    with node(tmp_path, "--model", endless, "--drain-timeout", "200ms") as process, process.stream() as events:
        next(events)
        process.signal(signal.SIGTERM)
        rest = list(events)

        assert rest[-1] is None
        assert rest[-2] is not None
        assert rest[-2]["error"]["code"] in {"runner_stopped", "node_stopping"}
        assert process.wait() == 0
        assert not process.node_json.exists()


def test_a_second_wish_stops_at_once(tmp_path: Path, endless: str) -> None:
    with node(tmp_path, "--model", endless) as process, process.stream() as events:
        next(events)
        process.signal(signal.SIGINT)
        process.wait_for("stopping")
        process.signal(signal.SIGINT)

        assert process.wait() == 0
        assert not process.node_json.exists()
        assert left_running(tmp_path) == []
        assert list(events)[-1] is None


def test_it_can_be_stopped_while_a_model_is_loaded(tmp_path: Path) -> None:
    slow = make_fake(tmp_path / "slow", load_seconds=600.0)
    with node(tmp_path, "--model", str(slow)) as process:
        process.wait_for("is being loaded")
        (runner,) = process.runners()

        assert process.stop() == 0
        assert not runner.is_running()
        assert not process.node_json.exists()


def test_it_can_be_stopped_while_a_model_is_fetched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a hub that takes connections and says nothing
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with node(tmp_path, "--model", "org/name", environ=environ) as process:
            silent.settimeout(SECONDS_MAX)
            connection, _ = silent.accept()
            with connection:
                assert process.stop() == 0
            assert left_running(tmp_path) == []


def test_runners_end_with_a_node_that_is_killed_and_the_next_one_takes_over(tmp_path: Path, endless: str) -> None:
    with node(tmp_path, "--model", endless) as process, process.stream() as events:
        next(events)
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert left_running(tmp_path) == []
        assert process.node_json.exists()

    with node(tmp_path, "--model", endless) as process:
        assert process.chat(max_tokens=3)[0] == 200
        assert json.loads(process.node_json.read_text())["pid"] == process.pid
        assert process.stop() == 0


def test_a_killed_runner_is_an_error_event_and_the_next_request_has_a_new_one(tmp_path: Path, endless: str) -> None:
    with node(tmp_path, "--model", endless) as process:
        with process.stream() as events:
            next(events)
            (runner,) = process.runners()
            runner.kill()
            rest = list(events)
        assert rest[-1] is None
        assert rest[-2] is not None
        assert rest[-2]["error"]["code"] == "runner_crashed"

        assert process.chat(max_tokens=3)[0] == 200
        (successor,) = process.runners()
        assert successor.pid != runner.pid
        assert process.stop() == 0


def test_closed_standard_streams_do_no_harm(tmp_path: Path, model: str) -> None:
    (tmp_path / "tmp").mkdir()
    script = f'exec "{NODE}" start --data-dir "{tmp_path}/data" --api 127.0.0.1:0 --model "{model}" --models-dir "{tmp_path}/m"'
    process = subprocess.Popen(
        ["sh", "-c", f"{script} <&- >&-"], stderr=subprocess.PIPE, text=True, env=clean_environment(tmp_path)
    )
    try:
        assert process.stderr is not None
        with process.stderr as log:
            up = next(line for line in log if "is ready" in line)
            assert up
            process.terminate()
            assert "Traceback" not in log.read()
        assert process.wait(SECONDS_MAX) == 0
    finally:
        process.kill()
        process.wait()


def test_a_log_for_machines_says_nothing_of_what_clients_said(tmp_path: Path, model: str) -> None:
    with node(tmp_path, "--model", model, "--log-format", "json") as process:
        process.chat("a secret prompt")
        process.chat("a secret prompt", max_tokens=10**7)
        assert process.stop() == 0
    lines = [json.loads(line) for line in process.log]
    assert {line["node"] for line in lines} == {process.lines[0].split()[1]}
    assert "secret" not in "".join(process.log)


def test_more_requests_than_may_wait_are_turned_away(tmp_path: Path, endless: str) -> None:
    options = ("--max-running", "1", "--max-waiting", "1")
    with node(tmp_path, "--model", endless, *options) as process, ThreadPoolExecutor(2) as others:
        with process.stream() as events:
            next(events)
            asked = {others.submit(process.chat, max_tokens=2) for _ in range(2)}
            refused, waiting = wait(asked, SECONDS_MAX, FIRST_COMPLETED)
            assert [request.result()[0] for request in refused] == [429]
            assert len(waiting) == 1
        assert [request.result(SECONDS_MAX)[0] for request in waiting] == [200]
        assert process.stop() == 0
