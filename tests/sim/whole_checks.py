"""What must hold of whole nodes, whatever was asked of them and whatever went wrong. Knows nothing of how that came about."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import trio

from inference.requests import Accepted, Failed, Finished, Prefilled, Tokens
from inference.runner import fake_vocabulary as vocabulary
from inference.runner.fake_engine import FakeSettings
from node.in_flight import recount
from node.records import CANCEL, RANK, TASK, VERDICT, TaskId, Terminal, Verdict
from node.tasks import VERDICT_LINGER_SECONDS_MAX
from p2p.effects import Changed
from p2p.lattice import DEAD
from tests.fake_model import expected_ids, expected_text
from tests.sim.whole_cluster import WholeCluster
from tests.sim.whole_node import WholeNode
from tests.sim.whole_work import Client, Wish

CALM_SECONDS = 3.0  # from the last client's end until nothing is in flight and all hold the same, where nothing went wrong
CALM_SECONDS_MAX = 9.5  # the same after faults that only just ended
COLLECTED_SECONDS_MAX = VERDICT_LINGER_SECONDS_MAX + 15.0  # until nothing is left of any task
LOOK_SECONDS = 1.0
IDLE_LOOK_SECONDS = 0.2
OVERTAKEN_SECONDS_MAX = 1.0  # of who comes just when a place is free, and of late news of who waits where
IDLE_SECONDS_MAX = 1.0  # a home that waits looks by itself each half second, should a pull have been lost


class Broken(AssertionError):
    """A check failed; says which."""


class Watch:
    """Looks on from the beginning: at each change at every node, and at everybody once a second."""

    def __init__(self, cluster: WholeCluster) -> None:
        self.verdicts: dict[TaskId, Verdict] = {}
        self.looks = 0
        self._cluster = cluster
        cluster.on_start.append(self._follow)

    def _follow(self, whole: WholeNode) -> None:
        whole.gossip.on_changed.append(lambda change: self._changed(whole, change))

    def _changed(self, whole: WholeNode, change: Changed) -> None:
        member = whole.gossip.core.replica.members.get(change.node)
        if member is None:
            return
        records = member.namespace.records
        keys = records if change.changes is None else [written.key for written in change.changes]
        for kind, name in keys:
            record = records.get((kind, name))
            if kind == VERDICT and record is not None and isinstance(name, int) and isinstance(record.content, Verdict):
                task = TaskId(member.namespace.generation.nonce, name)
                before = self.verdicts.setdefault(task, record.content)
                if before != record.content:
                    raise Broken(f"the verdict on {task.text} was {before} and is {record.content} at {whole}")

    async def run(self) -> None:
        """For ever."""
        while True:
            for whole in self._cluster.live:
                self.look(whole)
            await trio.sleep(LOOK_SECONDS)

    def look(self, whole: WholeNode) -> None:
        """What holds at every moment."""
        self.looks += 1
        counted = whole.node.view.in_flight.counts
        anew = recount(whole.gossip.core.replica, whole.gossip.believe)
        # Between two calls of the core a suspicion may run out, which no change has told of yet.
        if counted != anew and whole.gossip.core.deadline > trio.current_time():
            raise Broken(f"{whole} counts {dict(counted)} in flight, and there are {dict(anew)}")
        self._check_manners(whole)
        for device in whole.devices.values():
            for runner in device.alive:
                if runner.core is not None and runner.core.load.running > runner.core.info.running_max:
                    raise Broken(f"a runner of {whole} took on {runner.core.load}")

    @staticmethod
    def _check_manners(whole: WholeNode) -> None:
        """All are honest here, so nobody breaks a rule in another's eyes; and nothing raises where a stream is served."""
        edge, gossip, heads = whole.membership.transport.counters, whole.gossip.counters, whole.executors.heads.counters
        if edge.violations or edge.failures or gossip.faults or heads.violations:
            raise Broken(f"{whole} met rules broken: {edge}, {gossip}, {heads}")


