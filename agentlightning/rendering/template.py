"""Models that have a chat template and no renderer of their own: the template renders, and also says how turns go on.

The bridge is what the template writes after an answer. A short conversation with a placeholder for the answer is
rendered together with the new messages; the text from the end of the placeholder's turn on is what follows the sampled
tokens. So nothing sampled is ever rendered, whatever the template looks like. Not for models that the `renderers`
library knows; its objects and this one have the same methods.

A template is checked before a renderer is looked for, so that a mistake in it is named with its file and line instead
of as a model whose tools are not understood.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from agentlightning.errors import ModelError
from agentlightning.rendering.messages import Message, Tool

_ANSWER = "Zq7answer"
_THOUGHT = "Zq7thought"
"""Placeholders: words that no template writes and that survive trimming."""


class Format(msgspec.Struct, frozen=True):
    """How the responses of a model are read and where its turns end, by the texts of single tokens."""

    name: str
    needs: tuple[str, ...]
    """Tokens that the vocabulary must have."""
    stops: tuple[str, ...]
    """Further tokens at which sampling ends, besides the tokenizer's own."""
    closes: tuple[str, ...]
    """Further tokens that end an assistant's turn once it is history."""
    read: Callable[[Any, Sequence[int], Sequence[int]], Any]
    """From the tokenizer, the response and its prompt to the library's parsed response."""


