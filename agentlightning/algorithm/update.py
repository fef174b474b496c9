"""Updating a policy from rollouts: credit, passes, gradients, optimiser steps. What else happens is in parts.

before_credit   parts change what was earned, and say what it is compared with
credit          advantages and weights, in minibatches
after_credit    parts look at them
packed          passes are packed, and parts change them
after_pass      for each minibatch: its gradient, a look at it, an optimiser step
after_update    parts measure

A `Publisher` makes what learners have learned what engines sample from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.algorithm.credit.assignment import credit, refuse_rewards_below_zero, seen_by
from agentlightning.algorithm.credit.ratios import ratio_range
from agentlightning.algorithm.episode import Episode, mean_reward
from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.hooks import PartsOfPolicy
from agentlightning.algorithm.part import Minibatch, PolicyScope, Update, Updated
from agentlightning.backend import Backend
from agentlightning.errors import EngineError
from agentlightning.learner.base import Learner, LossConfig, OptimParams, PassResult, joined
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.metrics import Reporter
from agentlightning.types.arrays import np

OF_SAMPLES = ("kl_old", "clip_fraction", "ratio_min", "ratio_max")
"""Metrics that compare with the weights that sampled: none did where chats are learned."""


class Updater:
    """Learns one step after the other, for one policy."""

    def __init__(self, settings: FeatureSettings, learner: Learner, reporter: Reporter, *, version: int = 0) -> None:
        """`version`: of the learner's weights."""
        self._settings = settings
        self._learner = learner
        self._loss = settings.loss_config()
        self._rule = settings.credit_rule()
        self._scope = PolicyScope(settings, learner, reporter)
        self.parts = PartsOfPolicy(settings.features, self._scope)
        """Their hooks, and what they keep in checkpoints."""
        self.version = version
        """The version of the learner's weights."""

    async def learn(self, episodes: Sequence[Episode], rate: float, step: int | None = None) -> dict[str, Any]:
        """One optimiser step per minibatch. With nothing to learn the weights stay and the metrics say so.

        step: how many steps the run has learned before; None: what happens every so many steps does not.
        """
        update = await self.prepare(episodes, step)
        done: list[Updated] = []
        for minibatch in [m for m in update.minibatches if m.passes] * self._settings.update_epochs:
            passed = await self._pass(minibatch)
            self.parts.after_pass(update, minibatch, passed)
            stepped = await self._learner.optim_step(self.optim(rate))
            self.version = update.version = stepped.version
            done.append(Updated(minibatch, passed, stepped))
        merged = _merged(done)
        if not self._settings.samples:
            merged = {k: v for k, v in merged.items() if k not in OF_SAMPLES}
        update.metrics = {**merged, **update.metrics}
        await self.parts.after_update(update, done)
        return update.metrics

    async def prepare(self, episodes: Sequence[Episode], step: int | None = None) -> Update:
        """What each optimiser step of an update learns from, and what was measured on the way."""
        refuse_rewards_below_zero(self._rule, episodes)
        update = Update(self._scope, self._rule, episodes, self.version, step)
        await self.parts.before_credit(update)
        update.batches = credit(
            update.episodes,
            update.rule,
            minibatches=self._settings.minibatches,
            values=update.values,
            bonuses=update.bonuses,
            keep_empty=True,
        )
        await self.parts.after_credit(update)
        update.minibatches = [self._packed(update, batch) for batch in update.batches]
        await self.parts.packed(update)
        return update

    def _packed(self, update: Update, batch: Sequence[CreditedCall]) -> Minibatch:
        sections = self.parts.sections(update, batch) or [batch]
        weights = [float(sum(c.weights.sum() for c in section)) for section in sections]
        if not all(weights):
            sections, weights = [batch], [1.0]
        shares = [weight / sum(weights) for weight in weights]
        passes = [[pack(calls) for calls in self._scope.split(section)] for section in sections]
        return Minibatch(passes, shares, len({c.group for c in batch}))

    async def _pass(self, minibatch: Minibatch) -> PassResult:
        """The gradient of all passes."""
        found: list[PassResult] = []
        for passes, share in zip(minibatch.sections, minibatch.shares, strict=True):
            found.append(await self._learner.forward_backward(passes, self.loss))
            if len(found) < len(minibatch.sections):
                await self.parts.after_section(share)
        return found[0] if len(found) == 1 else joined(found)

    @property
    def loss(self) -> LossConfig:
        """What is minimised now."""
        return self.parts.loss(self._loss)

    def optim(self, rate: float) -> OptimParams:
        """The numbers of an optimiser step at this learning rate."""
        adam = self._settings.adam
        return OptimParams(
            learning_rate=rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.max_grad_norm,
            max_kl=self._settings.max_kl,
        )


