"""The request that `agl serve` prints is one of the model's own run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from agentlightning.cli.sample import curl_command
from agentlightning.store import SqliteLightningStore
from agentlightning.types import AttemptStatus
from tests.store.builders import make_span

SAID = [
    {"role": "system", "parts": [{"type": "text", "content": "Don't guess."}]},
    {"role": "user", "parts": [{"type": "text", "content": "6 * 7"}]},
]


async def test_of_a_run(tmp_path: Path) -> None:
    model = tmp_path / "checkpoints" / "step-000001" / "model"
    model.mkdir(parents=True)
    store = SqliteLightningStore(tmp_path / "store.db")
    claim = await store.start_rollout({"q": "6 * 7"})
    spoken = {"gen_ai.input.messages": json.dumps(SAID), "gen_ai.request.max_tokens": 9}
    await store.add_span(make_span(claim, "chat policy", **spoken))
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
    await store.close()
    for place in (model, tmp_path, tmp_path / "checkpoints" / "step-000001"):
        command = await curl_command(str(place), "http://127.0.0.1:8000/v1", named="mail", with_key=False)
        assert "\n" not in command
        request = json.loads(shlex.split(command)[-1])
        assert request == {
            "model": "mail",
            "messages": [{"role": "system", "content": "Don't guess."}, {"role": "user", "content": "6 * 7"}],
            "max_tokens": 9,
        }


async def test_of_a_model_without_a_run(tmp_path: Path) -> None:
    command = await curl_command(str(tmp_path), "http://127.0.0.1:8000/v1", named="mail", with_key=True)
    assert "What is 12 + 30?" in command
    assert '"Authorization: Bearer $AGL_API_KEY"' in command
    assert '"calc"' in await curl_command("calc", "http://127.0.0.1:8000/v1", named="calc", with_key=False)
