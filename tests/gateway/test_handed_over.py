"""An agent with a name that calls for the first time begins a conversation of its own, however alike the prompts are;
its prompts that change later are changed prompts.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import Site


async def said(site: Site, system: str, agent: str | None, *messages: Any) -> Any:
    client = site.client(default_headers={} if agent is None else {"x-agl-agent": agent})
    asked: Any = [{"role": "system", "content": system}, *messages]
    answer = await client.chat.completions.create(model="policy", messages=asked)
    await client.close()
    return answer.choices[0].message


@pytest.mark.parametrize(
    ("first", "then", "cause"),
    [
        ("planner", "helper", "new_conversation"),
        ("planner", "planner", "system_prompt_changed"),
        (None, None, "system_prompt_changed"),
        (None, "helper", "system_prompt_changed"),  # it may be the one that had no name yet
    ],
)
async def test_a_history_that_another_agent_takes_over(
    site: Site, first: str | None, then: str | None, cause: str
) -> None:
    question = {"role": "user", "content": "What is 2 + 3?"}
    answer = await said(site, "You plan.", first, question)
    history = [question, {"role": "assistant", "content": answer.content or "x"}, {"role": "user", "content": "Go on."}]
    await said(site, "You help.", then, *history)
    _, call = await site.close()
    divergence = call.info.divergence
    assert divergence is not None
    assert (divergence.cause, divergence.tokens_lost > 0) == (cause, cause != "new_conversation")
