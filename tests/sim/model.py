"""A few cores, a bag of every frame they ever sent, and anything that may happen to them, one step at a time.

No clock runs here and nothing is timed: which frame arrives next, how often and whether at all is the caller's choice, and so
is everything else. Hypothesis chooses in the stateful test, a seed in the schedules. After each step what changed is held
against the oracle.
"""

from collections import Counter

from node.records import (
    CANCEL,
    RANK,
    SCHEMA,
    TASK,
    VERDICT,
    Executor,
    RankPhase,
    RankReport,
    TaskHeader,
    TaskId,
    Terminal,
    Verdict,
)
from node.tasks import (
    HomeSight,
    Outcomes,
    Status,
    Task,
    canceller_collects,
    executor_aborts,
    executor_collects,
    fold,
    home_collects,
    is_done,
    settle,
    status,
)
from p2p.core import Core
from p2p.effects import Chance, Changed, Clash, Close, Effect, Renewed, Send
from p2p.lattice import DEAD, SUSPECT, Generation
from p2p.sync_wire import Key, Name
from tests.sim.oracle import Broken, Oracle, whole

KIND = 200  # of records that are only written and read; no node knows it
CLUSTER = bytes(16)
BAG_MAX = 4000

Work = tuple[TaskId, int, int, int]  # task, attempt, rank, version of the home at submission


