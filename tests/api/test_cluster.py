"""`/cluster/...` over HTTP: documents, tasks, and events to readers of any pace."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio

from node.documents import StateDocument
from node.dump_document import DumpDocument, dump_document
from node.records import RANK, TASK, VERDICT, RankPhase, RankReport, TaskHeader, Terminal, Verdict
from node.state_changes import INTERVAL_SECONDS
from tests.api.http_client import Client, Connection, serving
from tests.api.memory_cluster import MemoryCluster
from tests.api.memory_service import MemoryService
from tests.node.cluster_replica import DESK, LAPTOP, READY_INSTANCE, executor, task_of

TASKS = 1000


@asynccontextmanager
async def serving_cluster(cluster: MemoryCluster, **settings: Any) -> AsyncIterator[Client]:  # noqa: ANN401 - of any type
    async with serving(MemoryService(), cluster=cluster, **settings) as client:
        yield client


def parsed(event: str) -> tuple[str, int, Any]:
    """Name, revision and document of one event."""
    name, number, data = event.split("\n")
    document = json.loads(data.removeprefix("data: "))
    assert number == f"id: {document['revision']}"
    return name.removeprefix("event: "), document["revision"], document


class Watcher:
    """Reads a connection's events, one at a time."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._rest = b""

    async def begin(self) -> "Watcher":
        """Ask for the events."""
        await self.connection.ask("GET", "/cluster/events")
        status, headers = await self.connection.read_head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        return self

    async def raw(self) -> str:
        """The next event or comment; nothing at the end."""
        while b"\n\n" not in self._rest:
            chunk = await self.connection.chunk()
            if not chunk:
                return ""
            self._rest += chunk
        event, _, self._rest = self._rest.partition(b"\n\n")
        return event.decode()

    async def text(self) -> str:
        """The next event."""
        while (text := await self.raw()).startswith(":"):
            pass
        return text

    async def event(self) -> tuple[str, int, Any]:
        """Name, revision and document of the next event."""
        return parsed(await self.text())


@asynccontextmanager
async def watching(client: Client) -> AsyncIterator[Watcher]:
    """The events of a fresh connection."""
    async with client.connect() as connection:
        yield await Watcher(connection).begin()


async def test_the_state_and_the_dump_are_the_services() -> None:
    cluster = MemoryCluster()
    async with serving_cluster(cluster) as client:
        state = await client.ask("GET", "/cluster/state")
        dump = await client.ask("GET", "/cluster/dump")

    assert msgspec.convert(state.json(), StateDocument) == cluster.state()
    assert msgspec.convert(dump.json(), DumpDocument) == dump_document(cluster.dump())


async def test_without_a_cluster_there_is_nothing() -> None:
    async with serving(MemoryService()) as client:
        reply = await client.ask("GET", "/cluster/state")

    assert (reply.status, reply.error()["code"]) == (404, "not_found")


async def test_a_task_by_its_id() -> None:
    async with serving_cluster(MemoryCluster()) as client:
        found = await client.ask("GET", f"/cluster/tasks/{task_of(DESK, 1).text}")

    assert (found.json()["status"], found.json()["executed_by"]) == ("running", LAPTOP)


UNKNOWN = ("x", task_of(DESK, 77).text, task_of(DESK, 1).text.upper(), "%2e%2e", "0" * 5000)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_tasks_that_nobody_knows(method: str) -> None:
    async with serving_cluster(MemoryCluster()) as client:
        for task_id in UNKNOWN:
            path = f"/cluster/tasks/{task_id}" + ("/cancel" if method == "POST" else "")
            reply = await client.ask(method, path)
            assert (reply.status, reply.error()["code"]) == (404, "task_not_found")
            assert len(reply.body) < 300


async def test_cancelling_twice_and_what_has_ended_d7() -> None:
    cluster = MemoryCluster()
    running, failed = task_of(DESK, 1).text, task_of(DESK, 2).text
    async with serving_cluster(cluster) as client:
        replies = [await client.ask("POST", f"/cluster/tasks/{task_id}/cancel") for task_id in (running, running, failed)]
        after = await client.ask("GET", f"/cluster/tasks/{running}")

    assert [reply.status for reply in replies] == [200, 200, 200]
    assert [reply.json() for reply in replies] == [
        {"task_id": running, "status": "cancelled"},
        {"task_id": running, "status": "cancelled"},
        {"task_id": failed, "status": "failed"},
    ]
    assert after.json()["status"] == "cancelled"
    assert sum(cluster.state().in_flight.values()) == 0


