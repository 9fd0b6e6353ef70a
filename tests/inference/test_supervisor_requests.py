"""Requests through the supervisor, with real runner processes and the fake engine. About 8 s."""

import os
import signal
from pathlib import Path

import pytest
import trio

from inference import supervisor as supervisor_module
from inference.requests import Accepted, ChatPrompt, Event, Failed, Finished, Refused, Request, Sampling
from tests.inference.supervised import answer, expected_answer, fault, kill, make_request, reach, reach_status, running, text_of


async def test_64_answers_at_once_are_each_as_if_alone(tmp_path: Path) -> None:
    requests = [make_request(f"r{n}", 40 + n, seed=n, text=f"prompt {n}", stop=("stop", "abc")[: n % 3]) for n in range(64)]
    answers: dict[str, list[Event]] = {}

    async def ask(request: Request) -> None:
        answers[request.request_id] = await answer(supervisor, request)

    async with running(tmp_path, prefill_tokens=50) as supervisor:
        await reach_status(supervisor, "ready")
        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(ask, request)
    for request in requests:
        events = answers[request.request_id]
        assert isinstance(events[0], Accepted)
        assert isinstance(events[-1], Finished)
        assert text_of(events) == expected_answer(request)


async def test_requests_in_flight_fail_when_the_runner_crashes_and_the_next_is_answered(tmp_path: Path) -> None:
    ends: list[Event] = []

    async def ask(number: int) -> None:
        ends.append((await answer(supervisor, make_request(f"r{number}", None)))[-1])

    async with running(tmp_path, stop_one_in=0, step_seconds=0.001) as supervisor:
        state = await reach_status(supervisor, "ready")
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, number)
            await reach(supervisor, lambda state: state.load is not None and state.load.running == 5)
            kill(state)
        assert all(isinstance(end, Failed) and end.code == "runner_crashed" and "SIGKILL" in end.message for end in ends)
        assert len(ends) == 5
        await reach_status(supervisor, "ready")
        assert supervisor.state.spawn == 2
        assert isinstance((await answer(supervisor, make_request("r0", 5)))[-1], Finished)


async def test_without_a_ready_runner_a_request_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, load_seconds=30) as supervisor:
        (end,) = await answer(supervisor, make_request())
        assert isinstance(end, Refused)
        assert end.load.running_max == 0


@pytest.mark.parametrize(
    "bad",
    [
        make_request("bad", sampling=Sampling(seed=-1)),
        make_request("bad", sampling=Sampling(seed=1, temperature=9)),
        make_request("bad", stop=("x",) * 17),
        make_request("bad", prompt=ChatPrompt(({"role": "user", "number": 1 << 80},))),
        make_request("bad", text="\ud800"),
    ],
)
async def test_a_request_that_no_runner_would_take_fails_alone(tmp_path: Path, bad: Request) -> None:
    async with running(tmp_path) as supervisor:
        state = await reach_status(supervisor, "ready")
        (end,) = await answer(supervisor, bad)
        assert isinstance(end, Failed)
        assert end.code == "invalid_parameter"
        request = make_request()
        assert text_of(await answer(supervisor, request)) == expected_answer(request)
        assert supervisor.state.pid == state.pid


async def test_refusals_of_the_runner_come_through(tmp_path: Path) -> None:
    async with running(tmp_path, running_max=1, stop_one_in=0, step_seconds=0.001) as supervisor:
        await reach_status(supervisor, "ready")
        async with supervisor.generate(make_request("first", None)) as events:
            assert isinstance(await anext(aiter(events)), Accepted)
            (end,) = await answer(supervisor, make_request("second"))
            assert isinstance(end, Refused)
            assert (end.load.running, end.load.running_max) == (1, 1)
            (end,) = await answer(supervisor, make_request("first"))
            assert isinstance(end, Failed)
            assert end.code == "invalid_parameter"


async def test_a_slow_consumer_holds_up_nobody_and_misses_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, stop_one_in=0, running_max=2) as supervisor:
        await reach_status(supervisor, "ready")
        async with supervisor.generate(make_request("slow", 4000)) as slow:
            quick = await answer(supervisor, make_request("quick", 4000))
            assert isinstance(quick[-1], Finished)
            await reach(supervisor, lambda state: state.load is not None and state.load.running == 0)
            events = [event async for event in slow]
        assert text_of(events) == text_of(quick)
        assert isinstance(events[-1], Finished)
        assert len(events) < 600, "unread tokens are joined"


@pytest.mark.parametrize("phase", ["submitted", "accepted", "prefilling", "generating"])
async def test_leaving_a_request_frees_its_place(tmp_path: Path, phase: str) -> None:
    async with running(tmp_path, stop_one_in=0, running_max=1, prefill_tokens=10, step_seconds=0.001) as supervisor:
        await reach_status(supervisor, "ready")
        for _ in range(3):
            text = "x" * (2000 if phase == "prefilling" else 20)
            async with supervisor.generate(make_request("a", None, text=text)) as stream:
                events = aiter(stream)
                wanted = {"submitted": 0, "accepted": 1, "prefilling": 3, "generating": 8}[phase]
                for _ in range(wanted):
                    await anext(events)
            # Its place is free by now: with one place only, the next request gets it.
            following = await answer(supervisor, make_request("b", 3))
            assert isinstance(following[-1], Finished)
        await reach_status(supervisor, "ready")
        assert supervisor.state.load is not None
        assert supervisor.state.load.kv_bytes == 0


async def test_cancelled_consumers_race_with_ends(tmp_path: Path) -> None:
    """Scopes cancelled at every possible event, beside answers that must not notice."""
    wrong: list[int] = []

    async def leave_after(number: int, events_max: int) -> None:
        with trio.CancelScope() as scope:
            async with supervisor.generate(make_request(f"left {number}", 12, seed=number)) as stream:
                count = 0
                async for _ in stream:
                    count += 1
                    if count == events_max:
                        scope.cancel()

    async def stay(number: int) -> None:
        request = make_request(f"stays {number}", 60, seed=number)
        if text_of(await answer(supervisor, request)) != expected_answer(request):
            wrong.append(number)

    async with running(tmp_path, running_max=64) as supervisor:
        await reach_status(supervisor, "ready")
        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(leave_after, number, number % 15)
                nursery.start_soon(stay, number)
        await reach(supervisor, lambda state: state.load is not None and state.load.running == 0)
        assert not wrong
        assert "0 requests" in repr(supervisor)


async def test_a_runner_that_does_not_answer_a_cancel_delays_leaving_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "CANCEL_SECONDS_MAX", 0.2)
    async with running(tmp_path, stop_one_in=0) as supervisor:
        state = await reach_status(supervisor, "ready")
        with trio.fail_after(20):
            async with supervisor.generate(make_request("a", None)) as stream:
                await anext(aiter(stream))
                assert state.pid is not None
                os.kill(state.pid, signal.SIGSTOP)  # whatever it was doing, it hears of no cancel now
        (end,) = await answer(supervisor, make_request("a"))
        assert isinstance(end, Failed), "its id is in use until the runner has said its end"
