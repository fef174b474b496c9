"""Loading the rendering of a model: which renderer fits it, tried on probe conversations before it is trusted."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from agentlightning.errors import ModelError
from agentlightning.rendering.base import RenderingSource
from agentlightning.rendering.library import BARE, MARKED, RenderersRendering
from agentlightning.rendering.messages import Message, Tool
from agentlightning.rendering.template import FORMATS, Format, TemplateRenderer, check_template, trouble_with_tools
from agentlightning.rendering.tokenizer import load_tokenizer, model_directory, read_json, stop_tokens

logger = logging.getLogger(__name__)

SETTINGS_FILE = "agentlightning.json"
"""The file in a model directory with {"renderer": name, "renderer_options": {…}}, written with every checkpoint."""

_TOOL_PARSERS = ("qwen3", "qwen3.5", "glm", "deepseek-v3")
"""The library's parsers of tool calls for templates, the common ones first."""
_HARMONY_TOKENS = 200_000
"""A smaller vocabulary is not that of GPT-OSS."""


def load_rendering(path: str, renderer: str | None = None) -> RenderersRendering:
    """The rendering of a model directory or hub id.

    Which renderer: the one named by `renderer`, else by the model's `agentlightning.json`, else by the library's list
    of hub ids, else the one that agrees with the model's own chat template on probe conversations, else the template
    itself. Raises `ModelError`, with the setting to give, when tools would not be understood.
    """
    found = _load(path, renderer)
    found.source = RenderingSource(path, renderer)
    return found


def _load(path: str, renderer: str | None) -> RenderersRendering:
    _require_renderers()
    from renderers.base import MODEL_RENDERER_MAP

    tokenizer = load_tokenizer(path)
    settings = read_json(model_directory(path) / SETTINGS_FILE)
    options = settings.get("renderer_options", {})
    name = renderer or _without_code(settings.get("renderer"), path) or MODEL_RENDERER_MAP.get(path)
    if name is not None:
        return _named(name, options, tokenizer, path)
    if tokenizer.chat_template is not None:
        check_template(tokenizer, path)
    for candidate in _candidates() if tokenizer.chat_template is not None else ():
        if candidate == "gpt-oss" and len(tokenizer.get_vocab()) < _HARMONY_TOKENS:
            continue  # it would fetch its vocabulary from the network only to disagree
        found = _try(candidate, options, tokenizer)
        if found is not None and _agrees(found, tokenizer):
            logger.info("%s is rendered by '%s', which agrees with its chat template.", path, candidate)
            return _finished(candidate, options, tokenizer, found, path)
    return _by_template(tokenizer, path, options)


def _without_code(name: Any, path: str) -> str | None:
    """The renderer that a model's own file names. Raises ModelError where the name is not one of the library's: it
    would be imported, and a model is data."""
    if name is None or name in ("default", *_candidates()):
        return name
    raise ModelError(
        f"{Path(path) / SETTINGS_FILE} names the renderer {name!r}, which is code. Nothing that a model's folder names "
        f"is imported: look at that code, and name it yourself (renderer={name!r}), or take the line out."
    )


def doubt_about(path: str, renderer: str) -> str | None:
    """What speaks against a renderer that was named: it was taken without asking the model's own chat template. None:
    the two agree, or there is no template to compare with.
    """
    tokenizer = load_tokenizer(path)
    if renderer == "default" or tokenizer.chat_template is None:
        return None
    unchecked = f"renderer='{renderer}' is taken as it was named"
    try:
        check_template(tokenizer, path)
    except ModelError as error:
        return f"{unchecked}, without a check: {error} Where the model is served by its template, it will fail."
    created = _try(renderer, read_json(model_directory(path) / SETTINGS_FILE).get("renderer_options", {}), tokenizer)
    if created is None or _agrees(created, tokenizer):
        return None
    return (
        f"{unchecked}, but writes other prompts than the chat template of {path}, which says how the model was taught. "
        "Leave renderer out to have the one that agrees found, or the template itself taken."
    )


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
    if not _tools_survive(renderer):
        raise ModelError(
            f"Tool calls of {path} cannot be read back with the renderer '{name}'. Give the one that fits as "
            "`renderer`, or 'default' if the agents use no tools."
        )

    def vary(given: Mapping[str, Any]) -> tuple[Any, Any | None]:
        applied = {**options, **given}
        return _create(name, applied, tokenizer), _try(name, {"thinking_retention": "all", **applied}, tokenizer)

    arguments = frozenset() if ":" in name else renderer.config.template_field_names()
    return RenderersRendering(name, tokenizer, renderer, keeping, parses_tools=True, arguments=arguments, vary=vary)


