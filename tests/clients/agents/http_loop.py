"""No client at all: JSON over HTTP by hand."""

import json
from typing import Any

import aiohttp

import agentlightning as agl
from tests.clients.tool import BOOK_TOOL, CALC_TOOL, MAX_TURNS, SYSTEM_PROMPT, calculate

PACKAGE, WIRE, STREAMS = "aiohttp", "Chat Completions", (False, True)
CHANGE = 'POST f"{llm.endpoint}/chat/completions" with "Authorization: Bearer " + llm.api_key'
SCRIPTED = False


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {llm.api_key}"}) as session:
        for _ in range(MAX_TURNS):
            body = {"model": llm.model, "messages": messages, "tools": [CALC_TOOL], "stream": stream}
            async with session.post(f"{llm.endpoint}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                message = await _streamed(response) if stream else (await response.json())["choices"][0]["message"]
            if not message.get("tool_calls"):
                return message["content"] or ""
            messages.append(message)
            for call in message["tool_calls"]:
                content = calculate(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return ""


async def _streamed(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The message that server-sent events add up to."""
    content, calls = "", dict[int, dict[str, Any]]()
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
                call |= {key: part[key] for key in ("id", "type") if part.get(key)}
                for key, text in part["function"].items():
                    call["function"][key] += text or ""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    must = {"type": "function", "function": {"name": "book"}}
    messages = [{"role": "user", "content": question}]
    body = {"model": llm.model, "messages": messages, "tools": [BOOK_TOOL], "tool_choice": must}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{llm.endpoint}/chat/completions", json=body) as response,
    ):
        (call,) = (await response.json())["choices"][0]["message"]["tool_calls"]
        return json.loads(call["function"]["arguments"])
