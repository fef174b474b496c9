"""Gradients to compare: what a learner would do, taken from it without a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from agentlightning.learner.base import LossConfig, PackedBatch, joined
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.types.call import Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The gradient of a loss on the passes of a minibatch, by trained tensor; None is zero."""

    tensors: Sequence[Tensor | None]
    norm: float
    logprobs_E: Float32Array
    """Of all entries' targets, in the order of the passes."""
    clip_fraction: float

    def dot(self, other: Gradient) -> float:
        """Their scalar product."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return sum(float((_exact(a) * _exact(b)).sum()) for a, b in pairs if a is not None and b is not None)


def gradient_of(learner: TorchLearner, parts: Sequence[PackedBatch], loss: LossConfig) -> Gradient:
    """Of no passes it is zero. The learner is left without a gradient; its weights stay."""
    learner.take_gradient()
    if not parts:
        return Gradient([None] * len(learner.policy.trainable()), 0.0, np.zeros(0, np.float32), 0.0)
    passed = joined([learner.forward_backward(part, loss) for part in parts])
    tensors = learner.take_gradient()
    squares = sum(float(_exact(t).square().sum()) for t in tensors if t is not None)
    return Gradient(tensors, squares**0.5, passed.logprobs, passed.metrics["clip_fraction"])


def _exact(tensor: Tensor) -> Tensor:
    """In float64, on the CPU where the tensor's device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
