"""`Rendering` by the `renderers` library, whose objects are hidden here. No place for per-model code."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.errors import ModelError
from agentlightning.rendering.base import Parsed, ParsedCall, RenderingSource
from agentlightning.rendering.control import SEAM, ControlTokens
from agentlightning.rendering.forms import (
    BARE_FORM,
    NO_MARKERS,
    CallForm,
    Markers,
    argument_form,
    harmony_form,
    hermes_form,
    invoke_form,
    parameter_form,
    section_form,
)
from agentlightning.rendering.grammar import answer_grammar, call_grammar
from agentlightning.rendering.messages import Message, Tool
from agentlightning.rendering.tokenizer import added_tokens
from agentlightning.types.arrays import Int32Array, np

_PIECE, _SEAM = 32 * 1024, 16
"""A long text is counted in pieces of so many characters, each of which has at most so many tokens more than in it."""
_TAIL = 512
"""Renderers of the families in `_TAIL_ONLY` look at no more of an earlier prompt than its last assistant header."""
_OPENING = 12
"""Tokens in which a prompt ends that begins the thoughts of a response, however `<think>` is written."""
_TAIL_ONLY = frozenset({"qwen3", "prime-qwen3"})
_MOST_VARIANTS = 64
"""Sets of template arguments whose renderers are kept."""

Vary = Callable[[Mapping[str, Any]], tuple[Any, Any | None]]
"""The renderer and the one that keeps reasoning, both with these arguments. Raises what their constructors raise."""


class RenderersRendering:
    """`Rendering` by the `renderers` library."""

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        renderer: Any,
        keeping: Any | None,
        *,
        parses_tools: bool,
        marked: bool | None = None,
        bare: bool | None = None,
        calls: str | None = None,
        arguments: frozenset[str] = frozenset(),
        vary: Vary | None = None,
    ) -> None:
        """
        keeping: the same renderer told to keep all reasoning, if the format knows the difference.
        marked: whether single tokens delimit reasoning and tool calls; None if the name says so. Likewise `bare`.
        calls: the name of the format in which tool calls are written, if `name` does not say it.
        arguments: of the chat template, that `vary` makes other renderers by.
        """
        self.name = name
        self.source: RenderingSource | None = None
        self.parses_tools = parses_tools
        self.arguments = arguments
        self._vary = vary
        self._variants: OrderedDict[str, RenderersRendering] = OrderedDict()
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._keeping = keeping or renderer
        self._tail = _TAIL if name in _TAIL_ONLY else None
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        self.markers = _markers(tokenizer) if (name in MARKED if marked is None else marked) else None
        self.bare = name in BARE if bare is None else bare
        self._form = _call_form(calls or name, tokenizer, self.markers)
        special = {tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
        marked_ids = msgspec.structs.astuple(self.markers) if self.markers else ()
        self.odd_ids = frozenset(special - {*self.stop_token_ids, *marked_ids})
        self._control = ControlTokens(added_tokens(tokenizer))
        self._texts: dict[int, str] = {}
        self.longest_token = max(map(len, tokenizer.get_vocab()))

    def with_arguments(self, arguments: Mapping[str, Any]) -> RenderersRendering:
        if not arguments:
            return self
        key = msgspec.json.encode(arguments, order="deterministic").decode()
        found = self._variants.get(key)
        if found is None:
            found = self._variant(arguments)
            if self.source is not None:
                found.source = msgspec.structs.replace(self.source, arguments=key)
            self._variants[key] = found
            while len(self._variants) > _MOST_VARIANTS:
                self._variants.popitem(last=False)
        return found

    def _variant(self, arguments: Mapping[str, Any]) -> RenderersRendering:
        """Made, and tried on a message: some values only fail where a template comes to them."""
        unknown = sorted(set(arguments) - self.arguments)
        if unknown or self._vary is None:
            raise ModelError(f"The chat format '{self.name}' has no argument {', '.join(unknown)}.")
        made = copy.copy(self)
        try:
            made._renderer, keeping = self._vary(self._control.in_values(arguments))
        except (AssertionError, ValueError, KeyError, TypeError, ImportError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            raise ModelError(f"The chat format '{self.name}' does not take {dict(arguments)}: {why}") from error
        made._keeping = keeping or made._renderer
        made._vary = None
        made.render([{"role": "user", "content": "?"}], None)
        return made

    def encode(self, text: str) -> Int32Array:
        if SEAM in text:
            text = text.replace(SEAM, "\ufffd")
        return _array(self._tokenizer.encode(text, add_special_tokens=False))

    def exceeds(self, texts: Iterable[str], tokens: int, stopped: Callable[[], bool]) -> bool:
        count = 0
        for text in texts:
            for at in range(0, len(text), _PIECE):
                if stopped():
                    return False
                count += max(0, len(self._tokenizer.encode(text[at : at + _PIECE], add_special_tokens=False)) - _SEAM)
                if count > tokens:
                    return True
        return False

    def decode(self, ids: Int32Array | Sequence[int]) -> str:
        return self._tokenizer.decode(_ints(ids), skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Int32Array:
        from jinja2 import TemplateError

        harmless, tools = self._control.as_text(messages, tools)
        try:
            return _array(self._renderer.render_ids(harmless, tools=tools, add_generation_prompt=True))
        except (TemplateError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"The chat format '{self.name}' cannot express these messages: {error}") from error

    def begin(self, prompt_ids: Int32Array, text: str) -> Int32Array | None:
        if self.markers is None and not self.bare:
            return None
        (message,), _ = self._control.as_text([{"role": "assistant", "content": text}], None)
        thought = "\n</think>\n\n" if self.starts_in_reasoning(prompt_ids) else ""
        return _array(self._tokenizer.encode(thought + message["content"], add_special_tokens=False))

    def bridge(
        self,
        prompt_ids: Int32Array,
        response_ids: Int32Array,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        keep_reasoning: bool,
    ) -> Int32Array | None:
        renderer = self._keeping if keep_reasoning else self._renderer
        prompt, response = self._prompt_tail(prompt_ids), _ints(response_ids)
        harmless, tools = self._control.as_text(new_messages, tools)
        bridged = renderer.bridge_to_next_turn(prompt, response, harmless, tools=tools)
        if bridged is None:
            return None
        before = prompt + response
        if bridged.token_ids[: len(before)] != before:  # it trimmed something that was sampled
            return None
        return _array(bridged.token_ids[len(before) :])

    def parse(self, response_ids: Int32Array, prompt_ids: Int32Array, tools: Sequence[Tool] | None) -> Parsed:
        try:
            return self._parse(response_ids, prompt_ids, tools)
        except RecursionError:  # a model that has collapsed writes brackets without end
            return self._unparsed(response_ids, None)

    def _parse(self, response_ids: Int32Array, prompt_ids: Int32Array, tools: Sequence[Tool] | None) -> Parsed:
        parsed = self._renderer.parse_response(
            _ints(response_ids), tools=_tools(tools), prompt_ids=self._prompt_tail(prompt_ids)
        )
        content = parsed.content.strip()
        reasoning = (parsed.reasoning_content or "").strip() or None
        if not parsed.tool_calls:
            return Parsed(content, reasoning)
        if not tools:
            return self._unparsed(response_ids, reasoning)
        calls = tuple(ParsedCall(c.name, _json_text(c.arguments)) for c in parsed.tool_calls if _is_call(c))
        # What the model got wrong stays visible to the agent (and to whoever reads the run).
        broken = [self.decode(response_ids[slice(*c.token_span)]) for c in parsed.tool_calls if _shown(c)]
        return Parsed("\n".join([content, *broken]).strip(), reasoning, calls)

    def starts_in_reasoning(self, prompt_ids: Int32Array) -> bool:
        from renderers.reasoning import prompt_ends_in_reasoning

        if self.decode(prompt_ids[-_OPENING:]).rstrip().endswith("<think>"):
            return True
        return prompt_ends_in_reasoning(
            self._tokenizer, self._prompt_tail(prompt_ids), stop_ids=set(self.stop_token_ids)
        )

    def call_grammar(self, tools: Sequence[Tool], *, in_reasoning: bool, required: bool, several: bool) -> str | None:
        if self._form is None:
            return None
        return call_grammar(
            tools,
            self._form,
            self.markers or NO_MARKERS,
            in_reasoning=in_reasoning,
            required=required,
            several=several,
        )

    def grammar(self, schema: Mapping[str, Any], tools: Sequence[Tool] | None, *, in_reasoning: bool) -> str | None:
        if self.markers is not None:
            return answer_grammar(schema, self.markers, in_reasoning=in_reasoning, tools=tools, form=self._form)
        if self.bare and not tools:
            return answer_grammar(schema)
        return None

    def _prompt_tail(self, prompt_ids: Int32Array) -> list[int]:
        return _ints(prompt_ids if self._tail is None else prompt_ids[-self._tail :])

    def _unparsed(self, response_ids: Int32Array, reasoning: str | None) -> Parsed:
        """A response whose tool-call syntax nobody asked to be parsed."""
        stops = set(self.stop_token_ids)
        ids = _ints(response_ids)
        end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        text = self.decode(ids[:end]).strip()
        inside, closed, after = text.partition("</think>")
        if reasoning is not None and closed:
            return Parsed(after.strip(), reasoning)
        if reasoning is not None or text.startswith("<think>"):
            return Parsed("", inside.removeprefix("<think>").strip() or None)
        return Parsed(text)


BARE = frozenset({"llama-3"})
"""Renderers without reasoning, whose answers begin where the prompt ends."""

MARKED = frozenset({"qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "glm-4.5", "glm-5", "glm-5.1"})
"""Renderers whose reasoning and tool calls are delimited by the tokens below."""


# ---- small conversions ---------------------------------------------------------------------------------------------


_FORMS: dict[str, Callable[[Markers, Callable[[str], int]], CallForm]] = {
    "qwen3": lambda markers, _: hermes_form(markers),
    **dict.fromkeys(("prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"), lambda markers, _: parameter_form(markers)),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1"), argument_form),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), lambda _, token: section_form(token)),
    "deepseek-v4": lambda _, token: invoke_form(token),
    "llama-3": lambda *_: BARE_FORM,
    "gpt-oss": lambda _, token: harmony_form(token),
}
"""How calls are written, by the renderer or the library's parser of them."""
_UNMARKED = frozenset({"deepseek-v3", "deepseek-r1", "deepseek-v4", "llama-3", "gpt-oss"})
"""Formats whose calls are not between the marked tokens."""


