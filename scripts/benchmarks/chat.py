"""Turns and prefill over HTTP with the real model: how soon a second turn starts, and what a long prompt does to others."""

import http.client
import itertools
import json
import socket
import struct
import threading
import time

from scripts.benchmarks.figures import PAIRS_MIN, median, ratio, report
from scripts.benchmarks.node_process import NodeProcess, running_node, stream_chat, user_message
from scripts.benchmarks.prompts import LONG_ANSWERS, words

MODEL = "smollm2:135m"
CANCEL_AFTER_SECONDS = 1.5  # 2,000 tokens take several seconds here


def second_turn(node: NodeProcess, seed: int) -> tuple[float, float]:
    """Times to first token of a 1,000-token chat's second and first turn, in seconds."""
    messages = user_message("Remember these words: " + words(970, seed))
    body: dict[str, object] = {"model": MODEL, "temperature": 0, "max_tokens": 16}
    first = stream_chat(node.port, {**body, "messages": messages})
    messages = [*messages, {"role": "assistant", "content": first.text}, *user_message("And now say hello.")]
    second = stream_chat(node.port, {**body, "messages": messages})
    return second.first, first.first


def gap_under_prefill(node: NodeProcess, seed: int) -> float:
    """The longest gap of a running stream, in seconds, while a 2,000-token prompt prefills."""
    body: dict[str, object] = {"model": MODEL, "temperature": 0}
    started = threading.Event()
    running = []
    question = user_message(LONG_ANSWERS[seed % len(LONG_ANSWERS)])
    thread = threading.Thread(
        target=lambda: running.append(stream_chat(node.port, {**body, "messages": question, "max_tokens": 200}, started))
    )
    thread.start()
    started.wait()
    long = stream_chat(node.port, {**body, "messages": user_message(words(1970, seed)), "max_tokens": 1})
    thread.join()
    end = min(long.arrivals[0], running[0].arrivals[-1])
    moments = [long.sent, *(moment for moment in running[0].arrivals if long.sent < moment < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(moments))


def cancel_under_prefill(node: NodeProcess, seed: int) -> float:
    """Seconds from a client's leaving in mid-prefill until the only slot serves the next request."""
    body = {"model": MODEL, "stream": True, "max_tokens": 50, "messages": user_message(words(1970, seed))}
    leaving = http.client.HTTPConnection(node.host, node.port, timeout=60)
    leaving.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    time.sleep(CANCEL_AFTER_SECONDS)
    assert leaving.sock is not None
    leaving.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    leaving.close()
    left = time.perf_counter()
    following = http.client.HTTPConnection(node.host, node.port, timeout=60)
    following.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, "messages": user_message("Hi"), "max_tokens": 1}),
        {"content-type": "application/json"},
    )
    response = following.getresponse()
    seconds = time.perf_counter() - left
    assert response.status == 200
    response.read()
    following.close()
    return seconds


def main() -> None:
    """Print the three figures."""
    with running_node("--model", MODEL) as node:
        value, text = ratio([second_turn(node, seed) for seed in range(PAIRS_MIN)])
        report("time to first token, second turn of a 1,000-token chat / first", text, "<= 0.3", reached=value <= 0.3)
        gaps = [gap_under_prefill(node, 100 + seed) for seed in range(PAIRS_MIN)]
        text = median([gap * 1000 for gap in gaps], "ms")
        report("longest gap of a stream while 2,000 tokens prefill", text, "all <= 500 ms", reached=max(gaps) <= 0.5)
    with running_node("--model", MODEL, "--max-running", "1") as node:
        cancels = [cancel_under_prefill(node, 200 + seed) for seed in range(PAIRS_MIN)]
        text = median([seconds * 1000 for seconds in cancels], "ms")
        report("slot free after a cancel in prefill", text, "all <= 1000 ms", reached=max(cancels) <= 1.0)
