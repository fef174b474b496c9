"""What a line of an agent's probably meant, by Python's words for what went wrong in it and by the line itself: how the
answers of model clients are read, and the fields of a task."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from subprocess import CalledProcessError

from agentlightning.errors import message_of
from agentlightning.runner.frameworks import CLIENT

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
OTHER_PROVIDER = (
    "A provider's model had answered already, and at this address nothing does: look at it, if it is a tool's or a "
    "judge's. The model's own is base_url=llm.endpoint."
)
_NO_MATCH = (
    "re.search and its like give None where the text has no match: if match is None, return a low reward, such as 0.0, "
    "so that the model learns from it."
)
_AN_ERROR = "An answer without choices is an error. To see it: response.raise_for_status(), or print(response.text)."
_HIDDEN = (
    "The agent's parameters are filled by their names, which this wrapper hides: write @functools.wraps(function) "
    "above the function that takes *args."
)
_NO_KEY = (
    "A dict is no key. Of a task take a field, such as task['question'], or json.dumps(task); and put no "
    "functools.cache on the agent itself, whose rollouts should differ."
)
_NO_VARIABLE = (
    "The environment has no such variable: set it before you start. If it is a model's key: the model in "
    f"training needs none of yours, {CLIENT}."
)
_NO_VARIABLES = (
    "The command finds no model: give it the rollout's, subprocess.run(…, env={**os.environ, 'OPENAI_BASE_URL': "
    "llm.endpoint, 'OPENAI_API_KEY': llm.api_key, 'OPENAI_MODEL': llm.model})."
)
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
    (r"'NoneType' object has no attribute 'group(s|dict)?'", "", _NO_MATCH),
    (r"'NoneType' object is not subscriptable", r"\bre\.\w+\(|\bmatch\b", _NO_MATCH),
    (r"^'?choices'?$", r"json", _AN_ERROR),
    (r"missing \d+ required positional argument.*'(llm|prompt_template|rollout|resources)'", r"\*\w+", _HIDDEN),
    (r"^'(?!OPENAI|ANTHROPIC|GEMINI|GOOGLE|AZURE)\w+'$", r"\benviron\[", _NO_VARIABLE),
    (r"'GivenResources' object has no attribute", "", "Resources are asked for by name: resources['llm']."),
    (
        r"'(Attempted)?Rollout' object has no attribute '(task|data|sample|example)'",
        "",
        "The task is rollout.input; it is the agent's first argument, too.",
    ),
    (
        r"^cannot access local variable",
        "",
        "A name that a function sets is its own: set it on every way through, or write `global NAME` first.",
    ),
    (
        r"between instances of '(str' and '(int|float)|(int|float)' and 'str)'|"
        r"operand type\(s\) for [^:]+: '(str' and '(int|float)|(int|float)' and 'str)'",
        "",
        "One of the two is a text: float(…) of it is a number. Where the model wrote none, return a low reward.",
    ),
    (
        r"'dict' object has no attribute",
        "",
        'A dict\'s fields stand in brackets: task["question"]. Tasks are what the data set says, as JSON.',
    ),
    (
        r"^maximum recursion depth exceeded",
        "",
        "A function calls itself without an end. Inside the agent its name is the agent: look for a call of it.",
    ),
    (r"^unhashable type: 'dict'", "", _NO_KEY),
    (r"^POST data should be bytes", "", "urllib sends bytes: data=json.dumps(…).encode()."),
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


def hint_of_task(error: BaseException, task: object) -> str | None:
    """The fields that a task has, where the agent looked for another one."""
    if isinstance(error, AttributeError | TypeError) and not isinstance(task, Mapping):
        kind, phrase = type(task).__name__, message_of(error)
        about = re.search(
            rf"'{kind}' object (has no attribute|is not subscriptable)|^{kind}\w* ind(ex|ic)\w* must be", phrase
        )
        return f"The task is of the kind {kind}, here {task!r:.60}, and has no fields." if about else None
    if isinstance(error, FileNotFoundError) and _is_relative(error.filename):
        return f"A relative path starts at {os.getcwd()}. Give an absolute one: Path(__file__).parent / 'file'."
    if type(error) is not KeyError or not isinstance(task, Mapping) or error.args[0] in task:
        return None
    if _is_of_another(error, task):
        return None
    values = any(not re.fullmatch(r"[^\W\d][\w.-]*", str(name)) for name in task)  # no names of fields
    heading = " If these are values, its CSV lacks a first line with the names." if values else ""
    return f"The task has no such field; it has {', '.join(map(str, list(task)[:20])) or 'none'}.{heading}"


def _is_of_another(error: KeyError, task: object) -> bool:
    """Whether the field was looked for in something else than the task, such as what the model wrote."""
    frame, number = list(traceback.walk_tb(error.__traceback__))[-1:][0] if error.__traceback__ else (None, 0)
    line = traceback.FrameSummary(frame.f_code.co_filename, number, "").line or "" if frame else ""
    found = re.search(rf"([\w.]+|[)\]])\[['\"]{re.escape(str(error.args[0]))}['\"]\]", line)
    if frame is None or found is None:
        return False
    known = {**frame.f_globals, **frame.f_locals}
    return found[1] in ")]" or (found[1] in known and known[found[1]] != task)


def output_of_command(error: BaseException) -> str | None:
    """The last line of what a command that failed wrote to its captured stderr, and what it lacked."""
    stderr = error.stderr if isinstance(error, CalledProcessError) else None
    text = (stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr or "").strip()
    if not text:
        return None
    lacks = re.search(r"api_key|OPENAI_|ANTHROPIC_|AuthenticationError|APIConnectionError|Connection refused", text)
    return "\n".join(filter(None, (f"It said: {text.splitlines()[-1][:300]}", lacks and _NO_VARIABLES)))


def _is_relative(name: object) -> bool:
    """Whether a file was looked for by a relative path; a bare word may be a command."""
    return isinstance(name, str) and not os.path.isabs(name) and ("." in name or os.sep in name)
