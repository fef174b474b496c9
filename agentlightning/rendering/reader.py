"""Reading a response while it is sampled: tokens in, text that is safe to send out.

What was sent is always a prefix of what `Rendering.parse` says of the whole response: white space at the ends, text
that may turn out to be a stop string, half characters and tool calls are held back until they are decided. Not the
parser: tool calls and the final word come from `parse`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from agentlightning.rendering.base import Rendering
from agentlightning.rendering.forms import NO_MARKERS
from agentlightning.types.call import Int32Array

logger = logging.getLogger(__name__)

_BROKEN = "�"


class Text(NamedTuple):
    content: str
    reasoning: str


class StreamReader:
    """Reads one response."""

    def __init__(
        self,
        rendering: Rendering,
        prompt_ids: Int32Array,
        *,
        tools: bool,
        stop: Sequence[str],
        raw: bool = False,
        shows_stop: bool = False,
        begun: Sequence[int] = (),
    ) -> None:
        """`raw`: all is text. `shows_stop`: a text ends with its stop string. `begun`: tokens before the response
        that its text begins with and that are not shown.
        """
        self._rendering = rendering
        self._markers = NO_MARKERS if raw or rendering.bare else rendering.markers
        self._may_be_call = rendering.bare and tools and not raw
        """Until the first text says whether a bare response is a call."""
        self._stops = frozenset(rendering.stop_token_ids)
        self._odd = frozenset() if raw else rendering.odd_ids
        self._tools = tools
        self._content = _Channel(rendering, stop, strip=not raw, shows_stop=shows_stop)
        self._reasoning = _Channel(rendering, (), strip=True)
        self._held = self._markers is None
        reasons = not self._held and not raw and rendering.starts_in_reasoning(prompt_ids)
        self._channel: _Channel | None = None if self._held else self._reasoning if reasons else self._content
        self._open = reasons
        """Whether reasoning was opened; an opener counts only before any text."""

        for token in begun:
            self._step(token)
        if len(begun):
            self._open, self._may_be_call = True, False
            self._content.go_on()

    def feed(self, ids: Sequence[int]) -> Text:
        """The text that these tokens make safe to send."""
        for token in ids:
            if self._channel is None:
                break
            self._step(token)
        return Text(self._content.take(), self._reasoning.take())

    def finish(self, content: str, reasoning: str | None) -> Text:
        """The text still to send, now that the response is whole."""
        return Text(self._content.rest(content, "content"), self._reasoning.rest(reasoning or "", "reasoning"))

    def _step(self, token: int) -> None:
        markers = self._markers
        assert markers is not None
        if token in self._stops or token in self._odd or (self._tools and token == markers.tool_open):
            self._channel = None
        elif token == markers.think_open and not self._open and self._content.blank:
            self._channel, self._open = self._reasoning, True
            self._content.clear()
        elif token == markers.think_close and self._channel is self._reasoning:
            self._channel = self._content
        elif token == markers.think_open and self._channel is self._reasoning:
            pass  # the parser drops a repeated opener
        elif self._channel is not None:
            self._channel.push(token)
            if self._may_be_call and not self._channel.blank:
                self._may_be_call = False
                if self._channel.begins_with("{"):
                    self._channel.clear()
                    self._channel = None


class _Channel:
    """One text of a response: decodes tokens as they come and knows what was sent."""

    def __init__(self, rendering: Rendering, stop: Sequence[str], *, strip: bool, shows_stop: bool = False) -> None:
        self._rendering = rendering
        self._strip = self._strip_start = strip
        self._stop = tuple(stop)
        self._shows_stop = shows_stop
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._before: list[int] = []  # tokens already decoded: context for decoders that look back
        self._fresh: list[int] = []
        self._text = ""
        self._sent = 0
        self._stopped = False

    @property
    def blank(self) -> bool:
        return not self._text.strip() and not self._fresh

    def begins_with(self, text: str) -> bool:
        return self._text.startswith(text)

    def clear(self) -> None:
        self._before, self._fresh, self._text = [], [], ""

    def go_on(self) -> None:
        """Begin to show, as the middle of a text."""
        self._text, self._strip_start = "", False

    def push(self, token: int) -> None:
        self._fresh.append(token)
        base = self._rendering.decode(self._before) if self._before else ""
        text = self._rendering.decode(self._before + self._fresh)
        if text.endswith(_BROKEN) and len(self._fresh) < 8:
            return
        fresh = text[len(base) :]
        self._text += fresh if self._text or not self._strip_start else fresh.lstrip()
        self._before, self._fresh = self._fresh, []

    def take(self) -> str:
        if self._stopped:
            return ""
        found = [(at, len(s) * self._shows_stop) for s in self._stop if (at := self._text.find(s)) >= 0]
        safe = self._text[: sum(min(found))] if found else self._text[: max(0, len(self._text) - self._hold)]
        self._stopped = bool(found)
        if self._strip:
            safe = safe.rstrip()
        part = safe[self._sent :]
        self._sent = max(self._sent, len(safe))
        return part

    def rest(self, whole: str, what: str) -> str:
        sent = self._text[: self._sent]
        if not whole.startswith(sent):
            logger.warning("A streamed %s differs from the parsed one: sent %r, parsed %r.", what, sent, whole)
            return ""
        return whole[len(sent) :]
