"""Which of several agents sent a request: what it says in our own ways, or what its program says in its own header.

A program's ids are made anew in each run and cannot be selected by, so its agents get names that are the same in every
rollout: `main`, and `sub-agent` or `sub-agent/NAME`. What clients send is not trusted: a name is short and printable,
and a header that cannot be read names nobody. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from agentlightning.types.names import AGENT_BAGGAGE

MAIN, SUB_AGENT = "main", "sub-agent"

_LONGEST_NAME = 256
_LONGEST_HEADER = 16_384
_AGENT_IN_BAGGAGE = re.compile(rf"(?:^|,)\s*{re.escape(AGENT_BAGGAGE)}\s*=\s*([^,;\s]+)")

Headers = Mapping[bytes, bytes]


def agent_name(headers: Headers, in_url: str | None) -> str | None:
    """The calling agent's name: from our header, the URL (`LLM.for_agent`), W3C baggage, or its program's header."""
    if own := headers.get(b"x-agl-agent"):
        return _clean(own.decode("utf-8", "replace"))
    if in_url is not None:
        return _clean(in_url)
    if b"baggage" in headers and (found := _AGENT_IN_BAGGAGE.search(headers[b"baggage"].decode("latin-1"))):
        return _clean(unquote(found[1]))
    for header, read in _OF_PROGRAMS:
        if header in headers and (name := read(headers)):
            return _clean(name)
    return None


def session_name(headers: Headers) -> str | None:
    """The session that a request belongs to, by its program's header; that of its parent, where it names one."""
    sent = (headers[header] for header in _SESSIONS if headers.get(header))
    return _clean(next(sent, b"").decode("utf-8", "replace"))


def _clean(name: str) -> str | None:
    """The name as it can be shown and stored; None if nothing is left of it."""
    return "".join(c for c in name[:_LONGEST_NAME] if c.isprintable()).strip() or None


def _either(sub_agent: bytes) -> Callable[[Headers], str]:
    """Main, unless the request has the header that only sub-agents send."""
    return lambda headers: SUB_AGENT if headers.get(sub_agent) else MAIN


def _of_codex(headers: Headers) -> str | None:
    """Agents with names have paths (`/root/reviewer`); the others say what kind of sub-agent they are, or none."""
    text = headers[b"x-codex-turn-metadata"]
    try:
        found: Any = json.loads(text) if len(text) <= _LONGEST_HEADER else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    path, kind = found.get("agent_name"), found.get("subagent_kind")
    name = path.removeprefix("/root").strip("/") if isinstance(path, str) else ""
    name = name or (kind if isinstance(kind, str) else "")
    return f"{SUB_AGENT}/{name}" if name else MAIN


_OF_PROGRAMS: tuple[tuple[bytes, Callable[[Headers], str | None]], ...] = (
    (b"x-claude-code-session-id", _either(b"x-claude-code-agent-id")),  # Claude Code
    (b"x-codex-turn-metadata", _of_codex),  # Codex
    (b"x-session-affinity", _either(b"x-parent-session-id")),  # opencode
)
"""A header by which a program is known, and how its agent's name is read. A program more is a line more."""

_SESSIONS = (
    b"x-claude-code-session-id",
    b"x-parent-session-id",  # opencode's sub-agents
    b"x-session-affinity",
    b"x-session-id",
    b"session_id",  # Codex
    b"session-id",
)
"""Headers that name a session, the first one that is there."""