class TemplateRenderer:
    """A chat template with the methods of the `renderers` library's renderers."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        options: Mapping[str, Any],
        format: Format | None,
        stops: Sequence[int],
        keeps_reasoning: bool,
    ) -> None:
        """
        options: for the library's DefaultRenderer: its parsers, and what else the template takes.
        format: how responses are read, if the library's parsers do not.
        stops: tokens at which sampling ends.
        keeps_reasoning: continue turns even if the template drops the reasoning of earlier ones.
        """
        from renderers import DefaultRendererConfig, create_renderer

        config = DefaultRendererConfig.model_validate(dict(options))
        self._inner: Any = create_renderer(tokenizer, config)
        self._tokenizer = tokenizer
        self._format = format
        self._stops = tuple(stops)
        closes = (*self._stops, *(tokenizer.convert_tokens_to_ids(t) for t in (format.closes if format else ())))
        self._closes = tuple(tokenizer.decode([token], skip_special_tokens=False) for token in closes)
        self._keeps_reasoning = keeps_reasoning
        self._extra = {k: v for k, v in options.items() if k not in ("tool_parser", "reasoning_parser")}
        # GPT-OSS's template has a word of its own for it.
        template = tokenizer.chat_template
        self._thinking = "reasoning_content" not in template and "thinking" in template

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def render_ids(
        self, messages: Sequence[Message], *, tools: list[Tool] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        worded = self._worded(messages)
        return self._inner.render_ids(worded, tools=tools, add_generation_prompt=add_generation_prompt)

    def parse_response(
        self, token_ids: list[int], *, tools: list[Tool] | None = None, prompt_ids: list[int] | None = None
    ) -> Any:
        if self._format is not None:
            return self._format.read(self._tokenizer, token_ids, prompt_ids or ())
        stop = next((at for at, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        return self._inner.parse_response(token_ids[:stop], tools=tools, prompt_ids=prompt_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[Tool] | None = None,
    ) -> Any | None:
        """The next turn's prompt; None if the template cannot say how to go on, or would drop what was thought."""
        from renderers import RenderedTokens

        if not previous_prompt_ids or not new_messages or any(m["role"] == "assistant" for m in new_messages):
            return None
        closing = self._closing(new_messages, tools)
        if closing is None:
            return None
        close, rest = closing
        if not (previous_completion_ids and previous_completion_ids[-1] in self._stops):
            parsed = self.parse_response(previous_completion_ids, prompt_ids=previous_prompt_ids)
            if parsed.reasoning_complete is False:
                return None  # it was cut off inside a thought; only rendering anew closes it as the template would
            rest = close + rest
        added = self._tokenizer.encode(rest, add_special_tokens=False)
        return RenderedTokens(token_ids=[*previous_prompt_ids, *previous_completion_ids, *added], message_indices=[])

    def _closing(self, new: Sequence[Message], tools: list[Tool] | None) -> tuple[str, str] | None:
        """What ends an assistant's turn as history, and the text after that up to the next turn's beginning."""
        from jinja2 import TemplateError

        conversation = [{"role": "user", "content": "?"}, self._placeholder(new), *new]
        try:
            text = self._tokenizer.apply_chat_template(
                self._worded(conversation), tools=tools, add_generation_prompt=True, tokenize=False, **self._extra
            )
        except (TemplateError, TypeError, ValueError, KeyError):
            return None
        if not self._keeps_reasoning and _THOUGHT not in text:
            return None
        if text.count(_ANSWER) != max(1, len(_leading_results(new))):
            return None
        after = text.rpartition(_ANSWER)[2]
        ends = [(at, -len(close), close) for close in self._closes if (at := after.find(close)) >= 0]
        if not ends:
            return None
        at, _, close = min(ends)
        return close, after[at + len(close) :]

    def _placeholder(self, new: Sequence[Message]) -> Message:
        """An answer that these messages could follow: tool results answer calls."""
        message: Message = {"role": "assistant", "content": _ANSWER}
        results = _leading_results(new)
        if results:
            message["content"] = ""
            message["tool_calls"] = [
                {
                    "id": m.get("tool_call_id") or f"call{i:05}",
                    "type": "function",
                    "function": {"name": m.get("name") or "call", "arguments": {"answer": _ANSWER}},
                }
                for i, m in enumerate(results)
            ]
        if not self._keeps_reasoning:
            message["reasoning_content"] = _THOUGHT
        return message

    def _worded(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the words and types of the template: arguments as an object where they are one."""
        found: list[Message] = []
        for message in messages:
            if self._thinking and message.get("reasoning_content"):
                message = {**message, "thinking": message["reasoning_content"]}
            if calls := message.get("tool_calls"):
                message = {**message, "tool_calls": [_with_object(call) for call in calls]}
            found.append(message)
        return found


def _leading_results(new: Sequence[Message]) -> list[Message]:
    """The tool results that new messages begin with."""
    return list(takewhile(lambda message: message["role"] == "tool", new))


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


# ---- formats the library reads only for its own renderers ------------------------------------------------------------


def _read_llama(tokenizer: Any, response: Sequence[int], _prompt: Sequence[int]) -> Any:
    from renderers.parsing import parse_llama_3

    stops = {tokenizer.convert_tokens_to_ids(text) for text in _LLAMA.stops}
    return parse_llama_3(tokenizer, list(response), stop_ids=stops)


def _read_harmony(tokenizer: Any, response: Sequence[int], prompt: Sequence[int]) -> Any:
    """The response with the header that its prompt began: a turn is a row of messages, each with its channel."""
    from renderers.parsing import parse_gpt_oss

    names = ("start", "end", "return", "call", "channel", "message", "constrain")
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    start = ids["start_id"]
    header: list[int] = []
    if start in prompt and (not response or response[0] != start):
        header = list(prompt[len(prompt) - 1 - list(prompt)[::-1].index(start) :])
    parsed = parse_gpt_oss(tokenizer, [*header, *response], **ids)
    for call in parsed.tool_calls:
        if call.token_span is not None:
            first, last = call.token_span
            call.token_span = (max(0, first - len(header)), last - len(header))
    return parsed


_LLAMA = Format(
    "llama-3", ("<|start_header_id|>", "<|eot_id|>"), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), (), _read_llama
)
_HARMONY = Format(
    "gpt-oss", ("<|channel|>", "<|message|>", "<|call|>"), ("<|return|>", "<|call|>"), ("<|end|>",), _read_harmony
)

FORMATS = (_LLAMA, _HARMONY)


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
    raise ModelError(f"{_what_is_wrong(tokenizer, path, first)} {_MENDED}.") from first


def trouble_with_tools(tokenizer: Any, path: str, tools: Sequence[Tool]) -> str | None:
    """The mistake that the template makes when it is given tools; None if it makes none."""
    try:
        _written(tokenizer, _QUESTION, list(tools))
    except Exception as error:
        return _what_is_wrong(tokenizer, path, error)
    return None


def _what_is_wrong(tokenizer: Any, path: str, error: Exception) -> str:
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
