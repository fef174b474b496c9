"""On-policy distillation: a token is worth what the teacher thinks of it, and rewards play no part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.update import Updater
from agentlightning.errors import ConfigError
from agentlightning.learner.base import PackedBatch
from agentlightning.metrics import Reporter
from agentlightning.types import Outcome

from .fakes import CountingLearner
from .test_credit import episode


class Teaching(CountingLearner):
    """The teacher finds the n-th token of a pass n tenths likelier than the policy."""

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Any:
        n = np.arange(len(batch.targets_E), dtype=np.float32)
        return batch.old_logprobs_E + (0.1 * n if reference else 0.0)


async def test_a_token_is_worth_how_much_likelier_the_teacher_finds_it() -> None:
    learner: Any = Teaching()
    settings = agl.Distill(model="calc", teacher="calc", minibatches=1)
    updater = Updater(settings, learner, Reporter())
    unrewarded = replace(episode("g", [], tokens=(2, 3), name="a"), reward=None)
    failed = episode("g", [(1.0, 0)], tokens=(4,), name="b", outcome=Outcome.AGENT_ERROR)
    metrics = await updater.learn([unrewarded, failed], 0.1)
    (batch,) = learner.batches
    assert batch.advantages_E.tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert batch.weights_E.sum() == pytest.approx(1.0)
    assert metrics["kl_teacher"] == pytest.approx(-0.2)


@pytest.mark.parametrize("how", ["teacher", "kl in the reward"])
async def test_what_older_weights_sampled_is_compared_under_the_weights_of_now(how: str) -> None:
    """A policy that says by now what the other model says has nothing to learn from it, whoever sampled the tokens."""

    class Arrived(CountingLearner):
        async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Any:
            return batch.old_logprobs_E + 0.5

    learner: Any = Arrived()
    settings: Any = agl.Distill(model="calc", teacher="calc", max_staleness=1, minibatches=1)
    if how != "teacher":
        settings = agl.GRPO(model="calc", advantage="drgrpo", kl_coef=1.0, kl_in="reward", max_staleness=1)
    updater = Updater(settings, learner, Reporter())
    episodes = [episode("g", [(r, 0)], tokens=(n,), name=f"r{n}") for r, n in ((0.0, 2), (1.0, 3))]
    update = await updater.prepare(episodes)
    found = sorted({float(a) for batch in update.minibatches for one in batch.passes for a in one.advantages_E})
    assert found == ([] if how == "teacher" else [-0.5, 0.5])
    assert update.metrics["kl_teacher" if how == "teacher" else "kl_reference"] == 0.0


def test_the_teacher_is_what_the_backend_loads_beside_the_policy() -> None:
    spec = agl.Distill(model="calc", teacher="runs/before").policy
    assert spec.model.reference == "runs/before"
    assert agl.GRPO(model="calc").policy.model.reference is None


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({}, r"agl\.Distill\(model=…, teacher=…\)"),
        ({"teacher": "calc", "kl_coef": 0.1}, "no other reference"),
        ({"teacher": "calc", "policies": ["a", "b"]}, "one policy"),
        ({"teacher": "calc", "advantage": "rloo"}, "advantage='rloo' has no effect"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        agl.Distill(model="calc", **given)
    with pytest.raises(ConfigError, match="teacher='calc' has no effect"):
        agl.GRPO(model="calc", teacher="calc")
