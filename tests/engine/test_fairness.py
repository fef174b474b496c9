"""What one owner asks for does not hold up another: places, turns, long prompts, grammars and stop lists."""

from __future__ import annotations

import json
import threading
from concurrent import futures
from typing import Any

import pytest
from llguidance import LLMatcher

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.events import POLICY, Ended, Failed, Request
from agentlightning.engine.grammar import Compiling
from agentlightning.engine.kv_cache import probe
from agentlightning.engine.limits import MAX_WAITING_GRAMMARS, repeated
from agentlightning.engine.queue import RequestQueue
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.errors import ConfigError
from agentlightning.learner.policy import Policy

from .conftest import gap, make_engine, random_ids, request, run


def steps_until(engine: TorchEngine, request_id: int) -> int:
    """How many steps until a request ends."""
    for step in range(1, 10_000):
        if any(isinstance(e, Ended) and e.request_id == request_id for e in engine.step()):
            return step
    raise AssertionError("it never ends")


@pytest.mark.parametrize("memory", ["plenty", "of a few whole contexts"])
def test_a_short_call_does_not_wait_for_anothers_many(policy: Policy, memory: str) -> None:
    """10 × n=128 of one attempt are there; another's five tokens take a few more steps than alone."""
    engine = make_engine(policy, max_concurrency=16, max_context=256)
    if memory != "plenty":
        per_slot = probe(policy.model).bytes_per_token * 257
        engine = make_engine(policy, max_concurrency=16, max_context=256, kv_budget_bytes=16 * per_slot)
    for number in range(1280):
        engine.submit(request(number, random_ids(20, number % 10), max_tokens=200, owner="greedy"))
    for _ in range(20):
        engine.step()
    assert engine.running >= 14
    engine.submit(request(9999, random_ids(8, 99), max_tokens=5, owner="modest"))
    assert steps_until(engine, 9999) <= 8


def test_without_others_an_owner_gets_nearly_everything(policy: Policy) -> None:
    engine = make_engine(policy, max_concurrency=16, max_context=128)
    for number in range(40):
        engine.submit(request(number, random_ids(20, number), max_tokens=80, owner="alone"))
    for _ in range(20):
        engine.step()
    assert engine.running == 16


@pytest.mark.slow
def test_owners_take_turns_by_tokens(policy: Policy) -> None:
    """Of two that always have something waiting each gets about half of the tokens, whoever asks for more at once."""
    engine = make_engine(policy, max_concurrency=4, max_context=128)
    tokens = {"long": 0, "short": 0}
    length = {"long": 60, "short": 10}
    owner: dict[int, str] = {}
    number = 0
    for _ in range(600):
        for name in tokens:
            while sum(1 for i, o in owner.items() if o == name) < (30 if name == "long" else 6):
                number += 1
                owner[number] = name
                params = SamplingParams(max_tokens=length[name], owner=name)
                engine.submit(Request(request_id=number, prompt_ids=random_ids(4, number), params=params))
        for event in engine.step():
            assert isinstance(event, Ended)
            tokens[owner.pop(event.request_id)] += len(event.chunk.ids) + 4
    assert 0.6 < tokens["short"] / tokens["long"] < 1.7, tokens


def test_a_new_owner_earns_no_credit_by_having_been_away() -> None:
    queue = RequestQueue.__new__(RequestQueue)
    queue.__init__(grammars=None)  # pyright: ignore[reportArgumentType]
    queue.add(request(1, random_ids(3, 0), owner="old"))
    first = queue.pop([POLICY], 1, 1)
    assert first is not None
    queue.charge(first, 1000)
    queue.add(request(2, random_ids(3, 0), owner="new"))
    queue.add(request(3, random_ids(3, 0), owner="old"))
    second = queue.pop([POLICY], 1, 1)
    assert second is not None
    assert second.request_id == 2
    queue.charge(second, 1)
    third = queue.pop([POLICY], 1, 1)
    assert third is not None
    assert third.request_id == 3


