"""The official client, Chat Completions."""

import json
from typing import Any

from openai import AsyncOpenAI

import agentlightning as agl
from tests.clients.tool import BOOK_TOOL, CALC_TOOL, MAX_TURNS, SYSTEM_PROMPT, calculate

PACKAGE, WIRE, STREAMS = "openai", "Chat Completions", (False, True)
CHANGE = "OpenAI(base_url=llm.endpoint, api_key=llm.api_key)"
SCRIPTED = False


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        for _ in range(MAX_TURNS):
            if stream:
                async with client.chat.completions.stream(
                    model=llm.model, messages=messages, tools=[CALC_TOOL]
                ) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                answer = await client.chat.completions.create(model=llm.model, messages=messages, tools=[CALC_TOOL])
                message = answer.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                assert call.type == "function"
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        said = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": question}], tools=[BOOK_TOOL], tool_choice="required"
        )
    return json.loads(said.choices[0].message.tool_calls[0].function.arguments)
