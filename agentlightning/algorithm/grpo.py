"""GRPO: sample a group of rollouts per task, compare siblings, push the policy towards the better ones.

THE LOOP is `GRPO.run`. Group Relative Policy Optimization: Shao et al., arXiv 2402.03300; clip-higher and token mean:
DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from agentlightning.algorithm.base import Algorithm, PolicySpec
from agentlightning.algorithm.checkpoint import (
    CheckpointInfo,
    prune_checkpoints,
    read_checkpoint,
    save_checkpoint,
)
from agentlightning.algorithm.credit import OUTCOME_USE, Use, credit
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.preflight import Preflight
from agentlightning.algorithm.sampling import Stopped, run_rollouts
from agentlightning.algorithm.schedule import TaskSchedule
from agentlightning.errors import ConfigError, EngineError
from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget
from agentlightning.types import Dataset, EnqueueRolloutRequest, Outcome, RolloutConfig, RolloutMode

logger = logging.getLogger(__name__)

COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward", ".3f"),
    ("val_reward", "val", ".3f"),
    ("failed", "failed", "d"),
    ("tokens", "tokens", ",d"),
    ("sampling_seconds", "sample s", ".1f"),
    ("learning_seconds", "learn s", ".1f"),
    ("entropy", "entropy", ".3f"),
    ("clip_fraction", "clipped", ".1%"),
)


@dataclass(kw_only=True)
class GRPO(Algorithm):
    """Settings of a GRPO run. `model` alone is enough; everything else has a default."""

    model: str
    """A model that ships with the package, a directory, a checkpoint, or a Hugging Face id."""
    group_size: int = 8
    """Rollouts per task that are compared with each other."""
    tasks_per_step: int = 16
    """A step samples tasks_per_step × group_size rollouts."""
    epochs: int = 1
    steps: int | None = None
    """Number of steps; None: as many as `epochs` need."""
    learning_rate: float = 1e-5
    schedule: Literal["constant", "linear"] = "constant"
    """Of the learning rate; "linear" falls to zero at the end of the run."""
    minibatches: int = 1
    """Updates per step; each takes whole groups and its share of the step's rollouts."""
    temperature: float = 1.0
    """Of training rollouts, whatever the agent asks for."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coef: float = 0.0
    normalize_std: bool = True
    """False is Dr.GRPO's advantage."""
    normalization: Literal["token", "rollout"] = "token"
    """Whether every token or every rollout counts the same."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    lora_rank: int | None = None
    """Train a LoRA adapter of this rank instead of all weights."""
    train_agents: str | None = None
    """A regular expression: only calls of agents whose name it finds something in are trained; None: all."""
    train_prompts: str | None = None
    """The same for the system prompt of a call."""
    max_calls: int | None = None
    """Model calls that one rollout may make; one that wants more is truncated."""
    max_tokens: int | None = None
    """Tokens that one rollout may have sampled, over all its calls."""
    max_context: int = 4096
    max_concurrency: int = 64
    tokens_per_batch: int = 16_384
    """Unique tokens in one forward and backward pass; bounds the learner's memory."""
    outcome_use: Mapping[Outcome, Use] = field(default_factory=lambda: dict(OUTCOME_USE))
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)
    val_every: int = 10
    """Validate before the first step, every so many steps, and after the last."""
    save_every: int = 10
    keep_checkpoints: int = 2
    """The last so many and the best one are kept."""
    max_logprob_gap: float | None = None
    """Stop when learner and engine disagree by more on what was just sampled; None: 1e-3 in float32, else 0.5."""
    device: str = "auto"
    dtype: str = "float32"
    renderer: str | None = None
    seed: int = 0
    """Decides the order of the tasks, and seeds the sampling."""

    def __post_init__(self) -> None:
        super().__init__()
        if self.group_size < 2:
            raise ConfigError("group_size must be at least 2: GRPO compares rollouts of the same task with each other.")
        if not 1 <= self.minibatches <= self.tasks_per_step:
            raise ConfigError(
                f"minibatches ({self.minibatches}) must be between 1 and tasks_per_step ({self.tasks_per_step})."
            )
        if self.schedule not in ("constant", "linear"):
            raise ConfigError(f"schedule is {self.schedule!r}; it can be 'constant' or 'linear'.")
        self.outcome_use = {**OUTCOME_USE, **self.outcome_use}
        self.policy = PolicySpec(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            lora_rank=self.lora_rank,
            max_context=self.max_context,
            max_concurrency=self.max_concurrency,
            temperature=self.temperature,
            train_agents=self.train_agents,
            train_prompts=self.train_prompts,
            max_calls=self.max_calls,
            max_tokens=self.max_tokens,
            seed=self.seed,
            renderer=self.renderer,
        )

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        if train_dataset is None:
            raise ConfigError("GRPO needs training tasks: Trainer.fit(agent, tasks).")
        schedule = TaskSchedule(train_dataset, self.tasks_per_step, self.seed)
        total = self.steps if self.steps is not None else self.epochs * schedule.steps_per_epoch
        done = await self._resume()
        preflight = Preflight(self.context.reporter, learned=done > 0)
        self.context.reporter.columns(COLUMNS)
        val_reward = None
        try:
            if done == 0 and val_dataset:
                val_reward = await self._validate(val_dataset, step=0)
                self.context.reporter.step({"step": 0, "val_reward": val_reward, "time": time.time()})
            while done < total and not preflight.solved:
                began = time.perf_counter()
                episodes = await self._sample(schedule.tasks(done), step=done + 1)
                sampled = time.perf_counter()
                preflight.check(episodes, self.outcome_use)
                batches = credit(
                    episodes,
                    self.outcome_use,
                    minibatches=self.minibatches,
                    normalize_std=self.normalize_std,
                    normalization=self.normalization,
                )
                metrics = await self._learn(batches, self._rate(done, total))
                learned = time.perf_counter()
                done += 1
                last = done == total or preflight.solved
                if val_dataset and (last or done % self.val_every == 0):
                    val_reward = metrics["val_reward"] = await self._validate(val_dataset, step=done)
                self.context.reporter.step(
                    {
                        "step": done,
                        **_summary(episodes),
                        **metrics,
                        "sampling_seconds": sampled - began,
                        "learning_seconds": learned - sampled,
                        "time": time.time(),
                        **await self._time_split(),
                    }
                )
                if last or done % self.save_every == 0:
                    await self._save(done, val_reward)
        except Stopped:
            if done:
                await self._save(done, val_reward)

    # ---- its parts -------------------------------------------------------------------------------------------------

    async def _sample(self, tasks: Sequence[Any], step: int) -> list[Episode]:
        """A group of finished rollouts per task, siblings side by side."""
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode=RolloutMode.TRAIN,
                config=self.rollout_config,
                metadata={"step": step, "group": f"{step}-{group}"},
            )
            for group, task in enumerate(tasks)
            for _ in range(self.group_size)
        ]
        return await run_rollouts(self.context, requests, f"step {step}: sampling")

    async def _validate(self, dataset: Dataset[Any], step: int) -> float:
        """Mean reward over the validation tasks. A failed rollout counts 0 here: a user would see it fail."""
        requests = [
            EnqueueRolloutRequest(
                input=dataset[i], mode=RolloutMode.VAL, config=self.rollout_config, metadata={"step": step}
            )
            for i in range(len(dataset))
        ]
        episodes = await run_rollouts(self.context, requests, f"step {step}: validating")
        return float(np.mean([e.reward or 0.0 for e in episodes]))

    def _rate(self, done: int, total: int) -> float:
        return self.learning_rate * (1 - done / total if self.schedule == "linear" else 1.0)

    async def _learn(self, batches: Sequence[Sequence[CreditedCall]], rate: float) -> dict[str, Any]:
        """One optimiser step per minibatch. With nothing to learn the weights stay and the metrics say so."""
        learner = self._learner()
        self.context.reporter.status("learning")
        loss = LossConfig(clip_low=self.clip_low, clip_high=self.clip_high, entropy_coef=self.entropy_coef)
        parts: list[dict[str, float]] = []
        for number, batch in enumerate(batches):
            for credited in split_by_budget(batch, self.tokens_per_batch):
                parts.append(await learner.forward_backward(pack(credited), loss))
                if number == 0:
                    self._check_gap(parts[-1]["logprob_gap_max"])
            optim = OptimParams(learning_rate=rate, weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)
            parts[-1].update(await learner.optim_step(optim))
        return _merge(parts)

    def _check_gap(self, gap: float) -> None:
        """The canary: before the first update the learner must see the very log-probs the engine sampled with."""
        limit = self.max_logprob_gap or (1e-3 if self.dtype == "float32" else 0.5)
        if gap > limit:
            raise EngineError(
                f"Engine and learner disagree about the same weights: log-probs of sampled tokens differ by {gap:.2e} "
                f"(limit {limit:.0e}). The run was stopped before it could train on wrong numbers; the last checkpoint "
                "is good. This is a bug in the engine's or the learner's support of this model: please report it."
            )

    async def _resume(self) -> int:
        """How many steps are done already."""
        if self.context.resume_from is None:
            return 0
        info = read_checkpoint(self.context.resume_from)
        await self._learner().load_state(str(self.context.resume_from / "optimizer"))
        return info.step

    async def _save(self, done: int, val_reward: float | None) -> None:
        run_dir = self.context.run_dir
        info = CheckpointInfo(step=done, base_model=self.model, seed=self.seed, val_reward=val_reward)
        await save_checkpoint(run_dir, self._learner(), info)
        prune_checkpoints(run_dir, self.keep_checkpoints)

    async def _time_split(self) -> dict[str, float]:
        """Seconds since the start that the model process sampled, learned, and had nothing to do."""
        if self.context.stats is None:
            return {}
        stats = await self.context.stats()
        return {
            "model_sampling_seconds": stats.sampling_s,
            "model_learning_seconds": stats.learning_s,
            "model_idle_seconds": stats.idle_s,
            "cached_tokens": stats.cached_tokens,
            "prefill_tokens": stats.prefill_tokens,
        }

    def _learner(self) -> Any:
        if self.context.learner is None:
            raise ConfigError("GRPO needs a learner; the trainer starts one from GRPO(model=…).")
        return self.context.learner


