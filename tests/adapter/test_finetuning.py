"""Conversations as files for fine-tuning services, checked by what each service documents."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from agentlightning.adapter.finetuning import FORMATS, fine_tuning_examples, to_jsonl
from agentlightning.gateway import Gateway
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Span
from tests.gateway.conftest import CALC, Site, calculator, rendering  # noqa: F401
from tests.gateway.scripted import ScriptedEngine

SYSTEM = {"role": "developer", "content": "Use the tool."}


@pytest.fixture
async def site(rendering: Any) -> AsyncIterator[Site]:  # noqa: F811
    store = InMemoryLightningStore()
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering) as gateway:
        claimed = await store.start_rollout(input={})
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
    await store.close()


# ---- what the services document --------------------------------------------------------------------------------------


def check_openai(example: dict[str, Any]) -> None:
    """OpenAI, "Supervised fine-tuning", and `FineTuneChatRequestInput` of its API description."""
    assert set(example) <= {"messages", "tools", "parallel_tool_calls"}
    open_calls: set[str] = set()
    for message in example["messages"]:
        role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
        assert role in {"system", "developer", "user", "assistant", "tool"}
        allowed = {"role", "content", "name"}
        if role == "assistant":
            assert set(message) <= allowed | {"tool_calls", "weight", "refusal"}
            assert content or calls, "an answer says or does something"
            for call in calls or ():
                assert set(call) == {"id", "type", "function"}
                assert call["type"] == "function"
                assert set(call["function"]) == {"name", "arguments"}
                assert isinstance(json.loads(call["function"]["arguments"]), dict), "a text that is an object"
            open_calls = {c["id"] for c in calls or ()}
            assert all(isinstance(i, str) and i for i in open_calls)
        elif role == "tool":
            assert set(message) == {"role", "content", "tool_call_id"}
            assert message["tool_call_id"] in open_calls
        else:
            assert set(message) <= allowed
            assert isinstance(content, str)
            assert content
    assert example["messages"][-1]["role"] == "assistant"
    check_tools(example, needs=())


def check_tools(example: dict[str, Any], needs: Sequence[str]) -> None:
    for tool in example.get("tools", ()):
        assert set(tool) == {"type", "function"}
        assert tool["type"] == "function"
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", tool["function"]["name"])
        assert isinstance(tool["function"].get("parameters", {}), dict)
        assert set(needs) <= set(tool["function"])
    assert example.get("tools") != [], "left out where there are none"


def check_together(example: dict[str, Any]) -> None:
    """Together AI, "Data preparation" and "Function calling": four roles, and turns take turns."""
    check_openai(example)
    assert set(example) <= {"messages", "tools"}
    roles = [m["role"] for m in example["messages"]]
    assert set(roles) <= {"system", "user", "assistant", "tool"}
    assert roles[0] in ("system", "user")
    after = {"system": {"user"}, "user": {"assistant"}, "tool": {"tool", "assistant"}, "assistant": {"user", "tool"}}
    assert all(b in after[a] for a, b in itertools.pairwise(roles)), roles


def check_mistral(example: dict[str, Any]) -> None:
    """mistral-finetune's README and `build_instruct_sample`, and the rules of mistral-common for version 3."""
    assert set(example) <= {"messages", "tools"}
    roles = [m["role"] for m in example["messages"]]
    assert set(roles) <= {"system", "user", "assistant", "tool"}
    assert roles.count("system") <= 1
    assert roles[-1] == "assistant"
    for message in example["messages"]:
        if message["role"] == "assistant":
            assert bool(message.get("content")) != bool(message.get("tool_calls")), "one of them and not both"
        ids = [c["id"] for c in message.get("tool_calls", ())]
        ids += [message["tool_call_id"]] if message["role"] == "tool" else []
        assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", i) for i in ids)
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], str)
    check_tools(example, needs=("name", "description", "parameters"))


CHECKS = {"openai": check_openai, "together": check_together, "mistral": check_mistral}


async def talk(site: Site) -> list[Span]:
    """A rollout with a developer's message, two messages of a user in a row, and a tool."""
    async with site.client() as client:
        messages: list[Any] = [SYSTEM, {"role": "user", "content": "Hello."}]
        messages.append({"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]})
        first = (await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])).choices[0]
        assert first.message.tool_calls
        call = first.message.tool_calls[0]
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        await client.chat.completions.create(model="policy", messages=messages, tools=[CALC])
    await site.close()
    return list(await site.spans())


@pytest.mark.parametrize("form", FORMATS)
async def test_every_line_is_as_the_service_documents(site: Site, form: str) -> None:
    examples = fine_tuning_examples(await talk(site), form)
    lines = to_jsonl(examples).splitlines()
    assert [json.loads(line) for line in lines] == examples
    for example in examples:
        CHECKS[form](example)
    said = examples[-1]["messages"][-1]
    assert said == {"role": "assistant", "content": "The answer is 5."}
    assert len(examples) == (2 if form == "mistral" else 1), "mistral learns the last answer of a line only"


async def test_what_the_services_differ_in(site: Site) -> None:
    spans = await talk(site)
    roles = {form: [m["role"] for m in fine_tuning_examples(spans, form)[-1]["messages"]] for form in FORMATS}
    end = ["assistant", "tool", "assistant"]
    assert roles == {
        "openai": ["system", "user", "user", *end],
        "together": ["system", "user", *end],
        "mistral": ["system", "user", "user", *end],
    }
    (example,) = fine_tuning_examples(spans, "together")
    assert example["messages"][1]["content"] == "Hello.\n\nWhat is 2 + 3?"


@pytest.mark.parametrize("form", FORMATS)
def test_what_cannot_be_learned_is_left_out(form: str) -> None:
    """A conversation that ends without an answer, one with a result that no call asked for, and a well-formed one."""

    def recorded(prompt: list[Any], answer: list[Any]) -> list[Span]:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps(prompt),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": answer}]),
        }
        return [Span.from_attributes(name="chat", attributes=attributes, rollout_id="r", attempt_id="a")]

    asked = {"role": "user", "parts": [{"type": "text", "content": "2 + 3?"}]}
    stray = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "x", "response": "5"}]}
    told = [{"type": "reasoning", "content": "Hm."}, {"type": "text", "content": "5"}]
    assert fine_tuning_examples(recorded([asked], told[:1]), form) == []
    assert fine_tuning_examples(recorded([asked, stray], told), form) == []
    (example,) = fine_tuning_examples(recorded([asked], told), form)
    CHECKS[form](example)
    assert "Hm." not in json.dumps(example), "reasoning is in none of the forms"
