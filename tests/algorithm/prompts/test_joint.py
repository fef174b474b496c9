"""Prompts and weights under one budget: how rounds are chosen, what they spend, that siblings share a prompt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.algorithm.joint import Round, choose
from agentlightning.errors import ConfigError
from agentlightning.metrics import SilentConsole
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer.sync import run_sync
from agentlightning.types import RolloutMode, RolloutStatus
from tests.algorithm.prompts.fakes import SEED, TRAIN, WORDS, FakeClient, apo, helpful
from tests.backend.bigram import BigramBackend

VAL = [{"question": f"v{n}"} for n in range(24)]
BUDGET = 800


def of(arm: Any, gain: float, rollouts: int = 100) -> Round:
    return Round(arm=arm, rollouts=rollouts, gain=gain)


@pytest.mark.parametrize(
    ("rounds", "arm", "why"),
    [
        ([], "prompt", "not tried"),
        ([of("prompt", 0.3)], "weights", "not tried"),
        ([of("prompt", 0.3), of("weights", 0.1)], "prompt", "prompt +0.3000 and weights +0.1000"),
        ([of("prompt", 0.3, 1000), of("weights", 0.1)], "weights", "prompt +0.0300 and weights +0.1000"),
        ([of("prompt", 9), of("prompt", 0), of("weights", 0.1), of("prompt", 0)], "weights", "prompt +0.0000"),
        ([of("weights", -0.1), of("prompt", 0.0)], "weights", "neither gains"),
        ([of("prompt", 0.1), *[of("weights", 0.3)] * 3], "prompt", "passed over for 3 rounds"),
    ],
)
def test_the_next_round_is_that_of_what_gained_most_per_rollout(rounds: list[Round], arm: str, why: str) -> None:
    chosen, reason = choose(rounds, memory=2, patience=3)
    assert chosen == arm
    assert why in reason


@agl.rollout
async def agent(task: dict[str, str], llm: agl.LLM, prompt_template: agl.PromptTemplate) -> float:
    """Earns by the prompt, as far as it has WORDS, and by the model, as far as it says vowels."""
    body = {"model": llm.model, "prompt": f"{task['question']}:", "max_tokens": 8}
    headers = {"authorization": f"Bearer {llm.api_key or 'none'}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{llm.get_base_url()}/completions", json=body, headers=headers) as response,
    ):
        text = (await response.json())["choices"][0]["text"]
    prompt = prompt_template.format(question=task["question"])
    stated = sum(word in prompt for word in WORDS) / len(WORDS)
    return 0.6 * stated + 0.4 * sum(c in "aeiou" for c in text) / max(len(text), 1)


def improve(run_dir: Path, seed: int = 0, client: Any = None, **settings: Any) -> tuple[agl.Joint, agl.RunResult]:
    resume, stop = settings.pop("resume", None), settings.pop("stop", None)
    where: dict[str, Any] = {"resume": resume} if resume else {"run_dir": run_dir}
    weights = agl.GRPO(
        model="calc",
        backend=BigramBackend,
        tasks_per_step=2,
        group_size=16,
        learning_rate=500.0,
        keep_checkpoints=100,  # this backend exports by copying the checkpoint it was resumed from
        seed=seed,
    )
    joint = agl.Joint(
        prompt=apo(client or FakeClient(helpful), beam_rounds=2, significance=0.4, gradient_batch_size=2, seed=seed),
        weights=weights,
        **{"budget_rollouts": BUDGET, "steps_per_round": 2, "rollouts_per_round": 160, **settings},
    )
    trainer = agl.Trainer(
        algorithm=joint,
        initial_resources={"prompt_template": agl.PromptTemplate(template=SEED)},
        console=SilentConsole(),
        **where,
    )
    return joint, run_sync(trainer.fit_async(agent, TRAIN, VAL, stop=stop))


def rollouts(run_dir: Path) -> list[Any]:
    async def read() -> list[Any]:
        store = SqliteLightningStore(run_dir / "store.db")
        found = list(await store.query_rollouts())
        await store.close()
        return found

    return run_sync(read())


def reached(run_dir: Path) -> float:
    last = (run_dir / "joint.jsonl").read_text().splitlines()[-1]
    return float(json.loads(last)["val_reward"])


@pytest.mark.slow
def test_it_tunes_both_within_its_budget_and_siblings_share_a_prompt(tmp_path: Path) -> None:
    joint, _ = improve(tmp_path / "run")
    ran = rollouts(tmp_path / "run")
    assert len(ran) <= BUDGET
    assert {r.arm for r in joint.rounds} == {"prompt", "weights"}
    assert sum(r.rollouts for r in joint.rounds) + len(VAL) == len(ran), "all that was run is told"
    assert joint.get_best_prompts()["prompt_template"].template != SEED
    groups: dict[str, set[str]] = {}
    for rollout in ran:
        if rollout.mode is RolloutMode.TRAIN and "group" in rollout.metadata:
            groups.setdefault(rollout.metadata["group"], set()).add(rollout.resources_id)
    assert all(len(resources) == 1 for resources in groups.values())
    assert len(set.union(*groups.values())) > 1, "later steps were sampled under a better prompt"
    assert reached(tmp_path / "run") > 0.7


@pytest.mark.slow
def test_a_run_stopped_within_a_round_of_prompts_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    stop = asyncio.Event()
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) == 6:  # in the second half of the first round of prompts
            stop.set()
        return helpful(prompt)

    first, _ = improve(tmp_path / "run", client=FakeClient(answer), stop=stop)
    ran = {r.rollout_id for r in rollouts(tmp_path / "run") if r.status is RolloutStatus.SUCCEEDED}
    assert len(first.rounds) == 0
    joint, _ = improve(tmp_path / "run", client=FakeClient(answer), resume=tmp_path / "run", budget_rollouts=350)
    assert [r.arm for r in joint.rounds][:2] == ["prompt", "weights"]
    kept = [json.loads(line)["key"] for line in (tmp_path / "run" / "critic.jsonl").read_text().splitlines()]
    paid = [key for key in kept if "ask-" in key]
    assert len(paid) == len(set(paid)) == len(asked) > 6
    assert ran <= {r.rollout_id for r in rollouts(tmp_path / "run")}
    assert "r1-" in "".join(ran), "some of the round that was interrupted are read back, not run again"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_it_beats_each_of_its_parts_at_the_same_number_of_rollouts(tmp_path: Path, seed: int) -> None:
    found: dict[str, float] = {}
    for arms in (("prompt", "weights"), ("prompt",), ("weights",)):
        folder = tmp_path / "-".join(arms)
        improve(folder, seed=seed, arms=arms)
        assert len(rollouts(folder)) <= BUDGET
        found["-".join(arms)] = reached(folder)
    assert found["prompt-weights"] > max(found["prompt"], found["weights"]), found


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"weights": agl.GRPO(model="calc", max_staleness=1)}, "max_staleness"),
        ({"prompt": apo(FakeClient(helpful), budget_rollouts=9)}, "rollouts_per_round"),
        ({"weights": agl.SFT(model="calc", source="chats")}, "sample none"),
        ({"steps_per_round": 0}, "at least 1"),
    ],
)
def test_settings_that_would_not_work_are_refused(settings: dict[str, Any], why: str) -> None:
    given = {"prompt": apo(FakeClient(helpful)), "weights": agl.GRPO(model="calc"), "budget_rollouts": 100}
    with pytest.raises(ConfigError, match=why):
        agl.Joint(**{**given, **settings})
