"""A model provider on loopback that answers by rules, for scripts that ask `OPENAI_BASE_URL`. Standard library only, so
that an environment with another package can run it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Thread
from typing import Any

_ids = count(1)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = answer(asked)
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", "message": message}
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        head = {"id": f"chatcmpl-{next(_ids)}", "object": "chat.completion", "created": 1, "model": asked["model"]}
        body = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The message that is given to a request of chat completions."""
    messages = asked["messages"]
    last = messages[-1]
    text = "\n".join(str(message.get("content")) for message in messages)
    if asked.get("response_format"):
        content = json.dumps({"reason": "compared", "score": 1.0 if text.count("Blue") > 1 else 0.25})
    elif "between 0 and 1" in text:
        content = "0.75" if "friendly" in text else "0.5"
    elif asked.get("tools") and last["role"] != "tool":
        return _tool_call(asked["tools"][0]["function"])
    elif last["role"] == "tool":
        content = f"The tool says {last['content']}"
    elif "SQL" in text:
        content = "The query is right." if "Check" in text else "```sql\nSELECT name FROM singer\n```"
    else:
        content = f"I was asked: {last['content']}"
    return {"role": "assistant", "content": content}


def _tool_call(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {}
    made = {"integer": 4, "number": 4, "boolean": True}
    wanted = schema.get("properties", {}).items()
    arguments = {name: made.get(property.get("type", ""), "12 * 15") for name, property in wanted}
    call = {"name": function["name"], "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Serve, and give the environment in which a script finds it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": "dummy"}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
