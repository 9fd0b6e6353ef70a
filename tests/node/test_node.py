"""The life of a request at a node, with a real supervisor over runners in memory, on virtual time."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from inference.requests import Accepted, Event, Failed, Finished, Tokens
from inference.runner.fake_engine import FakeSettings
from node.service import GenerateError, ModelNotFound, NoRoute, QueueFull
from node.task_home import LOADING_SECONDS_MAX
from tests.node.memory_runner import NODE_ID, Bench, MemoryDevice, chat, open_bench


class Client:
    """One request as its sender sees it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: GenerateError | None = None
        self.ended_at = -1.0
        self.scope = trio.CancelScope()
        self.task_id = ""

    async def ask(self, bench: Bench, model: str | None = "m", text: str = "hi", max_tokens: int | None = 4) -> None:
        with self.scope:
            try:
                async with bench.node.generate(model, chat(text, max_tokens=max_tokens)) as answer:
                    assert answer.executed_by == NODE_ID
                    self.task_id = answer.task_id
                    async for event in answer.events:
                        self.events.append(event)
            except GenerateError as error:
                self.error = error
        self.ended_at = trio.current_time()

    @property
    def failure(self) -> str:
        assert isinstance(self.events[-1], Failed)
        return self.events[-1].code

    @property
    def complete(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished)


def ready_device(**settings: object) -> MemoryDevice:
    device = MemoryDevice(settings=FakeSettings(**{"answer_tokens": 4, **settings}))  # type: ignore[arg-type]  # fields of several types
    device.may_resolve.set()
    device.may_load.set()
    return device


async def crowd(bench: Bench, nursery: trio.Nursery, count: int) -> list[Client]:
    """Clients that come one after the other, at the same moment."""
    clients = [Client() for _ in range(count)]
    for number, client in enumerate(clients):
        nursery.start_soon(client.ask, bench, "m", str(number))
        await wait_all_tasks_blocked()
    return clients


def submitted(device: MemoryDevice) -> list[str]:
    """The texts of the requests that the runner got, in order."""
    return [str(request.prompt.messages[0]["content"]) for request in device.submitted]  # type: ignore[union-attr]  # they are chats


async def test_an_answer_from_beginning_to_end(autojump_clock: MockClock) -> None:
    async with open_bench(ready_device()) as bench:
        bench.node.run_model("m")
        client = Client()
        await client.ask(bench)

    assert isinstance(client.events[0], Accepted)
    assert all(isinstance(event, Tokens) for event in client.events[2:-1])
    end = client.events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens) == ("length", 4)


async def test_requests_wait_in_order_and_are_tried_as_places_become_free(autojump_clock: MockClock) -> None:
    device = ready_device(running_max=2)
    async with open_bench(device) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        clients = await crowd(bench, nursery, 7)

    assert all(client.complete for client in clients)
    ends = [client.ended_at for client in clients]
    assert ends == sorted(ends)
    assert list(dict.fromkeys(submitted(device))) == [str(number) for number in range(7)]
    # Two at a time, and each refusal costs a try only where something ended since: nobody polls.
    assert len(device.submitted) <= 7 + 5


async def test_beyond_the_seats_a_request_is_turned_away(autojump_clock: MockClock) -> None:
    async with open_bench(ready_device(running_max=1), waiting_max=2) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        clients = await crowd(bench, nursery, 5)

    assert [client.complete for client in clients] == [True, True, True, False, False]
    for client in clients[3:]:
        assert isinstance(client.error, QueueFull)
        assert 1 <= client.error.retry_after <= 60
        assert "2 requests wait" in str(client.error)


async def test_with_no_seats_at_all_free_places_are_still_given(autojump_clock: MockClock) -> None:
    async with open_bench(ready_device(running_max=2), waiting_max=0) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        clients = await crowd(bench, nursery, 3)

    assert [client.complete for client in clients] == [True, True, False]
    assert isinstance(clients[2].error, QueueFull)


async def test_a_request_that_leaves_the_line_frees_its_seat_at_once(autojump_clock: MockClock) -> None:
    async with open_bench(ready_device(running_max=1), waiting_max=1) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        first, second = await crowd(bench, nursery, 2)
        second.scope.cancel()
        await wait_all_tasks_blocked()
        (third,) = await crowd(bench, nursery, 1)

    assert first.complete
    assert (second.events, second.error) == ([], None)
    assert third.complete


