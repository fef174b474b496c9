"""A calculator agent that knows nothing of Agent Lightning: task on stdin, model at OPENAI_BASE_URL, reward printed.

Standard library only. Run it by hand:
    echo '{"question": "What is 2 + 3?", "answer": 5}' | OPENAI_BASE_URL=http://… OPENAI_API_KEY=… python agent.py
"""

import json
import os
import re
import sys
import urllib.request

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "One operation on two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number"},
                "op": {"type": "string", "enum": ["+", "-", "*", "/"]},
                "b": {"type": "number"},
            },
            "required": ["a", "op", "b"],
        },
    },
}
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


def ask(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [TOOL], "max_tokens": 64}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def calculate(arguments):
    try:
        given = json.loads(arguments)
        value = OPERATIONS[given["op"]](given["a"], given["b"])
        return str(int(value) if value == int(value) else round(value, 4))
    except (ValueError, KeyError, TypeError, ArithmeticError):
        return "Error: give a, op and b"


def solve(question):
    messages = [
        {"role": "system", "content": "Answer the question. Use the calc tool for every operation."},
        {"role": "user", "content": question},
    ]
    for _ in range(4):
        message = ask(messages)
        if not message.get("tool_calls"):
            return message["content"] or ""
        messages.append(message)
        for call in message["tool_calls"]:
            result = calculate(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return ""


task = json.load(sys.stdin)
answer = solve(task["question"])
numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
print(answer)
print(1.0 if numbers and float(numbers[-1]) == task["answer"] else 0.0)
