"""What tau2 tells the model about the mock domain, for demonstrations, and the limits of a conversation;
tests/clients/test_support.py compares with what tau2 really sends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSTRUCTIONS = (HERE / "instructions.txt").read_text(encoding="utf-8").strip("\n")
TOOLS: list[dict[str, Any]] = json.loads((HERE / "tools.json").read_text(encoding="utf-8"))
GREETING = "Hi! How can I help you today?"
MAX_TOKENS = {"mock": 64}
"""Tokens of a message, by domain."""
MAX_STEPS = {"mock": 16}
"""Messages of a conversation, those of tools too; what is not over then earns nothing."""


def conversation(opening: str) -> list[dict[str, str]]:
    """What the model is told first: tau2 greets the user in its name."""
    return [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "assistant", "content": GREETING},
        {"role": "user", "content": opening},
    ]


def call(name: str, **arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
