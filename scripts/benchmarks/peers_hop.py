"""What it costs to ask a node that does not run the model: to the first token, and in tokens a second."""

import json
import statistics
import subprocess
import sys

from scripts.benchmarks.figures import PAIRS_MIN, interleaved, median, ratio, report
from scripts.benchmarks.node_process import stream_chat, user_message
from scripts.benchmarks.peers_cluster import PeerNode, fake_model, open_peers
from scripts.benchmarks.prompts import LONG_ANSWERS

REAL_MODEL = "smollm2:135m"
STEP_SECONDS = 0.02  # 50 tokens/s a stream, as a model that people use would make
REQUESTS = 20  # whose median is one measurement of the time to first token
ANSWER_TOKENS = 64
FAST_STEP_SECONDS = 0.001
FAST_CONNECTIONS = 16
FAST_TOKENS = 500
LOAD = [sys.executable, "-m", "scripts.benchmarks.http_load"]


def first_token(node: PeerNode) -> float:
    """Milliseconds from sending a request to its first content, the median of some, one after the other."""
    output = subprocess.check_output([*LOAD, str(node.port), "1", "2", str(REQUESTS)], text=True)
    return float(statistics.median(json.loads(line)["first"][0] for line in output.splitlines())) * 1e3


def fast_rate(node: PeerNode) -> float:
    """Tokens a second over several streams of an engine that makes more than a node passes on."""
    output = subprocess.check_output([*LOAD, str(node.port), str(FAST_CONNECTIONS), str(FAST_TOKENS), "1"], text=True)
    result = json.loads(output)
    return float(FAST_CONNECTIONS * FAST_TOKENS / result["seconds"])


def stream_rate(node: PeerNode, question: str) -> float:
    """Tokens a second of one stream, from its first token to its last."""
    body: dict[str, object] = {"model": REAL_MODEL, "messages": user_message(question), "temperature": 0}
    answer = stream_chat(node.port, {**body, "max_tokens": ANSWER_TOKENS})
    return (ANSWER_TOKENS - 1) / (answer.arrivals[-1] - answer.arrivals[0])


def paced() -> None:
    """The first token, with the fake engine at a model's pace."""
    with open_peers() as peers:
        model = fake_model(peers.directory / "model", step_seconds=STEP_SECONDS)
        executor, other = peers.start("--model", str(model)), peers.start()
        peers.wait_converged(instances=1)
        first_token(other)
        first_token(executor)
        pairs = interleaved(lambda: first_token(other), lambda: first_token(executor))
    added = [hop - direct for hop, direct in pairs]
    text = f"{median(added, 'ms')}; at the executor's node {median([direct for _, direct in pairs], 'ms')}"
    report("time to first token that one more hop adds", text, "<= 10 ms", reached=statistics.median(added) <= 10)


def real() -> None:
    """The rate of one stream, with the real model."""
    with open_peers() as peers:
        executor, other = peers.start("--model", REAL_MODEL), peers.start()
        peers.wait_converged(instances=1)
        stream_rate(executor, LONG_ANSWERS[0])
        pairs = []
        for number in range(PAIRS_MIN):
            question = LONG_ANSWERS[number % len(LONG_ANSWERS)]
            pairs.append((stream_rate(other, question), stream_rate(executor, question)))
    value, text = ratio(pairs)
    rates = median([direct for _, direct in pairs], "tokens/s")
    report("tokens a second through one more hop / without", f"{text}; without {rates}", ">= 0.95", reached=value >= 0.95)


def fast() -> None:
    """What a whole node passes on where the engine is no limit."""
    with open_peers() as peers:
        model = fake_model(peers.directory / "model", step_seconds=FAST_STEP_SECONDS)
        executor, other = peers.start("--model", str(model)), peers.start()
        peers.wait_converged(instances=1)
        fast_rate(other)
        pairs = interleaved(lambda: fast_rate(other), lambda: fast_rate(executor))
    _, text = ratio(pairs)
    made = f"of {FAST_CONNECTIONS / FAST_STEP_SECONDS:.0f} tokens/s made"
    hop, direct = (median(rates, "tokens/s") for rates in zip(*pairs, strict=True))
    print(f"     {made}, with the fake engine: {text}; through the hop {hop}, without {direct}", flush=True)


def main() -> None:
    """Print all figures."""
    paced()
    real()
    fast()


if __name__ == "__main__":
    main()
