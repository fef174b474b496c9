"""What a rendering promises: messages to prompt tokens, response tokens to messages, and the bridge between turns.

The invariant: `bridge` only ever appends. What was sampled stays as it was sampled, and only messages that are new get
tokenised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from agentlightning.rendering.forms import Markers
from agentlightning.rendering.messages import Message, Tool
from agentlightning.types.call import Int32Array


class RenderingSource(msgspec.Struct, frozen=True):
    """Where a rendering was loaded: `load_rendering(path, renderer)` gives the same one in another process."""

    path: str
    renderer: str | None
    arguments: str = "{}"
    """Of the chat template, as JSON: those of `Rendering.with_arguments`."""

    @property
    def base(self) -> RenderingSource:
        """Without arguments."""
        return RenderingSource(self.path, self.renderer)


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

    @property
    def arguments(self) -> frozenset[str]:
        """The arguments of the chat template that a request may give."""
        ...

    def with_arguments(self, arguments: Mapping[str, Any]) -> Rendering:
        """The rendering that gives these to the chat template. Raises `ModelError` for a value that it does not take,
        and for an argument that it does not have.
        """
        ...

    def encode(self, text: str) -> Int32Array: ...

    def exceeds(self, texts: Iterable[str], tokens: int, stopped: Callable[[], bool]) -> bool:
        """Whether these texts have certainly more than so many tokens. Looks at no more of them than it must, leaves
        the interpreter to others meanwhile, and gives up when it is `stopped`.
        """
        ...

    def decode(self, ids: Int32Array | Sequence[int]) -> str: ...

    def token_text(self, token: int) -> str:
        """One token as text; half a character is a replacement character."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Int32Array:
        """The whole prompt, ending where the assistant's next turn begins."""
        ...

    def begin(self, prompt_ids: Int32Array, text: str) -> Int32Array | None:
        """The tokens that follow a prompt where its answer begins with this text; None if it is not known how."""
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

    def call_grammar(self, tools: Sequence[Tool], *, in_reasoning: bool, required: bool, several: bool) -> str | None:
        """The grammar of a response whose calls have arguments by their tools' schemas; with `required` there is a
        call, of one or of `several` tools. None if it is not known how this format writes calls.
        """
        ...

    def grammar(self, schema: Mapping[str, Any], tools: Sequence[Tool] | None, *, in_reasoning: bool) -> str | None:
        """The grammar of a response whose answer follows a JSON schema, after reasoning and in place of tool calls
        if the model chooses so; None if it is not known where in this format an answer begins.
        """
        ...
