"""A rollout's sampling seed: two models, or two prompts, draw alike where only what is compared shall differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import openai
import pytest

import agentlightning as agl
from agentlightning.gateway.sampling.settings import Overrides, settle
from agentlightning.metrics import SilentConsole
from agentlightning.types.rollout import SAMPLING_SEED
from tests.gateway.conftest import Site


@pytest.mark.parametrize("mode", [agl.RolloutMode.TEST, agl.RolloutMode.TRAIN])
def test_rollouts_with_one_seed_draw_alike_call_by_call(mode: agl.RolloutMode) -> None:
    def seeds(rollout: str, seed: int | None) -> list[int | None]:
        calls = (settle({}, Overrides(), mode, rollout, call, sampling_seed=seed) for call in range(3))
        return [used.get("seed") for used in calls]

    assert seeds("one", 7) == seeds("another", 7)
    assert len({*seeds("one", 7), *seeds("one", 8)}) == 6
    assert seeds("one", None) == [None] * 3


def test_a_seed_of_the_agents_own_or_of_the_run_wins() -> None:
    mode = agl.RolloutMode.TEST
    assert settle({"seed": 5}, Overrides(), mode, "r", 0, sampling_seed=7)["seed"] == 5
    assert settle({}, Overrides(other={"seed": 6}), mode, "r", 0, sampling_seed=7)["seed"] == 6


@agl.rollout
async def asks_once(task: str, llm: agl.LLM) -> float:
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        ask = client.chat.completions.create
        await ask(model=llm.model, messages=[{"role": "user", "content": task}], max_tokens=12)
    return 1.0


def _answers(folder: Path, seed: int | None) -> list[list[int]]:
    """What was sampled for each of two tasks, twice."""
    algorithm = agl.Baseline(model="calc", backend="inprocess", max_context=256, repeats=2, seed=seed)
    agl.Trainer(algorithm=algorithm, run_dir=folder, console=SilentConsole()).fit(asks_once, ["a", "b"])
    return [call.response_ids.tolist() for episode in algorithm.episodes for call in episode.calls]


@pytest.mark.slow
def test_measurements_with_one_seed_draw_alike(tmp_path: Path) -> None:
    first, again = _answers(tmp_path / "first", 3), _answers(tmp_path / "again", 3)
    assert first == again
    assert len({tuple(answer) for answer in first}) > 2
    assert _answers(tmp_path / "other", 4) != first


@pytest.mark.parametrize("seed", ["7", 1.5, True])
async def test_a_seed_that_is_no_whole_number_is_refused_by_its_name(site: Site, seed: object) -> None:
    claimed = await site.store.start_rollout(input={}, metadata={SAMPLING_SEED: seed})
    other = replace(site, rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id)
    async with other.client() as client:
        with pytest.raises(openai.BadRequestError, match=f"{SAMPLING_SEED} {seed!r}"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
