"""An agent that answers arithmetic questions with a calculator tool.

It is an ordinary program: the official `openai` client, a tool, a loop, a number at the end. `@agl.rollout` is the only
line that knows that somebody trains the model behind it.
"""

from __future__ import annotations

import json
import operator
import re
from typing import Any

from openai import AsyncOpenAI

import agentlightning as agl

MAX_TURNS = 4
SYSTEM_PROMPT = "Answer the question. Use the calc tool for every operation."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
CALC_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "One operation on two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number"},
                "op": {"type": "string", "enum": list(OPERATIONS)},
                "b": {"type": "number"},
            },
            "required": ["a", "op", "b"],
        },
    },
}

# One client for all rollouts: making an OpenAI client costs about 20 ms of CPU, `with_options` less than 0.1 ms.
client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")


@agl.rollout
async def calc_agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Answer `task["question"]` in at most MAX_TURNS model calls; 1.0 if the answer is `task["answer"]`, else 0.0."""
    chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(MAX_TURNS):
        response = await chat.create(model=llm.model, messages=messages, tools=[CALC_TOOL], max_tokens=64)
        message = response.choices[0].message
        if not message.tool_calls:
            return score(message.content or "", task["answer"])
        messages.append(message)
        for call in message.tool_calls:
            result = calculate(call.function.arguments) if call.type == "function" else "Error: no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def calculate(arguments: str) -> str:
    """Run the tool on the JSON the model wrote. What is wrong with it is told to the model, not raised."""
    try:
        given = json.loads(arguments)
        a, op, b = given["a"], OPERATIONS[given["op"]], given["b"]
    except (ValueError, TypeError, KeyError):
        return "Error: give a, op and b"
    if type(a) not in (int, float) or type(b) not in (int, float):
        return "Error: a and b must be numbers"
    try:
        value = op(a, b)
        return str(int(value) if value == int(value) else round(value, 4))
    except ZeroDivisionError:
        return "Error: division by zero"
    except (OverflowError, ValueError):  # infinity and NaN are in the JSON that Python reads
        return "Error: not a finite number"


def score(text: str, answer: float) -> float:
    """1.0 if the last number in the model's final answer is the right one, else 0.0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return 1.0 if numbers and float(numbers[-1]) == answer else 0.0
