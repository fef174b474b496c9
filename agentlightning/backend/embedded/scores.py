"""What a model makes of tokens that were sampled before: `python -m agentlightning.backend.embedded.scores`.

A process of its own, so that whoever asks needs no torch and gets its memory back: it reads one `ScoreRequest` as JSON
from its input, writes one `ScoredCalls` as JSON to its output, and ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from agentlightning.adapter.tree import build_tree
from agentlightning.learner.base import PackedBatch
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.types.arrays import np


class ScoreCall(msgspec.Struct, frozen=True):
    """Tokens that were sampled after a prompt."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    temperature: float


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights are asked about which calls."""

    model: str
    """A directory of weights, or of an adapter."""
    calls: Sequence[ScoreCall]
    dtype: str = "float32"
    device: str = "auto"


class ScoredCalls(msgspec.Struct, frozen=True):
    """Of each call's sampled tokens: their log-probs over the whole vocabulary at the call's temperature, and the
    entropy of the distribution that each was drawn from, in nats."""

    logprobs: Sequence[Sequence[float]]
    entropies: Sequence[Sequence[float]]


def scored(request: ScoreRequest) -> ScoredCalls:
    """Raises ModelError where the model cannot be loaded, or has not these tokens."""
    learner = TorchLearner(load_policy(request.model, device=request.device, dtype=request.dtype))
    learner.policy.activate()
    logprobs_E, entropy_E = learner.scores(packed(request.calls))
    ends = np.cumsum([len(call.response_ids) for call in request.calls])[:-1]
    return ScoredCalls(*([part.tolist() for part in np.split(whole, ends)] for whole in (logprobs_E, entropy_E)))


def packed(calls: Sequence[ScoreCall]) -> PackedBatch:
    """The calls as one tree, an entry per sampled token; nothing is learned from it."""
    tree = build_tree([np.array([*c.prompt_ids, *c.response_ids], dtype=np.int32) for c in calls])
    lengths = [len(c.response_ids) for c in calls]
    starts = [len(c.prompt_ids) - 1 for c in calls]
    places = [np.arange(start, start + n, dtype=np.int32) for start, n in zip(starts, lengths, strict=True)]
    numbers_E = np.repeat(np.arange(len(calls), dtype=np.int32), lengths)
    nothing_E = np.zeros(sum(lengths), dtype=np.float32)
    return PackedBatch(
        ids_N=tree.ids_N,
        positions_N=tree.positions_N,
        starts_S=tree.starts_S,
        parents_S=tree.parents_S,
        source_E=np.concatenate([tree.locate(i, place) for i, place in enumerate(places)]),
        targets_E=np.concatenate([np.array(c.response_ids, dtype=np.int32) for c in calls]),
        sequence_E=numbers_E,
        group_E=numbers_E,
        old_logprobs_E=nothing_E,
        advantages_E=nothing_E,
        weights_E=nothing_E,
        temperature_E=np.repeat(np.array([c.temperature or 1.0 for c in calls], dtype=np.float32), lengths),
    )


def main() -> None:
    """Read what is asked, and write what came of it."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ScoreRequest)
    sys.stdout.buffer.write(msgspec.json.encode(scored(request)))


if __name__ == "__main__":
    main()