def _call_form(name: str, tokenizer: Any, markers: Markers | None) -> CallForm | None:
    """How the format of this name writes calls, if it is known; None too where its tokens are missing."""
    form = _FORMS.get(name)
    if form is None:
        return None
    if name not in _UNMARKED and (markers is None or markers.tool_open is None or markers.tool_close is None):
        return None
    missing = False

    def token(text: str) -> int:
        nonlocal missing
        found = tokenizer.convert_tokens_to_ids(text)
        missing |= found is None or found == tokenizer.unk_token_id
        return 0 if found is None else found

    made = form(markers or NO_MARKERS, token)
    return None if missing else made


def _markers(tokenizer: Any) -> Markers:
    def single(token: str) -> int | None:
        found = tokenizer.convert_tokens_to_ids(token)
        return None if found == tokenizer.unk_token_id else found

    return Markers(single("<think>"), single("</think>"), single("<tool_call>"), single("</tool_call>"))


def _tools(tools: Sequence[Tool] | None) -> list[Tool] | None:
    return list(tools) if tools else None


def _ints(ids: Int32Array | Sequence[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _array(ids: Sequence[int]) -> Int32Array:
    return np.array(ids, dtype=np.int32)


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _is_call(call: Any) -> bool:
    """Whether a call was read whole. The library takes whatever stands as a name, numbers and lists too."""
    return call.status == "ok" and isinstance(call.name, str) and bool(call.name)


def _shown(call: Any) -> bool:
    return not _is_call(call) and call.token_span is not None