def _summary(episodes: Sequence[Episode]) -> dict[str, Any]:
    """What the step's rollouts were like."""
    rewards = [e.reward for e in episodes if e.reward is not None]
    outcomes = Counter(e.outcome.value for e in episodes)
    return {
        "reward": float(np.mean(rewards)) if rewards else None,
        "rollouts": len(episodes),
        "failed": sum(n for o, n in outcomes.items() if o not in (Outcome.OK, Outcome.TRUNCATED)),
        "outcomes": dict(outcomes),
        "calls": sum(len(e.calls) for e in episodes),
        "tokens": sum(e.sampled_tokens for e in episodes),
    }


def _merge(parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Metrics of a step from those of its passes: means weighted by entries, sums, and the canary's first gap."""
    if not parts:
        return {"updates": 0}
    entries = np.array([p["entries"] for p in parts])
    means = {
        k: float(np.average([p[k] for p in parts], weights=entries)) for k in ("entropy", "clip_fraction", "kl_old")
    }
    norms = [p["grad_norm"] for p in parts if "grad_norm" in p]
    return {
        **means,
        "loss": sum(p["loss"] for p in parts),
        "grad_norm": float(np.mean(norms)),
        "updates": len(norms),
        "trained_tokens": int(entries.sum()),
        "tree_tokens": int(sum(p["tree_tokens"] for p in parts)),
        "logprob_gap_max": parts[0]["logprob_gap_max"],
        "version": int(parts[-1]["version"]),
    }
