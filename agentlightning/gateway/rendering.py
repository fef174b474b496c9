"""Rendering: messages to prompt tokens, response tokens to messages, and the bridge between turns.

The invariant: `bridge` only ever appends. What was sampled stays as it was sampled, and only messages that are new get
tokenised. The work is done by the `renderers` library; this seam hides it, picks the renderer of a model and proves the
pick on probe conversations. It is no place for per-model code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from agentlightning.errors import ModelError
from agentlightning.gateway.exchange import Message, Tool
from agentlightning.gateway.probes import agrees, tools_survive
from agentlightning.gateway.structured import Markers, answer_grammar
from agentlightning.gateway.template import FORMATS, Format, TemplateRenderer
from agentlightning.gateway.tokenizer import load_tokenizer, model_directory, read_json, stop_tokens
from agentlightning.types.call import Int32Array

logger = logging.getLogger(__name__)

SETTINGS_FILE = "agentlightning.json"
"""In a model directory: {"renderer": name, "renderer_options": {…}}, written with every checkpoint."""

_TAIL = 512
"""Renderers of the families in `_TAIL_ONLY` look at no more of an earlier prompt than its last assistant header."""
_TAIL_ONLY = frozenset({"qwen3", "prime-qwen3"})


class ParsedCall(msgspec.Struct, frozen=True):
    """A tool call as the model wrote it: `arguments` is a JSON text."""

    name: str
    arguments: str


class Parsed(msgspec.Struct, frozen=True):
    """A response taken apart. Text is stripped of white space at both ends."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ParsedCall, ...] = ()


