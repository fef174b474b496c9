"""What the model is told: the instructions and the tool. A user with another model begins by changing these."""

from __future__ import annotations

from typing import Any

INSTRUCTIONS = "Answer the question. Search until you know. Give the answer in <answer></answer>."
MAX_TURNS = 5
MAX_TOKENS = 64
SEARCH_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds documents.",
        "parameters": {
            "properties": {"query": {"title": "Query", "type": "string"}},
            "required": ["query"],
            "title": "searchArguments",
            "type": "object",
        },
    },
}
"""The tool as the framework sends it, of what the server says; tests/clients/test_rag.py compares."""


def conversation(question: str) -> list[dict[str, str]]:
    """What the model is told first."""
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
