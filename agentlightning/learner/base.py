"""The learner's seam: the verbs the field has settled on, over packed token trees.

    forward            log-probs of the targets of a batch, no gradient
    values             what the critic expects, no gradient
    forward_backward   a loss on the passes of a minibatch; gradients are added up
    optim_step         one optimiser step; the weights get the next version
    save_state / load_state / export   checkpoint with the optimiser's state; weights in Hugging Face format

Shape letters: N tokens of a batch, S segments of its trees, E loss entries (a sampled token on one leaf's path), K the
most tokens that a filter kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from agentlightning.learner.catalog import LOSSES
from agentlightning.types.arrays import Float32Array, Int32Array, np

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Of weights. In the two short ones the optimiser keeps float32 copies of what it trains."""


class PackedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Token trees laid out for one pass: every node's tokens once, depth first, so a parent comes before its children
    and all that stands on a segment follows it without a gap.

    Segment s holds the tokens [starts[s], starts[s + 1]) (the last one ends at N). Its tokens attend to themselves
    causally and to all tokens of its ancestor segments; `parents[s]` is the parent segment or -1 for a root.
    """

    ids_N: Int32Array
    """The tokens."""
    positions_N: Int32Array
    """Depth of each token on its path from the root."""
    starts_S: Int32Array
    """Where each segment begins in N."""
    parents_S: Int32Array
    """The parent of each segment, -1 for a root."""
    source_E: Int32Array
    """Index into N of the token whose logits predict the entry's target."""
    targets_E: Int32Array
    """The sampled token."""
    sequence_E: Int32Array
    """The conversation the entry was sampled in, a number: the unit of sequence-level ratios."""
    group_E: Int32Array
    """The group of siblings the entry belongs to, a number: the unit of preference pairs."""
    old_logprobs_E: Float32Array
    """Where ratios start from: plain log-probs at sampling time, unless they were corrected."""
    advantages_E: Float32Array
    """How much better than expected what the entry is part of turned out; above 0 makes its token likelier."""
    weights_E: Float32Array
    """Weight of the entry in the loss; the loss is the weighted sum, so that normalisation is the caller's choice."""
    temperature_E: Float32Array
    """Temperature the target was sampled at: logits are divided by it, so that ratios start at 1."""
    returns_E: Float32Array | None = None
    """What a critic should predict at the entry, NaN where it is not asked; None where there is no critic."""
    sampled_logprobs_E: Float32Array | None = None
    """Plain log-probs at sampling time, where ratios start from others; None: `old_logprobs_E` are those."""
    version_E: Int32Array | None = None
    """The weight version that sampled each target, -1 where nobody knows; None: nobody knows of any."""
    kept_EK: Int32Array | None = None
    """The tokens that a filter left to draw each target from, −1 behind the last: log-probs of the entry are over these
    alone. A row of −1, and None, is the whole vocabulary."""


class LossConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which loss to apply to a batch, and its numbers."""

    name: str = "ppo_clip"
    """A key of `learner.catalog.LOSSES`, or the import path of a function."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 − `clip_low` …"""
    clip_high: float = 0.2
    """… and at 1 + `clip_high`."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference, as part of the loss."""
    kl_estimator: str = "k3"
    """A key of `learner.loss.KL_ESTIMATORS`."""
    dpo_beta: float = 0.1
    """How far DPO may move from the reference."""
    reference: bool = False
    """Whether a loss from outside the package compares with the reference model."""
    token_accuracy: bool = False
    """Measure how often a target is the model's likeliest token."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the reference model."""
        known = LOSSES.get(self.name)
        return self.kl_coef != 0 or self.reference or (known is not None and known.reference)


