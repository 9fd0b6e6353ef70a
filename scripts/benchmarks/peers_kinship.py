"""One member of a kinship cluster at its defaults for a local network, for `peers_deaths`: needs kinship, and nothing of shoal.

    python peers_kinship.py NAME KEY [SEED ...]

Prints a JSON array for each thing that happens: ["up", address, members], then [event, member, moment, members].
"""

import asyncio
import importlib
import json
import sys
import time


async def main(name: str, key: str, seeds: list[str]) -> None:
    """Take part until killed."""
    kinship = importlib.import_module("kinship")  # not where shoal is checked and tested
    config = kinship.Config.lan(name=name, bind="127.0.0.1:0", keys=[key], seeds=seeds)
    async with kinship.Cluster(config) as cluster:
        events = cluster.events()
        print(json.dumps(["up", cluster.local.addr, len(cluster.members())]), flush=True)
        async for event in events:
            member = getattr(event, "member", None)
            row = [type(event).__name__, member.name if member else "", time.monotonic(), len(cluster.members())]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
