"""A node with nothing but a transport, in a process of its own: `python -m tests.p2p.transport_process NAME KEY`.

Prints its address, serves ECHO, and `/test/ticks/1`, a message every 10 ms; ends when its stdin does.
"""

import sys

import trio

from p2p.cluster_key import cluster
from p2p.libp2p_transport import open_transport
from p2p.stream import Stream, StreamProtocol
from p2p.wire import FrameCodec
from tests.p2p.transport_lab import ECHO, new_identity, serve_echo

TICKS = StreamProtocol[int]("/test/ticks/1", FrameCodec(int, 100))


async def serve_ticks(stream: Stream[int]) -> None:
    number = 0
    while True:
        await stream.send(number)
        number += 1
        await trio.sleep(0.01)


async def main(name: str, key: str) -> None:
    async with open_transport(new_identity(), ["127.0.0.1:0"], cluster(name, key)) as transport:
        transport.serve(ECHO, serve_echo)
        transport.serve(TICKS, serve_ticks)
        sys.stdout.write(transport.addresses[0] + "\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
