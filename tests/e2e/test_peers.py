"""Several real nodes: any of them answers, all of them agree, and none is needed by the others' requests."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2p.cluster_key import new_key
from tests.e2e.node_process import NODE, NodeProcess, clean_environment, text_of
from tests.e2e.peer_processes import alive, cluster, node_id, quiet, state, until
from tests.fake_model import make_fake

ROUTE_ONLY = ("--model", "none")


@pytest.fixture
def quick(tmp_path: Path) -> str:
    """A model that answers at once."""
    return str(make_fake(tmp_path / "quick", answer_tokens=5))


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """A model whose answers take their time, and go on until somebody stops them."""
    return str(make_fake(tmp_path / "slow", answer_tokens=None, stop_one_in=0, step_seconds=0.01))


def run(node: NodeProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of `node` beside a running node."""
    environ = clean_environment(node.directory)
    return subprocess.run([NODE, *arguments], capture_output=True, text=True, env=environ, timeout=60, check=False)


def test_each_of_three_answers_alike(tmp_path: Path, quick: str) -> None:
    with cluster(tmp_path, ("--model", quick), ROUTE_ONLY, ROUTE_ONLY) as nodes:
        until(lambda: all(node.request("GET", "/readyz")[0] == 200 for node in nodes))
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        answers = []
        for node in nodes:
            status, headers, data = node.request("POST", "/v1/chat/completions", body)
            assert status == 200, data
            assert headers["x-shoal-accepted-by"] == node_id(node)
            assert headers["x-shoal-executed-by"] == node_id(nodes[0])
            answers.append(json.loads(data)["choices"])
        assert answers[0] == answers[1] == answers[2]
        models = [json.loads(node.request("GET", "/v1/models")[2])["data"] for node in nodes]
        assert len(models[0]) == 1
        assert models[0] == models[1] == models[2]

        until(lambda: quiet(nodes))
        assert len(json.loads(run(nodes[1], "status", "--json", "--api", nodes[1].url).stdout)["nodes"]) == 3
        for other in nodes[1:]:
            compared = run(nodes[0], "dump", "--api", nodes[0].url, "--diff", other.url)
            assert compared.returncode == 0, compared.stdout + compared.stderr


def test_the_death_of_a_bystander_changes_nothing(tmp_path: Path, slow: str) -> None:
    """A4 (exo#2266)."""
    with cluster(tmp_path, ("--model", slow), ROUTE_ONLY, ROUTE_ONLY) as (executor, home, bystander):
        whole = executor.chat(max_tokens=300)[1]["choices"][0]["message"]["content"]
        with home.stream(max_tokens=300) as stream:
            events = [next(stream) for _ in range(50)]
            bystander.process.kill()
            events += list(stream)
        assert text_of(events) == whole
        assert events[-1] is None
        until(lambda: alive(home) == alive(executor) == {node_id(home), node_id(executor)})
        until(lambda: quiet([home, executor]))


@pytest.mark.parametrize("what", ["node", "runner"])
def test_an_answer_goes_on_elsewhere_when_its_executor_dies(tmp_path: Path, slow: str, what: str) -> None:
    with cluster(tmp_path, ("--model", slow), ("--model", slow), ROUTE_ONLY) as (one, other, home):
        until(lambda: len([i for i in state(home)["instances"] if i["status"] == "ready"]) == 2)
        whole = one.chat(max_tokens=300)[1]["choices"][0]["message"]["content"]
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "stream": True, "max_tokens": 300}
        with home.open("POST", "/v1/chat/completions", body) as response:
            executor = one if response.headers["x-shoal-executed-by"] == node_id(one) else other
            lines = [response.readline() for _ in range(50)]
            if what == "node":
                executor.process.kill()
            else:
                os.kill(executor.runners()[0].pid, signal.SIGKILL)
            lines += list(response)
        data = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
        assert data[-1] == b"[DONE]"
        events = [json.loads(item) for item in data[:-1]]
        assert text_of([event for event in events if event]) == whole
        until(lambda: not any(state(home)["in_flight"].values()))


def test_a_third_node_cancels_a_task(tmp_path: Path, slow: str) -> None:
    with cluster(tmp_path, ("--model", slow), ROUTE_ONLY, ROUTE_ONLY) as (executor, home, third):
        until(lambda: home.request("GET", "/readyz")[0] == 200)
        with home.stream(max_tokens=5000) as stream:
            events = [next(stream)]
            until(lambda: state(third)["tasks"])
            task_id = state(third)["tasks"][0]["task_id"]
            assert third.request("POST", f"/cluster/tasks/{task_id}/cancel")[0] == 200
            events += list(stream)
        until(lambda: quiet([executor, home, third]))
        task = json.loads(third.request("GET", f"/cluster/tasks/{task_id}")[2])
        assert task["status"] == "cancelled"
        assert executor.chat(max_tokens=3)[0] == 200  # the place is free


def test_a_crowd_at_one_door_is_spread_over_equal_nodes(tmp_path: Path, slow: str) -> None:
    with cluster(tmp_path, ("--model", slow), ("--model", slow)) as (one, other):
        until(lambda: len([i for i in state(one)["instances"] if i["status"] == "ready"]) == 2)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}

        def ask(_number: int) -> str:
            status, headers, _ = one.request("POST", "/v1/chat/completions", body)
            assert status == 200
            return headers["x-shoal-executed-by"]

        with ThreadPoolExecutor(20) as pool:
            executors = list(pool.map(ask, range(20)))
        assert 8 <= executors.count(node_id(one)) <= 12
        assert executors.count(node_id(one)) + executors.count(node_id(other)) == 20


@pytest.fixture
def namespaces() -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces joined by a cable; what runs a command inside each."""
    names = [f"shoal-test-{os.getpid()}-{end}" for end in "ab"]
    ip = shutil.which("ip") or "ip"

    def do(*arguments: str) -> int:
        return subprocess.run([ip, *arguments], capture_output=True, check=False).returncode

    try:
        made = [do("netns", "add", name) for name in names]
        made.append(do("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1]))
        for number, name in enumerate(names, 1):
            made.append(do("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable"))
            made += [do("-n", name, "link", "set", device, "up") for device in ("cable", "lo")]
        if any(made):
            pytest.skip("making network namespaces is not allowed here")
        yield [ip, "netns", "exec", names[0]], [ip, "netns", "exec", names[1]]
    finally:
        for name in names:
            do("netns", "del", name)


def test_nodes_on_one_cable_find_each_other_with_nothing_but_the_key(
    tmp_path: Path, namespaces: tuple[list[str], list[str]]
) -> None:
    key = tmp_path / "cluster.key"
    key.write_text(new_key() + "\n")
    nodes = []
    try:
        for number, inside in enumerate(namespaces, 1):
            options = ["--cluster-key-file", str(key), "--model", "none", "--name", f"n{number}"]
            nodes.append(NodeProcess(tmp_path / f"n{number}", *options, inside=inside))
        ids = [node_id(node) for node in nodes]

        def listed(number: int) -> set[str]:
            command = [*namespaces[number], NODE, "status", "--json", "--api", nodes[number].url]
            done = subprocess.run(command, capture_output=True, env=clean_environment(nodes[number].directory), check=True)
            return {member["node_id"] for member in json.loads(done.stdout)["nodes"] if member["status"] == "alive"}

        until(lambda: listed(0) == listed(1) == set(ids))
    finally:
        for node in nodes:
            node.destroy()
