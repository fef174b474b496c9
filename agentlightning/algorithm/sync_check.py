"""The trained weights are the served weights: after each publish, seen on tokens that were sampled just now.

The loop asks; no backend can leave it out. Three things must hold:
  - the version that was published is the one that the last optimiser step made;
  - tokens that are sampled now carry it;
  - the learner gives these tokens the log-probs that the engine gave them.
The last is compared with how far the step moved the learner, so that weights left behind are noticed when the step was
small: then the engine is as far off as the learner moved, instead of a rounding error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.given import made_call
from agentlightning.engine.base import Chunk, Engine, SamplingParams, concat
from agentlightning.errors import EngineError
from agentlightning.learner.base import Learner
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.types.arrays import Int32Array, np

PROMPT_TOKENS = 256
"""Of a prompt of the step; any of its beginnings is one to sample from."""
RESPONSE_TOKENS = 16
WAIT_SECONDS = 300.0
"""How long the engine may take to sample so few tokens."""
MOVED = 2e-4
"""Smaller movements of log-probs than this cannot be told from rounding."""


def refuse_unpublished(policy: str, published: int, learned: int) -> None:
    """Raises EngineError where publishing did not bring the engine to the learner's version."""
    if published != learned:
        raise EngineError(
            f"Publishing the policy '{policy}' left its engine at weight version {published}, and its learner has "
            f"version {learned}: the engine does not sample from what was trained. The run was stopped; the last "
            "checkpoint is good. Look at what the backend's publish does."
        )


class SyncCheck:
    """Checks that engine and learner of one policy agree. `version` is the one that the engine samples from."""

    def __init__(self, engine: Engine, learner: Learner, limit: float, *, version: int) -> None:
        """`limit`: how far log-probs of the same tokens may be apart; up to 1e-3 means exact numerics."""
        self._engine = engine
        self._learner = learner
        self._limit = limit
        self._last: CreditedCall | None = None
        self.version = version

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
        self.version = version
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
