"""Stands in for fastecdsa, which libp2p imports and shoal never uses.

fastecdsa has wheels for few platforms and needs a compiler and GMP elsewhere; libp2p needs it for ECDSA keys, while nodes have
Ed25519 keys. Where it isn't installed, `install` puts empty modules of its names in place, before libp2p is first imported.
"""

import importlib.util
import sys
from types import ModuleType

_NAMES = {
    "fastecdsa": (),
    "fastecdsa.curve": ("Curve", "P256"),
    "fastecdsa.keys": ("gen_keypair", "get_public_key"),
    "fastecdsa.point": ("Point",),
    "fastecdsa.encoding": (),
    "fastecdsa.encoding.sec1": ("SEC1Encoder",),
    "fastecdsa.encoding.util": ("int_bytelen", "bytes_to_int", "int_to_bytes"),
}


class _Absent:
    """Every name of the absent package; using one is an error."""

    def __init__(self, *_arguments: object, **_named: object) -> None:
        raise NotImplementedError("fastecdsa is not installed")


def install() -> None:
    """Put the empty modules in place, unless the real ones can be imported or that was done before."""
    if "fastecdsa" in sys.modules or importlib.util.find_spec("fastecdsa") is not None:
        return
    for name, members in _NAMES.items():
        module = ModuleType(name)
        if not members:
            module.__path__ = []
        for member in members:
            setattr(module, member, _Absent)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
