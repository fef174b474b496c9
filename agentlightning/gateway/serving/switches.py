"""The switches that keep known programs from sending what is unavailable here: a line for each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agentlightning.gateway.exchange import Refusal


class KnownProgram(NamedTuple):
    """A program by what its requests' `user-agent` begins with."""

    user_agent: str
    name: str
    switches: Mapping[str, str]
    """By what the refused field begins with: the variable or option that turns it off."""


_BETAS = "set CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1"
PROGRAMS = (
    KnownProgram("claude-cli/", "Claude Code", dict.fromkeys(("context_management", "compaction", "thread"), _BETAS)),
    KnownProgram("codex_", "Codex", {"tools": "start it with -c web_search=disabled"}),
)


def with_switch(refusal: Refusal, headers: Mapping[bytes, bytes]) -> Refusal:
    """The refusal of a field, with what its program has to turn it off, where that is known."""
    sent = headers.get(b"user-agent", b"").decode("latin-1")
    program = next((one for one in PROGRAMS if sent.startswith(one.user_agent)), None)
    if program is None or refusal.wire_code != "unsupported_parameter" or refusal.param is None:
        return refusal
    field = refusal.param
    switch = next((how for name, how in program.switches.items() if field.startswith(name)), None)
    if switch is None:
        return refusal
    message = f"{refusal.message} In {program.name}: {switch}."
    return Refusal(message, status=refusal.status, kind=refusal.kind, code=refusal.wire_code, param=field)
