"""A coding agent: it writes a function, runs tests as its tool, and is rewarded by tests that it never sees.

An ordinary program on the official `openai` client; `@agl.rollout` is the only line that knows about training. What it
writes runs in a sandbox and nowhere else.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

import agentlightning as agl

from .grading import code_block, code_in, score, tried
from .prompts import NO_CODE, TEST_TOOL, conversation

MAX_TURNS = 4
MAX_TOKENS = 96

# One client for all rollouts: making an OpenAI client costs about 20 ms of CPU, `with_options` less than 0.1 ms.
client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")


@agl.rollout
async def code_agent(task: dict[str, Any], llm: agl.LLM) -> None:
    """Write the function that `task["problem"]` describes; 1.0 if the last code is right on all tests, the hidden ones
    too, else 0.0. The last code is what the final message holds in a block, or else what was tested last.
    """
    chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    language = task.get("language", "Python")
    messages: list[Any] = conversation(task["problem"], language)
    tested: list[str] = []
    handed_in: str | None = None
    for _ in range(MAX_TURNS):
        response = await chat.create(model=llm.model, messages=messages, tools=[TEST_TOOL], max_tokens=MAX_TOKENS)
        message = response.choices[0].message
        if not message.tool_calls:
            handed_in = code_block(message.content or "")
            break
        messages.append(message)
        for call in message.tool_calls:
            code = code_in(call.function.arguments) if call.type == "function" else None
            tested += [] if code is None else [code]
            result = NO_CODE if code is None else await tried(code, task["tests"], language)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    agl.emit_reward(await earned(tested, handed_in, task), primary_key="correct")


async def earned(tested: list[str], handed_in: str | None, task: dict[str, Any]) -> dict[str, float]:
    """The reward, `correct`, and what tells how it came about: whether the code that counts was `tested`, whether the
    `first` was right, and, where that was wrong and another was written, whether the rollout was `repaired`.
    """
    written = tested if handed_in is None else [*tested, handed_in]
    if not written:
        return {"correct": 0.0, "tested": 0.0, "first": 0.0}
    correct, first = await score(written[-1], task), await score(written[0], task)
    found = {"correct": correct, "tested": float(written[-1] in tested), "first": first}
    return found if first or len(written) == 1 else {**found, "repaired": correct}


@agl.air.on_tool_failure
def failed_tests(tool: str, error: str) -> float | None:
    """A run of the tests that fails costs a little, one of code that does not even run a little more."""
    if tool != TEST_TOOL["function"]["name"]:
        return None
    return -0.05 if error.startswith("Error: f(") else -0.1
