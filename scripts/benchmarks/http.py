"""What HTTP costs, with the fake engine: tokens a second over many connections, and the time it adds to the first token."""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import trio

from api.app import serve
from api.settings import ApiSettings
from inference.launcher import launch_runner
from inference.model_store import ModelStore
from inference.requests import ChatPrompt, Request, Sampling, Tokens
from inference.runner_protocol import LoadModel
from inference.runner_state import RunnerProcess
from node import logs
from node.config import read
from node.executors import Executors
from node.local_runners import RunnerSettings, open_local_runners
from node.membership import open_membership
from node.node import Node, NodeSettings
from node.resources import device_memory_bytes
from p2p.identity import load_or_create
from scripts.benchmarks.figures import PAIRS_MIN, median, report
from scripts.benchmarks.node_process import NodeProcess, running_node

CONNECTIONS = 64
TOKENS = 400
# An engine that runs ahead of everybody has its tokens put together on the way; this one makes 64,000 a second at most.
STEP_SECONDS = 0.001
REQUESTS = 20  # whose median is one measurement of the time to first token
LOAD = [sys.executable, "-m", "scripts.benchmarks.http_load"]


def make_model(directory: Path) -> Path:
    """A model of the fake engine that never stops by itself."""
    directory.mkdir(parents=True)
    fake = {"stop_one_in": 0, "running_max": CONNECTIONS, "step_seconds": STEP_SECONDS}
    (directory / "config.json").write_text(json.dumps({"model_type": "fake", "max_position_embeddings": 8192, "fake": fake}))
    return directory


def throughput(node: NodeProcess) -> tuple[float, float]:
    """Events a second over all connections, and microseconds of the node's CPU time for each."""
    process = psutil.Process(node.process.pid)
    before = process.cpu_times()
    output = subprocess.check_output([*LOAD, str(node.port), str(CONNECTIONS), str(TOKENS), "1"], text=True)
    after = process.cpu_times()
    result = json.loads(output)
    if result["events"] != CONNECTIONS * TOKENS:
        raise RuntimeError(f"{result['events']} events came, not one for each of {CONNECTIONS * TOKENS} tokens")
    cpu_seconds = after.user + after.system - before.user - before.system
    return result["events"] / result["seconds"], cpu_seconds / result["events"] * 1e6


async def first_token_direct(node: Node) -> float:
    """Seconds from asking the service to the first token."""
    prompt = ChatPrompt(({"role": "user", "content": "Hello."},))
    request = Request(request_id=uuid.uuid4().hex, prompt=prompt, sampling=Sampling(seed=1), max_tokens=2)
    began = time.perf_counter()
    async with node.generate(None, request) as answer:
        async for event in answer.events:
            if isinstance(event, Tokens):
                break
        seconds = time.perf_counter() - began
        async for _ in answer.events:
            pass
    return seconds


async def first_token_http(port: int) -> float:
    """Seconds from sending the request to its first content, the median of some."""
    done = await trio.run_process([*LOAD, str(port), "1", "2", str(REQUESTS)], capture_stdout=True)
    return float(statistics.median(json.loads(line)["first"][0] for line in done.stdout.splitlines()))


async def added_seconds(directory: Path) -> list[tuple[float, float]]:
    """Pairs of times to first token, through HTTP and straight from the same node's service."""
    options = {"data_dir": str(directory), "models_dir": str(directory / "models"), "model": "none"}
    config = read(options)

    async def launch(command: LoadModel) -> RunnerProcess:
        return await launch_runner(command, environment=os.environ)

    pairs = []
    resolve = ModelStore(config.models_dir, os.environ).resolve
    identity = load_or_create(directory / "identity.key")
    async with (
        open_local_runners(RunnerSettings.of(config), resolve, launch) as runners,
        open_membership(config, identity, time.time()) as membership,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(membership.gossip.run)
        node = Node(
            identity.node_id,
            "bench",
            NodeSettings.of(config, device_memory_bytes(), "", ""),
            facts=membership.gossip,
            runners=runners,
            executors=Executors(),
            nursery=nursery,
        )
        await node.run_model(str(directory / "model")).settled()
        urls = await nursery.start(functools.partial(serve, node, ApiSettings(addresses=(("127.0.0.1", 0),))))
        port = int(urls[0].rpartition(":")[2])
        for _ in range(PAIRS_MIN + 1):
            direct = statistics.median([await first_token_direct(node) for _ in range(REQUESTS)])
            pairs.append((await first_token_http(port), direct))
        nursery.cancel_scope.cancel()
    return pairs[1:]  # the first one warmed up


def main() -> None:
    """Print both figures."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        directory = Path(name)
        model = make_model(directory / "model")
        with running_node("--model", str(model)) as node:
            throughput(node)
            measured = [throughput(node) for _ in range(PAIRS_MIN)]
        rates = [rate for rate, _ in measured]
        text = f"{median(rates, 'tokens/s')}; node {median([cost for _, cost in measured], 'us of CPU a token')}"
        wanted = f">= 20000 tokens/s, one event a token, {CONNECTIONS} connections"
        report("fake engine through HTTP", text, wanted, reached=statistics.median(rates) >= 20_000)
        logs.configure("console", "warning", "bench", sys.stderr)  # as the node above
        pairs = trio.run(added_seconds, directory)
        added = [(http - direct) * 1000 for http, direct in pairs]
        text = f"{median(added, 'ms')}; straight from the service {median([direct * 1000 for _, direct in pairs], 'ms')}"
        report("time to first token that HTTP adds", text, "<= 5 ms", reached=statistics.median(added) <= 5)


if __name__ == "__main__":
    main()
