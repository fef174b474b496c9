"""What if a step had been learned otherwise: gradients of variants beside the one taken, on a small model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import agentlightning as agl
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.update import Updater
from agentlightning.algorithm.whatif import TAKEN, Compared, StoredStep, telling_variants, variant, what_if
from agentlightning.errors import ConfigError
from agentlightning.learner.base import joined
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.metrics import Reporter

from .test_credit import episode

GROUPS = {"a": (1.0, 0.0, 0.0), "b": (1.0, 1.0, 0.0), "c": (1.0, 1.0, 1.0)}
"""The siblings of the last one earned the same."""


@pytest.fixture
def learner(tiny_model_dir: Path) -> TorchLearner:
    torch.set_num_threads(1)
    return TorchLearner(load_policy(tiny_model_dir, device="cpu"))


def stored(learner: TorchLearner, *, away: float = 0.0, **settings: Any) -> StoredStep:
    """Rollouts whose stored log-probs are the model's own, or `away` from them at random."""
    rng = np.random.default_rng(0)
    found: list[Episode] = []
    for group, rewards in GROUPS.items():
        for member, reward in enumerate(rewards):
            one = episode(group, [(reward, 1)], tokens=(3, 4 + member), name=f"{group}{member}")
            calls = []
            for call in one.calls:
                ids = rng.integers(0, 200, len(call.response_ids)).astype(np.int32)
                prompt = rng.integers(0, 200, 5).astype(np.int32)
                own = _logprobs(learner, prompt, ids) + away * rng.standard_normal(len(ids))
                calls.append(
                    replace(
                        call,
                        prompt_ids=prompt,
                        response_ids=ids,
                        logprobs=own.astype(np.float32),
                        plain_logprobs=own.astype(np.float32),
                    )
                )
            found.append(replace(one, calls=calls))
    made = agl.GRPO(model="calc", group_size=3, tasks_per_step=3, **settings)
    return StoredStep(1, found, made, {"learning_rate": 1e-3})


