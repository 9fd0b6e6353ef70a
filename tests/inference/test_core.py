"""The runner's core over the fake engine: admission, texts, ends, usage; no process, no clock."""

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.requests import (
    END_EVENTS,
    Accepted,
    ChatPrompt,
    Event,
    Failed,
    Finished,
    Load,
    Prefilled,
    Prompt,
    Refused,
    Request,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Tokens,
    Usage,
)
from inference.runner import fake_vocabulary
from inference.runner.core import Core
from inference.runner.engine import Row
from inference.runner.fake_engine import FakeEngine, FakeSettings
from inference.runner_protocol import Step
from tests.fake_model import expected_ids, expected_text

SEEDED = Sampling(seed=17)


def make_core(
    context: int = 8192, running_max: int = 8, before_step: Callable[[int], None] = lambda _: None, **settings: object
) -> Core:
    return Core(FakeEngine(FakeSettings(**settings), context, running_max, before_step))  # type: ignore[arg-type]  # fields of several types


def make_request(request_id: str = "a", prompt: Prompt | str | tuple[int, ...] = "hello", **fields: object) -> Request:
    made = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt) if isinstance(prompt, tuple) else prompt
    return Request(**{"request_id": request_id, "prompt": made, "sampling": SEEDED} | fields)  # type: ignore[arg-type]  # fields of several types


def taken(core: Core) -> list[Event]:
    """The events since the last call."""
    report = core.report()
    return [] if report is None else list(report.events)


def finish_all(core: Core) -> dict[str, list[Event]]:
    """Step until idle; the events from now on, by request."""
    events: dict[str, list[Event]] = {}
    while True:
        report = core.report()
        if report is not None:
            check_step(report)
            for event in report.events:
                events.setdefault(event.request_id, []).append(event)
        if core.idle:
            return events
        core.step()


def check_step(step: Step) -> None:
    """One Tokens event a request and step at most, and a load within its bounds."""
    with_tokens = [event.request_id for event in step.events if isinstance(event, Tokens)]
    assert len(with_tokens) == len(set(with_tokens))
    assert 0 <= step.load.running <= step.load.running_max
    assert 0 <= step.load.kv_bytes <= step.load.kv_bytes_max


def check_stream(events: Sequence[Event]) -> None:
    """Accepted Prefilled* Tokens* (Finished | Failed), or one Refused or Failed."""
    assert isinstance(events[-1], END_EVENTS)
    assert not any(isinstance(event, END_EVENTS) for event in events[:-1])
    if len(events) > 1:
        assert isinstance(events[0], Accepted)
        assert not any(isinstance(event, Accepted) for event in events[1:])


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))


