"""The table of request fields in docs/gateway.md, from the dialects' own tables and the fields that the clients know.

    python scripts/fields.py

writes it anew. A test compares it with the code.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from agentlightning.gateway.dialects import chat, completions, messages, responses

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
BEGIN, END = "<!-- fields: python scripts/fields.py -->\n", "<!-- /fields -->"

DIALECTS: dict[str, tuple[ModuleType, Any]] = {
    "Chat Completions": (chat, chat_create_params.CompletionCreateParamsNonStreaming),
    "Responses": (responses, response_create_params.ResponseCreateParamsNonStreaming),
    "Messages": (messages, message_create_params.MessageCreateParamsNonStreaming),
    "Completions": (completions, completion_create_params.CompletionCreateParamsNonStreaming),
}
"""The module of each wire format, and the client's type of a request."""


def refused(dialect: str) -> list[str]:
    """Fields that the provider's client can send and this gateway refuses by name."""
    module, params = DIALECTS[dialect]
    return sorted(set(get_type_hints(params)) - {*module.READ, *module.HARMLESS, *module.NEUTRAL})


def table() -> str:
    lines = [
        "| format | honoured | accepted, no effect | only with the value that changes nothing | refused by name |",
        "|---|---|---|---|---|",
    ]
    for dialect, (module, _) in DIALECTS.items():
        neutral = [f"`{name}` ({_values(values)})" for name, values in module.NEUTRAL.items()]
        cells = [_listed(module.READ), _listed(module.HARMLESS), ", ".join(neutral), _listed(refused(dialect))]
        lines.append(f"| {dialect} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _values(values: tuple[Any, ...]) -> str:
    return " or ".join(f"`{value!r}`" for value in values) or "null"


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def main() -> None:
    text = PAGE.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: BEGIN + table() + END, text))


if __name__ == "__main__":
    main()
