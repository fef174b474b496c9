"""Volatile text of known programs: left out, recorded, and nothing else is touched."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest

from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.stable_prefix import parse_stable
from agentlightning.types.call import left_out_of
from tests.gateway.conftest import Site

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
HEADER = "x-anthropic-billing-header: cc_version=2.1.331.{}; cc_entrypoint=sdk-cli;"
PROMPT = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
MORE = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def body(system: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 9, "system": system, "messages": [{"role": "user", "content": "2 + 3?"}]}


@pytest.mark.parametrize(
    ("system", "plain"),
    [
        ([block(HEADER), block(PROMPT), MORE], [block(PROMPT), MORE]),
        ([block(f"{HEADER}\n\n{PROMPT}"), MORE], [block(PROMPT), MORE]),
        (f"{HEADER}\n{PROMPT}", PROMPT),
    ],
    ids=["a block", "within a block", "a text"],
)
def test_calls_of_a_known_program_have_one_prefix(system: Any, plain: Any) -> None:
    """As Claude Code 2.1.331 sends it, whose hash differs between its agents and after a compaction."""
    messages = BY_NAME["messages"]
    wanted = messages.parse(body(plain), {})
    for version in ("779", "129"):
        given = body(_filled(system, version))
        before = copy.deepcopy(given)
        found = parse_stable(messages, given, {})
        assert found.messages == wanted.messages
        assert given == before, "what came is not changed"
        (told,) = [one for one in found.left_out if one not in wanted.left_out]
        assert (told.field, told.kind) == ("system.x-anthropic-billing-header", "harmless")


async def test_after_a_compaction_the_system_prompt_is_the_same_branch_point(site: Site) -> None:
    """The hash has changed with the first message; the tokens of the system prompt are the known ones all the same."""
    prompt = f"{PROMPT} {'Be careful with files. ' * 40}"
    asked = ["What is 2 + 3?", "This session is being continued from a previous conversation: sums."]
    async with httpx.AsyncClient(headers={"x-api-key": site.key}) as client:
        for version, question in zip(("779", "129"), asked, strict=True):
            system = [block(HEADER.format(version)), block(prompt)]
            given = {**body(system), "messages": [{"role": "user", "content": question}]}
            answered = await client.post(f"{site.base_url}/messages", json=given)
            assert answered.status_code == 200, answered.text
    first, second = await site.close()
    assert second.info.divergence is not None
    shared = second.info.divergence.position
    assert shared > 150
    assert first.prompt_ids[:shared].tolist() == second.prompt_ids[:shared].tolist()
    (told,) = [one for span in await site.spans() for one in left_out_of([span]) if one.field.startswith("system.")]
    assert "Claude Code" in told.why


def _filled(system: Any, version: str) -> Any:
    if isinstance(system, str):
        return system.replace("{}", version)
    return [{**one, "text": one["text"].replace("{}", version)} for one in system]


@pytest.mark.parametrize("system", [None, "", [], [block(PROMPT)], f"Explain {HEADER}", [block(f"It says {HEADER}")]])
def test_nothing_of_other_programs_is_left_out(system: Any) -> None:
    messages = BY_NAME["messages"]
    given = body(system) if system is not None else {k: v for k, v in body("").items() if k != "system"}
    found, plain = parse_stable(messages, given, {}), messages.parse(given, {})
    assert (found.messages, found.left_out) == (plain.messages, plain.left_out)
