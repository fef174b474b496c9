"""The official client of Anthropic."""

import json
from typing import Any

from anthropic import AsyncAnthropic

import agentlightning as agl
from tests.clients.tool import MAX_TURNS, PARAMETERS, SYSTEM_PROMPT, Booking, calculate

PACKAGE, WIRE, STREAMS = "anthropic", "Anthropic Messages", (False, True)
CHANGE = "Anthropic(base_url=llm.endpoint, api_key=llm.api_key)"
SCRIPTED = False
TOOL: Any = {"name": "calc", "description": "One operation on two numbers.", "input_schema": PARAMETERS}


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    async with AsyncAnthropic(base_url=llm.endpoint, api_key=llm.api_key) as client:
        for _ in range(MAX_TURNS):
            request: dict[str, Any] = {
                "model": llm.model, "system": SYSTEM_PROMPT, "messages": messages, "tools": [TOOL], "max_tokens": 100
            }  # fmt: skip
            if stream:
                async with client.messages.stream(**request) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**request)
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                return "".join(block.text for block in message.content if block.type == "text")
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": calculate(json.dumps(use.input))}
                for use in uses
            ]
            messages.append({"role": "user", "content": results})
    return ""


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    tool = {"name": "book", "description": "Books a room.", "input_schema": Booking.model_json_schema()}
    async with AsyncAnthropic(base_url=llm.endpoint, api_key=llm.api_key) as client:
        said = await client.messages.create(
            model=llm.model, max_tokens=200, messages=[{"role": "user", "content": question}], tools=[tool],
            tool_choice={"type": "any"},
        )  # fmt: skip
    return next(block for block in said.content if block.type == "tool_use").input