def _logprobs(learner: TorchLearner, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
    row = torch.tensor(np.concatenate([prompt, ids]))[None].long()
    with torch.no_grad():
        logits = learner.policy.model(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logits.gather(1, row[0, len(prompt) :, None])[:, 0].numpy()


async def compared(
    learner: TorchLearner, step: StoredStep, changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Compared]:
    found = await what_if(step, learner, {name: variant(step.settings, c) for name, c in changes.items()})
    return {one.name: one for one in found.compared}


async def test_known_relations_hold(learner: TorchLearner) -> None:
    step = stored(learner)
    found = await compared(
        learner,
        step,
        {
            "same": {},
            "reinforce": {"loss": "reinforce"},
            "drgrpo": {"advantage": "drgrpo"},
            "rloo": {"advantage": "rloo"},
            "all": {"advantage": "reinforce"},
        },
    )
    taken = found[TAKEN]
    assert taken.cosine == pytest.approx(1.0)
    assert (taken.clip_fraction, taken.ratio_min, taken.ratio_max) == pytest.approx((0.0, 1.0, 1.0), abs=1e-4)
    assert found["same"].grad_norm == pytest.approx(taken.grad_norm, rel=1e-6)
    # Where all ratios are 1, PPO's surrogate has the gradient of REINFORCE.
    assert found["reinforce"].cosine == pytest.approx(1.0, abs=1e-6)
    assert found["reinforce"].grad_norm == pytest.approx(taken.grad_norm, rel=1e-4)
    # RLOO's advantage is Dr.GRPO's times n / (n − 1), with n = 3 everywhere.
    assert found["rloo"].grad_norm == pytest.approx(1.5 * found["drgrpo"].grad_norm, rel=1e-4)
    assert found["rloo"].cosine == pytest.approx(found["drgrpo"].cosine or 0.0, abs=1e-5)
    assert 0.3 < (found["all"].cosine or 1.0) < 0.999
    tokens = sum(e.sampled_tokens for e in step.episodes)
    of_equals = sum(e.sampled_tokens for e in step.episodes[6:])
    assert taken.zero_advantages == pytest.approx(of_equals / tokens)
    without = sum(e.sampled_tokens for e in step.episodes if e.reward == 0)
    assert found["all"].zero_advantages == pytest.approx(without / tokens)


async def test_the_gradient_norm_is_that_of_the_learner_itself(learner: TorchLearner, tiny_model_dir: Path) -> None:
    """An independent way: the surrogate's gradient by plain autograd over each conversation alone."""
    step = stored(learner)
    found = await what_if(step, learner, {})
    model = load_policy(tiny_model_dir, device="cpu").model
    tokens = sum(e.sampled_tokens for e in step.episodes)
    loss = torch.zeros(())
    for i in range(0, 9, 3):
        rewards = np.array([e.reward for e in step.episodes[i : i + 3]])
        for e in step.episodes[i : i + 3]:
            advantage = 0.0 if rewards.std() == 0 else float((e.reward - rewards.mean()) / rewards.std())  # pyright: ignore
            for call in e.calls:
                row = torch.tensor(np.concatenate([call.prompt_ids, call.response_ids]))[None].long()
                logits = model(row).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
                chosen = logits.gather(1, row[0, len(call.prompt_ids) :, None]).sum()
                loss = loss - advantage * chosen / tokens
    loss.backward()
    norm = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    assert found.compared[0].grad_norm == pytest.approx(norm, rel=1e-4)
    assert found.logprob_gap < 1e-4


@pytest.mark.slow
async def test_corrections_and_clips_count_where_other_weights_sampled(learner: TorchLearner) -> None:
    step = stored(learner, away=0.6)
    changes = {"token": {"correction": "token"}, "mask": {"correction": "mask"}, "cispo": {"loss": "cispo"}}
    found = await compared(learner, step, changes)
    taken = found[TAKEN]
    assert taken.clip_fraction > 0.05
    assert taken.ratio_min < 0.8
    assert taken.effective_sample_size < 0.95
    assert found["token"].clip_fraction == 0.0, "ratios start from the weights as they are now"
    assert 0 < found["mask"].effective_sample_size < 1
    assert (found["cispo"].cosine or 1.0) < 0.999


@pytest.mark.slow
async def test_later_minibatches_are_at_the_weights_that_the_run_had(learner: TorchLearner) -> None:
    step = stored(learner, minibatches=2, update_epochs=2)
    found = await what_if(step, learner, {})
    assert found.updates == 2, "of the two minibatches one teaches nothing"
    assert found.compared[0].cosine == pytest.approx(1.0)
    assert found.compared[0].ratio_max > 1.0005, "the second epoch goes on from where the first one came"
    names = telling_variants(step.settings)
    assert {"loss=gspo", "advantage=rloo", "credit=gigpo", "correction=token"} <= set(names)
    assert "advantage=grpo" not in names, "that is what it was"
    assert "loss=reinforce" not in names, "it is for one epoch only"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"minibatches": 3}, "no part of a gradient"),
        ({"credit": "gae"}, "trained none"),
        ({"credit": "teacher"}, "teacher"),
        ({"loss": "nope"}, "ppo_clip"),
    ],
)
def test_what_cannot_be_known_is_refused(changes: dict[str, Any], words: str) -> None:
    settings: TrainingSettings = agl.GRPO(model="calc")
    with pytest.raises(ConfigError, match=words):
        variant(settings, changes)


class Beside:
    """The learner as a backend's handle has it."""

    def __init__(self, learner: TorchLearner) -> None:
        self._learner = learner

    async def forward(self, batch: Any, *, reference: bool = False) -> Any:
        return self._learner.forward(batch, reference=reference)

    async def forward_backward(self, batches: Any, loss: Any) -> Any:
        return joined([self._learner.forward_backward(batch, loss) for batch in batches])

    async def keep_half(self, share: float) -> None:
        self._learner.keep_half(share)

    async def optim_step(self, params: Any) -> Any:
        return self._learner.optim_step(params)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"update_epochs": 2, "max_kl": None}], ids=str)
async def test_the_step_is_that_of_the_training_loop(
    learner: TorchLearner, tiny_model_dir: Path, settings: dict[str, Any]
) -> None:
    step = stored(learner, **settings)
    updater = Updater(step.settings, cast(Any, Beside(learner)), Reporter())
    plain = await updater.learn(step.episodes, 1e-3)
    again = TorchLearner(load_policy(tiny_model_dir, device="cpu"))
    updater = Updater(step.settings, cast(Any, Beside(again)), Reporter())
    learned = await updater.learn(step.episodes, 1e-3, step=0)
    found = await what_if(step, TorchLearner(load_policy(tiny_model_dir, device="cpu")), {})
    assert found.compared[0].grad_norm == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert found.updates == plain["updates"]
    # Telling halves apart changes nothing of the step.
    assert learned["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert learned["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert -1 <= learned["gradient_cosine"] <= 1
    assert learned["gradient_noise"] > 0
    assert "gradient_cosine" not in plain
