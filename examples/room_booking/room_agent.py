"""The agent: it asks its model for a room, lets it look at the rooms, and is graded by the building.

It speaks plain HTTP, so that the example needs no package besides; any OpenAI client does the same.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

import agentlightning as agl
from examples.room_booking.rooms import TOOL, Task, get_rooms_and_availability, grade

FIRST_PROMPT = "You help people to find a meeting room.\n\n{request}\n\nAnswer with the id of one room."


@agl.rollout
async def room_agent(task: Task, llm: agl.LLM, prompt_template: agl.PromptTemplate) -> float:
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt_template.format(request=task["request"])}]
    for _ in range(3):
        message = await ask(llm, messages)
        if not message.get("tool_calls"):
            return grade(message.get("content") or "", task)
        messages.append(message)
        for call in message["tool_calls"]:
            rooms = get_rooms_and_availability(task, json.loads(call["function"]["arguments"])["date"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(rooms)})
    return 0.0


async def ask(llm: agl.LLM, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": llm.model, "messages": messages, "tools": [TOOL], "temperature": 0}
    headers = {"authorization": f"Bearer {llm.api_key or 'none'}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{llm.get_base_url()}/chat/completions", json=body, headers=headers) as response,
    ):
        response.raise_for_status()
        return (await response.json())["choices"][0]["message"]