class Idle:
    """No place stays free while somebody waits for one. Only where nothing goes wrong: what failed is barred."""

    def __init__(self, cluster: WholeCluster) -> None:
        self._cluster = cluster
        self._since: dict[int, float] = {}  # by runner's identity: it had a place free and somebody waited for it

    async def run(self) -> None:
        """For ever."""
        while True:
            self._look()
            await trio.sleep(IDLE_LOOK_SECONDS)

    def _look(self) -> None:
        waited_for = {model for whole in self._cluster.live for model, line in whole.node.lines.items() if line.level()[0]}
        now = trio.current_time()
        for whole in self._cluster.live:
            for name, device in whole.devices.items():
                for runner in device.alive:
                    load = runner.core.load if runner.core is not None else None
                    if load is None or name not in waited_for or load.running >= load.running_max:
                        self._since.pop(id(runner), None)
                    elif now - self._since.setdefault(id(runner), now) > IDLE_SECONDS_MAX:
                        raise Broken(f"{whole} has places free for {name!r} and somebody waits: {load}")


def check_clients(clients: Iterable[Client], settings: Mapping[str, FakeSettings], cancelled: Iterable[str]) -> None:
    """Each client's request ended once, with what an uninterrupted answer would have been, or a beginning of it."""
    wished = set(cancelled)
    for client in clients:
        try:
            _check_client(client, settings[client.wish.model], wished)
        except AssertionError as error:
            raise Broken(f"{client}: {error}") from error


def _check_client(client: Client, settings: FakeSettings, cancelled: set[str]) -> None:
    assert client.over, "it still waits"
    ends = [event for event in client.events if isinstance(event, Finished | Failed)]
    assert len(ends) <= 1, f"it was told of {len(ends)} ends"
    assert not ends or client.events[-1] is ends[0], "something came after its end"
    assert ends or client.error is not None or client.left or client.home_died, "its answer broke off without an end"
    assert not (client.error is not None and client.events), "an error came after its answer had begun"
    kinds = [type(event) for event in client.events if not isinstance(event, Prefilled)]
    assert Accepted not in kinds[1:], "it was accepted twice"
    if Tokens in kinds:
        assert kinds[0] is Accepted, "tokens came before it was accepted"
    if client.outcome == "cancelled":
        assert client.task_id in cancelled, "nobody had cancelled it"
    _check_answer(client, settings)


def prompt_ids(wish: Wish) -> tuple[int, ...]:
    """As the fake engine's template has it."""
    return (vocabulary.USER, *vocabulary.encode(wish.text), vocabulary.STOP, vocabulary.ASSISTANT)


def _check_answer(client: Client, settings: FakeSettings) -> None:
    """All that it got is the beginning of the right answer, and all of it where that was said."""
    wish = client.wish
    ids, stopped = expected_ids(prompt_ids(wish), wish.sampling, wish.max_tokens, settings)
    got, text = client.token_ids, client.text
    assert got == ids[: len(got)], f"its tokens are {got} and not {ids[: len(got)]}"
    whole = expected_text(ids, wish.stop)
    assert whole.startswith(text), f"its text is {text!r} and not {whole!r}"
    if not client.complete:
        return
    assert text == whole, f"its text is {text!r} and not {whole!r}"
    by_string = whole != expected_text(ids)
    if not by_string and not any(string in whole for string in wish.stop):
        assert len(got) == len(ids), f"it got {len(got)} tokens of {len(ids)}"
        assert client.outcome == ("stop" if stopped else "length")
    end = client.end
    assert isinstance(end, Finished)
    assert end.usage.completion_tokens == len(got)
    assert end.usage.prompt_tokens == len(prompt_ids(wish))


def check_attempts(cluster: WholeCluster) -> None:
    """No runner is given what any runner was given before."""
    given = Counter(request.request_id for device in cluster.devices for request in device.submitted)
    twice = [request_id for request_id, count in given.items() if count > 1]
    if twice:
        raise Broken(f"given to runners more than once: {twice}")


