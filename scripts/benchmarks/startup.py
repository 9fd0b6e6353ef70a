"""How soon a started node answers, and how small it is beside its runner."""

import time

from scripts.benchmarks.figures import PAIRS_MIN, median, report
from scripts.benchmarks.node_process import running_node, stream_chat, user_message

MODEL = "smollm2:135m"


def main() -> None:
    """Print seconds from launch to the first token, the model being on disk, and the node's resident memory after chats."""
    seconds = []
    memory = []
    for number in range(PAIRS_MIN + 1):
        with running_node("--model", MODEL, wait_ready=False) as node:
            stream_chat(node.port, {"model": MODEL, "messages": user_message("Hi"), "max_tokens": 1})
            seconds.append(time.perf_counter() - node.started)
            stream_chat(node.port, {"model": MODEL, "messages": user_message("Tell me a story."), "max_tokens": 64})
            memory.append(node.rss_bytes / 1e6)
        if number == 0:  # may have fetched and converted the model
            seconds.clear()
    report("start to first token, model on disk", median(seconds, "s"), "all < 10 s", reached=max(seconds) < 10)
    report("node process", median(memory, "MB"), "all < 200 MB", reached=max(memory) < 200)
