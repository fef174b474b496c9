"""What a line of an agent's probably meant, by Python's words for what went wrong in it and by the line itself: how the
answers of model clients are read."""

from __future__ import annotations

import re

_NONE = r"\bNoneType\b"
_OF_AN_ANSWER = "In an answer of Chat Completions the text is answer.choices[0].message.content."
_OF_BLOCKS = "An answer of Anthropic's Messages is a list of blocks: answer.content[0].text."
_OF_EVENTS = (
    "client.chat.completions.stream gives events: if event.type == 'content.delta', its text is event.delta. "
    "create(…, stream=True) gives chunks."
)
_A_STREAM = "With stream=True the answer comes in parts:  for chunk in answer: …  Leave stream out to get it whole."
_A_CHUNK = "With stream=True each part has delta in place of message:  chunk.choices[0].delta.content or ''"
_ASYNC_FOR = "An async client's stream is read with  async for chunk in stream: …  in place of a plain for."
_PLAIN_FOR = "What is there is not asynchronous: read it with a plain  for chunk in stream: …"
_IS_WHOLE = "Without stream=True the answer is whole: answer.choices[0].message.content. With it, it comes in chunks."
_OF_TOOLS = "message.tool_calls is None where the model called no tool: for call in message.tool_calls or []: …"
_MEANT: tuple[tuple[str, str, str], ...] = (
    (r"'(Async)?Stream' object (has no attribute|is not subscriptable)", "", _A_STREAM),
    (r"'Choice' object has no attribute 'message'", "", _A_CHUNK),
    (r"'(Async\w*Stream\w*|async_generator)' object is not (iterable|an iterator)", "", _ASYNC_FOR),
    (r"requires an object with __aiter__ method, got (\w*Stream\w*|generator|list)", "", _PLAIN_FOR),
    (
        _NONE,
        r"delta\.content",
        "delta.content is None in parts of a stream without text: chunk.choices[0].delta.content or ''.",
    ),
    (
        _NONE,
        r"logprobs",
        "The log-probs of an answer are None unless its request asks for them: create(…, logprobs=True).",
    ),
    (_NONE, r"tool_calls", _OF_TOOLS),
    (
        _NONE,
        r"\.parsed\b",
        "message.parsed is None where the model refused or called a tool: return a low reward then.",
    ),
    (
        r"^string indices|'str' object has no attribute",
        r"\.arguments\b",
        "The arguments of a call are a text: json.loads(call.function.arguments).",
    ),
    (r"'list' object has no attribute '(text|strip|lower|split)'", r"\.content\.", _OF_BLOCKS),
    (r"'list' object has no attribute", r"\.choices\.", _OF_AN_ANSWER),
    (r"'Message' object has no attribute '(choices|text)'|'TextBlock' object is not subscriptable", "", _OF_BLOCKS),
    (
        r"'Response(OutputMessage)?' object has no attribute '(choices|text|content|message)'",
        "",
        "The text of an answer of the Responses API is answer.output_text.",
    ),
    (r"'\w+Event' object has no attribute '(choices|delta|content)'", "", _OF_EVENTS),
    (
        r"'(ChatCompletion|Choice)' object has no attribute '(content|text|message|output_text|role)'",
        r"^(?!.*\.message\b)",
        _OF_AN_ANSWER,
    ),
    (
        r"'tuple' object has no attribute '(choices|delta)'|__aiter__ method, got (ChatCompletion|Message)\b",
        "",
        _IS_WHOLE,
    ),
    (
        r"^list index out of range",
        r"\bchunk|\.delta\b",
        "The last chunk of a stream may have no choices: if chunk.choices: …",
    ),
    (
        r"'(AttemptedRollout|Rollout|Attempt|Span)' object has no attribute '(final_)?rewards?'",
        "",
        "The reward is in the spans of the rollout: agl.find_final_reward(spans).",
    ),
    (
        r"__aiter__ method, got coroutine",
        "",
        "`await` is missing: async for chunk in await client.chat.completions.create(…, stream=True).",
    ),
    (
        r"'\w+ToolCall' object has no attribute '(name|arguments)'",
        "",
        "They are a part of the call: call.function.name, call.function.arguments.",
    ),
    (
        r"EOF while parsing|^Unterminated string",
        "",
        "The text ends too early. If max_tokens cut the answer off, raise it; else return a low reward, such as 0.0.",
    ),
    (r"length limit was reached", "", "max_tokens of the request cut the answer off: raise it."),
    (
        r"^Missing required arg.*'max_tokens'",
        "",
        "Anthropic's Messages need max_tokens: messages.create(…, max_tokens=256).",
    ),
)
"""Python's words, what the line has, and the hint."""


def hint_of_line(words: str, line: str) -> str | None:
    """What mends a line that failed with these words; None where that is not known."""
    return next((hint for phrase, has, hint in _MEANT if re.search(phrase, words) and re.search(has, line)), None)
