"""Where requests go: a conversation back to the replica that holds its beginning, all others evenly to all."""

import concurrent.futures
from collections import Counter

from scripts.benchmarks.figures import PAIRS_MIN, ratio, report
from scripts.benchmarks.node_process import Streamed, stream_chat, user_message
from scripts.benchmarks.peers_cluster import PeerNode, Peers, fake_model, open_peers
from scripts.benchmarks.prompts import words

REAL_MODEL = "smollm2:135m"
REPLICAS = 3
TURNS = 10
LONG_CHATS = 3  # that go on for all turns; the others have two
FIRST_WORDS = 250  # of a conversation
TURN_TOKENS = 4  # of each answer
REQUESTS = 20
PATIENT_ROUNDS = 3  # of independent chats, one after the other
SPLIT_MIN, SPLIT_MAX = 4, 10  # of 20 at each of three
HALF_MIN, HALF_MAX = 8, 12  # of 20 at each of two
HALF_ROUNDS = 20
STEP_SECONDS = 0.02
HALF_TOKENS = 50  # a second, so that all are in flight at once


class Chat:
    """A conversation at one node."""

    def __init__(self, node: PeerNode, seed: int) -> None:
        self.turns: list[Streamed] = []
        self._node = node
        self._messages = user_message("Remember these words: " + words(FIRST_WORDS, seed))

    def turn(self) -> Streamed:
        """The next question and its answer."""
        body: dict[str, object] = {"messages": self._messages, "temperature": 0, "max_tokens": TURN_TOKENS}
        answer = stream_chat(self._node.port, {"model": REAL_MODEL, **body})
        self.turns.append(answer)
        said = {"role": "assistant", "content": answer.text}
        self._messages = [*self._messages, said, *user_message(f"And what is word {len(self.turns)}?")]
        return answer


def conversations(node: PeerNode, lone: PeerNode) -> None:
    """Ten turns among three replicas, whose second one is as quick as at a node by itself."""
    pairs, executors, held = [], [], ""
    for seed in range(PAIRS_MIN):
        chat, alone = Chat(node, seed), Chat(lone, seed)
        chat.turn()
        alone.turn()
        pairs.append((chat.turn().first, alone.turn().first))
        while seed < LONG_CHATS and len(chat.turns) < TURNS:
            chat.turn()
        held = saved(chat)
        executors.append(Counter(answer.executed_by for answer in chat.turns))
    most = ", ".join(f"{max(counts.values())} of {counts.total()}" for counts in executors)
    used = len({executed_by for counts in executors for executed_by in counts})
    text = f"turns at one of them: {most}; {used} had one of these chats"
    report(f"a chat among {REPLICAS} idle replicas", text, "all", reached=all(len(counts) == 1 for counts in executors))
    value, text = ratio(pairs)
    text = f"{text}; {held}"
    report("time to first token of a second turn, by that of one node", text, "<= 1.2", reached=value <= 1.2)


def saved(chat: Chat) -> str:
    """What it is worth that the beginning is held, in one chat."""
    first, second = (answer.first * 1e3 for answer in chat.turns[:2])
    return f"in the last of them {second:.0f} ms, after {first:.0f} ms of its first turn"


def ask(node: PeerNode, body: dict[str, object], seed: int) -> str:
    """Ask something of which nothing is held anywhere; who ran it."""
    return stream_chat(node.port, {**body, "messages": user_message(words(30, 1000 + seed))}).executed_by


def split(node: PeerNode, body: dict[str, object], first: int, *, at_once: bool) -> list[int]:
    """How many of 20 requests each executor got."""
    with concurrent.futures.ThreadPoolExecutor(REQUESTS if at_once else 1) as pool:
        executors = pool.map(lambda number: ask(node, body, first + number), range(REQUESTS))
        return sorted(Counter(executors).values())


def independent(node: PeerNode) -> None:
    """Chats that have nothing to do with each other, among three replicas."""
    body: dict[str, object] = {"model": REAL_MODEL, "temperature": 0, "max_tokens": 4}
    for at_once, rounds in ((True, PAIRS_MIN), (False, PATIENT_ROUNDS)):
        splits = [split(node, body, REQUESTS * (number + 100 * at_once), at_once=at_once) for number in range(rounds)]
        even = all(len(counts) == REPLICAS and SPLIT_MIN <= counts[0] <= counts[-1] <= SPLIT_MAX for counts in splits)
        name = f"{REQUESTS} independent chats {'at once' if at_once else 'one after the other'}, {REPLICAS} replicas"
        report(
            name, "; ".join("-".join(map(str, counts)) for counts in splits), f"{SPLIT_MIN} to {SPLIT_MAX} each", reached=even
        )


def replicas() -> None:
    """Three nodes with the real model, and one by itself."""
    model = ("--model", REAL_MODEL)
    with open_peers() as peers, open_peers() as others:
        node = start_replicas(peers, model, REPLICAS)
        lone = start_replicas(others, model, 1)
        for running in (*peers.nodes, lone):
            ask(running, {"model": REAL_MODEL, "max_tokens": 2}, -1)
        conversations(node, lone)
        others.stop()
        independent(node)


def start_replicas(peers: Peers, model: tuple[str, str], count: int) -> PeerNode:
    """So many nodes that run a model, once all know so; the first of them."""
    peers.start_all(*[model] * count)
    peers.wait_converged(instances=count)
    return peers.nodes[0]


def halves() -> None:
    """Two equal nodes, asked at one."""
    with open_peers() as peers:
        path = fake_model(peers.directory / "model", step_seconds=STEP_SECONDS)
        node = start_replicas(peers, ("--model", str(path)), 2)
        body: dict[str, object] = {"max_tokens": HALF_TOKENS}
        splits = [split(node, body, REQUESTS * number, at_once=True) for number in range(HALF_ROUNDS)]
    spread = Counter("-".join(map(str, counts)) for counts in splits)
    text = ", ".join(f"{counts} {times} times" for counts, times in spread.most_common())
    even = all(len(counts) == 2 and HALF_MIN <= counts[0] <= counts[-1] <= HALF_MAX for counts in splits)
    report(f"{REQUESTS} requests at once at one of two equal nodes", text, f"{HALF_MIN} to {HALF_MAX} each", reached=even)


def main() -> None:
    """Print all figures."""
    halves()
    replicas()


if __name__ == "__main__":
    main()