def test_a_long_prompt_is_computed_in_pieces_beside_decoding(policy: Policy) -> None:
    """And what comes out is exact."""
    engine = make_engine(policy, max_context=512, max_concurrency=4)
    engine._piece_tokens = 64
    talking = request(1, random_ids(10, 1), max_tokens=200, temperature=0.9, stream=True)
    engine.submit(talking)
    while not len(engine._slots.ready()):
        engine.step()
    long = request(2, random_ids(400, 2), max_tokens=5)
    engine.submit(long)
    short = request(3, random_ids(6, 3), max_tokens=3)
    engine.submit(short)
    most = 0
    ended: dict[int, Ended] = {}
    order: list[int] = []
    while engine.active:
        before = engine.counters.prefilled
        for event in engine.step():
            if isinstance(event, Ended):
                ended[event.request_id] = event
                order.append(event.request_id)
        most = max(most, engine.counters.prefilled - before)
    assert most <= 64
    assert order.index(3) < order.index(2)
    assert gap(policy, long, ended[2].chunk) < 2e-5


def schema_grammar(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


SLOW = schema_grammar({"type": "object", "patternProperties": {f"^x{i}[a-z]*$": {"type": "string"} for i in range(95)}})


def test_a_grammar_is_compiled_once_and_beside_sampling(policy: Policy) -> None:
    engine = make_engine(policy, max_concurrency=8)
    for number in range(64):
        engine.submit(request(number, random_ids(5, 1), max_tokens=4, grammar=SLOW, owner="schemas"))
    engine.submit(request(100, random_ids(8, 2), max_tokens=3, owner="other"))
    assert steps_until(engine, 100) <= 6
    assert len(engine._queue._grammars._kept) == 1
    ended = run(engine, [])
    assert set(ended) <= set(range(64))
    assert all(len(chunk.ids) for chunk in ended.values())


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        ({"stop": tuple(f"stop {i}" for i in range(10_000))}, "stop may hold 64 strings, not 10000"),
        ({"stop": ("x" * 10**6,)}, "1024 characters"),
        ({"grammar": schema_grammar({"enum": ["x" * 80 + str(i) for i in range(90_000)]})}, "524,288 characters"),
        (
            {"grammar": schema_grammar({"patternProperties": {f"^x{i}": {} for i in range(2000)}})},
            "100 patternProperties in all, not 2000",
        ),
        ({"grammar": schema_grammar({"type": "string", "pattern": "^(a{1000}){1000}$"})}, "10,000 times.*1,000,000"),
        ({"grammar": schema_grammar({"patternProperties": {r"^((\d{99}x)?){200}": {}}})}, "10,000 times.*19,800"),
        ({"grammar": schema_grammar({"pattern": "ab" * 20_000})}, "20,000 characters in all, not 40,000"),
        ({"grammar": "start: T\nT: /(a{1000}){1000}/"}, "10,000 times.*1,000,000"),
    ],
)
def test_what_would_stall_everybody_is_refused_with_its_limit(policy: Policy, params: dict, limit: str) -> None:
    with pytest.raises(ConfigError, match=limit):
        make_engine(policy).submit(request(1, random_ids(5, 1), **params))


