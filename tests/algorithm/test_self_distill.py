"""Self-distillation: the teacher is the model itself, with a message before the very tokens of the conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import agentlightning as agl
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.parts.teacher import in_front, message_tokens
from agentlightning.algorithm.update import Updater
from agentlightning.errors import ConfigError
from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams, PackedBatch
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.metrics import Reporter
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering

from .test_credit import episode

CALC = resolve_model("calc")
HINT = "The answer is 12."
QUESTION: list[Any] = [{"role": "user", "content": "What is 3 * 4?"}]


class Learning:
    """A torch learner behind the protocol, which writes down what it is given to learn."""

    def __init__(self) -> None:
        self.torch = TorchLearner(load_policy(CALC, device="cpu"), LearnerOptions(reference=str(CALC)))
        self.batches: list[PackedBatch] = []

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Any:
        return self.torch.forward(batch, reference=reference)

    async def forward_backward(self, batches: Any, loss: LossConfig) -> Any:
        self.batches += batches
        return self.torch.forward_backward(batches[0], loss)

    async def optim_step(self, params: OptimParams) -> Any:
        return self.torch.optim_step(params)


def logprobs(prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Of the response, by a plain forward of the model."""
    model = load_policy(CALC, device="cpu").model
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        found = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return found.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def asked(prompt: np.ndarray, responses: list[np.ndarray]) -> list[Episode]:
    found: list[Episode] = []
    for n, response in enumerate(responses):
        made = episode("g", [], tokens=(len(response),), name=f"r{n}")
        plain = logprobs(prompt, response).astype(np.float32)
        call = replace(made.calls[0], prompt_ids=prompt, response_ids=response, logprobs=plain, plain_logprobs=plain)
        task = {"question": "…", "hint": HINT}
        found.append(replace(made, rollout=made.rollout.model_copy(update={"input": task}), calls=[call], reward=None))
    return found


async def test_a_token_is_worth_how_much_likelier_it_is_with_the_hint() -> None:
    """Against plain forwards: log π(y | hint, x) − log π(y | x), where the hint is a system message before x."""
    rendering = load_rendering(CALC)
    prompt = rendering.render(QUESTION, None)
    hinted = rendering.render([{"role": "system", "content": HINT}, *QUESTION], None)
    responses = [rendering.encode(text) for text in ("It is 12.", "It is 7, or 8.")]
    learner: Any = Learning()
    updater = Updater(agl.SelfDistill(model="calc", minibatches=1), learner, Reporter())
    metrics = await updater.learn(asked(prompt, responses), 1e-4)
    expected = [logprobs(hinted, r) - logprobs(prompt, r) for r in responses]
    (batch,) = learner.batches
    np.testing.assert_allclose(batch.advantages_E, np.concatenate(expected), atol=1e-4)
    assert np.abs(batch.advantages_E).max() > 0.01, "the hint makes a difference"
    assert metrics["kl_teacher"] == pytest.approx(-np.concatenate(expected).mean(), abs=1e-4)
    assert metrics["updates"] == 1


def test_the_message_comes_before_the_very_tokens_that_were_sampled() -> None:
    rendering = load_rendering(CALC)
    prompt = np.concatenate([rendering.render(QUESTION, None), np.array([5, 6, 7], np.int32)])
    found = in_front(message_tokens(rendering, HINT), prompt)
    assert found[-len(prompt) :].tolist() == prompt.tolist()
    whole = rendering.render([{"role": "system", "content": HINT}, *QUESTION], None)
    assert found.tolist() == [*whole.tolist(), 5, 6, 7]


@pytest.mark.parametrize(
    ("message", "prompt", "expected"),
    [
        ([1, 8, 9, 2, 1], [1, 4, 2, 1, 5], [1, 8, 9, 2, 1, 4, 2, 1, 5]),  # both begin a message with 1
        ([0, 1, 8, 2, 1], [0, 1, 4, 2], [0, 1, 8, 2, 1, 4, 2]),  # 0 begins every text
        ([8, 9], [4, 5], [8, 9, 4, 5]),
    ],
)
def test_what_begins_every_text_stands_once(message: list[int], prompt: list[int], expected: list[int]) -> None:
    assert in_front(np.array(message, np.int32), np.array(prompt, np.int32)).tolist() == expected


async def test_a_task_without_the_hint_is_refused() -> None:
    learner: Any = Learning()
    updater = Updater(agl.SelfDistill(model="calc", hint="worked"), learner, Reporter())
    prompt = load_rendering(CALC).render(QUESTION, None)
    with pytest.raises(ConfigError, match="in its field 'worked'"):
        await updater.learn(asked(prompt, [np.array([5, 6], np.int32)]), 1e-4)


def test_the_teacher_is_the_model_itself_and_may_follow() -> None:
    assert agl.SelfDistill(model="calc").policy.model.reference == "calc"
    following = agl.SelfDistill(model="calc", reference_every=1, reference_share=0.01)
    assert following.reference_every == 1
    with pytest.raises(ConfigError, match=r"agl\.SelfDistill"):
        agl.GRPO(model="calc", hint="hint")
    with pytest.raises(ConfigError, match="loaded here"):
        agl.SelfDistill(model="calc", teacher_url="http://127.0.0.1/v1")
