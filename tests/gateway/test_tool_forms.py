"""Tools that are no plain functions: those of a namespace, and those that take a free text. The model knows functions;
the client gets its own form back, sends it back, and the conversation goes on with the sampled tokens.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.gateway.conftest import CALC, Site

PATCH = '*** Begin Patch\n+ "a"\n*** End Patch'
USER: Any = {"role": "user", "content": "Do it."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
SPAWN = {"type": "function", "name": "spawn", "parameters": CALC["function"]["parameters"], "strict": False}
TOOLS: list[Any] = [
    {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR},
    {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [SPAWN]},
    {"type": "web_search", "external_web_access": True},
]


def works(prompt: str, _: object) -> str:
    """Calls the one, then the other, each as no JSON writer would write it; then it is done."""
    results = prompt.count("<tool_response>")
    patch = json.dumps(PATCH)
    calls = (
        f'<tool_call>\n{{"name": "apply_patch", "arguments": {{"input":   {patch}}}}}\n</tool_call>',
        '<tool_call>\n{"name": "agents__spawn", "arguments": {"b":3,  "a": 2}}\n</tool_call>',
    )
    return calls[results] if results < 2 else "Done."


async def respond(client: AsyncOpenAI, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    create: Any = client.responses.create
    reply = await create(model="policy", tools=TOOLS, store=False, stream=stream, **fields)
    if not stream:
        return [item.model_dump(exclude_none=True) for item in reply.output]
    events = [event async for event in reply]
    said = [e for e in events if e.type.endswith((".input.done", "_input.done", "_arguments.done"))]
    whole = events[-1].response.output
    assert len(said) == len([i for i in whole if i.type in ("function_call", "custom_tool_call")])
    return [item.model_dump(exclude_none=True) for item in whole]


@pytest.mark.parametrize("script", [works])
@pytest.mark.parametrize("stream", [False, True])
async def test_namespaces_and_free_texts_come_back_as_they_were_declared(site: Site, stream: bool) -> None:
    async with site.client() as client:
        (patch,) = first = await respond(client, stream, input=[USER])
        assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
        items: list[Any] = [USER, *first]
        items.append({"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "ok"})
        (spawn,) = second = await respond(client, stream, input=items)
        assert (spawn["type"], spawn["name"], spawn["namespace"]) == ("function_call", "spawn", "agents")
        assert json.loads(spawn["arguments"]) == {"a": 2, "b": 3}
        items += [*second, {"type": "function_call_output", "call_id": spawn["call_id"], "output": "ok"}]
        (last,) = await respond(client, stream, input=items, tool_choice="auto")
    assert last["content"][0]["text"] == "Done."
    calls = await site.close()
    site.check_exact(calls)
    assert [call.info.parent_call_id for call in calls] == [None, *(call.info.call_id for call in calls[:-1])]
    assert "start: /.+/" in site.engine.rendering.decode(calls[0].prompt_ids)


@pytest.mark.parametrize("script", [works])
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_has_tools_of_free_texts_too(site: Site, stream: bool) -> None:
    custom = {"name": "apply_patch", "format": {"type": "grammar", "grammar": GRAMMAR}}
    tools: Any = [{"type": "custom", "custom": custom}]
    async with site.client() as client:
        create: Any = client.chat.completions.create
        reply = await create(model="policy", messages=[USER], tools=tools, stream=stream)
        if stream:
            chunks = [c.choices[0].delta.tool_calls async for c in reply if c.choices]
            ((call,),) = [[c.model_dump(exclude={"index"}) for c in calls] for calls in chunks if calls]
        else:
            (call,) = [c.model_dump() for c in reply.choices[0].message.tool_calls]
        assert (call["type"], call["custom"]) == ("custom", {"name": "apply_patch", "input": PATCH})
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
        await create(model="policy", messages=[USER, said, result], tools=tools)
    calls = await site.close()
    site.check_exact(calls)
    assert calls[1].info.parent_call_id == calls[0].info.call_id
