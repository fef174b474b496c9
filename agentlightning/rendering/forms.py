"""How each chat format writes tool calls, in the terms of a grammar. Data; `grammar.py` makes the grammars."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

TokenOf = Callable[[str], int]
"""The id of a single token, by its text."""


class Markers(msgspec.Struct, frozen=True):
    """Single tokens that open and close reasoning and tool calls, as far as the vocabulary has them."""

    think_open: int | None
    think_close: int | None
    tool_open: int | None
    tool_close: int | None


NO_MARKERS = Markers(None, None, None, None)


class Tags(msgspec.Struct, frozen=True):
    """Arguments that are written one by one: a text as it is, anything else as JSON."""

    opening: str
    """Before a value; KEY is the argument's name, STRING is "true" for a text and "false" for JSON."""
    closing: str
    never: tuple[str, ...]
    """What no text may contain, because the call would be read otherwise."""


class CallForm(msgspec.Struct, frozen=True):
    """How a format writes tool calls."""

    call: str
    """The rule of one call; `inside` is its tool's name and arguments."""
    opening: str
    """What of `inside` comes before the arguments; NAME is the tool's name."""
    closing: str
    """What comes after them."""
    tags: Tags | None = None
    """How arguments are written one by one; None where they are one JSON object."""
    around: tuple[str, str] = ("", "")
    """What opens and closes all calls together."""
    thought: str | None = None
    """The rule of reasoning before a call, where the markers do not say it."""
    thought_end: str | None = None
    """What ends reasoning that the prompt began, where no single token does."""
    prose: str | None = None
    """The regular expression of a text that is no call; None if it is not known."""
    several: bool = True
    """Whether a response may hold more than one call."""


BARE_FORM = CallForm(
    call="inside",
    opening=json.dumps('{"name": NAME, "parameters":') + " SPACE",
    closing='SPACE "}"',
    prose=r"/([ \n]*[^{ \n](.|\n)*)?/",
    several=False,
)
"""The whole response is `{"name": …, "parameters": …}`, as Llama 3 writes."""

_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_NO_CALL = r"/(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/"


def hermes_form(markers: Markers) -> CallForm:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Qwen 2.5 and Qwen 3 write."""
    return CallForm(
        call=_marked(markers),
        opening=json.dumps('{"name": NAME, "arguments":') + " SPACE",
        closing='SPACE "}"',
        prose=_NO_CALL,
    )


def parameter_form(markers: Markers) -> CallForm:
    """`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`, as Qwen 3.5 writes."""
    return CallForm(
        call=_marked(markers),
        opening=r'"<function=" NAME ">\n"',
        closing=r'"</function>"',
        tags=Tags(r'"<parameter=" KEY ">\n"', r'"\n</parameter>\n"', ("<parameter=", "</parameter>", *_MARKS)),
        prose=_NO_CALL,
    )


def argument_form(markers: Markers, token: TokenOf) -> CallForm:
    """`<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`, as GLM writes."""
    texts = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key, key_end, value, value_end = (f"<[{token(text)}]>" for text in texts)
    return CallForm(
        call=f"SPACE <[{markers.tool_open}]> inside <[{markers.tool_close}]>",
        opening="NAME SPACE",
        closing="",
        tags=Tags(f"{key} KEY {key_end} SPACE {value}", f"{value_end} SPACE", (*texts, *_MARKS)),
        prose=_NO_CALL,
    )


def section_form(token: TokenOf) -> CallForm:
    """A section of calls, each a name and JSON in a fence, as DeepSeek V3 and R1 write."""
    begin, end, one, one_end, separator = (
        f"<[{token(f'<｜tool▁{name}｜>')}]>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    )
    return CallForm(
        call=f'{one} "function" {separator} inside {one_end}',
        opening=r'NAME "\n```json\n"',
        closing=r'"\n```"',
        around=(begin, end),
        thought_end='TEXT "</think>" SPACE',
    )


def invoke_form(token: TokenOf) -> CallForm:
    """`<｜DSML｜tool_calls><｜DSML｜invoke name="…"><｜DSML｜parameter …>`, as DeepSeek V4 writes."""
    mark = f"<[{token('｜DSML｜')}]>"
    return CallForm(
        call=rf'"<" {mark} "invoke name=\"" inside "\n</" {mark} "invoke>"',
        opening=r'NAME "\">\n"',
        closing="",
        tags=Tags(
            rf'"<" {mark} "parameter name=\"" KEY "\" string=\"STRING\">"',
            rf'"</" {mark} "parameter>"',
            ("｜DSML｜", "<think>", "</think>"),
        ),
        around=(rf'SPACE "<" {mark} "tool_calls>" SPACE', rf'SPACE "</" {mark} "tool_calls>"'),
    )


def harmony_form(token: TokenOf) -> CallForm:
    """A message on the commentary channel to the function, perhaps after one on the analysis channel (GPT-OSS)."""
    start, end, channel, message, constrain, call = (
        f"<[{token(f'<|{name}|>')}]>" for name in ("start", "end", "channel", "message", "constrain", "call")
    )
    return CallForm(
        call=f"{channel} inside",
        opening=f'"commentary to=functions." NAME " " {constrain} "json" {message}',
        closing=call,
        thought=f'{channel} "analysis" {message} TEXT {end} {start} "assistant"',
        several=False,
    )


def _marked(markers: Markers) -> str:
    return f"SPACE <[{markers.tool_open}]> SPACE inside SPACE <[{markers.tool_close}]>"