def ids_of(events: Sequence[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


def run_one(core: Core, request: Request) -> list[Event]:
    core.submit(request)
    events = finish_all(core)[request.request_id]
    check_stream(events)
    return events


def test_an_answer_is_the_engines_tokens_and_their_text() -> None:
    core = make_core()
    events = run_one(core, make_request(max_tokens=50))
    ids, stopped = expected_ids(fake_vocabulary.encode("hello"), SEEDED, 50)
    assert events[0] == Accepted("a", fake_vocabulary.encode("hello"), 0)
    assert ids_of(events) == ids
    assert text_of(events) == expected_text(ids)
    assert events[-1] == Finished("a", "stop" if stopped else "length", Usage(5, len(ids), 0))
    assert core.load == Load(0, 8, 0, core.load.kv_bytes_max)


def test_by_length_exactly_max_tokens_are_counted() -> None:
    end = run_one(make_core(stop_one_in=0), make_request(max_tokens=7))[-1]
    assert end == Finished("a", "length", Usage(5, 7, 0))


def test_the_stop_token_is_in_no_text_and_no_count() -> None:
    events = run_one(make_core(answer_tokens=9), make_request(max_tokens=50))
    assert events[-1] == Finished("a", "stop", Usage(5, 9, 0))
    assert fake_vocabulary.STOP not in ids_of(events)


def test_an_answer_may_be_empty() -> None:
    events = run_one(make_core(answer_tokens=0), make_request(max_tokens=50))
    assert [type(event) for event in events] == [Accepted, Prefilled, Finished]
    assert events[-1] == Finished("a", "stop", Usage(5, 0, 0))


def test_without_max_tokens_an_answer_may_fill_the_context() -> None:
    end = run_one(make_core(context=64, stop_one_in=0), make_request())[-1]
    assert end == Finished("a", "length", Usage(5, 59, 0))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    stop=st.lists(st.sampled_from(["stop", "END", "abc", "\n\n", "日本", "😀", " the node", "s", "a🐟b"]), max_size=4),
    count=st.integers(1, 120),
    data=st.data(),
)
def test_stop_strings_and_continuations(seed: int, stop: list[str], count: int, data: st.DataObject) -> None:
    """Against the oracle; and broken off anywhere, the same text comes in two attempts."""
    sampling = Sampling(seed=seed)
    whole = run_one(make_core(), make_request(sampling=sampling, stop=tuple(stop), max_tokens=count))
    ids, _ = expected_ids(fake_vocabulary.encode("hello"), sampling, count)
    assert text_of(whole) == expected_text(ids[: len(ids_of(whole))], stop) == expected_text(ids, stop)

    tokens = [event for event in whole if isinstance(event, Tokens)]
    had = tokens[: data.draw(st.integers(0, len(tokens)), label="events before the break")]
    given_characters = data.draw(st.integers(0, len(text_of(had))), label="characters that reached the client")
    continuation = make_request(
        prompt=fake_vocabulary.encode("hello"),
        sampling=sampling,
        stop=tuple(stop),
        max_tokens=count,
        generated=tuple(ids_of(had)),
        given_characters=given_characters,
    )
    rest = run_one(make_core(), continuation)
    assert text_of(had)[:given_characters] + text_of(rest) == text_of(whole)
    assert ids_of(had) + ids_of(rest) == ids_of(whole)
    assert rest[-1] == whole[-1], "reason and usage of the whole request"


def test_a_stop_string_ends_the_row_at_once() -> None:
    core = make_core(stop_one_in=0)
    ids, _ = expected_ids(fake_vocabulary.encode("hello"), SEEDED, 200, FakeSettings(stop_one_in=0))
    stop = fake_vocabulary.decode(ids[:100]).rstrip("\N{REPLACEMENT CHARACTER}")[-5:]
    events = run_one(core, make_request(stop=(stop,), max_tokens=4000))
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"
    assert len(ids_of(events)) <= 100
    assert core.load.running == 0


def test_held_back_text_is_given_out_with_the_last_token() -> None:
    ids, _ = expected_ids(fake_vocabulary.encode("hello"), SEEDED, 20, FakeSettings(stop_one_in=0))
    text = fake_vocabulary.decode(ids)
    core = make_core(stop_one_in=0)
    events = run_one(core, make_request(stop=(text[-2:] + "never",), max_tokens=20))
    assert text_of(events) == text


def test_logprobs_come_with_their_tokens() -> None:
    core = make_core()
    events = run_one(core, make_request(max_tokens=10, top_logprobs=2, stop=("zzz",)))
    for event in events:
        if isinstance(event, Tokens) and event.token_ids:
            assert [logprob.token_id for logprob in event.logprobs] == list(event.token_ids)
            assert len(event.logprobs[0].top) == 2


def test_requests_of_one_step_come_in_one_frame_and_do_not_touch_each_other() -> None:
    core = make_core(stop_one_in=0, prefill_tokens=1000)
    requests = [make_request(f"r{n}", f"prompt {n}", sampling=Sampling(seed=n), max_tokens=20 + n) for n in range(8)]
    for request in requests:
        core.submit(request)
    core.step()
    report = core.report()
    assert report is not None
    assert sum(isinstance(event, Tokens) for event in report.events) == 8
    before = {event.request_id: event.text for event in report.events if isinstance(event, Tokens)}
    events = finish_all(core)
    for n, request in enumerate(requests):
        ids, _ = expected_ids(fake_vocabulary.encode(f"prompt {n}"), request.sampling, 20 + n, FakeSettings(stop_one_in=0))
        assert before[request.request_id] + text_of(events[request.request_id]) == fake_vocabulary.decode(ids)


@pytest.mark.parametrize(
    ("prompt_count", "max_tokens", "fits"), [(59, 5, True), (60, 5, False), (63, None, True), (64, None, False)]
)
def test_the_context_holds_prompt_and_answer(prompt_count: int, max_tokens: int | None, fits: bool) -> None:
    core = make_core(context=64)
    core.submit(make_request(prompt=(65,) * prompt_count, max_tokens=max_tokens))
    (event,) = taken(core)
    if fits:
        assert isinstance(event, Accepted)
        return
    assert isinstance(event, Failed)
    assert event.code == "context_length_exceeded"
    assert "64 tokens" in event.message
    assert str(prompt_count + (max_tokens or 1)) in event.message
    assert core.idle


@pytest.mark.parametrize("as_chat", [True, False])
def test_text_too_long_by_far_is_refused_without_being_tokenized(as_chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = fake_vocabulary.TOKEN_CHARACTERS_MAX
    core = make_core(context=64)

    def prompt(text: str) -> Prompt:
        return ChatPrompt(({"role": "user", "content": text},)) if as_chat else TextPrompt(text)

    core.submit(make_request(prompt=prompt("x" * 64 * longest)))
    (counted,) = taken(core)
    monkeypatch.setattr(FakeEngine, "tokenize", None)
    core.submit(make_request(prompt=prompt("x" * (64 * longest + 1))))
    (refused,) = taken(core)

    assert isinstance(counted, Failed)
    assert isinstance(refused, Failed)
    assert counted.code == refused.code == "context_length_exceeded"
    assert "65 tokens at least" in refused.message


def test_what_the_whole_budget_cannot_hold_is_no_question_of_room() -> None:
    core = make_core(context=8192, kv_bytes_max=64 * 1024)
    assert core.info.context == 64
    core.submit(make_request(max_tokens=100))
    (event,) = taken(core)
    assert isinstance(event, Failed)
    assert event.code == "context_length_exceeded"


def test_kv_is_reserved_in_whole_steps_of_a_caches_growth() -> None:
    core = make_core(kv_bytes_per_token=10, kv_step=16)
    core.submit(make_request(prompt=(65,) * 10, max_tokens=7))
    assert core.load.kv_bytes == 32 * 10


def test_without_room_a_request_is_refused_with_the_load() -> None:
    core = make_core(kv_bytes_per_token=10, kv_step=16, kv_bytes_max=1000)
    core.submit(make_request("a", prompt=(65,) * 32, max_tokens=32))
    core.submit(make_request("b", prompt=(65,) * 32, max_tokens=32))
    load = Load(1, 8, 640, 1000)
    assert taken(core)[1] == Refused("b", 640, load)
    assert core.load == load
    core.cancel("a")
    core.submit(make_request("b", prompt=(65,) * 32, max_tokens=32))
    assert isinstance(taken(core)[-1], Accepted)


def test_no_more_than_running_max_run_at_once() -> None:
    core = make_core(running_max=2)
    for n in range(3):
        core.submit(make_request(f"r{n}", max_tokens=5))
    assert [type(event) for event in taken(core)] == [Accepted, Accepted, Refused]


def test_the_prefix_cache_yields_to_requests() -> None:
    core = make_core(kv_bytes_per_token=10, kv_step=16, kv_bytes_max=2000, stop_one_in=0)
    engine = core._engine
    run_one(core, make_request(prompt=(65,) * 80, max_tokens=40))
    assert engine.cache_bytes() > 1000
    core.submit(make_request("b", prompt=(66,) * 80, max_tokens=50))
    assert isinstance(taken(core)[0], Accepted)
    assert core.load.kv_bytes + engine.cache_bytes() <= 2000


def test_a_second_turn_comes_from_the_prefix_cache() -> None:
    core = make_core(stop_one_in=0)
    first = run_one(core, make_request(prompt=(65,) * 40, max_tokens=10))
    second = run_one(core, make_request("b", prompt=(*[65] * 40, *ids_of(first), 66), max_tokens=10))
    assert isinstance(second[0], Accepted)
    assert second[0].cached_tokens == 50
    assert isinstance(second[-1], Finished)
    assert second[-1].usage == Usage(51, 10, 50)


class TestFailures:
    """One bad request fails alone."""

    def alone(self, core: Core, bad: Request) -> Failed:
        """Run `bad` beside a good request, whose answer must be as if it had been alone; the bad one's end."""
        core.submit(make_request("good", max_tokens=30))
        core.step()
        core.submit(bad)
        events = finish_all(core)
        ids, _ = expected_ids(fake_vocabulary.encode("hello"), SEEDED, 30)
        assert ids_of(events["good"]) == ids
        assert isinstance(events["good"][-1], Finished)
        end = events["bad"][-1]
        assert isinstance(end, Failed)
        return end

    def test_a_template_error(self) -> None:
        prompt = ChatPrompt(({"role": "user", "content": "hi"},))
        end = self.alone(make_core(template_error="No such role."), make_request("bad", prompt))
        assert (end.code, end.message) == ("template_error", "No such role.")

    def test_generated_ids_that_are_no_tokens(self) -> None:
        end = self.alone(make_core(), make_request("bad", generated=(1 << 30,), max_tokens=5))
        assert (end.code, end.param) == ("invalid_parameter", "generated")

    def test_a_parameter_that_the_engine_cannot_honour(self) -> None:
        end = self.alone(make_core(), make_request("bad", sampling=Sampling(seed=1, logit_bias=((1 << 30, 1.0),))))
        assert (end.code, end.param) == ("invalid_parameter", "logit_bias")

    def test_an_empty_prompt(self) -> None:
        assert self.alone(make_core(), make_request("bad", prompt="")).code == "invalid_parameter"

    def test_a_request_over_which_the_engine_stumbles_in_a_step(self) -> None:
        core = make_core(fail_marker="poison")
        end = self.alone(core, make_request("bad", prompt="poison", max_tokens=5))
        assert end.code == "engine_error"
        assert core.load.kv_bytes == 0

    def test_a_request_over_which_the_engine_raises(self) -> None:
        class Stumbling(FakeEngine):
            def tokenize(self, prompt: object) -> tuple[int, ...]:
                if prompt == TextPrompt("stumble"):
                    raise ValueError("first line\nsecond line")
                if prompt == TextPrompt("tumble"):
                    raise ValueError("x" * 10_000)
                return super().tokenize(prompt)  # type: ignore[arg-type]  # fields of several types

        def core() -> Core:
            return Core(Stumbling(FakeSettings(), 8192, 8, lambda _: None))

        assert len(self.alone(core(), make_request("bad", prompt="tumble")).message) < 400
        end = self.alone(core(), make_request("bad", prompt="stumble"))
        assert end.code == "engine_error"
        assert end.message == "The engine failed on it: ValueError: first line second line."

    def test_a_request_that_the_engine_has_half_taken_on(self) -> None:
        class Half(FakeEngine):
            def insert(self, row: Row) -> int:
                cached = super().insert(row)
                if row.request_id == "bad":
                    raise RuntimeError("no more room")
                return cached

        core = Core(Half(FakeSettings(), 8192, 8, lambda _: None))
        assert self.alone(core, make_request("bad")).code == "engine_error"
        assert core.load.kv_bytes == 0

    def test_an_id_that_is_in_use(self) -> None:
        core = make_core()
        core.submit(make_request("a", max_tokens=5))
        core.submit(make_request("a", max_tokens=5))
        accepted, failed = taken(core)
        assert isinstance(accepted, Accepted)
        assert isinstance(failed, Failed)
        assert failed.code == "invalid_parameter"
        assert isinstance(finish_all(core)["a"][-1], Finished)


class TestCancel:
    """In any phase, and at once."""

    def test_before_the_first_step(self) -> None:
        core = make_core()
        core.submit(make_request(max_tokens=5))
        core.cancel("a")
        assert taken(core)[-1] == Finished("a", "cancelled", Usage(5, 0, 0))
        assert core.idle
        assert core.load.kv_bytes == 0

    def test_in_prefill(self) -> None:
        core = make_core(prefill_tokens=10)
        core.submit(make_request(prompt=(65,) * 100, max_tokens=5))
        core.step()
        core.cancel("a")
        assert [type(event) for event in taken(core)] == [Accepted, Prefilled, Finished]
        assert core.idle

    def test_while_generating(self) -> None:
        core = make_core(stop_one_in=0)
        core.submit(make_request(max_tokens=500))
        for _ in range(6):
            core.step()
        core.cancel("a")
        core.cancel("a")
        assert taken(core)[-1] == Finished("a", "cancelled", Usage(5, 6, 0))
        assert core.idle

    def test_of_an_unknown_id_is_no_error(self) -> None:
        core = make_core()
        core.cancel("nobody")
        assert core.report() is None


def test_all_fail_where_the_engine_is_broken() -> None:
    core = make_core()
    core.submit(make_request("a", max_tokens=500))
    core.submit(make_request("b", max_tokens=500))
    taken(core)
    core.fail_all("engine_error", "It broke.")
    assert taken(core) == [Failed("a", "engine_error", "It broke."), Failed("b", "engine_error", "It broke.")]
    assert core.idle


def test_a_continuation_of_which_only_the_end_was_missing() -> None:
    whole = run_one(make_core(stop_one_in=0), make_request(max_tokens=12))
    core = make_core(stop_one_in=0)
    rest = run_one(core, make_request(max_tokens=12, generated=tuple(ids_of(whole)), given_characters=len(text_of(whole)) - 1))
    assert text_of(rest) == text_of(whole)[-1]
    assert rest[-1] == whole[-1]
    full = run_one(make_core(context=17, stop_one_in=0), make_request(generated=tuple(ids_of(whole))))
    assert isinstance(full[-1], Finished)
    assert full[-1].reason == "length"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, 40), st.integers(1, 60)),
        st.tuples(st.just("cancel"), st.integers(0, 5), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=100)
