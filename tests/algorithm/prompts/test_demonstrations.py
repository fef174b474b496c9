"""Demonstrations: where the gateway puts them, which runs they are chosen from, and that agents earn more with them."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

import agentlightning as agl
from agentlightning.algorithm.prompts.demonstrations import changed, turns_of
from agentlightning.algorithm.prompts.evaluation import Trial
from agentlightning.gateway.prompts import with_prompts
from agentlightning.metrics import SilentConsole
from agentlightning.types import Outcome

SYSTEM, QUESTION = {"role": "system", "content": "s"}, {"role": "user", "content": "3 + 4"}
ASKED, ANSWERED = {"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}
SHOWN = agl.Demonstrations.of([[ASKED, ANSWERED]])


@pytest.mark.parametrize(
    ("dialect", "body", "expected"),
    [
        ("chat", {"messages": [SYSTEM, QUESTION]}, {"messages": [SYSTEM, ASKED, ANSWERED, QUESTION]}),
        ("chat", {"messages": [QUESTION]}, {"messages": [ASKED, ANSWERED, QUESTION]}),
        ("messages", {"system": "s", "messages": [QUESTION]}, {"messages": [ASKED, ANSWERED, QUESTION]}),
        ("responses", {"input": "3 + 4"}, {"input": [ASKED, ANSWERED, QUESTION]}),
        ("responses", {"input": [SYSTEM, QUESTION]}, {"input": [SYSTEM, ASKED, ANSWERED, QUESTION]}),
        ("responses", {"input": "more", "previous_response_id": "r"}, {"input": "more"}),
        ("completions", {"prompt": "3 + 4"}, {"prompt": "3 + 4"}),
    ],
)
def test_they_come_behind_the_system_prompt_in_each_wire_format(dialect: str, body: Any, expected: Any) -> None:
    before = json.dumps(body)
    assert with_prompts(dialect, body, [SHOWN], None) == {**body, **expected}
    assert json.dumps(body) == before, "the request is not changed in place"
    assert with_prompts(dialect, body, [agl.Demonstrations()], None) == body


def test_the_text_holds_the_messages_and_nothing_else() -> None:
    two = agl.Demonstrations.of([[ASKED, ANSWERED], [QUESTION, {"role": "assistant", "content": "seven\n\nor 7"}]])
    assert two.demonstrations == [[ASKED, ANSWERED], two.messages[2:]]
    said = [ASKED, {"role": "assistant", "content": "a line\u2028another\u0085and a third"}]
    assert agl.Demonstrations.of([said]).messages == said
    for text in ('{"role": "system", "content": "x"}', "3 + 4", '{"role": "user"}', "[" * 100_000):
        with pytest.raises(agl.ConfigError, match="a line is"):
            agl.Demonstrations(template=text)


def said(*messages: dict[str, Any], agent: str = "") -> Trial:
    return Trial(0, "task", 1.0, Outcome.OK, None, messages, {agent: messages})


def test_what_a_run_shows_is_its_own_turns_and_text_only() -> None:
    turns = (("user", "3 + 4"), ("assistant", "7"))
    answer = {"role": "assistant", "content": "7"}
    assert turns_of(said(SYSTEM, QUESTION, answer), [], None) == turns
    assert turns_of(said(SYSTEM, ASKED, ANSWERED, QUESTION, answer), SHOWN.messages, None) == turns
    assert turns_of(said(QUESTION, {**answer, "tool_calls": [{"id": "1"}]}), [], None) is None
    assert turns_of(said(QUESTION, {"role": "assistant", "content": ""}), [], None) is None
    assert turns_of(said(QUESTION, answer, agent="writer"), [], "^writer$") == turns
    assert turns_of(said(QUESTION, answer, agent="planner"), [], "^writer$") is None


def test_changes_stay_within_the_pool_and_the_limit() -> None:
    pool = [(("user", str(n)), ("assistant", str(n))) for n in range(9)]
    rng, now, sizes = random.Random(0), list[Any](), set[int]()
    for _ in range(300):
        now = changed(now, pool, 3, rng)
        assert set(now) <= set(pool)
        assert len(set(now)) == len(now)
        sizes.add(len(now))
    assert sizes == {1, 2, 3}
    assert changed([], [], 3, rng) == []


@asynccontextmanager
async def model() -> AsyncIterator[tuple[str, list[Any]]]:
    """A model that answers half of the questions with the bare sum, and all once a conversation shows three sums."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        asked.append(messages)
        a, b = (int(n) for n in messages[-1]["content"].split(" + "))
        shown = sum(m["role"] == "assistant" for m in messages)
        text = str(a + b) if shown >= 3 or a % 2 else f"The sum is {a + b}."
        message = {"role": "assistant", "content": text}
        return web.json_response({"id": "1", "choices": [{"message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


@agl.rollout
async def adder(task: dict[str, int], llm: agl.LLM) -> float:
    """Knows nothing of demonstrations."""
    body = {"model": llm.model, "messages": [SYSTEM, {"role": "user", "content": f"{task['a']} + {task['b']}"}]}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with (
        ClientSession() as session,
        session.post(f"{llm.get_base_url()}/chat/completions", json=body, headers=headers) as response,
    ):
        text = (await response.json())["choices"][0]["message"]["content"]
    return float(text == str(task["a"] + task["b"]))


SETTINGS: dict[str, Any] = {
    "apo": {"beam_width": 2, "branch_factor": 3, "beam_rounds": 3, "val_batch_size": 12, "gradient_batch_size": 2},
    "gepa": {"iterations": 8, "val_batch_size": 12, "reflection_minibatch_size": 4},
}


@pytest.mark.parametrize(
    ("algorithm", "answer"), [("apo", None), ("gepa", None), ("apo", "right")], ids=["apo", "gepa", "right answers"]
)
@pytest.mark.slow
async def test_they_are_chosen_from_runs_without_a_critic(tmp_path: Path, algorithm: str, answer: str | None) -> None:
    if algorithm == "gepa":
        pytest.importorskip("gepa")
    tuner = {"apo": agl.APO, "gepa": agl.GEPA}[algorithm](**SETTINGS[algorithm])
    tasks = [{"a": n, "b": n % 7, "right": n + n % 7} for n in range(100)]
    async with model() as (url, asked):
        trainer = agl.Trainer(
            algorithm=tuner,
            models={"llm": agl.Provider(base_url=url, model="m")},
            initial_resources={"shown": agl.Demonstrations(answer=answer)},
            console=SilentConsole(),
            run_dir=tmp_path / "run",
        )
        await trainer.fit_async(adder, tasks[:20], tasks[20:])
    best = tuner.get_best_prompt()
    assert isinstance(best, agl.Demonstrations)
    assert 3 <= len(best.demonstrations) <= 4
    for question, shown in best.demonstrations:
        a, b = (int(n) for n in question["content"].split(" + "))
        assert shown["content"] == str(a + b), "what earned less than 1 is not shown as it was"
        assert a < 20, "only training tasks are"
    assert (tmp_path / "run" / "best" / "shown.jsonl").read_text() == best.template
    assert any(messages[:-1] == [SYSTEM, *best.messages] for messages in asked), "as turns, behind the system prompt"


def test_a_text_to_write_needs_a_critic(tmp_path: Path) -> None:
    @agl.rollout
    def asks(task: Any, text: agl.PromptTemplate) -> float:
        return 1.0

    trainer = agl.Trainer(
        algorithm=agl.APO(),
        models={"llm": agl.Provider(base_url="http://127.0.0.1:9/v1")},
        initial_resources={"text": agl.PromptTemplate(template="x"), "shown": agl.Demonstrations()},
        console=SilentConsole(),
        run_dir=tmp_path / "run",
    )
    with pytest.raises(agl.ConfigError, match="needs a critic to write text"):
        trainer.fit(asks, [{"a": 1, "b": 2}] * 4, [{"a": 1, "b": 2}] * 4)
