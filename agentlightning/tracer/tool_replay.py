"""Replay of tools: what is left of the recorded results that an attempt's own tools are answered with."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from agentlightning.types import RecordedTool
from agentlightning.types.recording import digest_of


class ToolReplay:
    """The tools of a recording. Calls may come in any order and from any thread: of those with the same name and the
    same arguments the first gets the first record, and so on."""

    def __init__(self, tools: Sequence[RecordedTool]) -> None:
        self._lock = threading.Lock()
        self._left: dict[tuple[str | None, str, str], deque[RecordedTool]] = {}
        for tool in tools:
            self._left.setdefault((tool.inside, tool.name, tool.arguments), deque()).append(tool)

    def take(self, name: str, arguments: str, inside: str | None) -> RecordedTool | None:
        """The record of a call with these arguments, as JSON text; None where there is none, or none is left.

        `inside`: the record of the decorated function that makes the call, so that what a tool calls is no answer to
        what the agent calls itself.
        """
        with self._lock:
            left = self._left.get((inside, name, digest_of(arguments)))
            return left.popleft() if left else None