@given(ACTIONS)
def test_whatever_happens_streams_are_whole_and_all_room_comes_back(actions: list[tuple[str, int, int, int]]) -> None:
    core = make_core(running_max=3, kv_bytes_per_token=10, kv_step=16, kv_bytes_max=2000, prefill_tokens=16, stop_one_in=20)
    engine = core._engine
    events: dict[str, list[Event]] = {}
    submitted: dict[int, str] = {}
    for number, (action, name, prompt_count, max_tokens) in enumerate(actions):
        if action == "submit":
            submitted[name] = f"{name}.{number}"
            core.submit(make_request(submitted[name], prompt=(65 + name,) * prompt_count, max_tokens=max_tokens))
        elif action == "cancel":
            core.cancel(submitted.get(name, "nobody"))
        else:
            core.step()
        assert core.load.kv_bytes + engine.cache_bytes() <= 2000
        for event in taken(core):
            events.setdefault(event.request_id, []).append(event)
    for request_id, rest in finish_all(core).items():
        events.setdefault(request_id, []).extend(rest)
    for stream in events.values():
        check_stream(stream)
    assert core.load == Load(0, 3, 0, 2000)


def test_the_same_commands_give_the_same_frames() -> None:
    def frames() -> bytes:
        core = make_core()
        for n in range(5):
            core.submit(make_request(f"r{n}", max_tokens=30))
        steps = []
        while not core.idle:
            core.step()
            steps.append(core.report())
        return msgspec.msgpack.encode(steps)

    assert frames() == frames()