def test_a_grammar_that_takes_too_long_is_refused(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.engine.grammar.COMPILE_SECONDS", 0.0)
    engine, hold, seen = make_engine(policy), threading.Event(), threading.Event()
    monkeypatch.setattr(engine._queue._grammars, "_compile", lambda grammar: seen.wait(60))
    engine._queue._grammars._thread.submit(hold.wait)
    engine.submit(request(1, random_ids(5, 1), grammar=SLOW))
    assert not engine.step(), "what it waits for others is not its own time"
    hold.set()
    events = []
    while engine.active:
        events += engine.step()
    seen.set()
    (failed,) = events
    assert isinstance(failed, Failed)
    assert "was not compiled within" in failed.message


def test_new_grammars_hold_up_sampling_for_a_moment_only(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    matcher = Compiling.matcher

    def watched(self: Compiling, wait: float = 0.0) -> Any:
        waits.append(wait)
        return matcher(self, 0.0)

    monkeypatch.setattr(Compiling, "matcher", watched)
    grammars, hold = make_engine(policy)._queue._grammars, threading.Event()
    grammars._thread.submit(hold.wait)
    for number in range(50):
        grammars.begin(f'start: "{number}"', "a")
    hold.set()
    assert sum(wait > 0 for wait in waits) <= 2, "many at once are waited for once, or twice on a slow machine"


def test_a_grammar_found_wanting_later_fails_its_request_alone(policy: Policy) -> None:
    engine, hold = make_engine(policy), threading.Event()
    engine._queue._grammars._thread.submit(hold.wait)
    engine.submit(request(1, random_ids(5, 1), grammar="start: missing"))
    engine.submit(request(2, random_ids(5, 1), max_tokens=3))
    hold.set()
    events = []
    while engine.active:
        events += engine.step()
    assert {type(e): e.request_id for e in events} == {Failed: 1, Ended: 2}


def test_a_grammar_waits_for_one_of_anothers_and_not_for_all(policy: Policy) -> None:
    engine, hold = make_engine(policy), threading.Event()
    grammars, order = engine._queue._grammars, list[str]()
    grammars._thread.submit(hold.wait)
    begun = {name: grammars.begin(f'start: "{name}"', "greedy") for name in map(str, range(100))}
    begun["mine"] = grammars.begin('start: "mine"', "modest")
    assert grammars.begin('start: "99"', "modest") is begun["99"], "it waits for a turn of each that asks for it"
    for name, compiling in begun.items():
        compiling.future.add_done_callback(lambda _, name=name: order.append(name))
    hold.set()
    futures.wait([compiling.future for compiling in begun.values()], 60)
    assert order.index("mine") <= 1
    assert order.index("99") <= 3
    assert len(order) == 101, "each is compiled once"


@pytest.mark.slow
def test_a_call_with_a_new_schema_does_not_wait_for_anothers_thousand(policy: Policy) -> None:
    engine, hold = make_engine(policy, max_concurrency=8), threading.Event()
    engine._queue._grammars._thread.submit(hold.wait)
    for number in range(MAX_WAITING_GRAMMARS):
        grammar = schema_grammar({"enum": [f"{number}"]})
        engine.submit(request(number, random_ids(5, 1), max_tokens=4, grammar=grammar, owner="greedy"))
    with pytest.raises(ConfigError, match=f"{MAX_WAITING_GRAMMARS} different JSON schemas waiting"):
        engine.submit(request(998, random_ids(5, 1), grammar=schema_grammar({"enum": ["more"]}), owner="greedy"))
    again = schema_grammar({"enum": [f"{MAX_WAITING_GRAMMARS - 1}"]})
    engine.submit(request(999, random_ids(5, 1), max_tokens=4, grammar=again, owner="greedy"))
    engine.submit(request(1000, random_ids(5, 1), max_tokens=4, grammar=SLOW, owner="modest"))
    texts = [waiting.params.grammar for waiting, _ in engine._queue._compiling.values()]
    assert texts[-2] is texts[-3], "requests with the same grammar hold one text"
    left: list[int] = []
    *greedy, (_, modest) = engine._queue._compiling.values()
    modest.future.add_done_callback(lambda _: left.append(sum(compiling.waits for _, compiling in greedy)))
    hold.set()
    assert 1000 in run(engine, [])
    assert left[0] >= MAX_WAITING_GRAMMARS - 2


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[A-Z]{2}-[0-9]{1,20000}$", 1),
        ("^([a-z]{1,63}\\.){1,8}[a-z]{2,63}$", 504),
        (r"(\(a{9}\)[(]{9}){9}", 81),
        ("((a{20}){20,}){20}", 8000),
        ("(a{20}|b)*c{30}", 1),
        ("((a|b{5}c)+){7}", 35),
        ("){3}(((", 1),
    ],
)
def test_repetitions_inside_of_each_other_are_counted(pattern: str, expected: int) -> None:
    assert repeated(pattern) == expected


def test_a_grammar_that_is_slow_to_follow_ends_its_requests_alone(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(policy, max_concurrency=4)
    slow = [request(number, random_ids(5, 1), max_tokens=20, grammar=SLOW) for number in range(3)]
    for asked in slow:
        engine.submit(asked)
    while engine.running < 3:
        engine.step()
    monkeypatch.setattr("agentlightning.engine.grammar.STEP_SECONDS", -1.0)
    events = engine.step()
    monkeypatch.undo()
    failed = [(event.request_id, event.error) for event in events if isinstance(event, Failed)]
    assert failed == [(number, "ConfigError") for number in range(3)], "the request's fault, and nobody tries it again"
    with pytest.raises(ConfigError, match="too complex"):
        engine.submit(request(9, random_ids(5, 1), grammar=SLOW))
    assert len(run(engine, [request(10, random_ids(5, 1), max_tokens=3)])[10].ids) == 3
