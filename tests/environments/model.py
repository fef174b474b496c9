"""A model that answers as a function says, behind a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from agentlightning.types import LLM, Attempt, AttemptedRollout

Answer = Callable[[list[dict[str, Any]]], "str | list[tuple[str, dict[str, Any]]]"]
"""What is said to these messages: text, or calls of tools."""


@contextmanager
def answering(answer: Answer) -> Iterator[LLM]:
    """The model as a resource."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = answer(body["messages"])
            message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
            if not isinstance(said, str):
                message["tool_calls"] = [
                    {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                    for n, (name, given) in enumerate(said)
                ]
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            response = {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [choice],
            }
            data = json.dumps(response).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield LLM(endpoint=f"http://127.0.0.1:{server.server_port}/v1", model="policy", api_key="k")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attempted(task: Any) -> AttemptedRollout:
    """A rollout with an attempt, as a runner hands it to an agent."""
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0)
    return AttemptedRollout(rollout_id="ro-1", input=task, start_time=0.0, attempt=attempt)
