"""The trained weights are the served weights: before each optimiser step, seen on what they sampled of the step's
tokens, and after each publish, seen on tokens that were sampled just now.

No backend can leave it out. After a publish two things must hold:
  - tokens that are sampled now carry the version that the last optimiser step made;
  - the learner gives these tokens the log-probs that the engine gave them.
The last is compared with how far the step moved the learner, so that weights left behind are noticed when the step was
small: then the engine is as far off as the learner moved, instead of a rounding error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentlightning.algorithm.credit.ratios import mean_kl
from agentlightning.algorithm.episode import Episode, made_call
from agentlightning.algorithm.part import Minibatch, Part, PolicyHooks, PolicyScope, RunHooks, RunScope, Update, Updated
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.engine.base import Chunk, Engine, SamplingParams, concat
from agentlightning.errors import EngineError
from agentlightning.learner.base import Learner, PackedBatch, PassResult
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.metrics.catalogue import ENGINE, Metric
from agentlightning.types.arrays import Int32Array, np

PROMPT_TOKENS = 256
"""Of a prompt of the step; any of its beginnings is one to sample from."""
RESPONSE_TOKENS = 16
WAIT_SECONDS = 300.0
"""How long the engine may take to sample so few tokens."""
MOVED = 2e-4
"""Smaller movements of log-probs than this cannot be told from rounding."""


class SyncCheck:
    """Checks that engine and learner of one policy agree."""

    def __init__(self, engine: Engine, learner: Learner, limit: float) -> None:
        """`limit`: how far log-probs of the same tokens may be apart; up to 1e-3 means exact numerics."""
        self._engine = engine
        self._learner = learner
        self._limit = limit
        self._last: CreditedCall | None = None

    async def run(self, version: int, episodes: Sequence[Episode]) -> float:
        """Sample a few tokens under what was just published; the largest gap between engine and learner.

        Raises EngineError when they are not of `version`, or the gap says that engine and learner differ.
        """
        prompt = next(c.prompt_ids for e in episodes for c in e.calls if c.info.trained)[:PROMPT_TOKENS]
        chunks = await self._sample(prompt, version)
        if wrong := {chunk.version for chunk in chunks} - {version}:
            raise EngineError(
                f"Weight version {version} was published, and the engine still samples from version {min(wrong)}. The "
                "run was stopped; the last checkpoint is good. Look at what the backend's publish does."
            )
        gap, moved = await self._compare(prompt, concat(chunks))
        behind = self._limit <= 1e-3 and moved > MOVED and gap > moved / 2
        if gap > self._limit or behind:
            raise EngineError(
                f"Weight version {version} was published, and the engine's log-probs of freshly sampled tokens are "
                f"{gap:.2e} off the learner's (limit {self._limit:.0e}; the step moved the learner's by {moved:.2e}): "
                "the engine samples from other weights than those that were trained, or computes them otherwise. The "
                "run was stopped; the last checkpoint is good. Look at what the backend's publish does."
            )
        return gap

    async def _sample(self, prompt: Int32Array, version: int) -> list[Chunk]:
        params = SamplingParams(max_tokens=RESPONSE_TOKENS, seed=version)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return [chunk async for chunk in self._engine.generate(prompt, params)]
        except TimeoutError:
            raise EngineError(
                f"The engine sampled nothing within {WAIT_SECONDS:.0f} s after weight version {version} was published. "
                "The run was stopped; the last checkpoint is good."
            ) from None

    async def _compare(self, prompt: Int32Array, chunk: Chunk) -> tuple[float, float]:
        """The gap on the fresh tokens, and how far the learner moved on those that were fresh the last time."""
        last, fresh = self._last, _entry(prompt, chunk)
        self._last = fresh
        now = await self._learner.forward(pack([fresh]))
        gap = _largest(now, fresh)
        return gap, 0.0 if last is None else _largest(await self._learner.forward(pack([last])), last)


def _entry(prompt: Int32Array, chunk: Chunk) -> CreditedCall:
    call = made_call("sync", "sync", "sync", prompt, chunk.ids, chunk.plain_logprobs)
    nothing = np.zeros(len(chunk.ids), dtype=np.float32)
    return CreditedCall(call, 0, 0, nothing, nothing)


def _largest(now_E: np.ndarray, entry: CreditedCall) -> float:
    return float(np.abs(now_E - entry.call.plain_logprobs).max(initial=0.0))


@dataclass(frozen=True, kw_only=True)
class Agreement(Part):
    """Engine and learner give the same tokens the same log-probs; every run is checked."""

    metrics = (
        Metric(
            "logprob_gap_max",
            "Largest gap of log-probs",
            ENGINE,
            "nats",
            "The largest difference between engine and learner on tokens that the learner's own weights sampled.",
        ),
        Metric(
            "kl_engine",
            "KL between engine and learner",
            ENGINE,
            "nats",
            "The mean KL(engine ‖ learner) on the same tokens, per token.",
        ),
        Metric(
            "sync_gap",
            "Gap after publishing",
            ENGINE,
            "nats",
            "The largest difference between engine and learner on tokens sampled right after the weights were "
            "published.",
        ),
    )

    settings: TrainingSettings
    """Their limit is read when a run has begun: a limit that is not set is the model's own, which needs its files."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self:
        return cls(settings=settings)

    def in_run(self, run: RunScope) -> RunHooks:
        backend, limit = run.backend, self.settings.logprob_gap_limit
        checks = {a: SyncCheck(backend.engine(a), backend.learner(a), limit) for a in run.policies}
        return _AfterPublishing(checks)

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _BeforeStepping(self.settings.logprob_gap_limit)


