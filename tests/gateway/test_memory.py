"""What one attempt may hold of the gateway's memory; what left it is continued all the same, token by token."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import openai
import pytest
from hypothesis import given, settings, strategies as st

from agentlightning.gateway import Gateway
from agentlightning.gateway.history.answers import Answered
from agentlightning.gateway.history.memory import Memory, SessionBudget, Shared
from agentlightning.gateway.history.session import Session, Tokens
from agentlightning.gateway.history.tree import Entry, Piece
from agentlightning.gateway.limits import RequestLimits
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import Site
from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_session import RENDERING, Talk

SMALL = SessionBudget(messages=12, bytes=2**20)


def said(text: str) -> Any:
    return {"role": "user", "content": text}


def entries(memory: Memory) -> list[Entry]:
    found: list[Entry] = []
    rest = list(memory.roots.values())
    while rest:
        below = [child for same in rest.pop().children.values() for child in same]
        found, rest = found + below, rest + below
    return found


def pieces(memory: Memory) -> list[Piece]:
    found, rest = [], list(memory.pieces)
    while rest:
        piece = rest.pop()
        found, rest = [*found, piece], rest + piece.children
    return found


def check(memory: Memory) -> None:
    """What is counted is what is there, and nothing is there that no message holds."""
    held, tokens = entries(memory), pieces(memory)
    assert memory.messages == len(held)
    assert sum(memory.seen.values()) == len(held)
    assert not any(entry.gone for entry in held)
    assert all(piece.uses or piece.children for piece in tokens)
    arrays = [len(p.segment.ids) * 4 * (1 if p.segment.logprobs is None else 3) for p in tokens]
    texts = [len(e.text or "") + len(e.reasoning or "") for e in held]
    assert memory.bytes == 900 * len(held) + 400 * len(tokens) + sum(arrays) + sum(texts)


def test_the_branch_not_used_for_longest_leaves_first() -> None:
    talk = Talk(Session(RENDERING, budget=SMALL))
    memory = talk.session.memory
    system = {"role": "system", "content": "Be brief."}
    answers: Any = {}
    for number in range(20):
        _, _, answers[number] = talk.ask([system, said(f"question {number}")], f"answer {number}")
        check(memory)
        assert memory.messages <= SMALL.messages
    look_up = talk.session.look_up
    kept = look_up([system, said("question 19"), answers[19], said("on")], None)
    assert (kept.left, kept.walk.turn is None) == (None, False)
    old = look_up([system, said("question 0"), answers[0], said("on")], None)
    assert (old.left, old.walk.turn) == ("c1", None)
    assert look_up([system, said("question 1"), answers[0], said("on")], None).left is None


def test_tokens_have_a_budget_too() -> None:
    talk = Talk(Session(RENDERING, budget=SessionBudget(messages=10_000, bytes=20_000)))
    for number in range(30):
        talk.ask([said(f"{number} " + "word, " * 200)], "ok")
        check(talk.session.memory)
    assert talk.session.memory.bytes <= 20_000


@pytest.mark.parametrize("tools", [False, True])
def test_what_only_looks_leaves_nothing(tools: bool) -> None:
    session = Session(RENDERING, budget=SMALL)
    for number in range(100):
        given = [{"type": "function", "function": {"name": f"f{number}"}}] if tools else None
        session.look_up([said(f"{number}")], given)
    assert (len(session.memory.roots), session.memory.messages) == (0, 0)
    for number in range(100):
        given = [{"type": "function", "function": {"name": f"f{number}"}}] if tools else None
        session.plan([said(f"{number}")], given, f"{number}/p")
        check(session.memory)
    assert len(session.memory.roots) <= SMALL.messages


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=40))
def test_any_conversations_are_counted_right_and_fit(steps: list[tuple[int, int, bool]]) -> None:
    """Conversations go on, branch off and are told again with another past."""
    talk = Talk(Session(RENDERING, budget=SessionBudget(messages=8, bytes=2**16)))
    histories: list[list[Any]] = [[said(f"begin {n}")] for n in range(4)]
    for which, cut, raw in steps:
        history = histories[which][: 1 + 2 * cut]
        if raw:
            talk.session.plan_tokens(RENDERING.encode(f"raw {which} {cut}"), f"raw{talk.count}")
        _, _, answer = talk.ask(history, f"{len(history)}")
        histories[which] = [*history, answer, said(f"on {talk.count}")]
        check(talk.session.memory)
        assert talk.session.memory.messages <= max(8, len(history) + 1)


def test_all_goes_at_once_without_a_collection() -> None:
    talk = Talk(Session(RENDERING))
    for number in range(5):
        talk.ask([said(f"{number}"), said("a"), said("b")], "ok")
        talk.session.plan_tokens(RENDERING.encode(f"raw {number}"), f"raw{number}")
    found = [weakref.ref(piece.segment.ids) for piece in pieces(talk.session.memory)]
    gc.disable()
    try:
        talk.session.memory.clear()
        assert not [ref for ref in found if ref() is not None]
    finally:
        gc.enable()


async def many_others(client: openai.AsyncOpenAI, count: int = 30) -> None:
    for number in range(count):
        await client.chat.completions.create(model="policy", messages=[said(f"other {number}")])


@pytest.fixture
async def small(store: InMemoryLightningStore, rendering: RenderersRendering) -> Any:
    engine = ScriptedEngine(rendering, lambda prompt, params: f"It is {len(prompt)}.")
    claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
    limits = RequestLimits(history_messages=10)
    async with Gateway(store, engine, rendering, request_limits=limits) as gateway:
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)


async def test_a_branch_that_left_is_continued_with_its_tokens(small: Site) -> None:
    messages: list[Any] = [said("What is 2 + 3?")]
    async with small.client() as client:
        for _ in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, said("Sure?")]
            await many_others(client)
    calls = [call for call in await small.close() if call.info.parent_call_id or "2 + 3" in _text(small, call)]
    small.check_exact(calls)
    assert [call.info.divergence for call in calls[1:]] == [None, None]
    assert [call.info.parent_call_id for call in calls] == [None, *[call.info.call_id for call in calls[:2]]]


def _text(site: Site, call: Any) -> str:
    return site.engine.rendering.decode(call.prompt_ids)


async def test_a_response_that_left_is_referred_to(small: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await small.gateway._attempts.get(small.rollout_id, small.attempt_id)  # pyright: ignore[reportPrivateUsage]
    live.answered = Answered(most=200)
    async with small.client() as client:
        first = await client.responses.create(model="policy", input="What is 2 + 3?")
        for number in range(10):
            await client.responses.create(model="policy", input=f"other {number}")
        assert first.id not in live.answered
        second = await client.responses.create(model="policy", input="Sure?", previous_response_id=first.id)
        assert second.output_text
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="policy", input="Sure?", previous_response_id="none")
    calls = await small.close()
    assert calls[-1].info.parent_call_id == calls[0].info.call_id
    small.check_exact([calls[0], calls[-1]])


def test_conversations_that_are_referred_to_are_bounded() -> None:
    answered = Answered(most=1000)
    for number in range(100):
        answered[f"r{number}"] = [said("word " * 20)]
        assert answered.bytes <= 1000
    assert list(answered["r99"]) == [said("word " * 20)]
    assert "r0" not in answered
    assert (answered.take_missed(), answered.take_missed()) == ("r0", None)
    answered["long"] = [said("x" * 5000)]
    assert list(answered) == ["long"], "the latest stays, however large"


async def test_an_attempt_that_ended_holds_nothing(small: Site) -> None:
    async with small.client() as client:
        await many_others(client, 3)
    live = await small.gateway._attempts.get(small.rollout_id, small.attempt_id)  # pyright: ignore[reportPrivateUsage]
    (session,) = live.sessions.values()
    assert session.memory.messages
    await small.close()
    assert (session.memory.messages, len(session.memory.pieces), live.sessions) == (0, 0, {})


# ---- all attempts together -------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_attempts_hold_no_more_together_than_they_may(steps: list[tuple[int, int, int]]) -> None:
    """Whatever conversations of several attempts go on, branch off and end."""
    shared = Shared(12_000)
    talks = [Talk(Session(RENDERING, shared=shared)) for _ in range(3)]
    histories: list[list[list[Any]]] = [[[said(f"begin {t} {n}")] for n in range(4)] for t in range(3)]
    for which, branch, cut in steps:
        if cut == 4:
            talks[which].session.memory.clear()
            continue
        history = histories[which][branch][: 1 + 2 * cut]
        _, _, answer = talks[which].ask(history, f"{len(history)}")
        histories[which][branch] = [*history, answer, said(f"on {talks[which].count}")]
        memories = [talk.session.memory for talk in talks]
        for memory in memories:
            check(memory)
        assert shared.bytes == sum(memory.bytes for memory in memories)
        current = 1300 * (len(history) + 2) + 20 * sum(len(m["content"] or "") + 20 for m in history)
        assert shared.bytes <= max(shared.most, current)


def test_who_holds_most_gives_up_first() -> None:
    shared = Shared(30_000)
    small, large = Talk(Session(RENDERING, shared=shared)), Talk(Session(RENDERING, shared=shared))
    _, _, answer = small.ask([said("mine")], "yours")
    for number in range(100):
        large.ask([said(f"{number} " + "word, " * 20)], "ok")
        assert shared.bytes <= shared.most
    question = small.session.look_up([said("mine"), answer, said("on")], None)
    assert (question.left, question.walk.turn is None) == (None, False), "it lost nothing to the other"
    answered = Answered(shared=shared)
    answered["r0"] = [said("x" * 20_000)]
    answered["r1"] = [said("y" * 9_000)]
    assert shared.bytes <= shared.most
    assert "r0" not in answered
    assert answered.take_missed() == "r0", "it is read back from the store"
    for one in (small, large):
        one.session.memory.clear()
    answered.forget()
    assert shared.bytes == 0


@pytest.mark.parametrize("complete", [True, False])
def test_a_branch_that_leaves_while_its_answer_is_sampled_is_found_again(complete: bool) -> None:
    shared = Shared(10**9)
    talk = Talk(Session(RENDERING, shared=shared))
    session = talk.session
    _, _, first = talk.ask([said("first")], "one")
    prompt = session.plan([said("first"), first, said("second")], None, "p2")
    while session.memory.leave_one(None):
        pass
    answer: Any = {"role": "assistant", "content": "two"}
    ids, logprobs = RENDERING.encode("two"), RENDERING.encode("two").astype("float32")
    named: Any = {"ids": ids, "logprobs": logprobs, "plain_logprobs": logprobs, "versions": ()}
    session.commit(prompt, answer, "c2", segment_id="c2/r", complete=complete, **named)
    check(session.memory)
    assert (session.memory.messages, session.memory.pieces, shared.bytes) == (0, [], 0), "it is held no longer"
    question = session.look_up([said("first"), first, said("second"), answer, said("third")], None)
    assert question.left == ("c2" if complete else "c1")


@pytest.fixture
async def together(store: InMemoryLightningStore, rendering: RenderersRendering) -> Any:
    engine = ScriptedEngine(rendering, lambda prompt, params: f"It is {len(prompt)}.")
    claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
    async with Gateway(store, engine, rendering, request_limits=RequestLimits(history_total_bytes=40_000)) as gateway:
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)


@pytest.mark.slow
async def test_open_attempts_hold_no_more_than_all_may_and_go_on_exactly(together: Site) -> None:
    """Ten attempts are open at once; each goes on from a conversation that had to leave meanwhile."""
    shared = together.gateway._memory  # pyright: ignore[reportPrivateUsage]
    sites = [await together.another(RolloutMode.VAL) for _ in range(10)]
    begun: list[list[Any]] = []
    for site in sites:
        async with site.client() as client:
            asked = [said("What is 2 + 3?")]
            reply = await client.chat.completions.create(model="policy", messages=asked)
            begun.append([*asked, {"role": "assistant", "content": reply.choices[0].message.content}, said("Sure?")])
            await many_others(client, 12)
            assert shared.bytes <= shared.most
    for site, messages in zip(sites, begun, strict=True):
        async with site.client() as client:
            await client.chat.completions.create(model="policy", messages=messages)
            assert shared.bytes <= shared.most
    for site in sites:
        calls = await site.close()
        assert calls[-1].info.parent_call_id == calls[0].info.call_id
        assert calls[-1].info.divergence is None
        together.check_exact([calls[0], calls[-1]])
    assert shared.bytes == 0


def test_a_message_is_counted_as_what_it_takes() -> None:
    """What is counted is the memory that Python takes, give or take a quarter."""
    session, tokens = Session(RENDERING), RENDERING.encode("word")
    session.plan([said("x")], None, "p")
    gc.collect()
    tracemalloc.start()
    before, counted = tracemalloc.get_traced_memory()[0], session.memory.bytes
    for number in range(3):
        question = session.look_up([said(f"{number}"), *[said("word") for _ in range(1000)]], None)
        session.place(question, Tokens(tokens, None), f"p{number}")
        del question
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert session.memory.bytes - counted == pytest.approx(taken, rel=0.25)
