"""A coding agent: it writes a function, runs tests as its tool, and is rewarded by tests that it never sees.

An ordinary program on the official `openai` client; `@agl.rollout` is the only line that knows about training. What it
writes runs in a sandbox and nowhere else.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

import agentlightning as agl

from .sandbox import Answer, run_code

MAX_TURNS = 4
MAX_TOKENS = 72
SYSTEM_PROMPT = "Write a Python function f(xs). Run the tests until they pass."
TEST_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "run_tests",
        "description": "Tests the code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
PASSED = "All tests pass."

# One client for all rollouts: making an OpenAI client costs about 20 ms of CPU, `with_options` less than 0.1 ms.
client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")


@agl.rollout
async def code_agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Write the function that `task["problem"]` describes; 1.0 if the code that was tested last is right on all tests,
    the hidden ones too, else 0.0.
    """
    chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    messages: list[Any] = conversation(task["problem"])
    code: str | None = None
    for _ in range(MAX_TURNS):
        response = await chat.create(model=llm.model, messages=messages, tools=[TEST_TOOL], max_tokens=MAX_TOKENS)
        message = response.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            written = code_in(call.function.arguments) if call.type == "function" else None
            code = written if written is not None else code
            result = "Error: give the code" if written is None else await tried(written, task["tests"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return await score(code, task)


def conversation(problem: str) -> list[dict[str, str]]:
    """What the model is told first."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"f(xs): {problem}"}]


def code_in(arguments: str) -> str | None:
    """The code in a tool call's JSON; None if there is none."""
    try:
        code = json.loads(arguments)["code"]
    except (ValueError, TypeError, KeyError):
        return None
    return code if isinstance(code, str) else None


async def tried(code: str, tests: list[Any]) -> str:
    """What the agent is told of its code."""
    return verdict(await answer_of(code, [given for given, _ in tests]), tests)


def verdict(answer: Answer, tests: list[Any]) -> str:
    """That all is well, or the first thing that is not."""
    if answer.error is not None:
        return f"Error: {answer.error}"
    for (given, wanted), found in zip(tests, answer.values, strict=True):
        if not right(found, wanted):
            return f"Error: f({given}) is {json.dumps(found)[:60]}, not {wanted}"
    return PASSED


def right(found: Any, wanted: Any) -> bool:
    """Whether they are the same value of the same type: True is not 1."""
    return json.dumps(found) == json.dumps(wanted)


async def score(code: str | None, task: dict[str, Any]) -> float:
    """What the code earns; hidden tests are run where those that can be seen pass."""
    if code is None or await tried(code, task["tests"]) != PASSED:
        return 0.0
    return float(await tried(code, task["hidden"]) == PASSED)


_known: dict[tuple[str, str], Answer] = {}
KEEP = 4096


async def answer_of(code: str, inputs: list[Any]) -> Answer:
    """What the code gives; the same code is not run again on the same inputs."""
    key = (code, json.dumps(inputs))
    if key not in _known:
        if len(_known) >= KEEP:
            _known.clear()
        _known[key] = await run_code(code, inputs)
    return _known[key]


@agl.air.on_tool_failure
def failed_tests(tool: str, error: str) -> float | None:
    """A run of the tests that fails costs a little, one of code that does not even run a little more."""
    if tool != TEST_TOOL["function"]["name"]:
        return None
    return -0.05 if error.startswith("Error: f(") else -0.1