class Place:
    """One node of the model with its executor and its home."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.counter = 0
        self.boots = 0
        self.core: Core
        self.outcomes: dict[int, Outcomes] = {}
        self.work: dict[Work, RankPhase] = {}
        self.open: dict[int, bool] = {}  # numbers of this home's tasks -> whether timed out
        self.number = 0


class Model:
    """The cluster as a state machine; each method is one step."""

    def __init__(self, size: int, chance: Chance) -> None:
        self.chance = chance
        self.oracle = Oracle()
        self.counts: Counter[str] = Counter()
        self.bag: list[tuple[int, int, bytes]] = []  # to, from, body
        self.fresh: list[int] = []  # numbers of frames that never arrived
        self.submissions: list[tuple[int, Work]] = []
        self.truth: dict[tuple[int, int, int, int], RankPhase] = {}  # of home's nonce, number, attempt, rank
        self.nonces = 0
        self.names = [bytes([17 * place]) + bytes(14) + bytes([place]) for place in range(size)]
        self.by_name = {name: place for place, name in enumerate(self.names)}
        self.by_nonce: dict[int, int] = {}
        self.places = [Place(place) for place in range(size)]
        for place in range(size):
            self._boot(place)
        for place in range(size):
            self._connect(place, range(place))

    # Faults.

    def restart(self, place: int, *, disk: bool) -> None:
        """The process ends and a new one starts, perhaps without what the old one knew."""
        self.counts["restart" if disk else "lost disk"] += 1
        self.oracle.forgotten(place)
        for other in self.places:
            if other.place != place:
                self._act(other.place, other.core.disconnected(self.names[place], 0.0, broken=True))
        self._boot(place, disk=disk)
        self._connect(place, range(len(self.places)))

    def forget(self, observer: int, other: int) -> None:
        """An observer takes another for dead, for long, and forgets it."""
        core = self.places[observer].core
        name = self.names[other]
        member = core.replica.members.get(name)
        if observer == other or member is None:
            return
        self.counts["forget"] += 1
        core.membership.learn(name, member.standing._replace(liveness=DEAD), None, 0.0)
        self.oracle.forgotten(observer, name)
        core.membership._bury(name)
        self._act(observer, core.outbox.take())

    def accuse(self, accuser: int, other: int, *, dead: bool) -> None:
        """A node wrongly takes another for suspect or dead."""
        core = self.places[accuser].core
        member = core.replica.members.get(self.names[other])
        if accuser == other or member is None:
            return
        self.counts["accuse"] += 1
        core.membership.learn(self.names[other], member.standing._replace(liveness=DEAD if dead else SUSPECT), None, 0.0)
        self._act(accuser, core.outbox.take())

    def lose(self, index: int) -> None:
        """A frame that never arrived is given up (it may still be replayed)."""
        if self.fresh:
            self.counts["lose"] += 1
            del self.fresh[index % len(self.fresh)]

    def replay(self, index: int) -> None:
        """Any frame that was ever sent arrives, again or late."""
        if self.bag:
            self.counts["replay"] += 1
            self._arrive(index % len(self.bag))

    def deliver(self, index: int) -> None:
        """A frame arrives; not in the order of sending unless by chance."""
        if self.fresh:
            index %= len(self.fresh)
            self.counts["deliver" if index == 0 else "reorder"] += 1
            self._arrive(self.fresh.pop(index))

    # Records.

    def write(self, place: int, name: Name, value: object) -> None:
        """Write any record."""
        self._write(place, (KIND, name), value)

    def delete(self, place: int, name: Name) -> None:
        """Delete it."""
        self._delete(place, (KIND, name))

    def flush(self, place: int) -> None:
        """Push what is pending."""
        core = self.places[place].core
        core.sync.flush(0.0)
        self._act(place, core.outbox.take())

    def compare(self, place: int, other: int) -> None:
        """Begin a repair."""
        if place != other:
            core = self.places[place].core
            core.sync.compare(self.names[other])
            self._act(place, core.outbox.take())

    def exchange(self, place: int, other: int) -> None:
        """A whole repair without loss, between two."""
        if place == other:
            return
        self.counts["exchange"] += 1
        before = len(self.bag)
        self.compare(place, other)
        for _ in range(40):
            arrived = self._deliver_new(before, {place, other})
            for one in (place, other):
                if self.places[one].core.links[self.names[place + other - one]].dirty:
                    self.flush(one)
                    arrived = True
            if not arrived:
                return

    def converge(self, rounds: int = 8) -> None:
        """Repair between all pairs until nothing changes; all replicas must then be equal and hold what was written."""
        for _ in range(rounds):
            for place in range(len(self.places)):
                for other in range(place):
                    self.exchange(place, other)
            if len({place.core.replica.root for place in self.places}) == 1:
                break
        states = [whole(place.core.replica) for place in self.places]
        if any(state != states[0] for state in states):
            raise Broken("replicas differ after lossless repairs between all")
        for node in self.places:
            self.check(node.place)
            member = node.core.me
            life = self.oracle.lives[member.standing.generation.nonce]
            if (member.namespace.max_version, set(states[0])) != (life.version, set(self.names)):
                raise Broken("a member or the end of its records is missing after repairs")

    def check(self, place: int) -> None:
        """Hold all that one node holds against the oracle."""
        replica = self.places[place].core.replica
        for name in self.names:
            self.oracle.check(place, replica, name, None)
            member = replica.members.get(name)
            flaw = member.namespace.flaw() if member is not None else None
            if flaw is not None:
                raise Broken(flaw)

    # Tasks.

    def begin(self, home: int, executors: tuple[int, ...]) -> None:
        """A home accepts a request."""
        place = self.places[home]
        place.number += 1
        place.open[place.number] = False
        self.counts["task"] += 1
        self._submit(home, place.number, 0, executors)

    def retry(self, index: int, executors: tuple[int, ...]) -> None:
        """The home tries again elsewhere: a new attempt fences the old one."""
        home, number = self._open(index)
        header = self._own(home, (TASK, number))
        if isinstance(header, TaskHeader) and self._own(home, (VERDICT, number)) is None:
            self.counts["retry"] += 1
            self._submit(home, number, header.attempt + 1, executors)

    def submission(self, index: int, *, lost: bool, doubled: bool) -> None:
        """A submission arrives at its executor, or not, or again later."""
        if not self.submissions:
            return
        index %= len(self.submissions)
        target, work = self.submissions[index]
        if not doubled:
            del self.submissions[index]
        place = self.places[target]
        task, attempt, rank, _ = work
        if lost or place.core.me.namespace.generation.nonce != self._executor_boot(work):
            return
        if place.outcomes.setdefault(task.home, Outcomes()).takes(TaskId(task.home, task.number * 8 + rank), attempt):
            self._report(target, work, RankPhase.QUEUED)

    def progress(self, index: int, phase: RankPhase) -> None:
        """A rank goes on, to any later phase."""
        found = self._work(index)
        if found is not None:
            place, work = found
            before = self.places[place].work[work]
            if not is_done(before) and phase > before:
                self._report(place, work, phase)

    def attend(self, index: int) -> None:
        """An executor looks whether it should stop, or whether its report is still wanted."""
        found = self._work(index)
        if found is None:
            return
        place, work = found
        task, attempt, rank, version = work
        sight, cancelled, _ = self._sight(place, task)
        if executor_collects(sight, attempt, submitted_version=version):
            del self.places[place].work[work]
            self._delete(place, (RANK, (task.home, task.number, attempt, rank)))
        elif not is_done(self.places[place].work[work]) and executor_aborts(
            sight, attempt, cancelled=cancelled, submitted_version=version
        ):
            self._report(place, work, RankPhase.ABORTED)

    def cancel(self, place: int, index: int) -> None:
        """Anybody wishes to cancel a task that it sees."""
        home, number = self._open(index)
        if number:
            nonce = self.places[home].core.me.namespace.generation.nonce
            self.counts["cancel"] += 1
            self._write(place, (CANCEL, (nonce, number)), ("x",))

    def time_out(self, index: int) -> None:
        """The home's clock says that a task's time is over."""
        home, number = self._open(index)
        if number:
            self.places[home].open[number] = True

    def judge(self, index: int) -> None:
        """The home looks at a task and writes its verdict if there is one to write."""
        home, number = self._open(index)
        task = self.task_at(home, home, number)
        if task is None:
            return
        verdict = settle(task, timed_out=self.places[home].open[number])
        if verdict is not None:
            nonce = self.places[home].core.me.namespace.generation.nonce
            header = self._own(home, (TASK, number))
            assert isinstance(header, TaskHeader)
            phases = [self.truth.get((nonce, number, header.attempt, rank)) for rank in range(len(header.executors))]
            if verdict.status is Terminal.COMPLETE and any(phase is not RankPhase.OK for phase in phases):
                raise Broken(f"task {number} is called complete while its ranks are {phases}")
            self.oracle.settled((nonce, number), int(verdict.status))
            self.counts["verdict"] += 1
            self._write(home, (VERDICT, number), verdict)

    def collect(self, index: int, age: float) -> None:
        """The home drops a task that is over."""
        home, number = self._open(index)
        task = self.task_at(home, home, number)
        if task is not None and home_collects(task, age, executors_gone=False):
            self.counts["collect"] += 1
            del self.places[home].open[number]
            self._delete(home, (TASK, number))
            self._delete(home, (VERDICT, number))

    def collect_cancels(self, place: int) -> None:
        """A canceller takes back what is answered."""
        records = self.places[place].core.me.namespace.records
        for kind, name in [key for key in records if key[0] == CANCEL]:
            assert isinstance(name, tuple)
            sight, _, verdict = self._sight(place, TaskId(name[0], name[1]))
            if canceller_collects(sight, verdict):
                self._delete(place, (kind, name))

    def task_at(self, observer: int, home: int, number: int) -> Task | None:
        """A task of a home's present boot, as an observer folds it."""
        replica = self.places[observer].core.replica
        member = replica.members.get(self.names[home])
        if member is None or not member.current:
            return None
        records = member.namespace.records
        record = records.get((TASK, number))
        if record is None:
            return None
        header = record.content
        assert isinstance(header, TaskHeader)
        nonce = member.namespace.generation.nonce
        verdict = records.get((VERDICT, number))
        reports: dict[int, RankReport] = {}
        for rank, executor in enumerate(header.executors):
            holder = replica.members.get(self.names[self.by_nonce[executor.boot]])
            if holder is not None and holder.namespace.generation.nonce == executor.boot:
                report = holder.namespace.records.get((RANK, (nonce, number, header.attempt, rank)))
                if report is not None and isinstance(report.content, RankReport):
                    reports[rank] = report.content
        cancelled = any((CANCEL, (nonce, number)) in other.namespace.records for other in replica.members.values())
        content = verdict.content if verdict is not None else None
        return fold(header, content if isinstance(content, Verdict) else None, cancelled, reports)

    # Within.

    def _boot(self, place: int, *, disk: bool = True) -> None:
        node = self.places[place]
        node.boots += 1
        node.counter = node.counter + 1 if disk else 1
        self.nonces += 1
        generation = Generation(node.counter, self.nonces)
        self.by_nonce[self.nonces] = place
        node.core = Core(self.names[place], generation, cluster=CLUSTER, schema=SCHEMA, chance=self.chance)
        node.outcomes, node.work, node.open, node.number = {}, {}, {}, 0
        self.oracle.born(self.names[place], generation)

    def _connect(self, place: int, others: range) -> None:
        for other in others:
            if other != place:
                first = len(self.bag)
                for one, far in ((place, other), (other, place)):
                    core = self.places[one].core
                    self._act(one, core.connected(self.names[far], 0.0))
                # A stream begins with its two greetings or there is none.
                for number in (first, first + 1):
                    self._arrive(number)
                    self.fresh.remove(number)

    def _act(self, place: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.fresh.append(len(self.bag))
                self.bag.append((self.by_name[effect.peer], place, effect.body))
            elif isinstance(effect, Renewed):
                node = self.places[place]
                self.oracle.renewed(self.names[place], Generation(node.counter, effect.generation.nonce), effect.generation)
                node.counter = effect.generation.counter
            elif isinstance(effect, Changed):
                self._changed(place, effect)
            elif isinstance(effect, Close) and effect.fault:
                raise Broken(f"a frame of ours was refused: {effect.reason}")
            elif isinstance(effect, Clash):
                raise Broken("a node was told that it has a double")

    def _changed(self, place: int, change: Changed) -> None:
        keys = None if change.changes is None else [written.key for written in change.changes]
        self.oracle.check(place, self.places[place].core.replica, change.node, keys)
        home = self.by_name[change.node]
        member = self.places[place].core.replica.members.get(change.node)
        if member is None or not member.current:
            return
        for kind, name in member.namespace.records if keys is None else keys:
            if kind in (TASK, VERDICT) and isinstance(name, int):
                self._see(place, home, name)

    def _see(self, observer: int, home: int, number: int) -> None:
        task = self.task_at(observer, home, number)
        if task is not None:
            now = status(task)
            nonce = self.places[observer].core.replica.members[self.names[home]].namespace.generation.nonce
            self.oracle.saw(observer, (nonce, number), int(now), terminal=now.terminal)

    def _arrive(self, number: int) -> None:
        to, sender, body = self.bag[number]
        core = self.places[to].core
        self._act(to, core.handle(self.names[sender], body, 0.0))

    def _deliver_new(self, since: int, among: set[int]) -> bool:
        due = [n for n in self.fresh if n >= since and self.bag[n][0] in among and self.bag[n][1] in among]
        for number in due:
            self.fresh.remove(number)
            self._arrive(number)
        return bool(due)

    def _write(self, place: int, key: Key, value: object) -> None:
        core = self.places[place].core
        before = core.me.namespace.max_version
        kind, name = key
        core.write(kind, name, value, 0.0, urgent=True)
        if core.me.namespace.max_version != before:
            life = self.oracle.lives[core.me.namespace.generation.nonce]
            life.write(key, core.me.namespace.records[key].value)
        self._act(place, core.outbox.take())

    def _delete(self, place: int, key: Key) -> None:
        core = self.places[place].core
        if key in core.me.namespace.records:
            self.oracle.lives[core.me.namespace.generation.nonce].write(key, None)
        core.delete(*key, 0.0)
        self._act(place, core.outbox.take())

    def _own(self, place: int, key: Key) -> object:
        record = self.places[place].core.me.namespace.records.get(key)
        return None if record is None else record.content

    def _submit(self, home: int, number: int, attempt: int, executors: tuple[int, ...]) -> None:
        core = self.places[home].core
        boots = tuple(Executor(self.places[e].core.me.namespace.generation.nonce, 1) for e in executors)
        self._write(home, (TASK, number), TaskHeader(attempt, 7, boots, 100, 50, 600))
        task = TaskId(core.me.namespace.generation.nonce, number)
        for rank, executor in enumerate(executors):
            self.submissions.append((executor, (task, attempt, rank, core.me.namespace.max_version)))

    def _executor_boot(self, work: Work) -> int | None:
        task, attempt, rank, _ = work
        home = self.places[self.by_nonce[task.home]].core.me.namespace
        record = home.records.get((TASK, task.number)) if home.generation.nonce == task.home else None
        header = record.content if record is not None else None
        if not isinstance(header, TaskHeader) or header.attempt != attempt:
            return None
        return header.executors[rank].boot

    def _report(self, place: int, work: Work, phase: RankPhase) -> None:
        task, attempt, rank, _ = work
        self.places[place].work[work] = phase
        self.truth[task.home, task.number, attempt, rank] = phase
        self._write(place, (RANK, (task.home, task.number, attempt, rank)), RankReport(phase))

    def _open(self, index: int) -> tuple[int, int]:
        """Home and number of one of all open tasks; number 0 where there is none."""
        tasks = [(place.place, number) for place in self.places for number in place.open]
        return tasks[index % len(tasks)] if tasks else (0, 0)

    def _work(self, index: int) -> tuple[int, Work] | None:
        works = [(place.place, work) for place in self.places for work in place.work]
        return works[index % len(works)] if works else None

    def _sight(self, place: int, task: TaskId) -> tuple[HomeSight, bool, Verdict | None]:
        replica = self.places[place].core.replica
        member = replica.members.get(self.names[self.by_nonce[task.home]])
        if member is None or member.namespace.generation.nonce != task.home:
            gone = member is None or member.standing.generation.nonce != task.home
            return HomeSight(not gone, 0, None), False, None
        header = member.namespace.records.get((TASK, task.number))
        verdict = member.namespace.records.get((VERDICT, task.number))
        cancelled = any((CANCEL, (task.home, task.number)) in m.namespace.records for m in replica.members.values())
        content = header.content if header is not None else None
        said = verdict.content if verdict is not None else None
        sight = HomeSight(True, member.namespace.max_version, content if isinstance(content, TaskHeader) else None)
        return sight, cancelled, said if isinstance(said, Verdict) else None


__all__ = ["Broken", "Model", "Status"]