def _by_template(
    tokenizer: Any, path: str, options: Mapping[str, Any], *, tools_required: bool = True
) -> RenderersRendering:
    """The model's own chat template, with the parser that reads back the tool calls which the template writes."""
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{path} has no chat template. Add a chat_template.jinja to the model directory, or name the renderer that "
            f"fits it as `renderer`: {', '.join(_candidates())}."
        )
    check_template(tokenizer, path)
    thinking = {"reasoning_parser": "think"} if "<think>" in tokenizer.chat_template else {}
    vocabulary = tokenizer.get_vocab()
    ways: list[tuple[str, Mapping[str, Any], Format | None]] = [
        *((parser, {"tool_parser": parser, **thinking}, None) for parser in _TOOL_PARSERS),
        *((f.name, {}, f) for f in FORMATS if all(token in vocabulary for token in f.needs)),
    ]
    for name, parsers, format in ways:
        vary = partial(_template_renderers, tokenizer, path, {**parsers, **options}, format)
        made = vary({})
        if _tools_survive(made[0]):
            logger.info("%s is rendered by its chat template; tool calls are read as '%s' writes them.", path, name)
            return RenderersRendering(
                "default",
                tokenizer,
                *made,
                parses_tools=True,
                marked=name in MARKED,
                bare=name in BARE,
                calls=name,
                arguments=_arguments_of(tokenizer),
                vary=vary,
            )
    if tools_required:
        broken = trouble_with_tools(tokenizer, path, _PROBE_TOOLS)
        raise ModelError(
            f"{broken + ' ' if broken else ''}It is not known how {path} writes tool calls, so an agent's tools would "
            f"silently not work. Give as `renderer` the one that fits ({', '.join(_candidates())}), or 'default' if "
            "the agents use no tools."
        )
    vary = partial(_template_renderers, tokenizer, path, {**thinking, **options}, None)
    arguments = _arguments_of(tokenizer)
    return RenderersRendering("default", tokenizer, *vary({}), parses_tools=False, arguments=arguments, vary=vary)


def _template_renderers(
    tokenizer: Any, path: str, options: Mapping[str, Any], format: Format | None, given: Mapping[str, Any]
) -> tuple[TemplateRenderer, TemplateRenderer]:
    """A renderer that obeys the template about reasoning, and one that keeps it. `given`: arguments of a request."""
    named = [tokenizer.convert_tokens_to_ids(text) for text in (format.stops if format else ())]
    stops = dict.fromkeys([tokenizer.eos_token_id, *stop_tokens(path), *named])
    known = [token for token in stops if token is not None]
    obeying, keeping = (
        TemplateRenderer(tokenizer, options={**options, **given}, format=format, stops=known, keeps_reasoning=keeps)
        for keeps in (False, True)
    )
    return obeying, keeping


def _arguments_of(tokenizer: Any) -> frozenset[str]:
    """The arguments of a tokenizer's own chat template."""
    from agentlightning.rendering.sandbox import arguments_of  # which needs jinja2 and transformers

    return arguments_of(tokenizer.chat_template) if isinstance(tokenizer.chat_template, str) else frozenset()


def _require_renderers() -> None:
    try:
        _import_renderers()
    except ImportError as error:
        from agentlightning.errors import missing_extra

        raise missing_extra("torch", error.name or "renderers") from error


def _import_renderers() -> None:
    """Without the client of OpenAI's, which `renderers` names in an annotation: to import it takes four times as long
    as all else that is needed here."""
    alone = threading.active_count() == 1  # another thread might import the client in the meantime
    if not alone or "renderers" in sys.modules or "openai" in sys.modules:
        import renderers

        return
    instead: Any = ModuleType("openai")
    instead.AsyncOpenAI = object
    sys.modules["openai"] = instead
    try:
        import renderers  # noqa: F401
    finally:
        del sys.modules["openai"]


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


_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_PROBE_TOOLS: tuple[Tool, ...] = (_TOOL,)
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_USER: Message = {"role": "user", "content": "Add one to 2."}
_ASKS: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
_RESULT: Message = {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "add"}
_ANSWER: Message = {"role": "assistant", "content": "It is 3."}

_PROBES: tuple[tuple[list[Message], list[Tool] | None], ...] = (
    ([_USER], None),
    ([_SYSTEM, _USER], None),
    ([_SYSTEM, _USER, _ANSWER, _USER], None),
    ([_USER], [_TOOL]),
    ([_SYSTEM, _USER], [_TOOL]),
    ([_SYSTEM, _USER, _ASKS, _RESULT], [_TOOL]),
)


def _agrees(renderer: Any, tokenizer: Any) -> bool:
    """Whether the chat template accepts most probes, and the renderer gives its tokens on each of those."""
    from jinja2 import TemplateError

    agreed = 0
    for messages, tools in _PROBES:
        try:
            wanted = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        except (TemplateError, TypeError, ValueError):
            continue
        try:
            got = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        except (AssertionError, TemplateError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if list(got) != list(wanted):
            return False
        agreed += 1
    return agreed > len(_PROBES) // 2


def _tools_survive(renderer: Any) -> bool:
    """Whether a tool call that was rendered is read back as the same call."""
    from jinja2 import TemplateError

    wanted = [("add", {"a": 2}, "ok")]
    try:
        history = list(renderer.render_ids([_USER], tools=[_TOOL], add_generation_prompt=False))
        prompt = list(renderer.render_ids([_USER], tools=[_TOOL], add_generation_prompt=True))
        whole = list(renderer.render_ids([_USER, _ASKS], tools=[_TOOL], add_generation_prompt=False))
        # A response begins where the prompt ends; where the prompt begins it otherwise (GPT-OSS: with a thought), the
        # whole turn is read.
        for start in (_common(prompt, whole), _common(history, whole)):
            parsed = renderer.parse_response(whole[start:], tools=[_TOOL], prompt_ids=whole[:start])
            if [(c.name, c.arguments, c.status) for c in parsed.tool_calls] == wanted:
                return True
    except (AssertionError, TemplateError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return False


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