class Rendering(Protocol):
    """Messages ↔ tokens for one model. Pure: the same input gives the same output."""

    @property
    def name(self) -> str: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        ...

    @property
    def parses_tools(self) -> bool: ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least its length divided by this many tokens."""
        ...

    @property
    def markers(self) -> Markers | None:
        """What a response may be streamed by; None where only the whole response can be read."""
        ...

    @property
    def odd_ids(self) -> frozenset[int]:
        """Special tokens inside a response after which only the whole can be read: some parsers leave them out."""
        ...

    @property
    def bare(self) -> bool:
        """Whether a response is plain text from its first token on, or else nothing but a call written as JSON."""
        ...

    def encode(self, text: str) -> Int32Array: ...

    def decode(self, ids: Int32Array | Sequence[int]) -> str: ...

    def token_text(self, token: int) -> str:
        """One token as text; half a character is a replacement character."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Int32Array:
        """The whole prompt, ending where the assistant's next turn begins."""
        ...

    def bridge(
        self,
        prompt_ids: Int32Array,
        response_ids: Int32Array,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        keep_reasoning: bool,
    ) -> Int32Array | None:
        """The tokens that follow `prompt_ids + response_ids` to make the next turn's prompt; None if it must be
        rendered anew.

        `keep_reasoning=False` obeys the model's template where it drops the reasoning of earlier turns.
        """
        ...

    def parse(self, response_ids: Int32Array, prompt_ids: Int32Array, tools: Sequence[Tool] | None) -> Parsed:
        """A response as message parts. Without `tools`, tool-call syntax stays in the content."""
        ...

    def starts_in_reasoning(self, prompt_ids: Int32Array) -> bool: ...

    def forced_call(self, name: str | None) -> Int32Array | None:
        """The beginning of a response that is a call (of `name`); None if this format cannot be forced."""
        ...

    def grammar(self, schema: Mapping[str, Any], prompt_ids: Int32Array, tools: Sequence[Tool] | None) -> str | None:
        """The grammar of a response whose answer follows a JSON schema, after reasoning and in place of tool calls
        if the model chooses so; None if it is not known where in this format an answer begins.
        """
        ...


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
    ) -> None:
        """
        keeping: the same renderer told to keep all reasoning, if the format knows the difference.
        marked: whether single tokens delimit reasoning and tool calls; None if the name says so. Likewise `bare`.
        """
        self.name = name
        self.parses_tools = parses_tools
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._keeping = keeping or renderer
        self._tail = _TAIL if name in _TAIL_ONLY else None
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        self.markers = _markers(tokenizer) if (name in _MARKED if marked is None else marked) else None
        self.bare = name in _BARE if bare is None else bare
        special = {tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
        marked_ids = msgspec.structs.astuple(self.markers) if self.markers else ()
        self.odd_ids = frozenset(special - {*self.stop_token_ids, *marked_ids})
        self._texts: dict[int, str] = {}
        self.longest_token = max(map(len, tokenizer.get_vocab()))

    def encode(self, text: str) -> Int32Array:
        return _array(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Int32Array | Sequence[int]) -> str:
        return self._tokenizer.decode(_ints(ids), skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Int32Array:
        from jinja2 import TemplateError

        try:
            return _array(self._renderer.render_ids(list(messages), tools=_tools(tools), add_generation_prompt=True))
        except (TemplateError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"The chat format '{self.name}' cannot express these messages: {error}") from error

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
        bridged = renderer.bridge_to_next_turn(prompt, response, list(new_messages), tools=_tools(tools))
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
        calls = tuple(ParsedCall(c.name, _json_text(c.arguments)) for c in parsed.tool_calls if c.status == "ok")
        # What the model got wrong stays visible to the agent (and to whoever reads the run).
        broken = [self.decode(response_ids[slice(*c.token_span)]) for c in parsed.tool_calls if _shown(c)]
        return Parsed("\n".join([content, *broken]).strip(), reasoning, calls)

    def starts_in_reasoning(self, prompt_ids: Int32Array) -> bool:
        from renderers.reasoning import prompt_ends_in_reasoning

        return prompt_ends_in_reasoning(
            self._tokenizer, self._prompt_tail(prompt_ids), stop_ids=set(self.stop_token_ids)
        )

    def forced_call(self, name: str | None) -> Int32Array | None:
        opening = _FORCED.get(self.name)
        if opening is None:
            return None
        return self.encode(opening.any if name is None else opening.named.replace("NAME", json.dumps(name)[1:-1]))

    def grammar(self, schema: Mapping[str, Any], prompt_ids: Int32Array, tools: Sequence[Tool] | None) -> str | None:
        if self.markers is not None:
            in_reasoning, in_json = self.starts_in_reasoning(prompt_ids), self.name in _FORCED
            return answer_grammar(schema, self.markers, in_reasoning=in_reasoning, tools=tools, calls_in_json=in_json)
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


class _Opening(msgspec.Struct, frozen=True):
    any: str
    named: str


_HERMES = _Opening('<tool_call>\n{"name": "', '<tool_call>\n{"name": "NAME", "arguments":')
_FORCED = {"qwen3": _HERMES}
"""How a response that must be a tool call begins, by renderer."""

_BARE = frozenset({"llama-3"})
"""Renderers without reasoning, whose answers begin where the prompt ends."""
_TOOL_PARSERS = ("qwen3", "qwen3.5", "glm", "deepseek-v3")
"""The library's parsers of tool calls for templates, the common ones first."""
_HARMONY_TOKENS = 200_000
"""Fewer than this, and a vocabulary is not the one of GPT-OSS."""

_MARKED = frozenset({"qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "glm-4.5", "glm-5", "glm-5.1"})
"""Renderers whose reasoning and tool calls are delimited by the tokens below."""


def load_rendering(path: str, renderer: str | None = None) -> RenderersRendering:
    """The rendering of a model directory or hub id.

    Which renderer: the one named by `renderer`, else by the model's `agentlightning.json`, else by the library's list
    of hub ids, else the one that agrees with the model's own chat template on probe conversations, else the template
    itself. Raises `ModelError`, with the setting to give, when
    tools would not be understood.
    """
    _require_renderers()
    from renderers.base import MODEL_RENDERER_MAP

    tokenizer = load_tokenizer(path)
    settings = read_json(model_directory(path) / SETTINGS_FILE)
    options = settings.get("renderer_options", {})
    name = renderer or settings.get("renderer") or MODEL_RENDERER_MAP.get(path)
    if name is not None:
        return _named(name, options, tokenizer, path)
    for candidate in _candidates() if tokenizer.chat_template is not None else ():
        if candidate == "gpt-oss" and len(tokenizer.get_vocab()) < _HARMONY_TOKENS:
            continue  # it would fetch its vocabulary from the network only to disagree
        found = _try(candidate, options, tokenizer)
        if found is not None and agrees(found, tokenizer):
            logger.info("%s is rendered by '%s', which agrees with its chat template.", path, candidate)
            return _finished(candidate, options, tokenizer, found, path)
    return _by_template(tokenizer, path, options)


def _named(name: str, options: Mapping[str, Any], tokenizer: Any, path: str) -> RenderersRendering:
    if name == "default":
        return _by_template(tokenizer, path, options, tools_required=False)
    try:
        created = _create(name, options, tokenizer)
    except (AssertionError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelError(
            f"The renderer '{name}' does not fit {path}: {error}. Give another one as `renderer`; known are "
            f"{', '.join(_candidates())}, and 'default' for the model's own chat template."
        ) from error
    return _finished(name, options, tokenizer, created, path)


def _finished(name: str, options: Mapping[str, Any], tokenizer: Any, renderer: Any, path: str) -> RenderersRendering:
    keeping = _try(name, {"thinking_retention": "all", **options}, tokenizer)
    if not tools_survive(renderer):
        raise ModelError(
            f"Tool calls of {path} cannot be read back with the renderer '{name}'. Give the one that fits as "
            "`renderer`, or 'default' if the agents use no tools."
        )
    return RenderersRendering(name, tokenizer, renderer, keeping, parses_tools=True)


def _by_template(
    tokenizer: Any, path: str, options: Mapping[str, Any], *, tools_required: bool = True
) -> RenderersRendering:
    """The model's own chat template, with the parser that reads back the tool calls which the template writes."""
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{path} has no chat template. Add a chat_template.jinja to the model directory, or name the renderer that "
            f"fits it as `renderer`: {', '.join(_candidates())}."
        )
    thinking = {"reasoning_parser": "think"} if "<think>" in tokenizer.chat_template else {}
    vocabulary = tokenizer.get_vocab()
    ways: list[tuple[str, Mapping[str, Any], Format | None]] = [
        *((parser, {"tool_parser": parser, **thinking}, None) for parser in _TOOL_PARSERS),
        *((f.name, {}, f) for f in FORMATS if all(token in vocabulary for token in f.needs)),
    ]
    for name, parsers, format in ways:
        made = _template_renderers(tokenizer, path, {**parsers, **options}, format)
        if tools_survive(made[0]):
            logger.info("%s is rendered by its chat template; tool calls are read as '%s' writes them.", path, name)
            return RenderersRendering(
                "default", tokenizer, *made, parses_tools=True, marked=name in _MARKED, bare=name in _BARE
            )
    if tools_required:
        raise ModelError(
            f"It is not known how {path} writes tool calls, so an agent's tools would silently not work. Give as "
            f"`renderer` the one that fits ({', '.join(_candidates())}), or 'default' if the agents use no tools."
        )
    made = _template_renderers(tokenizer, path, {**thinking, **options}, None)
    return RenderersRendering("default", tokenizer, *made, parses_tools=False)


def _template_renderers(
    tokenizer: Any, path: str, options: Mapping[str, Any], format: Format | None
) -> tuple[TemplateRenderer, TemplateRenderer]:
    """One that obeys the template about reasoning, one that keeps it."""
    named = [tokenizer.convert_tokens_to_ids(text) for text in (format.stops if format else ())]
    stops = dict.fromkeys([tokenizer.eos_token_id, *stop_tokens(path), *named])
    known = [token for token in stops if token is not None]
    obeying, keeping = (
        TemplateRenderer(tokenizer, options=options, format=format, stops=known, keeps_reasoning=keeps)
        for keeps in (False, True)
    )
    return obeying, keeping


def _require_renderers() -> None:
    try:
        import renderers  # noqa: F401
    except ImportError as error:
        from agentlightning.errors import missing_extra

        raise missing_extra("torch", error.name or "renderers") from error


def _candidates() -> list[str]:
    """Renderers of text models, the common ones first."""
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    first = ["qwen3", "llama-3", "qwen3.5", "gpt-oss"]
    return first + sorted(set(RENDERER_REGISTRY) - {"default", *first})


def _create(name: str, options: Mapping[str, Any], tokenizer: Any) -> Any:
    from openai_harmony import HarmonyError
    from renderers import CustomRendererConfig, config_from_name, create_renderer

    if ":" in name:
        return create_renderer(tokenizer, CustomRendererConfig.model_validate({"import_path": name, **options}))
    config = config_from_name(name)
    if config is None:
        raise ValueError("'auto' is what happens when no renderer is named")
    try:
        checked: Any = type(config).model_validate(dict(options))
        return create_renderer(tokenizer, checked)
    except HarmonyError as error:
        raise ValueError(f"its vocabulary cannot be loaded: {error}") from error


def _try(name: str, options: Mapping[str, Any], tokenizer: Any) -> Any | None:
    """A renderer, or None where the vocabulary or the options do not fit it (constructors say so in many ways)."""
    try:
        return _create(name, options, tokenizer)
    except (AssertionError, ValueError, KeyError, TypeError, AttributeError, ImportError, OSError, ModelError):
        return None


# ---- small conversions ---------------------------------------------------------------------------------------------


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


def _shown(call: Any) -> bool:
    return call.status != "ok" and call.token_span is not None
