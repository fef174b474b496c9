"""Training files: lines of JSON, each read when it is wanted and checked for its method.

A line is never read beyond its limit, whatever a file holds. Errors name the line, counted from 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.adapter.scores import COMMENTS, SCORES
from agentlightning.algorithm.sampling.examples import Messages, messages_of, pair_of
from agentlightning.errors import AgentLightningError, ConfigError

MOST_BYTES = 8 << 20
"""Of a line."""
MOST_LINES = 10_000_000
"""Of a file, each with 16 bytes of memory."""
_BOM = b"\xef\xbb\xbf"
_AT_ONCE = 1 << 20
_OF_CHAT = {"messages", "tools", "parallel_tool_calls", "functions"}
_OF_PAIR = {"input", "preferred_output", "non_preferred_output"}


class LineError(AgentLightningError):
    """A line of a training file cannot be used."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"Line {number}: {why}")
        self.number = number


class Lines:
    """The lines of a file as examples of a method: a data set that holds where they begin, and no more."""

    def __init__(self, path: Path, method: str) -> None:
        self._path = path
        self._read = READERS[method]
        self._starts = array("q")
        self._numbers = array("q")
        for number, start, size in _lines_in(path):
            if size > MOST_BYTES:
                raise LineError(number, f"it has more than {MOST_BYTES >> 20} MiB, as many as a line may have.")
            if len(self._starts) == MOST_LINES:
                raise LineError(number, f"the file has more than {MOST_LINES:,} lines.")
            if size:
                self._starts.append(start)
                self._numbers.append(number)
        if not self._starts:
            raise LineError(1, "the file holds no line.")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        """Raises LineError."""
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            return self._example(self._numbers[index], file.readline(MOST_BYTES + 1))

    def check(self) -> None:
        """Raises LineError for the first line that is no example."""
        with self._path.open("rb") as file:
            for number, start in zip(self._numbers, self._starts, strict=True):
                file.seek(start)
                self._example(number, file.readline(MOST_BYTES + 1))

    def _example(self, number: int, line: bytes) -> Any:
        try:
            if b"\0" in line:
                raise ConfigError("it has a NUL character; a file of JSON lines is UTF-8 text.")
            found = msgspec.json.decode(line.decode())
            if not isinstance(found, Mapping):
                array = " Write each item of the array on a line of its own." if isinstance(found, list) else ""
                raise ConfigError(f"it is no JSON object.{array}")
            return self._read(found)
        except UnicodeDecodeError as error:
            raise LineError(number, f"it is no UTF-8: {error.reason} at byte {error.start}.") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise LineError(number, f"it is no JSON: {error}.") from None
        except ConfigError as error:
            raise LineError(number, str(error)) from None


def _lines_in(path: Path) -> Iterator[tuple[int, int, int]]:
    """The number of each line, where it begins, and how many bytes it has besides blanks at its ends: 0 for an empty
    one, and no more than one above the limit for those that are longer."""
    number = at = 0
    with path.open("rb") as file:
        if file.read(len(_BOM)) == _BOM:
            at = len(_BOM)
        file.seek(at)
        start, held = at, b""
        while block := file.read(_AT_ONCE):
            held += block
            *whole, held = held.split(b"\n")
            for line in whole:
                number += 1
                yield number, start, len(line.strip())
                start += len(line) + 1
            if len(held) > MOST_BYTES:
                yield number + 1, start, len(held)
                return
        if held:
            yield number + 1, start, len(held.strip())


def _chat(line: Mapping[str, Any]) -> dict[str, Any]:
    if "messages" not in line:
        messages_of(line)  # says what to write in place of what there is
    _refuse_others(line, _OF_CHAT | {SCORES, COMMENTS})
    chat = _with_tools(line)
    messages_of(chat)
    _check_calls(chat["messages"], line.get("parallel_tool_calls", True))
    return chat


def _pair(line: Mapping[str, Any]) -> dict[str, Any]:
    older = {"preferred_completion": "preferred_output", "non_preferred_completion": "non_preferred_output"}
    line = {older.get(name, name): value for name, value in line.items()}
    if "input" not in line:
        pair_of(line)
    _refuse_others(line, _OF_PAIR)
    if not isinstance(line.get("input"), Mapping):
        raise ConfigError('"input" is to hold the messages of the conversation.')
    prompt = line["input"]
    _refuse_others(prompt, _OF_CHAT)
    pair = {**line, "input": _with_tools(prompt)}
    messages, _, *outputs = pair_of(pair)
    for some in (messages, *outputs):
        _check_calls(some, prompt.get("parallel_tool_calls", True))
    return pair


def _item(line: Mapping[str, Any]) -> Mapping[str, Any]:
    messages = line.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise ConfigError('"messages" is to hold the prompt, as a list of messages.')
    if messages[-1].get("role") != "user":
        raise ConfigError("the last message is to be the user's.")
    return line


READERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "supervised": _chat,
    "dpo": _pair,
    "reinforcement": _item,
    "agent": dict,
}
"""How a line of each method is read. Each raises ConfigError."""


def _refuse_others(line: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(line.keys() - known):
        raise ConfigError(f"it has {', '.join(map(repr, unknown[:5]))}, which has no meaning here.")


def _with_tools(line: Mapping[str, Any]) -> dict[str, Any]:
    """The messages and tools, also where they are the functions of older files."""
    tools = line.get("tools")
    functions = line.get("functions") or []
    if not isinstance(tools or [], list) or not isinstance(functions, list):
        raise ConfigError("tools are a list.")
    tools = [*(tools or []), *({"type": "function", "function": one} for one in functions)]
    messages = line.get("messages")
    if isinstance(messages, list):
        messages = [_with_calls(m) if isinstance(m, Mapping) else m for m in messages]
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose `function_call` is a call of a tool."""
    call = message.get("function_call")
    if not isinstance(call, Mapping):
        return message
    rest = {name: value for name, value in message.items() if name != "function_call"}
    return {**rest, "tool_calls": [{"id": "call_0", "type": "function", "function": call}]}


def _check_calls(messages: Messages, parallel: Any) -> None:
    if not isinstance(parallel, bool):
        raise ConfigError("parallel_tool_calls is true or false.")
    if not parallel and any(len(m.get("tool_calls") or ()) > 1 for m in messages):
        raise ConfigError("parallel_tool_calls is false, and a message calls several tools at once.")