async def test_whoever_stood_behind_one_that_leaves_has_its_turn_at_once(autojump_clock: MockClock) -> None:
    device = ready_device(answer_tokens=None, stop_one_in=0, kv_bytes_per_token=1, kv_step=1, kv_bytes_max=100)
    async with open_bench(device) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        half, large, small = Client(), Client(), Client()
        nursery.start_soon(half.ask, bench, "m", "a", 50)
        await trio.sleep(0.1)
        nursery.start_soon(large.ask, bench, "m", "b", 90)  # waits for the first one's memory
        await trio.sleep(0.1)
        nursery.start_soon(small.ask, bench, "m", "c", 2)  # would fit, but does not overtake
        await trio.sleep(2)
        assert (large.events, small.events) == ([], [])
        large.scope.cancel()
        await trio.sleep(4)
        assert small.complete
        assert not half.complete


async def test_a_client_that_leaves_frees_its_place_within_a_step(autojump_clock: MockClock) -> None:
    device = ready_device(running_max=1, answer_tokens=None, stop_one_in=0)
    async with open_bench(device) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        first, second = Client(), Client()
        nursery.start_soon(first.ask, bench, "m", "long", 1000)
        await trio.sleep(3.5)
        nursery.start_soon(second.ask, bench, "m", "short", 1)
        await trio.sleep(3)
        assert second.events == []
        first.scope.cancel()
        before = trio.current_time()

    assert second.complete
    assert second.ended_at - before <= 2 * device.step_seconds


async def test_a_long_request_ends_when_its_time_is_over(autojump_clock: MockClock) -> None:
    device = ready_device(running_max=1, answer_tokens=None, stop_one_in=0)
    async with open_bench(device, task_seconds=10.5) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        running, waiting = Client(), Client()
        nursery.start_soon(running.ask, bench, "m", "a", 1000)
        await trio.sleep(2)
        nursery.start_soon(waiting.ask, bench, "m", "b", 1000)
        await trio.sleep(60)
        core = bench.runner().core
        assert core is not None
        assert core.idle

    assert running.failure == waiting.failure == "timed_out"
    assert (running.ended_at, waiting.ended_at) == (10.5, 12.5)
    assert len(running.events) > 8
    assert isinstance(waiting.events[0], Accepted)  # it got the place that the first one left


async def test_a_request_may_run_out_of_time_in_line(autojump_clock: MockClock) -> None:
    device = ready_device(running_max=1, answer_tokens=None, stop_one_in=0)
    async with open_bench(device, task_seconds=10.0) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        for text in ("a", "b"):
            nursery.start_soon(Client().ask, bench, "m", text, 1000)
        await wait_all_tasks_blocked()
        (last,) = await crowd(bench, nursery, 1)

    assert [type(event) for event in last.events] == [Failed]
    assert last.failure == "timed_out"
    assert last.ended_at == 10.0


async def test_a_request_waits_for_a_model_that_is_on_its_way(autojump_clock: MockClock) -> None:
    device = MemoryDevice()
    async with open_bench(device) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        clients = await crowd(bench, nursery, 3)
        assert bench.node.not_ready() == "The model 'm' is being fetched (34 %)."
        device.may_resolve.set()
        await wait_all_tasks_blocked()
        assert bench.node.not_ready() == "The model 'm' is being loaded (0 %)."
        await trio.sleep(LOADING_SECONDS_MAX - 1)
        device.may_load.set()
        await wait_all_tasks_blocked()
        assert bench.node.not_ready() is None

    assert all(client.complete for client in clients)
    assert submitted(device) == ["0", "1", "2"]


async def test_but_not_for_ever(autojump_clock: MockClock) -> None:
    async with open_bench(MemoryDevice()) as bench:
        bench.node.run_model("m")
        client = Client()
        await client.ask(bench)

    assert isinstance(client.error, NoRoute)
    assert str(client.error) == "The model 'm' is still being fetched (34 %)."
    assert client.error.retry_after == 59  # 34 % took 30 seconds
    assert client.ended_at == LOADING_SECONDS_MAX


async def test_a_model_that_cannot_be_loaded_is_no_route_at_once(autojump_clock: MockClock) -> None:
    device = ready_device()
    device.load_error = "The model is of an unknown kind."
    async with open_bench(device) as bench:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        client = Client()
        await client.ask(bench)

        assert isinstance(client.error, NoRoute)
        assert str(client.error) == "The model 'm' can't be served: The model is of an unknown kind."
        assert client.ended_at == 0.0
        assert bench.node.models() == ()
        assert bench.node.not_ready() == str(client.error)


