"""`@algo`: a function is an algorithm and gets what it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.metrics import SilentConsole


@agl.rollout
async def agent(task: int, prompt_template: agl.PromptTemplate) -> float:
    return float(prompt_template.format(task=task))


def fit(algorithm: agl.Algorithm, tmp_path: Path, *data: Any) -> None:
    resources: Any = {"prompt_template": agl.PromptTemplate(template="{task}", engine="f-string")}
    agl.Trainer(
        algorithm=algorithm, initial_resources=resources, run_dir=tmp_path / "run", console=SilentConsole()
    ).fit(agent, *data)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_function_is_given_what_it_asks_for(tmp_path: Path, kind: str) -> None:
    seen: dict[str, Any] = {}

    @agl.algo
    async def asynchronous(*, store: Any, train_dataset: Any, val_dataset: Any, initial_resources: Any) -> None:
        seen.update(train=train_dataset, val=val_dataset, resources=initial_resources)
        rollout = await store.enqueue_rollout(train_dataset[1])
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
        seen["reward"] = agl.find_final_reward(await store.query_spans(rollout.rollout_id, "latest"))

    @agl.algo
    def synchronous(
        train_dataset: Any, val_dataset: Any, initial_resources: Any, context: Any, rounds: int = 1
    ) -> None:
        assert context.run_dir == tmp_path / "run"
        seen.update(train=train_dataset, val=val_dataset, resources=initial_resources, reward=2.0 * rounds)

    fit(asynchronous if kind == "async" else synchronous, tmp_path, [1, 2], [3])
    assert (seen["train"], seen["val"], seen["reward"]) == ([1, 2], [3], 2.0)
    assert list(seen["resources"]) == ["prompt_template"]


def test_the_function_stays_callable() -> None:
    @agl.algo
    def double(x: int = 1) -> int:
        return 2 * x

    assert double(4) == 8
    assert isinstance(double, agl.Algorithm)
    assert double.__name__ == "double"  # pyright: ignore[reportAttributeAccessIssue]


def test_what_nobody_gives_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"asks for 'learning'.*store, train_dataset"):

        @agl.algo
        def wrong(learning: Any) -> None: ...


def test_data_that_is_not_taken_is_refused(tmp_path: Path) -> None:
    @agl.algo
    async def no_validation(*, train_dataset: Any) -> None: ...

    with pytest.raises(ConfigError, match="takes no val_dataset"):
        fit(no_validation, tmp_path, [1], [2])
