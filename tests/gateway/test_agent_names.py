"""Names of a program's agents, from headers as the programs send them, and from headers that make no sense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from agentlightning.gateway import Gateway
from agentlightning.gateway.serving.agent_names import agent_name
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import Site, calculator
from tests.gateway.scripted import ScriptedEngine

CLAUDE = {"X-Claude-Code-Session-Id": "6e623435-2d96-494b-aec7-8d6c5f5f77fb"}
OPENCODE = {"x-session-id": "ses_df06c53e2ffew8lv", "x-session-affinity": "ses_df06c53e2ffew8lv"}


def codex(**more: Any) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps({"agent_name": "/root", "request_kind": "turn", **more})}


SENT: list[tuple[dict[str, str], str | None]] = [
    (CLAUDE, "main"),
    ({**CLAUDE, "x-claude-code-agent-id": "a6c18846502d4f55e"}, "sub-agent"),
    (OPENCODE, "main"),
    ({**OPENCODE, "x-parent-session-id": "ses_df06c33f8ffe"}, "sub-agent"),
    (codex(thread_source="user"), "main"),
    (codex(subagent_kind="thread_spawn"), "sub-agent/thread_spawn"),
    (codex(subagent_kind="thread_spawn", agent_name="/root/reviewer"), "sub-agent/reviewer"),
    (codex(agent_name=7, subagent_kind=["x"]), "main"),
    ({"x-codex-turn-metadata": "{"}, None),
    ({"x-codex-turn-metadata": "[" * 9000}, None),
    ({"x-codex-turn-metadata": json.dumps({"agent_name": "/root/" + "x" * 20_000})}, None),
    ({"x-parent-session-id": "of a program that nobody knows"}, None),
    ({**CLAUDE, "x-agl-agent": "told"}, "told"),
    ({**CLAUDE, "baggage": "agentlightning.agent=by%20baggage"}, "by baggage"),
]
"""As the newest versions sent them to a server that wrote them down (2.1.331, 1.18.33, 0.169.0)."""


@pytest.mark.parametrize(("headers", "name"), SENT)
def test_a_programs_agents_have_names(headers: dict[str, str], name: str | None) -> None:
    assert agent_name({k.lower().encode(): v.encode() for k, v in headers.items()}, None) == name


HEADERS = st.sampled_from(
    [b"x-agl-agent", b"baggage", b"x-claude-code-session-id", b"x-claude-code-agent-id", b"x-codex-turn-metadata"]
)
JSON = st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner), max_leaves=3)
METADATA = st.dictionaries(st.sampled_from(["agent_name", "subagent_kind"]), JSON).map(lambda d: json.dumps(d).encode())


@given(st.dictionaries(HEADERS, st.binary(max_size=600) | METADATA), st.none() | st.text())
def test_a_name_is_short_and_printable_whatever_is_sent(headers: dict[bytes, bytes], in_url: str | None) -> None:
    name = agent_name(headers, in_url)
    assert name is None or (0 < len(name) <= 256 and name.isprintable())


async def test_only_the_sub_agents_of_a_program_are_trained(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    engine = ScriptedEngine(rendering, calculator)
    claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
    async with Gateway(store, engine, rendering, train_agents="^sub-agent") as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        async with site.client() as client:
            for headers, _ in SENT:
                ask: Any = [{"role": "user", "content": "What is 2 + 3?"}]
                if sum(map(len, headers.values())) < 9000:
                    await client.chat.completions.create(model="policy", messages=ask, extra_headers=headers)
        calls = await site.close()
    assert {c.info.agent for c in calls if c.info.trained} == {name for _, name in SENT if name and "sub-agent" in name}
    assert {c.info.agent for c in calls if not c.info.trained} >= {"main", None}
