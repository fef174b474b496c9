"""The loss on held-out examples, as a part of a training run: of a batch after each step, of all where a checkpoint is
written. And how often a token of chats is the model's likeliest one, in training too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, RunHooks, RunScope
from agentlightning.algorithm.sampling.examples import rendering_of
from agentlightning.backend import POLICY
from agentlightning.learner.base import Evaluates, LossConfig
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget
from agentlightning.types import Dataset
from agentlightning.types.arrays import np

_MEASURED = LossConfig(name="reinforce", token_accuracy=True)


@dataclass(frozen=True, kw_only=True)
class TokenAccuracy(Part):
    """Measures `token_accuracy`: how often a token that is learned was the model's likeliest one before the step."""

    name = "token_accuracy"

    def in_policy(self, policy: PolicyScope) -> PolicyHooks | None:
        return _AccuracyMeasured()


class _AccuracyMeasured(PolicyHooks):
    def loss(self, loss: LossConfig) -> LossConfig:
        return msgspec.structs.replace(loss, token_accuracy=True)


@dataclass(frozen=True, kw_only=True)
class ValidationLoss(Part):
    """Measures `valid_loss` and `full_valid_loss`: nats per token of chats, or what DPO minimises for preferences. Of
    chats also `valid_token_accuracy` and `full_valid_token_accuracy`, where the learner can."""

    name = "validation_loss"
    examples: Dataset[Any] = field(repr=False)
    episodes_of: Callable[[Any, Any, str], list[Episode]] = field(repr=False)
    """Makes the rollouts of an example, as in training."""

    def in_run(self, run: RunScope) -> RunHooks:
        return _ValidationMeasures(self, run)


class _ValidationMeasures(RunHooks):
    def __init__(self, part: ValidationLoss, run: RunScope) -> None:
        self._part = part
        self._run = run
        self._learner = run.backend.learner(POLICY)
        self._last = run.settings.steps_of(len(run.tasks))
        self._made: list[list[Episode]] = []
        """By example, once it is needed."""

    async def published(self, step: int, versions: Mapping[str, int], episodes: Sequence[Episode]) -> dict[str, Any]:
        if not self._made:
            rendering, examples = rendering_of(self._run.settings), self._part.examples
            self._made = [self._part.episodes_of(rendering, examples[i], f"valid-{i}") for i in range(len(examples))]
        batch, size = self._run.settings.tasks_per_step, len(self._made)
        chosen = [self._made[((step - 1) * batch + i) % size] for i in range(min(batch, size))]
        found = await self._measured("valid", chosen)
        if step % self._run.settings.save_every == 0 or step == self._last:
            found |= await self._measured("full_valid", self._made)
        return found

    async def _measured(self, name: str, examples: Sequence[Sequence[Episode]]) -> dict[str, Any]:
        loss, accuracy = await self._loss(examples)
        return {f"{name}_loss": loss} | ({} if accuracy is None else {f"{name}_token_accuracy": accuracy})

    async def _loss(self, examples: Sequence[Sequence[Episode]]) -> tuple[float, float | None]:
        """The mean over tokens, or over pairs; and the share of tokens that are the likeliest ones."""
        settings = self._run.settings
        pairs = settings.loss_spec.pairs
        calls: list[CreditedCall] = []
        for group, episodes in enumerate(examples):
            for episode in episodes:
                for call in episode.calls:
                    sign = np.full(len(call.response_ids), 1.0 if episode.reward else -1.0, dtype=np.float32)
                    calls.append(CreditedCall(call, len(calls), group, sign, sign))
        margins, total, tokens, likeliest = np.zeros(len(examples)), 0.0, 0, 0.0
        evaluating = self._learner if isinstance(self._learner, Evaluates) and not pairs else None
        for some in split_by_budget(calls, settings.tokens_per_batch, whole_groups=pairs):
            batch = pack(some)
            if evaluating is not None:
                passed = await evaluating.evaluate([batch], _MEASURED)
                logprobs_E = passed.logprobs
                likeliest += passed.metrics["token_accuracy"] * len(logprobs_E)
            else:
                logprobs_E = await self._learner.forward(batch)
            if pairs:
                gap_E = logprobs_E - await self._learner.forward(batch, reference=True)
                np.add.at(margins, batch.group_E, batch.advantages_E * gap_E)
            total, tokens = total - float(logprobs_E.sum()), tokens + len(logprobs_E)
        if pairs:
            return float(np.logaddexp(0.0, -settings.loss_config().dpo_beta * margins).mean()), None
        return total / max(tokens, 1), None if evaluating is None else likeliest / max(tokens, 1)
