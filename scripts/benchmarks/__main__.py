"""`scripts/bench [NAME ...]`: run benchmarks by name, all of them without one."""

import argparse
import importlib

LONG = {"replication", "routing"}  # those that know --long
BENCHMARKS = {
    "decode": "decode over HTTP against BatchGenerator in one process; 8 streams against one",
    "decode_engine": "what the engine adds to decoding: its steps against BatchGenerator's, in one process",
    "chat": "second turn, streams and cancels while a long prompt prefills",
    "http": "tokens a second through HTTP with the fake engine; time to first token that HTTP adds",
    "replication": "the replicated state in virtual time: spreading, idle traffic, deaths, heals, cost (--long: hours)",
    "routing": "waits of routing on old views beside a router that knows everything, in virtual time (--long: more tasks)",
    "transport": "libp2p between two processes beside plain TCP; the relay of 64 engine slots",
    "peers_hop": "what asking a node costs that does not run the model: first token, tokens a second",
    "peers_relay": "tokens of 64 streams from a head's engine to a home over libp2p: how late, at what cost, how many at most",
    "peers_slow": "clients that read nothing for a minute: memory, attempts, and what another client notices",
    "peers_chat": "where requests go: a chat back to its replica, all else evenly",
    "peers_gossip": "how soon a change is on 10 nodes",
    "peers_deaths": "how soon 9 nodes know that the tenth was killed; kinship beside it (fetched from PyPI for that)",
    "peers_idle": "CPU and bytes of a node that has nothing to do, of 2 and of 10",
    "peers_many": "30 nodes on one machine: until they agree; memory and CPU",
    "startup": "start to first token; memory of the node process",
    "mlx_lm_server": "the ratio to mlx_lm.server, as a user gets it and with the same BLAS and dtypes",
}


def main() -> None:
    """Run what was asked for, one after the other."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Print the figures that the documents claim.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (none: all); `list` names them")
    parser.add_argument(
        "--long", action="store_true", help=f"{', '.join(sorted(LONG))}: as many samples as the claims are made of"
    )
    options = parser.parse_args()
    names = options.names
    if names == ["list"]:
        for name, what in BENCHMARKS.items():
            print(f"{name:14} {what}")
        return
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        print(f"== {name}: {BENCHMARKS[name]}", flush=True)
        main = importlib.import_module(f"scripts.benchmarks.{name}").main
        main(options.long) if name in LONG else main()


if __name__ == "__main__":
    main()
