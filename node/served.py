"""The names under which models are served, and how each stands. Pure.

A name that stands for two different models (the same name, other bytes) means the one with the smaller hash, on every
node alike; each can be asked for by `name@hash`. So no request is ever answered by one model and gone on with by another.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from inference.models import SHORT_HASH_DIGITS
from node.instances import Instance, Phase


class Served(Struct, frozen=True):
    """A model under one of its names, with its instances that are ready or on their way."""

    name: str
    model_hash: str
    instances: tuple[Instance, ...]


def served_models(instances: Iterable[Instance]) -> dict[str, Served]:
    """All models that are served or will be, by name, in the order of names."""
    found: dict[str, dict[str, list[Instance]]] = {}
    for instance in instances:
        if instance.phase <= Phase.READY:
            found.setdefault(instance.spec.model, {}).setdefault(instance.spec.model_hash, []).append(instance)
    served: dict[str, Served] = {}
    for name in sorted(found):
        for place, model_hash in enumerate(sorted(found[name])):
            shown = name if place == 0 else f"{name}@{model_hash[:SHORT_HASH_DIGITS]}"
            ordered = sorted(found[name][model_hash], key=lambda instance: instance.order)
            served[shown] = Served(shown, model_hash, tuple(ordered))
    return served


def failed_reason(instances: Mapping[int, Instance], name: str) -> str | None:
    """Why a model that nobody serves any more is not served, where some instance of it says so."""
    broken = [i for i in instances.values() if i.spec.model == name and i.phase is Phase.BROKEN]
    return next((instance.reason for instance in sorted(broken, key=lambda i: i.order, reverse=True) if instance.reason), None)