async def test_a_crash_after_acceptance_is_told_and_the_next_request_has_a_new_runner(autojump_clock: MockClock) -> None:
    device = ready_device(answer_tokens=None, stop_one_in=0)
    async with open_bench(device) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        client, following = Client(), Client()
        nursery.start_soon(client.ask, bench, "m", "a", 100)
        await trio.sleep(5)
        bench.runner().die(-9)
        await wait_all_tasks_blocked()
        assert bench.node.not_ready() == "The model 'm' is being started again after a crash."
        await following.ask(bench)

    assert client.failure == "runner_crashed"
    assert len(client.events) > 3
    assert following.complete
    assert len(device.runners) == 2


async def test_a_crash_before_acceptance_goes_unnoticed_once(autojump_clock: MockClock) -> None:
    device = ready_device()
    async with open_bench(device) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        client = Client()
        with bench.runner().frozen():
            nursery.start_soon(client.ask, bench)
            await wait_all_tasks_blocked()
            bench.runner().die(-9)

    assert client.complete
    assert len(device.runners) == 2


async def test_what_kills_two_runners_is_told(autojump_clock: MockClock) -> None:
    device = ready_device()
    device.deadly_text = "poison"
    async with open_bench(device) as bench:
        bench.node.run_model("m")
        client, harmless = Client(), Client()
        await client.ask(bench, text="poison")
        await harmless.ask(bench)

    assert [type(event) for event in client.events] == [Failed]
    assert client.failure == "runner_crashed"
    assert harmless.complete
    assert len(device.runners) == 3


async def test_draining_lets_running_requests_end_and_sends_the_others_away(autojump_clock: MockClock) -> None:
    async with open_bench(ready_device(running_max=1)) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        running, waiting = await crowd(bench, nursery, 2)
        await bench.node.drain()
        late = Client()
        await late.ask(bench)
        assert running.complete
        assert bench.node.not_ready() == "This node is stopping."

    assert [type(client.error) for client in (waiting, late)] == [NoRoute, NoRoute]


async def test_a_node_that_goes_down_ends_what_runs(autojump_clock: MockClock) -> None:
    device = ready_device(answer_tokens=None, stop_one_in=0)
    client = Client()
    async with trio.open_nursery() as nursery:
        async with open_bench(device) as bench:
            bench.node.run_model("m")
            await wait_all_tasks_blocked()
            nursery.start_soon(client.ask, bench, "m", "a", 1000)
            await trio.sleep(3)
        nursery.cancel_scope.deadline = trio.current_time() + 100

    assert client.failure == "runner_stopped"


async def test_names(autojump_clock: MockClock) -> None:
    async with open_bench(ready_device(), aliases={"gpt-4o": "m", "lost": "absent"}) as bench:
        nobody = Client()
        await nobody.ask(bench)
        assert isinstance(nobody.error, NoRoute)
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        assert [(model.name, model.context) for model in bench.node.models()] == [("m", 4096), ("gpt-4o", 4096)]
        ids = set()
        for name in (None, "m", "default", "gpt-4o"):
            client = Client()
            await client.ask(bench, name)
            assert client.complete
            ids.add(client.task_id)
        assert len(ids) == 4
        unknown = Client()
        await unknown.ask(bench, "n")

    assert isinstance(unknown.error, ModelNotFound)


@pytest.mark.parametrize("count", [1, 5])
async def test_nothing_is_left_behind(autojump_clock: MockClock, count: int) -> None:
    async with open_bench(ready_device(running_max=2)) as bench, trio.open_nursery() as nursery:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()
        await crowd(bench, nursery, count)
        await trio.sleep(100)
        tasks = len(nursery.child_tasks)
        assert tasks == 0
        await bench.node.drain()


async def test_a_node_that_was_just_started_waits_for_news_of_the_others(autojump_clock: MockClock) -> None:
    async with open_bench(ready_device(), joining_seconds=5.0) as bench, trio.open_nursery() as nursery:
        early, mistaken = Client(), Client()
        nursery.start_soon(early.ask, bench, "m")
        nursery.start_soon(mistaken.ask, bench, "another")
        await trio.sleep(3)
        assert [client.error for client in (early, mistaken)] == [None, None]
        bench.node.run_model("m")
    assert early.complete
    assert isinstance(mistaken.error, ModelNotFound)
    assert mistaken.ended_at == 5.0
