"""The grader of agent.sh: is the calculation that the model asked for the right one?

It gets the finished run as JSON on stdin (task, stdout, stderr, exit_code, workspace, spans) and prints the reward. A
program that is graded cannot give itself a reward.
"""

import json
import sys

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


def reward(run):
    message = json.loads(run["stdout"])["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    if len(calls) != 1:
        return 0.0
    try:
        given = json.loads(calls[0]["function"]["arguments"])
        return float(OPERATIONS[given["op"]](given["a"], given["b"]) == run["task"]["answer"])
    except (ValueError, KeyError, TypeError, ArithmeticError):
        return 0.0


print(reward(json.load(sys.stdin)))
