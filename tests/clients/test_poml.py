"""Prompts in POML, by the real package: filled in, and tuned as any other template."""

from __future__ import annotations

import pytest

import agentlightning as agl

pytestmark = [pytest.mark.clients, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("poml")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("<poml><p>Hello {{name}}!</p></poml>", "Hello Ann!"),
        ("<poml><role>I am {{name}}.</role><task>Add <b>{{n}}</b>.</task></poml>", "I am Ann.\n\n# Task\n\nAdd **3**."),
        ("<poml><system-msg>I am {{name}}.</system-msg><human-msg>Add {{n}}</human-msg></poml>", "I am Ann.\n\nAdd 3"),
    ],
)
def test_a_prompt_is_filled_in(template: str, words: str) -> None:
    assert words in agl.PromptTemplate(template=template, engine="poml").format(name="Ann", n=3)


async def test_an_agent_is_given_one() -> None:
    said: list[str] = []

    @agl.rollout
    def agent(task: str, prompt_template: agl.PromptTemplate) -> float:
        said.append(prompt_template.format(task=task))
        return 1.0

    store = agl.InMemoryLightningStore()
    prompt = agl.PromptTemplate(template="<poml><task>{{task}}</task></poml>", engine="poml")
    runner = agl.LitAgentRunner(agl.DummyTracer())
    runner.init(agent)
    runner.init_worker(0, store)
    rollout = await runner.step("Add 1 and 2", {"prompt_template": prompt})
    runner.teardown()
    assert rollout.status == "succeeded", rollout.attempt.error
    assert said == ["# Task\n\nAdd 1 and 2"]
    await store.close()
