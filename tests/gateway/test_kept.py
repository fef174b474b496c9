"""What a filter left to draw from is asked for in training, and gets into the store with the tokens."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.gateway import Gateway
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import Site
from tests.gateway.scripted import ScriptedEngine

ASK: Any = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("replays", "mode"), [(True, RolloutMode.TRAIN), (True, RolloutMode.VAL), (False, "train")])
async def test_kept_tokens_are_stored(
    store: InMemoryLightningStore, rendering: RenderersRendering, replays: bool, mode: Any, stream: bool
) -> None:
    engine = ScriptedEngine(rendering, lambda _prompt, _params: "5, I think.")
    async with Gateway(store, engine, rendering, filter_replay=replays) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode(mode))
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        async with site.client() as client:
            asked: Any = {"model": "policy", "messages": ASK, "top_p": 0.5, "stream": stream}
            answer: Any = await client.chat.completions.create(**asked)
            if stream:
                assert [part async for part in answer]
        (call,) = await site.close()
    if not replays or mode is RolloutMode.VAL:
        assert call.kept is None
        return
    assert call.kept is not None
    assert call.kept.tolist() == [1] * len(call.response_ids) + call.response_ids.tolist()
