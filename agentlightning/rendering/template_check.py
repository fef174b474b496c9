"""Is a model's own chat template sound? Asked before a renderer is looked for, so that a mistake in the template is
named with its file and line instead of as a model whose tools are not understood.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from agentlightning.errors import ModelError
from agentlightning.rendering.messages import Message, Tool

_WORD = "Zq7hello"
"""A text that no template writes by itself."""
_QUESTION: tuple[Message, ...] = ({"role": "user", "content": _WORD},)
_PLAIN: tuple[tuple[Message, ...], ...] = (
    _QUESTION,
    ({"role": "system", "content": "Be brief."}, *_QUESTION),
    (*_QUESTION, {"role": "assistant", "content": "Hello."}, *_QUESTION),
)
_MENDED = (
    "Mend the template, or take the one of the model's own repository: tokenizer.chat_template, saved with "
    "tokenizer.save_pretrained"
)


def check_template(tokenizer: Any, path: str) -> None:
    """Raises ModelError where the template cannot be read, writes no conversation at all, or drops what was said."""
    first: Exception | None = None
    for messages in _PLAIN:
        try:
            text = _written(tokenizer, messages)
        except Exception as error:  # a template is code of its own: anything can go wrong in it
            first = first or error
            if type(error).__name__ == "TemplateTooLarge":  # of a module that needs jinja2
                break
            continue
        if _WORD not in text:
            raise ModelError(
                f"The chat template of {path} ({_place(tokenizer)}) drops what the user says: it writes {text[:60]!r} "
                f"for a message of the user. {_MENDED}."
            )
        return
    assert first is not None
    raise ModelError(f"{what_is_wrong(tokenizer, path, first)} {_MENDED}.") from first


def trouble_with_tools(tokenizer: Any, path: str, tools: Sequence[Tool]) -> str | None:
    """What goes wrong in the template when it is given tools; None if nothing does."""
    try:
        _written(tokenizer, _QUESTION, list(tools))
    except Exception as error:
        return what_is_wrong(tokenizer, path, error)
    return None


def what_is_wrong(tokenizer: Any, path: str, error: Exception) -> str:
    """The mistake in a sentence, with the template's file, its line and the words of that line."""
    line = _line_of(error)
    lines = (tokenizer.chat_template or "").splitlines()
    at = "" if line is None else f", line {line}"
    words = f" ({lines[line - 1].strip()[:80]})" if line and line <= len(lines) and lines[line - 1].strip() else ""
    complaint = str(error).rstrip(".") or type(error).__name__
    return f"The chat template of {path} fails in {_place(tokenizer)}{at}{words}: {complaint}."


def _written(tokenizer: Any, messages: Sequence[Message], tools: list[Tool] | None = None) -> str:
    copies = [dict(message) for message in messages]
    return tokenizer.apply_chat_template(copies, tools=tools, add_generation_prompt=True, tokenize=False)


def _line_of(error: Exception) -> int | None:
    """Jinja gives the template's own line: of a mistake in its grammar, or of the frame that was running."""
    line = getattr(error, "lineno", None)
    frames = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    return line or (frames[-1] if frames else None)


def _place(tokenizer: Any) -> str:
    return getattr(tokenizer, "template_file", "its chat template")
