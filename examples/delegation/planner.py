"""A provider that stands in for the main agent's large model: it looks, asks the sub-agent, and writes the answer.

It speaks the Responses API, streamed, as Codex does. It knows one way to work; a real provider takes its place with
`Provider(base_url="https://api.openai.com/v1", …)`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

ROLE = "repairer"
"""The sub-agent, as the configuration of Codex knows it (examples/terminal/inside/start.py)."""
LOOK = "python3 check.py 2>&1; cat $(ls | grep -v check)"
_FAILS = re.compile(r"(\w+)\.(\w+)\(")
_NAMESPACE = "multi_agent_v1"
_WAIT_MS = 300_000


def next_item(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the main agent does after what has been: an item of the Responses API, a tool call or a message."""
    told = [str(item.get("output", "")) for item in items if item.get("type") == "function_call_output"]
    if not told:
        return _call("exec_command", {"cmd": LOOK})
    failed, _, source = told[0].partition("Output:\n")[2].partition("\n")
    found = _FAILS.match(failed)
    if found is None:
        return _message("There is nothing to mend.")
    if len(told) == 1:
        return _call("spawn_agent", {"message": function_of(source, found[2]), "agent_type": ROLE}, _NAMESPACE)
    if len(told) == 2:
        agent = json.loads(told[1]).get("agent_id") if told[1].startswith("{") else None
        if agent is None:
            return _message(f"The sub-agent did not start: {told[1]}")
        return _call("wait_agent", {"targets": [agent], "timeout_ms": _WAIT_MS}, _NAMESPACE)
    said = _said(told[2])
    if len(told) > 3 or said is None:
        return _message("I wrote what the sub-agent said." if said else "The sub-agent said nothing.")
    mended = with_last_line(source, found[2], said)
    return _call("exec_command", {"cmd": f"printf %s {shlex.quote(mended)} > {found[1]}.py"})


def function_of(source: str, name: str) -> str:
    """The function's three lines."""
    lines = source.splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith(f"def {name}(")), 0)
    return "\n".join(lines[at : at + 3])


def with_last_line(source: str, name: str, line: str) -> str:
    """The module with another last line in this function."""
    old = function_of(source, name)
    return source.replace(old, "\n".join([*old.splitlines()[:-1], f"    {line}"]), 1)


def _said(told: str) -> str | None:
    """The first line of what the sub-agent said; None if it failed or did not end."""
    try:
        statuses = json.loads(told)["status"].values()
    except (ValueError, KeyError, AttributeError):
        return None
    said = next((s["completed"] for s in statuses if isinstance(s, dict) and s.get("completed")), None)
    return said.strip().splitlines()[0] if isinstance(said, str) and said.strip() else None


def _call(name: str, arguments: dict[str, Any], namespace: str | None = None) -> dict[str, Any]:
    item = {"type": "function_call", "name": name, "arguments": json.dumps(arguments), "status": "completed"}
    return item if namespace is None else {**item, "namespace": namespace}


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, "status": "completed"}


class _Handler(BaseHTTPRequestHandler):
    """Answers each request with one item."""

    def do_POST(self) -> None:
        """The stream of a response: begun, one item, ended."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count = len(asked["input"])
        item = {"id": f"item_{count}", **next_item(asked["input"])}
        if item["type"] == "function_call":
            item["call_id"] = f"call_{count}"
        response = {"id": f"resp_{count}", "object": "response", "model": asked["model"], "status": "in_progress"}
        usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        events = [
            {"type": "response.created", "response": response},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {
                "type": "response.completed",
                "response": {**response, "status": "completed", "output": [item], "usage": usage},
            },
        ]
        body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the terminal clean."""


@contextmanager
def planning() -> Iterator[str]:
    """Run it, on loopback; gives its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
