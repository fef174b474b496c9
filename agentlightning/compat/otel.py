"""Helpers for attributes, links and tags of spans."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from opentelemetry import trace as otel_trace

from agentlightning.compat.semconv import LightningSpanAttributes, LinkPydanticModel
from agentlightning.keys import redacted
from agentlightning.types import Attributes, Span

LINK = LightningSpanAttributes.LINK.value
TAG = LightningSpanAttributes.TAG.value
_PLAIN = (str, bool, int, float)


def full_qualified_name(obj: type) -> str:
    """`module.Class`; the class alone for builtins."""
    return obj.__qualname__ if obj.__module__ == "builtins" else f"{obj.__module__}.{obj.__qualname__}"


def get_tracer_provider(inspect: bool = True) -> Any:
    """The global provider of OpenTelemetry's SDK. Raises RuntimeError where none is set up."""
    from opentelemetry.sdk.trace import TracerProvider

    provider = otel_trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        raise RuntimeError("There is no tracer provider yet: call OtelTracer().init() first.")
    return provider


def get_tracer(use_active_span_processor: bool = True) -> otel_trace.Tracer:
    """A tracer of the global provider, whose spans go to the current attempt."""
    return get_tracer_provider().get_tracer("agentlightning")


def make_tag_attributes(tags: Sequence[str]) -> dict[str, str]:
    """Tags as attributes of a span."""
    return {f"{TAG}.{index}": tag for index, tag in enumerate(tags)}


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """The tags among the attributes of a span."""
    return [str(value) for _, value in _numbered(attributes, TAG)]


def make_link_attributes(links: Mapping[str, str]) -> dict[str, str]:
    """Links as attributes of a span: to all spans whose attribute has this value (trace_id and span_id included)."""
    found: dict[str, str] = {}
    for index, (key, value) in enumerate(links.items()):
        if not isinstance(value, str):
            raise ValueError(f"The link's value for '{key}' must be text, not {type(value).__name__}.")
        found |= {f"{LINK}.{index}.key_match": key, f"{LINK}.{index}.value_match": value}
    return found


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    """The links among the attributes of a span."""
    links: list[LinkPydanticModel] = []
    for index in count():
        key, value = (attributes.get(f"{LINK}.{index}.{part}") for part in ("key_match", "value_match"))
        if key is None or value is None:
            return links
        links.append(LinkPydanticModel(key_match=key, value_match=value))
    raise AssertionError("count() has no end")


def query_linked_spans(spans: Sequence[Span], links: Sequence[LinkPydanticModel]) -> list[Span]:
    """The spans that all links match."""
    return [span for span in spans if all(_value(span, link.key_match) == link.value_match for link in links)]


def _value(span: Span, key: str) -> Any:
    return getattr(span, key) if key in ("trace_id", "span_id") else span.attributes.get(key)


def filter_attributes(attributes: Mapping[str, Any], prefix: str) -> Attributes:
    """The attributes at or below a prefix."""
    return {k: v for k, v in attributes.items() if k == prefix or k.startswith(f"{prefix}.")}


def filter_and_unflatten_attributes(attributes: Mapping[str, Any], prefix: str) -> Any:
    """The attributes below a prefix, without it, as nested values."""
    return unflatten_attributes({k[len(prefix) + 1 :]: v for k, v in attributes.items() if k.startswith(f"{prefix}.")})


def flatten_attributes(nested: Any, expand_leaf_lists: bool = False) -> Attributes:
    """Nested dictionaries and lists under dotted keys; lists of plain values stay unless told otherwise."""
    flat: Attributes = {}

    def put(key: str, value: Any) -> None:
        leaf = isinstance(value, list | tuple) and all(isinstance(v, _PLAIN) for v in value)
        if isinstance(value, Mapping):
            for inner, v in value.items():
                put(f"{key}.{inner}" if key else str(inner), v)
        elif isinstance(value, list | tuple) and (expand_leaf_lists or not leaf):
            for index, v in enumerate(value):
                put(f"{key}.{index}" if key else str(index), v)
        else:
            flat[key] = value

    put("", nested)
    return flat


def unflatten_attributes(flat: Mapping[str, Any]) -> Any:
    """Dotted keys as nested dictionaries; a dictionary whose keys are 0, 1, … is a list."""
    root: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, last = key.split(".")
        at = root
        for part in outer:
            inner = at.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = at[part] = {"": inner}
            at = inner
        at[last] = value
    return _lists(root)


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(v) for key, v in value.items()}
    if inner and set(inner) == {str(n) for n in range(len(inner))}:
        return [inner[str(n)] for n in range(len(inner))]
    return inner


def sanitize_attribute_value(value: Any, force: bool = True) -> Any:
    """The value as OpenTelemetry takes it: plain, a list of plain values of one type, else JSON text."""
    if isinstance(value, _PLAIN):
        return value
    of_one_type = isinstance(value, list | tuple) and len({type(v) for v in value}) <= 1
    if of_one_type and all(isinstance(v, _PLAIN) for v in value):
        return list(value)
    if not force:
        raise ValueError(f"An attribute cannot be a {type(value).__name__}.")
    return json.dumps(value, default=str)


def sanitize_attributes(attributes: Mapping[str, Any], force: bool = True) -> Attributes:
    """All of them."""
    return {key: sanitize_attribute_value(value, force) for key, value in attributes.items()}


sanitize_attribute_values = sanitize_attributes


def sanitize_list_attribute_sanity(values: Sequence[Any]) -> list[Any]:
    """A list of values of one plain type. Raises ValueError for others."""
    return sanitize_attribute_value(list(values), force=False)


def check_attributes_sanity(attributes: Mapping[str, Any]) -> None:
    """Raises ValueError for keys that are no text, or where one key is another's prefix."""
    for key in attributes:
        if not isinstance(key, str):
            raise ValueError(f"Attribute keys are text, not {type(key).__name__}: {key!r}.")
        if any(other.startswith(f"{key}.") for other in attributes if isinstance(other, str)):
            raise ValueError(f"The attribute '{key}' has a value and others below it.")


def format_exception_attributes(exception: BaseException) -> Attributes:
    """An exception as OpenTelemetry's attributes."""
    return {
        "exception.type": full_qualified_name(type(exception)),
        "exception.message": redacted(str(exception)),
        "exception.stacktrace": redacted("".join(traceback.format_exception(exception))),
        "exception.escaped": True,
    }


def _numbered(attributes: Mapping[str, Any], prefix: str) -> list[tuple[int, Any]]:
    found = [(key[len(prefix) + 1 :], value) for key, value in attributes.items() if key.startswith(f"{prefix}.")]
    return sorted((int(number), value) for number, value in found if number.isdecimal())