class OptimParams(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW's numbers for one step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """0 turns clipping off."""
    max_kl: float | None = None
    """How far the step may move the policy: the mean KL(new ‖ old) per token, in nats. A longer one is halved."""


class PassResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the passes of a minibatch."""

    loss: float
    """Their sum."""
    logprobs: Float32Array
    """Plain log-probs of all entries' targets before the step, shape [E], in the order of the passes: what the engine
    said of the same tokens is compared with them."""
    tree_tokens: int
    """Tokens that were computed."""
    metrics: dict[str, float]
    """Means over the entries, by name."""


def joined(passes: Sequence[PassResult]) -> PassResult:
    """The passes of a minibatch as one: sums, and means weighted by entries."""
    entries = [len(one.logprobs) for one in passes]
    names = passes[0].metrics
    return PassResult(
        loss=sum(one.loss for one in passes),
        logprobs=np.concatenate([one.logprobs for one in passes]),
        tree_tokens=sum(one.tree_tokens for one in passes),
        metrics={k: float(np.average([one.metrics[k] for one in passes], weights=entries)) for k in names},
    )


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an optimiser step."""

    version: int
    """Of the weights after it."""
    grad_norm: float
    """Before clipping."""
    metrics: dict[str, float] = {}
    """`critic_loss` where there is a critic; with `OptimParams.max_kl`, `kl_step` and `halvings`: how far the step
    moved the policy, and how often it was halved; after `MeasuresNoise.keep_half`, `learner.noise.noise_measures`."""


class PackingCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How far a packed pass and the same tokens in separate rows are apart, relative to the largest value."""

    logprobs: float
    gradients: float
    """The largest over all trained tensors."""
    holds: bool
    """Within tolerance. Otherwise the learner computes rows from now on."""


class LearnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a learner computes; none of it changes what it computes."""

    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, about a third more time."""
    offload: bool = False
    """Keep the optimiser's moments and float32 copies of the weights in the CPU's memory, and step there; for a GPU."""
    logits_at_once: int = 1 << 26
    """Logits (tokens × vocabulary) that exist at the same time; more are computed piece by piece."""
    tree_attention: Literal["auto", "flex", "segments"] = "auto"
    """How trees attend: segment by segment, or by FlexAttention in one kernel; "auto" is the latter on an NVIDIA or AMD
    GPU. Where that cannot be, segments are taken and a warning says why."""
    reference: str | None = None
    """The model that KL and DPO compare with, by name or path; None: none is needed. An adapter compares with its
    base model and loads no other, or with the adapter in this directory."""
    critic: bool = False
    """Train a value head beside the policy."""


class Learner(Protocol):
    """Updates a policy. Metrics are plain floats by name. Paths are URIs: a directory today."""

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        """Plain log-probs of the entries' targets, shape [E]; under the reference model if asked for."""
        ...

    async def values(self, batch: PackedBatch) -> Float32Array:
        """What the critic expects from each entry's state on, shape [E]."""
        ...

    async def forward_backward(self, batches: Sequence[PackedBatch], loss: LossConfig) -> PassResult:
        """Add the gradients of the loss on all passes of a minibatch to those that are there."""
        ...

    async def optim_step(self, params: OptimParams) -> StepResult:
        """Clip, step, zero the gradients. The engine samples from the new weights once they are published."""
        ...

    async def save_state(self, uri: str) -> None:
        """Optimiser state and version into the directory `uri` (atomically), for `load_state`."""
        ...

    async def load_state(self, uri: str) -> None:
        """Take up what `save_state` wrote."""
        ...

    async def export(self, uri: str) -> None:
        """The policy as a Hugging Face model directory that plain `transformers` loads (atomically)."""
        ...


@runtime_checkable
class MovesReference(Protocol):
    """What a learner may be able to do besides: let its reference follow the policy."""

    async def move_reference(self, share: float) -> None:
        """Take the reference this share of the way to the policy; `save_state` keeps it from then on."""
        ...


@runtime_checkable
class KeepsRoutes(Protocol):
    """What a learner may be able to do besides: replay the routing of a mixture of experts."""

    async def keep_routes(self, batches: Sequence[PackedBatch]) -> None:
        """Remember which experts the weights as they are choose in these passes, and nothing else: from now on
        `forward_backward` takes the same ones in the same passes, and `rerouted` is among its metrics."""
        ...


@runtime_checkable
class Evaluates(Protocol):
    """What a learner may be able to do besides: compute a loss without its gradients."""

    async def evaluate(self, batches: Sequence[PackedBatch], loss: LossConfig) -> PassResult:
        """The loss on all passes; gradients stay as they are."""
        ...


@runtime_checkable
class ChecksPacking(Protocol):
    """What a learner may be able to do besides: compare its packed passes with separate rows."""

    async def check_packing(self, batch: PackedBatch, loss: LossConfig) -> PackingCheck:
        """Leaves gradients as they are."""
        ...


@runtime_checkable
class MeasuresNoise(Protocol):
    """What a learner may be able to do besides: compare the gradients of two halves of a minibatch."""

    async def keep_half(self, share: float) -> None:
        """Remember the gradient as it is, that of this share of the minibatch; the next `optim_step` measures it."""
        ...
