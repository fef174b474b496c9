"""What a good agent's model would say, by a script: it reads a file, has a sub-agent work, or reads until it sums up.

Each is a function from a prompt's text to a response's, and has a task that goes with it.
"""

from __future__ import annotations

import json
import re
from typing import Any

WORD = "heliotrope"
READS = {"prompt": "Read the file notes.txt in this folder and tell me the word that stands in it."}
DELEGATES = {"prompt": "MAIN-TASK: delegate"}
LONG = f"{WORD}\n" + "".join(f"line {n}: {n * n}\n" for n in range(600))
"""A file that `compacting` reads many times."""
SUB_TASK, SUMMARY = "SUB-TASK: say hi", f"SUMMED-UP: the word is {WORD}."
_SHELLS = re.compile(r"bash|shell|exec|terminal|command", re.IGNORECASE)
_READERS = re.compile(r"^(read|view|cat|open)", re.IGNORECASE)
_COMMANDS = ("cat notes.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
"""The second one is how mini-swe-agent's model says that it is done."""
WRITES = "printf hello > /app/out.txt"
"""What `writing` runs in place of the first."""
LOOKS: dict[str, Any] = {"description": "look", "prompt": SUB_TASK}
STARTS: dict[str, dict[str, Any]] = {
    "Agent": {**LOOKS, "subagent_type": "general-purpose"},
    "Task": {**LOOKS, "subagent_type": "general-purpose"},
    "agent": {**LOOKS, "subagent_type": "general-purpose"},
    "task": {**LOOKS, "subagent_type": "general"},
    "invoke_agent": {"agent_name": "generalist", "prompt": SUB_TASK},
    "spawn_agent": {"message": SUB_TASK, "agent_type": "default", "task": SUB_TASK, "systemPrompt": "You help."},
}
"""What starts a sub-agent, by the tool's name; of the arguments those that the tool has."""
_SUMS_UP = re.compile(r"summar|compact|hand-?off|snapshot|extract", re.IGNORECASE)
_HANDS_OVER = re.compile(r"transfer|hand_?off|delegate|helper", re.IGNORECASE)
_HANDED_OVER = ("tool_call", "Calling tools", "called tool")
"""How frameworks write a call into the history, the last two as text."""
_NAMES = re.compile(r"agent|coworker", re.IGNORECASE)
_MOST_READS = 12


def reading(prompt: str, _params: object) -> str:
    """What a good agent's model would say: a call of a tool that reads, and the answer."""
    tools = _declared(prompt)
    done = prompt.count("<tool_response>\n")
    shell = next((tool for tool in tools if _SHELLS.search(tool["name"])), None)
    reader = next((tool for tool in tools if _READERS.search(tool["name"])), None)
    tool = shell if reader is None or done else reader
    if tool is None or done >= len(_COMMANDS):
        return f"The word is {WORD}."
    if tool is reader or shell is not None:
        call = {"name": tool["name"], "arguments": arguments_for(tool["parameters"], done)}
        return f"<think>\nI read it.\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return f"The word is {WORD}."


def writing(prompt: str, _params: object) -> str:
    """Writes a file by whatever tool runs commands, and ends."""
    shell = next((tool for tool in _declared(prompt) if _SHELLS.search(tool["name"])), None)
    done = prompt.count("<tool_response>\n")
    if shell is None or done >= len(_COMMANDS):
        return "It is written."
    arguments = json.dumps(arguments_for(shell["parameters"], done)).replace(_COMMANDS[0], WRITES)
    return _call(shell["name"], json.loads(arguments))


def arguments_for(schema: dict[str, Any], done: int) -> dict[str, Any]:
    """What a tool that reads or runs something has to be given."""
    properties = schema.get("properties", {})
    wanted = schema.get("required") or list(properties)[:1]
    return {name: _value(name, properties.get(name, {}), done) for name in wanted}


def _value(name: str, schema: dict[str, Any], done: int) -> Any:
    kind = schema.get("type", "string")
    if kind == "array":
        return ["bash", "-c", _COMMANDS[done]] if re.search("command|cmd", name) else []
    if kind in ("boolean", "integer", "number", "object"):
        return {"boolean": False, "integer": 1, "number": 1, "object": {}}[kind]
    if re.search("path|file", name, re.IGNORECASE):
        return "notes.txt"
    return _COMMANDS[done] if re.search("command|cmd|script", name, re.IGNORECASE) else "Read the file."


def delegating(prompt: str, _: object) -> str:
    """Starts a sub-agent, waits for it where that is a tool of its own, and ends."""
    tools = {tool["name"].split(".")[-1].split("__")[-1]: tool for tool in _declared(prompt)}
    starts = next((name for name in STARTS if name in tools), None)
    if "MAIN-TASK" in prompt and starts is not None and SUB_TASK not in prompt:
        taken = tools[starts]["parameters"].get("properties", {})
        return _call(tools[starts]["name"], {name: given for name, given in STARTS[starts].items() if name in taken})
    started = re.search(r'agent_id\\*":\s*\\*"([0-9a-f-]{36})', prompt)
    if "MAIN-TASK" in prompt and started and "wait_agent" in tools and f'["{started[1]}"' not in prompt:
        return _call(tools["wait_agent"]["name"], {"targets": [started[1]], "timeout_ms": 30_000})
    return "All done."


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def compacting(prompt: str, _: object) -> str:
    """Reads the file again and again until it is asked to sum up; then once more, and ends."""
    asked = prompt.rpartition("<|im_start|>user\n")[2].rpartition("</tool_response>")[2]
    read = prompt.count("<tool_response>\n")
    before, summed_up, after = prompt.partition(SUMMARY)
    if _SUMS_UP.search(asked) and not summed_up and WORD in before:
        return f"<summary>\n{SUMMARY}\n</summary>"
    if after.count("<tool_response>\n") or read >= _MOST_READS:
        return f"The word is {WORD}."
    tools = _declared(prompt)
    shell = next((tool for tool in tools if _SHELLS.search(tool["name"])), None)
    if shell is None:
        return "Nothing to do."
    call = _call(shell["name"], arguments_for(shell["parameters"], 0))
    return call.replace(_COMMANDS[0], f"{_COMMANDS[0]} # {read}")  # some end what repeats itself


def handing_over(prompt: str) -> str:
    """Hands over to the agent `helper` by whatever tool there is for it, once, and ends."""
    tools = {tool["name"]: tool for tool in _declared(prompt)}
    hands_over = next((name for name in tools if _HANDS_OVER.search(name)), None)
    so_far = prompt.rpartition(DELEGATES["prompt"])[2]
    handed_over = any(words in so_far for words in _HANDED_OVER) or DELEGATES["prompt"] not in prompt
    if hands_over is not None and not handed_over:
        schema = tools[hands_over]["parameters"]
        wanted = schema.get("required") or list(schema.get("properties", {}))
        return _call(hands_over, {name: "helper" if _NAMES.search(name) else SUB_TASK for name in wanted})
    if "final_answer" in tools:
        return _call("final_answer", {"answer": "All done."})
    return "[[ ## answer ## ]]\nAll done.\n\n[[ ## completed ## ]]" if "[[ ## " in prompt else "All done."


def _declared(prompt: str) -> list[dict[str, Any]]:
    lines = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    return [tool["function"] for tool in map(json.loads, lines)]
