"""The official client, Responses, stateful: each turn sends only what is new."""

import json
from typing import Any

from openai import AsyncOpenAI

import agentlightning as agl
from tests.clients.tool import BOOK_TOOL, MAX_TURNS, PARAMETERS, SYSTEM_PROMPT, calculate

PACKAGE, WIRE, STREAMS = "openai", "Responses", (False, True)
CHANGE = "OpenAI(base_url=llm.endpoint, api_key=llm.api_key)"
SCRIPTED = False
TOOL: Any = {
    "type": "function", "name": "calc", "description": "One operation on two numbers.", "parameters": PARAMETERS
}  # fmt: skip


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    settings: dict[str, Any] = {"model": llm.model, "tools": [TOOL], "instructions": SYSTEM_PROMPT}
    given: Any = question
    previous = None
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        for _ in range(MAX_TURNS):
            request: dict[str, Any] = {**settings, "input": given}
            if previous is not None:
                request["previous_response_id"] = previous
            if stream:
                async with client.responses.stream(**request) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**request)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            previous = response.id
            given = [
                {"type": "function_call_output", "call_id": call.call_id, "output": calculate(call.arguments)}
                for call in calls
            ]
    return ""


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:

    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        said = await client.responses.create(
            model=llm.model,
            input=question,
            tools=[{"type": "function", **BOOK_TOOL["function"]}],
            tool_choice="required",
        )
    return json.loads(next(item for item in said.output if item.type == "function_call").arguments)
