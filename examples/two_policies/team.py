"""A rollout of three agents: a solver and a sceptic with a policy each, and the model that both started from."""

from __future__ import annotations

from typing import Any

import agentlightning as agl
from agentlightning.trainer.example import load_example

calc = load_example("calc", "calc_agent")

SETTINGS: dict[str, Any] = {
    "model": "calc",
    "policies": ["solver", "sceptic"],
    "frozen": "base",
    "lora_rank": 8,
    "learning_rate": 2e-3,
    "tasks_per_step": 8,
    "group_size": 8,
    "max_context": 512,
}


@agl.rollout
async def team(task: dict[str, Any], llm: agl.LLM) -> None:
    """The solver is paid for right answers, the sceptic for answers without the tool; nobody pays the base."""
    chat = calc.client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    first = [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": task["question"]}]
    shared: dict[str, Any] = {"tools": [calc.CALC_TOOL], "max_tokens": 64}
    messages: list[Any] = list(first)
    right = 0.0
    for _ in range(calc.MAX_TURNS):
        message = (await chat.create(model="solver", messages=messages, **shared)).choices[0].message
        if not message.tool_calls:
            right = calc.score(message.content or "", task["answer"])
            break
        messages.append(message)
        for call in message.tool_calls:
            result = calc.calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    doubt = (await chat.create(model="sceptic", messages=first, **shared)).choices[0].message
    await chat.create(model="base", messages=first, **shared)
    agl.emit_reward(right, agent="solver")
    agl.emit_reward(0.0 if doubt.tool_calls else 1.0, agent="sceptic")
