"""Tasks that have ended, for longer than their records are kept: each home remembers its last, and tells any node that asks."""

from collections import OrderedDict
from typing import Annotated

import trio
from msgspec import Meta, Struct

from node.documents import TaskDocument
from p2p.ids import NodeId
from p2p.stream import Stream, StreamProtocol, TransportError
from p2p.transport import Transport
from p2p.wire import FrameCodec, ProtocolViolation

ENDED_MAX = 1000
ASK_SECONDS = 2.0
FRAME_BYTES_MAX = 64 << 10


class Ask(Struct, frozen=True, tag=0):
    """A question: what has become of a task of yours."""

    task_id: Annotated[str, Meta(max_length=128)]


class Told(Struct, frozen=True, tag=1):
    """The answer; None where it is not remembered."""

    task: TaskDocument | None


LOOKUP = StreamProtocol[Ask | Told]("lookup/1", FrameCodec(Ask | Told, FRAME_BYTES_MAX))


class EndedTasks:
    """The last ENDED_MAX of this home."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, TaskDocument] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: TaskDocument) -> None:
        """One more; the one that was added first may go."""
        self._tasks[task.task_id] = task
        while len(self._tasks) > ENDED_MAX:
            self._tasks.popitem(last=False)

    def get(self, task_id: str) -> TaskDocument | None:
        """One of them."""
        return self._tasks.get(task_id)

    async def serve(self, stream: Stream[Ask | Told]) -> None:
        """Answer one question.

        Raises: StreamBroken, ProtocolViolation.
        """
        with trio.move_on_after(ASK_SECONDS) as scope:
            question = await stream.receive()
            if not isinstance(question, Ask):
                raise ProtocolViolation("an answer where a question was due")
            await stream.send(Told(self.get(question.task_id)))
            await stream.close_send()
        if scope.cancelled_caught:
            stream.reset()


async def ask_home(transport: Transport, home: NodeId, task_id: str) -> TaskDocument | None:
    """What a task's home remembers of it; None also where it can't be asked."""
    with trio.move_on_after(ASK_SECONDS):
        try:
            async with await transport.open(home, LOOKUP) as stream:
                await stream.send(Ask(task_id))
                await stream.close_send()
                answer = await stream.receive()
        except (TransportError, ProtocolViolation, trio.EndOfChannel):
            return None
        if isinstance(answer, Told) and answer.task is not None and answer.task.task_id == task_id:
            return answer.task
    return None
