"""`TorchLearner` with passes and steps done by verl's workers. The whole policy is here, for whoever samples from it.

What is small or rare is computed on the whole policy, in this process: the guard of the step, the check of packing, the
reference. So the verbs, the files and the meaning of every number are those of the own learner.

Shape letters: E loss entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentlightning.errors import ConfigError
from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams, PackedBatch, PassResult
from agentlightning.learner.catalog import compares_siblings
from agentlightning.learner.optimizer import Optimizer, is_short
from agentlightning.learner.policy import Policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.verl.group import Workers, start_workers
from agentlightning.learner.verl.loss import row_loss
from agentlightning.learner.verl.rows import ROW_TOKENS, Pass, passes_of
from agentlightning.learner.verl.sizes import Sizes
from agentlightning.types.call import Float32Array

AT_ONCE = 1 << 27
"""Numbers of weights that travel together, unless one tensor has more."""


class VerlLearner(TorchLearner):
    """See `TorchLearner`. What two leaves of a tree share is computed for each."""

    def __init__(
        self, policy: Policy, options: LearnerOptions, workers: Workers, shares: int, *, row_tokens: int = ROW_TOKENS
    ) -> None:
        """The workers began with the policy's model, and with its weights where all of them are trained; a batch is
        dealt among `shares` of them, each of which computes about `row_tokens` tokens of rows at once."""
        self._workers, self._shares, self._row_tokens = workers, shares, row_tokens
        super().__init__(policy, options)
        if policy.peft is not None:
            hand_over(workers, policy, policy.trainable())

    def _make_optimizer(self) -> Optimizer:
        return RemoteOptimizer(self._workers, self.policy)

    def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        if reference:
            return super().forward(batch, reference=True)
        from agentlightning.learner.verl.tensors import put, tensors_of

        refuse_filters(batch)
        logprobs_E = np.empty(len(batch.source_E), dtype=np.float32)
        for one in self._passes(batch):
            found = self._workers.ask("infer_batch", tensors_of(one, batch, {"compute_loss": False}))
            put(logprobs_E, one, found["log_probs"])
        return logprobs_E

    def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> PassResult:
        from agentlightning.learner.verl.tensors import put, sums_in, tensors_of

        refuse_filters(batch)
        self._passed.append(batch)
        reference_E = super().forward(batch, reference=True) if loss.needs_reference else None
        self._workers.ask("set_loss_fn", partial(row_loss, loss))
        logprobs_E = np.empty(len(batch.source_E), dtype=np.float32)
        sums: Counter[str] = Counter()
        tokens = 0
        for one in self._passes(batch, whole_groups=compares_siblings(loss.name)):
            found = self._workers.ask("forward_backward", tensors_of(one, batch, reference_E=reference_E))
            put(logprobs_E, one, found["log_probs"])
            sums.update(sums_in(found))
            tokens += sum(len(row.ids_L) for rows in one for row in rows)
        total, entries = sums.pop("total"), sums.pop("entries")
        metrics = {name: value / entries for name, value in sums.items()}
        return PassResult(loss=total, logprobs=logprobs_E, tree_tokens=tokens, metrics=metrics)

    def _passes(self, batch: PackedBatch, *, whole_groups: bool = False) -> list[Pass]:
        return passes_of(batch, self._shares, whole_groups=whole_groups, row_tokens=self._row_tokens)

    def keep_half(self, share: float) -> None:
        """Not measured: the gradient is with the workers."""

    def keep_routes(self, batch: PackedBatch, *, first: bool) -> None:
        raise ConfigError(
            "verl's workers choose experts again in each pass: set routing_replay=False, or learner='own'."
        )


def start_verl(policy: Policy, dtype: str, sizes: Sizes, options: LearnerOptions) -> VerlLearner:
    """Workers on the Ray cluster that this process is on, and the learner they are."""
    refuse_shares(policy, sizes)
    workers = start_workers(policy, dtype, sizes, gradient_checkpointing=options.gradient_checkpointing)
    return VerlLearner(policy, options, workers, sizes.workers // sizes.sequence_parallel)


def refuse_shares(policy: Policy, sizes: Sizes) -> None:
    """Raises ConfigError for a model whose attention so many workers cannot share, or if what they need is not here."""
    share, config = sizes.sequence_parallel, policy.model.config.get_text_config()
    if share == 1:
        return
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if heads % share or (kv_heads % share and share % kv_heads):
        raise ConfigError(
            f"{share} workers cannot share the {heads} attention heads, with {kv_heads} of keys and values, of "
            f"'{policy.path}': each takes as many. Choose another sequence_parallel."
        )
    if sizes.gpus and not (find_spec("flash_attn") or find_spec("kernels")):
        raise ConfigError("On GPUs sequence_parallel needs FlashAttention on all machines: pip install flash-attn.")


class RemoteOptimizer(Optimizer):
    """The workers' optimiser, with the policy's own copy of the weights kept up to date."""

    def __init__(self, workers: Workers, policy: Policy) -> None:
        self._workers = workers
        self._policy = policy

    def gather(self) -> None:
        """Gradients add up in float32 by themselves."""

    def clip(self, limit: float) -> float:
        return self._workers.ask("clip", limit)[0]

    def step(self, params: OptimParams) -> None:
        numbers = {"lr": params.learning_rate, "eps": params.eps, "weight_decay": params.weight_decay}
        betas = (float(params.beta1), float(params.beta2))
        self._workers.ask("optimizer_step", {name: float(n) for name, n in numbers.items()} | {"betas": betas})
        self._bring()

    def weights(self) -> list[Tensor]:
        """Weights stay with the workers."""
        self._workers.ask("keep_weights")
        return []

    def halve_step(self, before: Sequence[Tensor]) -> None:
        self._workers.ask("halve_step")
        self._bring()

    def zero(self) -> None:
        self._workers.ask("optimizer_zero_grad")

    def state(self) -> dict[str, Any]:
        """With the workers' float32 weights where the policy's own are short, as the own learner writes its copies."""
        state, parameters = self._workers.ask("optimizer_state")[0], self._policy.trainable()
        if not any(map(is_short, parameters)):
            return state
        pairs = zip(parameters, self._whole(), strict=True)
        return {**state, "copies": [weights for parameter, weights in pairs if is_short(parameter)]}

    def load(self, state: Any) -> None:
        parameters, copies = self._policy.trainable(), list(state["copies"])
        if sum(map(is_short, parameters)) != len(copies):
            raise ValueError("it was trained in another dtype")
        problem = self._workers.ask("load_optimizer", {**state, "copies": []})[0]
        if problem is not None:
            raise ValueError(problem)
        if copies:
            hand_over(self._workers, self._policy, [copies.pop(0) if is_short(p) else p for p in parameters])

    def _bring(self) -> None:
        with torch.no_grad():
            for ours, theirs in zip(self._policy.trainable(), self._whole(), strict=True):
                ours.copy_(theirs)

    def _whole(self) -> Iterator[Tensor]:
        """The workers' weights, one after the other."""
        for first, last in stretches([p.numel() for p in self._policy.trainable()]):
            yield from self._workers.ask("weights", first, last)[0]


def hand_over(workers: Workers, policy: Policy, weights: Sequence[Tensor]) -> None:
    """The workers' weights are these, of the policy's trained tensors, from now on."""
    names = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    for first, last in stretches([weight.numel() for weight in weights]):
        stretch = zip(names[first:last], weights[first:last], strict=True)
        workers.ask("take", first, {name: weight.detach() for name, weight in stretch})


def stretches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a list of tensors so that each part has about `AT_ONCE` numbers."""
    first, numbers = 0, 0
    for last, size in enumerate(sizes):
        if numbers and numbers + size > AT_ONCE:
            yield first, last
            first, numbers = last, 0
        numbers += size
    yield first, len(sizes)


def refuse_filters(batch: PackedBatch) -> None:
    if batch.kept_EK is not None and bool((batch.kept_EK >= 0).any()):
        raise ConfigError(
            "verl's engine takes log-probs over the whole vocabulary, and these tokens were drawn from a part of it. "
            "Set top_p=1, top_k=0 and min_p=0, or learner='own'."
        )
