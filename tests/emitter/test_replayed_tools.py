"""Tools that forks answer from the record: what is recorded, what is given again, and what runs all the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.emitter.tools import LONGEST_RESULT
from agentlightning.errors import ConfigError
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer, SpanTree, ToolReplay
from agentlightning.types import RecordedAttempt, Span, recorded_tools
from agentlightning.types.names import OPERATION_OUTPUT, REPLAYABLE, REPLAYED_FROM

Work = Callable[[], Any]


async def attempt(work: Work, before: Sequence[Span] = (), following: Sequence[Any] = ()) -> tuple[Any, list[Span]]:
    """What the work returned in an attempt, and the attempt's spans. With those of an attempt before it is a fork."""
    async with DummyTracer().trace_context(rollout_id="r", attempt_id="a") as trace:
        trace.tools = ToolReplay(recorded_tools(before, following)) if before else None
        result = work()
        if isinstance(result, Awaitable):
            result = await result
    return result, trace.spans


def call_at(start_time: float | None) -> Any:
    """A call of the model that began then."""
    return SimpleNamespace(info=SimpleNamespace(start_time=start_time))


class Shop:
    """Tools that count how often they ran."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

        @agl.replayed
        def order(what: str, number: int = 1) -> dict[str, Any]:
            self.ran.append((what, number))
            return {"what": what, "order": len(self.ran)}

        @agl.replayed(name="stock")
        async def stock_of(what: str) -> int:
            await asyncio.sleep(0)
            self.ran.append(what)
            return len(self.ran)

        self.order, self.stock = order, stock_of


def from_record(spans: Sequence[Span]) -> list[bool]:
    return [REPLAYED_FROM in span.attributes for span in spans]


async def test_a_fork_is_given_the_results_and_runs_nothing() -> None:
    shop = Shop()

    async def work() -> list[Any]:
        return [shop.order("tea"), await shop.stock("tea"), shop.order("tea", number=1), shop.order("milk", 2)]

    told, spans = await attempt(work)
    assert shop.ran == [("tea", 1), "tea", ("tea", 1), ("milk", 2)]
    assert not any(from_record(spans))
    again, forked = await attempt(work, spans)
    assert again == told
    assert len(shop.ran) == 4, "nothing ran"
    assert from_record(forked) == [True] * 4
    assert [s.attributes[REPLAYED_FROM] for s in forked] == [s.span_id for s in spans]
    assert "stock (from the record)" in str(SpanTree(forked))
    third, _ = await attempt(work, forked)
    assert third == told, "a fork of the fork"
    assert len(shop.ran) == 4


async def test_what_the_record_does_not_have_runs() -> None:
    shop = Shop()
    _, spans = await attempt(lambda: shop.order("tea"))
    again, _ = await attempt(lambda: [shop.order("milk"), shop.order("tea"), shop.order("tea")], spans)
    assert [one["order"] for one in again] == [2, 1, 3]
    assert shop.ran == [("tea", 1), ("milk", 1), ("tea", 1)]


async def test_results_are_those_of_before_the_fork() -> None:
    shop = Shop()
    _, spans = await attempt(lambda: [shop.order("tea") for _ in range(3)])
    at = call_at(spans[1].end_time)
    assert [tool.result is None for tool in recorded_tools(spans, [at])] == [False, False]
    again, _ = await attempt(lambda: [shop.order("tea") for _ in range(3)], spans, [at])
    assert [one["order"] for one in again] == [1, 2, 4]


async def test_a_tool_that_was_at_work_at_the_fork_keeps_its_place() -> None:
    slow = asyncio.Event()
    ran: list[int] = []

    @agl.replayed
    async def look() -> int:
        ran.append(number := len(ran) + 1)
        if number == 1:
            await slow.wait()
        return number

    async def work() -> list[int]:
        first = asyncio.create_task(look())
        await asyncio.sleep(0)
        second = await look()
        slow.set()
        return [await first, second]

    told, spans = await attempt(work)
    assert told == [1, 2]
    point = next(s.end_time for s in spans if s.attributes[OPERATION_OUTPUT] == "2")
    between = [s if s.end_time == point else s.model_copy(update={"end_time": (point or 0) + 1}) for s in spans]
    again, _ = await attempt(work, between, [call_at(point)])
    assert again == [3, 2]


async def test_one_that_raised_runs_again_in_its_place() -> None:
    ran: list[int] = []

    @agl.replayed
    def moody() -> int:
        ran.append(len(ran))
        if len(ran) in (1, 3):
            raise ValueError("a secret of the tool's")
        return len(ran)

    def work() -> list[Any]:
        found: list[Any] = []
        for _ in range(2):
            try:
                found.append(moody())
            except ValueError:
                found.append("failed")
        return found

    told, spans = await attempt(work)
    assert told == ["failed", 2]
    assert spans[0].status.status_code == "ERROR"
    assert "secret" not in spans[0].model_dump_json()
    again, _ = await attempt(work, spans)
    assert again == told
    assert len(ran) == 3


@dataclass
class _Point:
    x: int


@pytest.mark.parametrize("result", [_Point(1), (1, 2), {1: "a"}, float("nan"), [{"a": b"x"}], {1, 2}, object()])
async def test_a_result_that_json_does_not_give_back_is_not_recorded(
    result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    @agl.replayed(name="odd_tool")
    def odd(n: int) -> Any:
        ran.append(n)
        return result if n == 0 else n

    def work() -> list[Any]:
        return [odd(0), odd(1), odd(0)]

    _, spans = await attempt(work)
    assert [span.attributes[REPLAYABLE] for span in spans] == [False, True, False]
    again, _ = await attempt(work, spans)
    assert again[0] is result
    assert ran == [0, 1, 0, 0, 0]
    assert caplog.text.count("odd_tool") == 1, "said once"


async def test_a_very_long_result_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    @agl.replayed
    def page(size: int) -> str:
        ran.append(size)
        return "x" * size

    def work() -> list[int]:
        return [len(page(size)) for size in (LONGEST_RESULT - 2, LONGEST_RESULT, LONGEST_RESULT)]

    _, spans = await attempt(work)
    assert sum(len(str(span.attributes.get(OPERATION_OUTPUT, ""))) for span in spans) == LONGEST_RESULT
    assert (await attempt(work, spans))[0] == [LONGEST_RESULT - 2, LONGEST_RESULT, LONGEST_RESULT]
    assert ran == [LONGEST_RESULT - 2, LONGEST_RESULT, LONGEST_RESULT, LONGEST_RESULT, LONGEST_RESULT]
    assert caplog.text.count("256 KiB") == 1


async def test_a_result_with_a_key_of_the_attempt_is_not_recorded() -> None:
    from agentlightning.keys import new_secret, sign_attempt_key

    key = sign_attempt_key(new_secret(), "r", "a")

    @agl.replayed
    def asks() -> str:
        return f"sent with {key}"

    _, (span,) = await attempt(asks)
    assert key not in span.model_dump_json()


async def test_arguments_that_json_cannot_hold_are_like_no_others(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[Any] = []

    @agl.replayed
    def ask(client: Any, question: str) -> int:
        ran.append(question)
        return len(ran)

    @agl.replayed(ignore=["client"])
    def ask_any(client: Any, question: str) -> int:
        ran.append(question)
        return len(ran)

    _, spans = await attempt(lambda: [ask(_Point(1), "a"), ask(_Point(1), "b"), ask_any(_Point(1), "c")])
    assert len(spans) == 1
    assert "ignore=['client']" in caplog.text
    assert len(caplog.records) == 1
    again, _ = await attempt(lambda: [ask(_Point(1), "a"), ask_any(_Point(2), "c")], spans)
    assert again == [4, 3]


async def test_arguments_are_compared_by_what_they_are() -> None:
    @agl.replayed
    def same(a: Any, *rest: Any, client: Any = logging, **more: Any) -> str:
        return "ran"

    async def kept(first: Work, second: Work) -> bool:
        _, spans = await attempt(first)
        _, forked = await attempt(second, spans)
        return from_record(forked) == [True]

    assert await kept(lambda: same(1), lambda: same(a=1))
    assert await kept(lambda: same({"a": 1, "b": 2}, 3), lambda: same({"b": 2, "a": 1}, 3))
    assert await kept(lambda: same(1, x=1, y=2), lambda: same(1, y=2, x=1))
    for other in (lambda: same("1"), lambda: same(1.0), lambda: same(True), lambda: same(1, 1), lambda: same(1, x=1)):
        assert not await kept(lambda: same(1), other)


async def test_what_a_tool_calls_is_its_own_affair() -> None:
    ran: list[str] = []

    @agl.replayed
    def inner() -> int:
        ran.append("inner")
        return len(ran)

    @agl.replayed
    def outer(fail: bool) -> int:
        found = inner()
        ran.append("outer")
        if fail and len(ran) < 3:
            raise ValueError
        return found

    _, spans = await attempt(lambda: [outer(False), inner()])
    again, _ = await attempt(lambda: [outer(False), inner()], spans)
    assert again == [1, 3], "the agent's own call is not answered with what the tool had called"
    assert ran == ["inner", "outer", "inner"]

    def work() -> int:
        try:
            return outer(True)
        except ValueError:
            return 0

    ran.clear()
    told, spans = await attempt(work)
    assert told == 0
    assert ran == ["inner", "outer"]
    assert (await attempt(work, spans))[0] == 1, "the tool runs again, and what it calls is answered"
    assert ran == ["inner", "outer", "outer"]


async def test_outside_of_an_attempt_it_is_the_function(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    assert shop.order("tea") == {"what": "tea", "order": 1}
    assert await shop.stock(what="tea") == 2
    assert not caplog.records
    assert shop.order.__name__ == "order"
    assert asyncio.iscoroutinefunction(shop.stock)
    untyped: Any = shop.order
    with pytest.raises(TypeError, match="unexpected keyword"):
        untyped("tea", colour="green")
    with pytest.raises(TypeError, match="unexpected keyword"):
        await attempt(lambda: untyped("tea", colour="green"))


async def test_attempts_at_the_same_time_have_each_their_own() -> None:
    shop = Shop()
    first, second = [(await attempt(lambda: shop.order("tea")))[1] for _ in range(2)]

    async def work() -> Any:
        await asyncio.sleep(0.01)
        threads = await asyncio.gather(*(asyncio.to_thread(shop.order, "tea") for _ in range(2)))
        return sorted(one["order"] for one in threads)

    found = await asyncio.gather(*(attempt(work, spans) for spans in (first, second, first)), attempt(work))
    orders = [orders for orders, _ in found]
    assert [one[0] for one in orders[:3]] == [1, 2, 1]
    assert sorted(n for one in (*(o[1:] for o in orders[:3]), orders[3]) for n in one) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: agl.replayed(lambda: (yield)), "generator"),
        (lambda: agl.replayed(ignore=["self"])(len), "no parameter 'self'"),
        (lambda: agl.replayed("search"), "@agl.replayed"),  # pyright: ignore[reportCallIssue, reportArgumentType]
        (lambda: agl.replayed(_Point), "not <class"),
    ],
)
def test_what_cannot_be_decorated_is_said(make: Work, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


async def test_a_rollout_with_a_recording_is_a_fork() -> None:
    shop = Shop()

    @agl.rollout
    def buys(task: str, resources: agl.NamedResources) -> float:
        return float(shop.order(task)["order"])

    store = InMemoryLightningStore()
    runner = agl.LitAgentRunner(DummyTracer())
    runner.init(buys)
    runner.init_worker(0, store)
    first = await runner.step("tea")
    spans = (await store.query_spans(first.rollout_id, "latest")).items
    recording = RecordedAttempt(rollout_id=first.rollout_id, calls=[], tools=recorded_tools(spans))
    forked = await runner.step("tea", {"recording": recording})
    assert shop.ran == [("tea", 1)]
    spans = (await store.query_spans(forked.rollout_id, "latest")).items
    assert True in from_record(spans)
    assert agl.find_final_reward(spans) == 1.0
    again = RecordedAttempt(rollout_id=forked.rollout_id, calls=[], tools=recorded_tools(spans))
    await runner.step("tea", {"recording": again})
    assert len(shop.ran) == 1
    await runner.step("tea", {"llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")})
    assert len(shop.ran) == 2, "only forks are answered"


def test_recordings_of_before_there_were_tools_load() -> None:
    assert RecordedAttempt.model_validate({"rollout_id": "r", "calls": []}).tools == []