def check_order(clients: Iterable[Client]) -> None:
    """Who waits for a model is served before whoever came later for it, at whatever nodes they wait."""
    served = [client for client in clients if client.token_times]
    for client in served:
        for later in served:
            ahead = client.token_times[0] - later.token_times[0]
            if client.wish.model == later.wish.model and min(later.asked_at - client.asked_at, ahead) > OVERTAKEN_SECONDS_MAX:
                raise Broken(f"{client} came at {client.asked_at:.2f} and was overtaken by {later} of {later.asked_at:.2f}")


_VERDICTS = {
    "stop": Terminal.COMPLETE,
    "length": Terminal.COMPLETE,
    "cancelled": Terminal.CANCELLED,
    "left": Terminal.CANCELLED,
    "timed_out": Terminal.TIMED_OUT,
}


def check_verdicts(clients: Iterable[Client], verdicts: Mapping[TaskId, Verdict]) -> None:
    """What the cluster was told of a task is what its client was."""
    for client in clients:
        task = TaskId.parse(client.task_id)
        verdict = verdicts.get(task) if task is not None else None
        if verdict is None or client.home_died:
            continue
        right = _VERDICTS.get(client.outcome, Terminal.FAILED)
        if verdict.status is not right:
            raise Broken(f"{client} has the verdict {verdict.status.name}")


# When all is over.


def unrest(cluster: WholeCluster) -> list[str]:
    """What is not yet as it must be soon after the last fault and the last client."""
    found = [] if cluster.agree() else ["not all hold the same, and each other for alive"]
    for whole in cluster.live:
        found += [f"{whole.place}: {what}" for what in _unrest(whole)]
    return found


def _unrest(whole: WholeNode) -> Iterator[str]:
    node, executors = whole.node, whole.executors
    counts = node.view.in_flight.counts
    if counts:
        yield f"{dict(counts)} in flight"
    if node.home.running or node.in_flight:
        yield f"{len(node.home.running)} own tasks run, {node.in_flight} in all"
    tasks = list(executors.head.tasks)
    if tasks or executors.head.unanswered.count:
        yield f"{tasks} run for others, {executors.head.unanswered}"
    if node.home.reserved:
        yield f"places are promised: {node.home.reserved}"
    waiting = {model: len(line) for model, line in node.lines.items() if len(line)}
    if waiting:
        yield f"in line: {waiting}"
    for instance in whole.instances.values():
        state = instance.supervisor.state if instance.supervisor is not None else None
        if state is not None and state.load is not None and state.load.running:
            yield f"the supervisor of {instance} has {state.load}"
    for device in whole.devices.values():
        for runner in device.alive:
            if runner.core is not None and not runner.core.idle:
                yield f"a runner still works: {runner.core.load}"


def remains(cluster: WholeCluster) -> list[str]:
    """What is left of tasks that have ended."""
    found = unrest(cluster)
    for whole in cluster.live:
        for member in whole.gossip.core.replica.members.values():
            keys = [key for key in member.namespace.records if key[0] in {TASK, VERDICT, RANK, CANCEL}]
            belief = whole.gossip.believe(member.node)
            if keys and member.current and belief is not None and belief < DEAD:  # what a dead one had is in no view
                found.append(f"{whole.place}: records {keys[:4]} of {len(keys)} of {member.node.hex()[:8]}")
        if whole.executors.submitted or whole.node.home.ended:
            found.append(f"{whole.place}: {len(whole.executors.submitted)} attempts, {len(whole.node.home.ended)} tasks kept")
    return found


async def rest(what: Callable[[WholeCluster], list[str]], cluster: WholeCluster, seconds: float) -> float:
    """Wait until nothing is found; how long that took.

    Raises: Broken.
    """
    began = trio.current_time()
    while found := what(cluster):
        if trio.current_time() - began >= seconds:
            raise Broken(f"{seconds:g} s after the end: {'; '.join(found[:8])}")
        await trio.sleep(0.1)
    return trio.current_time() - began