class _AfterPublishing(RunHooks):
    def __init__(self, checks: Mapping[str, SyncCheck]) -> None:
        self._checks = checks

    async def published(self, step: int, versions: Mapping[str, int], episodes: Sequence[Episode]) -> dict[str, Any]:
        gaps = [await self._checks[alias].run(version, episodes) for alias, version in versions.items()]
        return {"sync_gap": max(gaps)} if gaps else {}


class _BeforeStepping(PolicyHooks):
    """How far learner and engine are apart on the tokens that the learner's weights sampled: the largest difference of
    log-probs, and the mean KL."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._gaps: list[float] = []
        self._kls: list[float] = []

    def after_pass(self, update: Update, minibatch: Minibatch, passed: PassResult) -> None:
        """Raises EngineError above the limit: one of the two computes something else than the other."""
        passes = minibatch.passes
        fresh_E = np.concatenate([_versions(one) for one in passes]) == update.version
        if not fresh_E.any():
            return
        now_E, sampled_E = passed.logprobs[fresh_E], np.concatenate([_sampled(one) for one in passes])[fresh_E]
        gap = float(np.abs(now_E - sampled_E).max())
        if gap > self._limit:
            raise EngineError(
                f"Engine and learner disagree about the same weights: log-probs of sampled tokens differ by {gap:.2e} "
                f"(limit {self._limit:.0e}). The run was stopped before it could train on wrong numbers; the last "
                "checkpoint is good. This is a bug in the engine's or the learner's support of this model: please "
                "report it."
            )
        self._gaps.append(gap)
        self._kls.append(mean_kl(now_E, sampled_E))

    async def after_update(self, update: Update, done: Sequence[Updated]) -> None:
        if self._gaps:
            update.metrics |= {"logprob_gap_max": max(self._gaps), "kl_engine": float(np.mean(self._kls))}
        self._gaps, self._kls = [], []


def _versions(batch: PackedBatch) -> np.ndarray:
    return np.full(len(batch.targets_E), -1) if batch.version_E is None else batch.version_E


def _sampled(batch: PackedBatch) -> np.ndarray:
    return batch.old_logprobs_E if batch.sampled_logprobs_E is None else batch.sampled_logprobs_E
