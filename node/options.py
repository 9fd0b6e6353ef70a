"""The options of a node: one table, from which flags, environment variables and file keys all derive.

A repeatable option takes several flags, a list in the file, or in its variable a list with commas between (a value with a
comma of its own needs a flag or the file).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from node import option_values as values
from node.option_values import Address

ENVIRONMENT_PREFIX = "SHOAL_"
DEFAULT_MODEL = "smollm2:135m"
DEFAULT_API = (Address("127.0.0.1", 52416), Address("::1", 52416))


@dataclass(frozen=True)
class Option:
    """One row of the table. `default` is text that is parsed like any other value; None means worked out by `load`."""

    name: str
    parse: Callable[[str], object]
    help: str
    metavar: str = ""
    default: str | None = None
    default_help: str = ""
    repeatable: bool = False
    switch: bool = False  # takes no value as a flag
    negatable: bool = False  # has --no-NAME beside --NAME
    secret: bool = False  # its value appears in no message

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper().replace("-", "_")

    @property
    def field(self) -> str:
        """Its key among parsed flags."""
        return self.name.replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option("data-dir", values.path, "identity key and config.toml; one node per data directory", "DIR",
           default_help="the user data directory, shoal/"),
    Option("models-dir", values.path, "fetched and converted models; nodes of one machine may share it", "DIR",
           default_help="the user cache directory, shoal/models"),
    Option("name", values.name, "shown to people; need not be unique", "NAME", default_help="host name"),
    Option("cluster", values.name, "nodes of another cluster name never merge state", "NAME", "default"),
    Option("cluster-key", values.cluster_key, "shared secret, without which a peer can't join (see `node key`)", "KEY",
           secret=True, default_help="none"),
    Option("cluster-key-file", values.path, "a file that holds the cluster key", "FILE", default_help="none"),
    Option("listen", values.address, "p2p address", "HOST:PORT",
           default_help="127.0.0.1:0 without a cluster key, 0.0.0.0:0 with one"),
    Option("join", values.peer_address, "a peer to dial and to keep: a multiaddr or host:port", "ADDRESS", repeatable=True,
           default_help="none"),
    Option("discovery", values.switch, "find peers on the local network by mDNS", switch=True, negatable=True,
           default_help="on where --listen is not loopback"),
    Option("api", values.address_or_none, "HTTP address; port 0 picks one, `none` switches HTTP off", "HOST:PORT",
           repeatable=True, default_help=" and ".join(map(str, DEFAULT_API))),
    Option("api-key", values.api_key, "a bearer key that HTTP requests must carry", "KEY", repeatable=True, secret=True,
           default_help="none"),
    Option("insecure-api", values.switch, "allow HTTP on a non-loopback address without a key", default="false", switch=True,
           default_help="off"),
    Option("model", values.model, "the model that this node runs, or `none`", "MODEL", DEFAULT_MODEL),
    Option("alias", values.alias, "another name under which a model is served", "NAME=MODEL", repeatable=True,
           default_help="none"),
    Option("max-running", values.positive_count, "requests that a runner works on at once", "N", default_help="by memory"),
    Option("max-waiting", values.count, "requests that wait at this node; beyond: 429", "N", "32"),
    Option("task-timeout", values.positive_duration, "a request's longest life", "S", "600"),
    Option("idle-unload", values.positive_duration, "when an unused instance that nobody asked for is unloaded", "S", "900"),
    Option("context", values.positive_count, "prompt and answer tokens of one request", "N", default_help="min(model's, 8192)"),
    Option("max-disk", values.size, "what model files may use", "SIZE", default_help="no limit"),
    Option("max-memory", values.size, "what runners may use (4GB, 512MiB); 0: never runs a model", "SIZE",
           default_help="75 %% of the device's"),
    Option("drain-timeout", values.duration, "on the first Ctrl-C: how long running requests may go on", "S", "30"),
    Option("log-format", values.log_format, "console, or json for machines", "FORMAT", "console"),
    Option("log-level", values.log_level, "debug, info, warning or error", "LEVEL", "info"),
)  # fmt: skip
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
