"""What Codex tells the model, for demonstrations; tests/clients compares it with what Codex really sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOOLS: list[dict[str, Any]] = json.loads((HERE / "tools.json").read_text(encoding="utf-8"))
INSTRUCTIONS = (HERE / "inside" / "instructions.md").read_text(encoding="utf-8").strip()


def conversation(issue: str) -> list[dict[str, str]]:
    """What the model is told first."""
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": issue}]


def call(command: str) -> str:
    """A command as the model gives it."""
    return f'<tool_call>\n{{"name": "exec_command", "arguments": {json.dumps({"cmd": command})}}}\n</tool_call>'


def shown(output: str, code: int, chunk: str = "0" * 6, seconds: float = 0.0) -> str:
    """What the model is told of a command that ended. A token is taken for four bytes."""
    tokens = -(-len(output.encode()) // 4)
    return (
        f"Chunk ID: {chunk}\nWall time: {seconds:.4f} seconds\nProcess exited with code {code}\n"
        f"Original token count: {tokens}\nOutput:\n{output}"
    )