class PolicyUpdaters:
    """An updater per policy. Metrics carry the policy's name in front: `solver/loss`."""

    def __init__(self, updaters: Mapping[str, Updater], reporter: Reporter) -> None:
        self._updaters = updaters
        self._reporter = reporter
        self._unused: set[str] = set()

    async def learn(self, episodes: Sequence[Episode], rate: float, step: int | None = None) -> dict[str, Any]:
        """Learn one step with each policy, one after the other."""
        metrics: dict[str, Any] = {}
        for name, updater in self._updaters.items():
            # A rollout that got on without the policy says nothing of it, not even as what others are compared with.
            own = [one for one in (seen_by(name, e) for e in episodes) if any(c.info.trained for c in one.calls)]
            if not own:
                self._warn_of_unused(name)
            fresh = [e for e in own if not e.replayed]
            tokens = sum(e.sampled_tokens for e in fresh)
            found = {"reward": mean_reward(fresh), "rollouts": len(fresh), "tokens": tokens}
            found |= await updater.learn(own, rate, step)
            metrics |= {f"{name}/{key}": value for key, value in found.items()}
        return metrics

    def _warn_of_unused(self, policy: str) -> None:
        if policy not in self._unused:
            self._unused.add(policy)
            self._reporter.warn(
                f"No rollout of this step called the policy '{policy}', so it learns nothing. An agent calls it by "
                f"model='{policy}'."
            )


def _merged(done: Sequence[Updated]) -> dict[str, Any]:
    """Metrics of a step from those of its minibatches: means weighted by entries, sums, and the largest values."""
    if not done:
        return {"updates": 0}
    passes, steps = [one.passed for one in done], [one.step for one in done]
    entries = np.array([len(p.logprobs) for p in passes])
    means = {k: float(np.average([p.metrics[k] for p in passes], weights=entries)) for k in passes[0].metrics}
    ratios = [ratio_range(p.logprobs, _old_logprobs(one.minibatch)) for one, p in zip(done, passes, strict=True)]
    moved = [step.metrics["kl_step"] for step in steps if "kl_step" in step.metrics]
    return {
        **means,
        "loss": sum(p.loss for p in passes),
        "grad_norm": float(np.mean([step.grad_norm for step in steps])),
        "updates": len(steps),
        "trained_tokens": int(entries.sum()),
        "tree_tokens": sum(p.tree_tokens for p in passes),
        "ratio_min": min(low for low, _ in ratios),
        "ratio_max": max(high for _, high in ratios),
        **({"kl_step": max(moved), "halvings": int(sum(s.metrics["halvings"] for s in steps))} if moved else {}),
        "version": steps[-1].version,
    }


def _old_logprobs(minibatch: Minibatch) -> np.ndarray:
    return np.concatenate([one.old_logprobs_E for one in minibatch.passes])


class Publisher:
    """Knows which version of each policy is published."""

    def __init__(self, backend: Backend, versions: Mapping[str, int]) -> None:
        """`versions`: those that the engines sample from, by alias."""
        self._backend = backend
        self._versions = dict(versions)
        self.seconds = 0.0
        """How long the last one took."""

    async def publish(self, learned: Mapping[str, int]) -> dict[str, int]:
        """Publish the policies that have learned since they were published last; their new versions.

        Raises EngineError where a backend publishes nothing, or something else.
        """
        began = time.perf_counter()
        new = {alias: version for alias, version in learned.items() if version != self._versions[alias]}
        for alias, version in new.items():
            refuse_unpublished(alias, await self._backend.publish(alias), version)
            self._versions[alias] = version
        self.seconds = time.perf_counter() - began
        return new


def refuse_unpublished(policy: str, published: int, learned: int) -> None:
    """Raises EngineError where publishing did not bring the engine to the learner's version."""
    if published != learned:
        raise EngineError(
            f"Publishing the policy '{policy}' left its engine at weight version {published}, and its learner has "
            f"version {learned}: the engine does not sample from what was trained. The run was stopped; the last "
            "checkpoint is good. Look at what the backend's publish does."
        )
