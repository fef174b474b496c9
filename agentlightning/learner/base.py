"""The learner's seam: the verbs the field has settled on, over packed token trees.

    forward            log-probs of the targets of a batch, no gradient
    forward_backward   a loss on a batch; gradients are added up
    optim_step         one optimiser step; the weights get the next version
    save_state / load_state / export   checkpoint with the optimiser's state; weights in Hugging Face format

Shape letters: N tokens of a batch, S segments of its trees, E loss entries (a sampled token on one leaf's path).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from agentlightning.types.call import Float32Array, Int32Array


class PackedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Token trees laid out for one pass: every node's tokens once, parents before children.

    Segment s holds the tokens [starts[s], starts[s + 1]) (the last one ends at N). Its tokens attend to themselves
    causally and to all tokens of its ancestor segments; `parents[s]` is the parent segment or -1 for a root.
    """

    ids_N: Int32Array
    positions_N: Int32Array
    """Depth of each token on its path from the root."""
    starts_S: Int32Array
    parents_S: Int32Array
    source_E: Int32Array
    """Index into N of the token whose logits predict the entry's target."""
    targets_E: Int32Array
    """The sampled token."""
    sequence_E: Int32Array
    """Which leaf (sampled path) the entry belongs to, numbered from 0 within the batch."""
    old_logprobs_E: Float32Array
    """Plain log-probs at sampling time."""
    advantages_E: Float32Array
    weights_E: Float32Array
    """Weight of the entry in the loss; the loss is the weighted sum, so that normalisation is the caller's choice."""
    temperature_E: Float32Array
    """Temperature the target was sampled at: logits are divided by it, so that ratios start at 1."""


class LossConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which loss to apply to a batch, and its numbers."""

    name: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coef: float = 0.0


class OptimParams(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW's numbers for one step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """0 turns clipping off."""


class Learner(Protocol):
    """Updates a policy. Metrics are plain floats by name."""

    async def forward(self, batch: PackedBatch) -> Float32Array:
        """Plain log-probs of the entries' targets, shape [E]."""
        ...

    async def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> dict[str, float]: ...

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        """Clip, step, zero the gradients. The metrics hold `grad_norm` and `version`."""
        ...

    async def save_state(self, path: str) -> None:
        """Optimiser state and version into the directory `path` (atomically), for `load_state`."""
        ...

    async def load_state(self, path: str) -> None: ...

    async def export(self, path: str) -> None:
        """The policy as a Hugging Face model directory that plain `transformers` loads (atomically)."""
        ...
