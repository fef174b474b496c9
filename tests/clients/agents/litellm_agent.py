"""LiteLLM."""

import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import json

import litellm

import agentlightning as agl
from tests.clients.tool import BOOK_TOOL, CALC_TOOL, MAX_TURNS, SYSTEM_PROMPT, calculate

PACKAGE, WIRE, STREAMS = "litellm", "Chat Completions", (False, True)
CHANGE = 'litellm.acompletion(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key, …)'
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        answer: Any = await litellm.acompletion(
            f"openai/{llm.model}", messages=messages, tools=[CALC_TOOL], stream=stream,
            api_base=llm.endpoint, api_key=llm.api_key,
        )  # fmt: skip
        if stream:
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            content = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return ""


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    said = await litellm.acompletion(
        f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key, tools=[BOOK_TOOL], tool_choice="required",
        messages=[{"role": "user", "content": question}],
    )  # fmt: skip
    return json.loads(said.choices[0].message.tool_calls[0].function.arguments)