async def test_methods() -> None:
    task = task_of(DESK, 1).text
    async with serving_cluster(MemoryCluster()) as client:
        for method, path in (
            ("POST", "/cluster/state"), ("DELETE", "/cluster/events"), ("GET", f"/cluster/tasks/{task}/cancel"),
        ):  # fmt: skip
            assert (await client.ask(method, path)).status == 405
        head = await client.ask("HEAD", "/cluster/events")

    assert (head.status, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


PATHS = ("/cluster/state", "/cluster/dump", "/cluster/events", "/cluster/tasks/x", "/cluster/tasks/x/cancel")


async def test_strangers_see_and_change_nothing() -> None:
    cluster = MemoryCluster()
    before = cluster.replica.replica.root
    async with serving_cluster(cluster, api_keys=("k",)) as client:
        for path in (*PATHS, f"/cluster/tasks/{task_of(DESK, 1).text}/cancel"):
            method = "POST" if path.endswith("cancel") else "GET"
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                reply = await client.ask(method, path, headers=headers)
                assert (reply.status, reply.error()["code"]) == (401, "invalid_api_key")
            foreign = await client.ask(method, path, headers={"Authorization": "Bearer k"}, host="evil.example")
            assert foreign.status == 403
        allowed = await client.ask("GET", "/cluster/state", headers={"Authorization": "Bearer k"})

    assert allowed.status == 200
    assert cluster.replica.replica.root == before


async def test_events_begin_with_all_and_go_on_with_changes() -> None:
    cluster = MemoryCluster()
    header = TaskHeader(0, READY_INSTANCE, (executor(LAPTOP),), 10, 20, 60)
    async with serving_cluster(cluster) as client, watching(client) as events:
        first = await events.event()
        cluster.write(DESK, TASK, 5, header)
        begun = await events.event()
        cluster.write(LAPTOP, RANK, (*task_of(DESK, 5), 0, 0), RankReport(RankPhase.OK))
        cluster.write(DESK, VERDICT, 5, Verdict(Terminal.COMPLETE))
        ended = await events.event()

    assert (first[0], first[2]["state"]["node_id"]) == ("state", DESK)
    assert (begun[0], ended[0]) == ("change", "change")
    assert first[1] < begun[1] < ended[1]
    assert [(entry["task_id"], entry["status"]) for entry in begun[2]["tasks"]] == [(task_of(DESK, 5).text, "pending")]
    assert begun[2]["in_flight"][f"{READY_INSTANCE:016x}"] == 2
    assert [entry["status"] for entry in ended[2]["tasks"]] == ["complete"]
    assert ended[2]["digest"] == cluster.state().digest


async def test_quiet_streams_show_that_they_live() -> None:
    async with serving_cluster(MemoryCluster(), pulse_seconds=0.01) as client, watching(client) as events:
        seen = [await events.raw() for _ in range(3)]

    assert [event.partition("\n")[0] for event in seen] == ["event: state", ": still here", ": still here"]


async def still_there(stream: trio.SocketStream) -> bool:
    """Whether a connection that nobody reads is up, after a moment in which it may have ended."""
    await trio.sleep(INTERVAL_SECONDS)
    try:
        await stream.send_all(b"x")
    except trio.BrokenResourceError:
        return False
    return True


def change_all(cluster: MemoryCluster, number: int) -> None:
    """Half a megabyte of changes."""
    for task in range(TASKS):
        cluster.write(DESK, TASK, 100 + task, TaskHeader(number, READY_INSTANCE, (executor(LAPTOP),), 10, 20, 60))


@asynccontextmanager
async def idling(client: Client) -> AsyncIterator[Watcher]:
    """A reader whose connection holds little, once it has asked."""
    stream = await trio.open_tcp_stream(client.host, client.port)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 << 10)
    async with stream:
        yield await Watcher(Connection(stream)).begin()


async def test_a_reader_that_reads_nothing_is_told_the_latest_once_it_does_and_nothing_grows_meanwhile() -> None:
    cluster = MemoryCluster()
    async with serving_cluster(cluster) as client, idling(client) as events:
        looks: list[int] = []
        while len(looks) < 3 or looks[-1] != looks[-3]:  # until all buffers on the way are full
            assert len(looks) < 100
            change_all(cluster, len(looks))
            await trio.sleep(2 * INTERVAL_SECONDS)
            looks.append(cluster.looks)
        last = len(looks) - 1
        documents: list[Any] = []
        while not documents or documents[-1]["digest"] != cluster.replica.replica.root.hex():
            documents.append((await events.event())[2])

    assert len(documents) <= looks[-1] + 2
    assert [entry["attempt"] for entry in documents[-1]["tasks"] if entry["task_id"] == task_of(DESK, 100).text] == [last]
    assert len(documents[-1]["tasks"]) == TASKS, "what was missed is told once"


async def test_a_reader_that_takes_nothing_at_all_is_cut_off() -> None:
    cluster = MemoryCluster()
    async with serving_cluster(cluster, stalled_seconds=0.5, pulse_seconds=0.05) as client, idling(client) as events:
        number = 0
        with trio.fail_after(60):
            while await still_there(events.connection.stream):
                number += 1
                change_all(cluster, number)
        assert (await client.ask("GET", "/healthz")).status == 200


async def test_readers_that_leave_leave_nothing() -> None:
    cluster = MemoryCluster()
    async with serving_cluster(cluster) as client:
        for _ in range(5):
            async with watching(client) as events:
                await events.event()
        looks = cluster.looks
        for number in range(3):
            cluster.write(DESK, TASK, number, TaskHeader(9, READY_INSTANCE, (executor(LAPTOP),), 1, 1, 1))
            assert (await client.ask("GET", "/healthz")).status == 200

    assert cluster.looks == looks


async def test_a_node_that_stops_says_so() -> None:
    cluster = MemoryCluster()
    reply: list[str] = []
    async with trio.open_nursery() as nursery, serving_cluster(cluster) as client:
        connection = Connection(await trio.open_tcp_stream(client.host, client.port))
        events = await Watcher(connection).begin()
        await events.event()

        async def read() -> None:
            reply.extend([await events.text(), await events.raw()])

        nursery.start_soon(read)
    await trio.aclose_forcefully(connection.stream)

    assert reply[1] == ""
    name, data = reply[0].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "node_stopping"


async def test_a_service_that_fails_in_the_middle_is_an_error_event() -> None:
    cluster = MemoryCluster()
    async with serving_cluster(cluster) as client, watching(client) as events:
        await events.event()
        cluster.fault = ZeroDivisionError()
        cluster.watch.touch()
        last = await events.text()

    assert last.startswith("event: error\ndata: ")
    assert "internal_error" in last
    assert "ZeroDivision" not in last
