"""What the gateway puts into requests, in each wire format, and that a program in Node is given it."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.prompts.candidate import Candidate, flaw, placeholders
from agentlightning.gateway.prompts import prompts_in, with_prompts
from agentlightning.litagent.program import ProgramRun
from agentlightning.metrics import SilentConsole
from examples.room_booking.make_tasks import make_tasks
from examples.room_booking.rooms import grade
from examples.room_booking.stand_in import RULES, StandIn

NEW = agl.SystemPrompt(template="new {not a placeholder}")
AFTER = agl.SystemPrompt(template="more", how="after")
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("dialect", "body", "prompt", "expected"),
    [
        ("chat", {"messages": [{"role": "system", "content": "old"}, USER]}, AFTER, "old\n\nmore"),
        ("chat", {"messages": [{"role": "developer", "content": "old"}, USER]}, NEW, NEW.template),
        ("chat", {"messages": [USER]}, AFTER, "more"),
        ("chat", {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}]}, AFTER, "a\n\nmore"),
        ("responses", {"instructions": "old", "input": "hi"}, AFTER, "old\n\nmore"),
        ("responses", {"input": [{"role": "developer", "content": "old"}, USER]}, AFTER, "old\n\nmore"),
        ("responses", {"input": "hi"}, NEW, NEW.template),
        ("messages", {"system": "old", "messages": [USER]}, AFTER, "old\n\nmore"),
        ("messages", {"messages": [USER]}, NEW, NEW.template),
    ],
)
def test_the_system_prompt_in_each_wire_format(dialect: str, body: Any, prompt: Any, expected: str) -> None:
    before = copy.deepcopy(body)
    changed = with_prompts(dialect, body, [prompt], None)
    assert body == before, "the request is not changed in place"
    places = [changed.get("instructions"), changed.get("system")]
    for name in ("messages", "input"):
        if isinstance(changed.get(name), list):
            places += [m["content"] for m in changed[name] if m["role"] in ("system", "developer")]
    assert [place for place in places if place] == [expected]
    assert str(changed).count("hi") == str(body).count("hi")


def test_anthropics_cache_mark_stays() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **mark}], "messages": [USER]}
    assert with_prompts("messages", body, [AFTER], None)["system"] == [
        {"type": "text", "text": "a\n\nb\n\nmore", **mark}
    ]


def test_tools_are_described_anew_by_name_in_both_forms() -> None:
    tool = agl.ToolDescription(tool="find", template="finds")
    chat = {"tools": [{"type": "function", "function": {"name": "find", "description": "?"}}, {"name": "other"}]}
    changed = with_prompts("chat", chat, [tool], None)["tools"]
    assert changed == [{"type": "function", "function": {"name": "find", "description": "finds"}}, {"name": "other"}]
    flat = with_prompts("messages", {"tools": [{"name": "find"}]}, [tool], None)
    assert flat["tools"] == [{"name": "find", "description": "finds"}]


@pytest.mark.parametrize("given", ["old", {"parts": [{"text": "old"}]}])
@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
def test_the_gemini_apis_places(given: Any, name: str) -> None:
    turn = {"role": "user", "parts": [{"text": "hi"}]}
    shown = agl.Demonstrations(template='{"role": "user", "content": "a"}\n{"role": "assistant", "content": "b"}')
    tool = agl.ToolDescription(tool="find", template="finds")
    body = {name: given, "contents": [turn], "tools": [{"functionDeclarations": [{"name": "find"}, {"name": "other"}]}]}
    assert with_prompts("gemini", body, [AFTER, tool, shown], None) == {
        name: {"parts": [{"text": "old\n\nmore"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"text": "b"}]},
            turn,
        ],
        "tools": [{"functionDeclarations": [{"name": "find", "description": "finds"}, {"name": "other"}]}],
    }


def test_only_the_agent_it_is_for() -> None:
    prompt = agl.SystemPrompt(template="new", agent="^writer$")
    body = {"messages": [USER]}
    assert len(with_prompts("chat", body, [prompt], "writer")["messages"]) == 2
    assert with_prompts("chat", body, [prompt], "planner") == body
    assert with_prompts("chat", body, [prompt], None) == body


def test_braces_mean_nothing_in_it_and_an_empty_one_changes_nothing() -> None:
    assert placeholders(NEW) == frozenset()
    assert flaw(NEW, NEW.template, "another {thing}") is None
    assert with_prompts("chat", {"messages": [USER]}, [agl.SystemPrompt(template="")], None) == {"messages": [USER]}
    assert prompts_in({"a": AFTER, "p": agl.PromptTemplate(template="x")}) == (AFTER,)
    made = Candidate.of({"a": "less"}).resources({"a": AFTER})["a"]
    assert made == agl.SystemPrompt(template="less", how="after")


@pytest.mark.slow
async def test_a_program_in_node_is_given_what_its_code_does_not_say(tmp_path: Path) -> None:
    """With all rules in the gateway's system prompt the stand-in makes no mistake, so the program earns everything."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    rewards = {}
    rules = " ".join(rule.sentence for rule in RULES.values())
    for name, text in (("without", ""), ("with", rules)):
        stand_in = StandIn()
        prompt = agl.SystemPrompt(template=text, how="after")
        baseline, trainer = _node(tmp_path / name, await stand_in.start(), prompt)
        await trainer.fit_async(_program(), make_tasks(6, seed=3))
        await stand_in.stop()
        rewards[name] = [e.reward for e in baseline.episodes]
    assert rewards["with"] == [1.0] * 6
    assert sum(rewards["without"]) < 5


def _program() -> agl.Program:
    script = Path(__file__).parents[2] / "examples" / "room_booking" / "agent.js"

    def graded(run: ProgramRun) -> float:
        return grade(run.stdout, run.task)

    return agl.Program(["node", str(script)], grader=graded)


def _node(run_dir: Path, url: str, prompt: agl.SystemPrompt) -> tuple[agl.Baseline, agl.Trainer]:
    baseline = agl.Baseline()
    trainer = agl.Trainer(
        algorithm=baseline,
        models={"llm": agl.Provider(base_url=url, model="agent")},
        initial_resources={"system": prompt},
        console=SilentConsole(),
        run_dir=run_dir,
    )
    return baseline, trainer
