"""What is served in this cluster as one node sees it: under which names, and how each model stands."""

from collections.abc import Mapping

import trio

from node.cluster_view import ClusterView
from node.instances import Instance, Phase
from node.local_runners import Down, LocalInstance, OnItsWay, Up
from node.names import ServedName, Unknown, resolve
from node.served import Served, failed_reason, served_models
from node.service import ServedModel
from node.standing import Coming, Lost, Serving, Standing
from node.view import Roster
from p2p.lattice import LEFT

NO_MODEL = "No model runs in this cluster: start a node with --model MODEL."


class Standings:
    """One node's view: instances anywhere by the replicated state, its own also while they have no records yet."""

    def __init__(self, view: ClusterView, own: Mapping[int, LocalInstance], aliases: Mapping[str, str]) -> None:
        self._view = view
        self._own = own
        self._aliases = aliases  # alias: model
        self._coming: dict[str, float] = {}  # models on their way, by name: since when
        self._served: dict[str, Served] = {}
        self._served_in: Roster | None = None

    def own_changed(self) -> None:
        """An own instance has come, gone or gone on."""
        now = trio.current_time()
        coming = {instance.name for instance in self._own.values() if isinstance(instance.phase, OnItsWay)}
        self._coming = {name: self._coming.get(name, now) for name in coming}

    def served(self, name: str) -> Served | None:
        """A model by its served name; None where it isn't known anywhere, or its hash is not known yet."""
        return self._all_served().get(name)

    def _all_served(self) -> dict[str, Served]:
        roster = self._view.roster
        if roster is not self._served_in:
            self._served_in, self._served = roster, served_models(roster.instances.values())
        return self._served

    def names(self) -> tuple[str, ...]:
        """All served names, and those of models that are on their way to this node's disk, whose hash nobody knows yet."""
        coming = (instance.name for instance in self._own.values() if not isinstance(instance.phase, Down))
        return tuple(dict.fromkeys([*self._all_served(), *coming]))

    @property
    def none(self) -> bool:
        """Whether there never was any model."""
        return not self._own and not self._all_served() and not self._failed()

    def _failed(self) -> tuple[str, ...]:
        """Models of instances elsewhere that came to nothing, on nodes that have not taken their leave."""
        roster = self._view.roster
        broken = [i for i in roster.instances.values() if i.phase is Phase.BROKEN and i.head is not None]
        there = [i for i in broken if i.head is not None and roster.nodes[i.head.node].liveness is not LEFT]
        return tuple(dict.fromkeys(instance.spec.model for instance in sorted(there, key=lambda i: i.order)))

    def models(self) -> tuple[ServedModel, ...]:
        """The models that can be asked for, under their names and this node's aliases; those on no disk yet are not."""
        found = []
        for name, served in self._all_served().items():
            created = min((s.record.created for i in served.instances for s in i.shards if s is not None), default=0)
            names = [name, *(alias for alias in self._aliases if self.named(alias) == name)]
            context = max(map(self._context, served.instances), default=0)
            found += [ServedModel(name=n, model_hash=served.model_hash, created=created, context=context) for n in names]
        return tuple(found)

    def _context(self, instance: Instance) -> int:
        own = self._own.get(instance.instance_id)
        if own is not None:
            return own.context
        head = instance.head
        if head is None:
            return 0
        runners = self._view.roster.runners
        return next((r.record.context for r in runners if (r.node, r.number) == (head.node, head.record.runner)), 0)

    def named(self, model: str | None) -> str | Unknown:
        """The served name that is meant by what a client asks for."""
        spellings: dict[str, list[str]] = {}
        for instance in self._own.values():
            spellings.setdefault(instance.name, []).append(instance.asked)
        names = dict.fromkeys([*(instance.name for instance in self._own.values()), *self._all_served()])
        found = resolve(model, [ServedName(name, tuple(spellings.get(name, ()))) for name in names], self._aliases)
        if isinstance(found, Unknown) and (model or not names):  # one that failed elsewhere is known, and so is the reason
            failed = resolve(model, [ServedName(name) for name in self._failed()], self._aliases)
            return failed if isinstance(failed, str) else found
        return found

    def standing(self, name: str) -> Standing:
        """How a model stands, by its served name."""
        served = self.served(name)
        hashes = (served.model_hash,) if served is not None else ()
        if any(self._view.roster.candidates(model_hash) for model_hash in hashes):
            return Standing(Serving(), hashes)
        own = [instance for instance in self._own.values() if instance.name == name]
        for instance in own:
            phase = instance.phase
            if isinstance(phase, OnItsWay | Up):
                text = phase.text if isinstance(phase, OnItsWay) else "getting ready"
                done, total = (phase.done, phase.total) if isinstance(phase, OnItsWay) else (0, 0)
                since = self._coming.get(name, trio.current_time())
                return Standing(Coming(f"The model {name!r} is still {text}.", since, done, total), hashes)
        if served is not None:
            since = self._coming.setdefault(name, trio.current_time())
            ready = any(instance.phase is Phase.READY for instance in served.instances)
            text = "on a node that can't be reached or is stopping" if ready else "still being loaded"
            return Standing(Coming(f"The model {name!r} is {text}.", since), hashes)
        for instance in own:
            if isinstance(instance.phase, Down):
                return Standing(Lost(cannot_serve(name, instance.phase.reason)))
        reason = failed_reason(self._view.roster.instances, name)
        return Standing(Lost(cannot_serve(name, reason or "No node runs it any more.")))

    def not_ready(self) -> str | None:
        """None once a model can be served, else one sentence why not."""
        names = dict.fromkeys([*self.names(), *(instance.name for instance in self._own.values())])
        states = [self.standing(name).state for name in names]
        if any(isinstance(state, Serving) for state in states):
            return None
        for kind in (Coming, Lost):
            for state in states:
                if isinstance(state, kind):
                    return state.reason.replace(" is still ", " is ")
        return NO_MODEL


def cannot_serve(name: str, reason: str) -> str:
    """One sentence for whoever asks for a model that is down."""
    return f"The model {name!r} can't be served: {reason}"
