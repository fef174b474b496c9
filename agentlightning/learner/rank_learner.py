"""The torch learner over several ranks: the model sharded by FSDP2, each rank a part of every batch. Synchronous.

All ranks do the same verbs in the same order with the same arguments (their driver sees to that), each computes its
part, and all have the results. Parameters, gradients and the optimiser's state are spread over the ranks (Zhao et al.,
PyTorch FSDP, arXiv 2304.11277; Rajbhandari et al., ZeRO, arXiv 1910.02054, stage 3): a layer's weights are whole while
it computes. The numbers are those of one rank but for the order of sums.

With `tensor_parallel` so many neighbouring ranks compute each part together, each with some of every layer's heads and
of its MLP's width, while weights are spread over all ranks. Which linear layers are cut, and which way, is in a model's
own plan (transformers' `base_model_tp_plan`; Shoeybi et al., Megatron-LM, arXiv 1909.08053): "colwise" ones have some
of their outputs on each rank, the "rowwise" ones behind them some of their inputs, and the results are summed over the
ranks. Each rank computes everything else alike.

Shape letters: E loss entries.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.errors import ConfigError, ModelError
from agentlightning.learner.base import LearnerOptions, LossConfig, PackedBatch, PassResult
from agentlightning.learner.catalog import compares_siblings
from agentlightning.learner.forward import Scores, decoder_of, why_no_tree
from agentlightning.learner.optimizer import whole
from agentlightning.learner.packing import RankPart, split_batch
from agentlightning.learner.policy import Policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.trial import measure, relative_error, tolerance, try_trees
from agentlightning.types.call import Float32Array

logger = logging.getLogger(__name__)


class Sharded(nn.Module):
    """The root of a sharded model: what is computed in its forward finds embeddings and output layer whole."""

    def __init__(self, model: PreTrainedModel, ranks: int, tensor_parallel: int) -> None:
        super().__init__()
        self.model = model
        meshes = init_device_mesh(
            model.device.type, (ranks // tensor_parallel, tensor_parallel), mesh_dim_names=("parts", "layers")
        )
        if tensor_parallel > 1:
            # Sums over both dimensions are two operations; each rank would say that one were faster.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            _spread(model, meshes["layers"])
        mesh = meshes["parts"]
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                fully_shard(layer, mesh=mesh)
        # Not the default for a root: weights of before a step would stay whole, and be computed with after it.
        fully_shard(self, mesh=mesh, reshard_after_forward=True)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # The loss is a sum over the entries of all ranks, not a mean of theirs.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def forward(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Tensors come out in a tuple, where FSDP finds them and prepares their gradients."""
        return work()


class RankLearner(TorchLearner):
    """`TorchLearner` on this rank of the process group. No critic, no rows."""

    def __init__(self, policy: Policy, options: LearnerOptions, *, tensor_parallel: int = 1) -> None:
        """Shards the policy's model: from now on it computes in here only. Of so many ranks as `tensor_parallel` each
        has some of every layer."""
        if options.critic:
            raise ConfigError("A critic is trained on one rank: leave `ranks` out, or take credit='broadcast'.")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._tensor_parallel = tensor_parallel
        _check_parallel(policy.model, tensor_parallel)
        reason = why_no_tree(policy.model, 1)
        if reason is None:
            options, reason = try_trees(policy.model, options)
        if reason is not None:
            raise ModelError(_rows(reason))
        if policy.peft is not None and options.reference:
            if (Path(options.reference) / "adapter_config.json").is_file():
                policy.add_reference(options.reference)
            options = msgspec.structs.replace(options, reference=None)
        expected = None if tensor_parallel == 1 else measure(policy.model, options)
        self._sharded = Sharded(policy.model, self.ranks, tensor_parallel)
        super().__init__(policy, options)
        self._tried = True
        if expected is not None:
            self._compare(*expected)

    def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        part = self._part(batch)
        return self._gathered(super().forward(part.batch, reference=reference), part, len(batch.source_E))[0]

    def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> PassResult:
        part = self._part(batch, whole_groups=compares_siblings(loss.name))
        result = super().forward_backward(part.batch, loss)
        self._passed[-1] = batch  # and not this rank's part of it
        names, count = sorted(result.metrics), len(part.entries)
        sums = [result.loss, *(result.metrics[name] * count for name in names)]
        logprobs, total = self._gathered(result.logprobs, part, len(batch.source_E), sums)
        return PassResult(
            loss=total[0],
            logprobs=logprobs,
            tree_tokens=len(batch.ids_N),
            metrics={name: value / len(batch.source_E) for name, value in zip(names, total[1:], strict=True)},
        )

    def copy_to(self, parameters: Sequence[nn.Parameter] | None) -> None:
        """Write the trained weights into those of a whole model; None: help another rank to do so."""
        mine = self.policy.trainable()
        with torch.no_grad():
            for number, sharded in enumerate(mine):
                weights = whole(sharded)
                if parameters is not None:
                    parameters[number].copy_(weights)

    def _compare(self, logprobs_E: Tensor, norms_P: Tensor) -> None:
        """Raises `ModelError` where ranks that share rows compute something else than the whole model did: a part
        that its plan forgets."""
        found_E, found_P = measure(self.policy.model, self.options, self._inside)
        found_P = found_P / (self.ranks // self._tensor_parallel)  # each part has computed the same
        error_P = (found_P - norms_P).abs() / norms_P.clamp(min=1e-3 * float(norms_P.max()))
        error = torch.stack([torch.tensor(relative_error(found_E, logprobs_E)), error_P.max()]).double()
        dist.all_reduce(error, dist.ReduceOp.MAX)
        if not float(error.max()) <= tolerance(self.policy.model):
            raise ModelError(
                f"{type(self.policy.model).__name__} cannot be computed with tensor_parallel={self._tensor_parallel}: "
                f"log-probs differ by {error[0]:.1g} and gradients by {error[1]:.1g} (relative) from those of one "
                "rank. Leave tensor_parallel out."
            )

    def _part(self, batch: PackedBatch, *, whole_groups: bool = False) -> RankPart:
        parts = split_batch(batch, self.ranks // self._tensor_parallel, whole_groups=whole_groups)
        return parts[self.rank // self._tensor_parallel]

    def _gathered(
        self, mine_E: Float32Array, part: RankPart, count: int, sums: Sequence[float] = ()
    ) -> tuple[Float32Array, list[float]]:
        """Every entry's value, and sums over the parts: of those that compute one together, the first says it."""
        together = torch.zeros(count + len(sums), dtype=torch.float64)
        if self.rank % self._tensor_parallel == 0:
            together[torch.from_numpy(part.entries)] = torch.from_numpy(mine_E[: len(part.entries)].astype(np.float64))
            together[count:] = torch.tensor(sums, dtype=torch.float64)
        dist.all_reduce(together)
        return together[:count].numpy().astype(np.float32), together[count:].tolist()

    def _choose_passes(self, batch: PackedBatch) -> None:
        reason = why_no_tree(self.policy.model, int(batch.positions_N.max()) + 1)
        if reason is not None:
            raise ModelError(_rows(reason))

    def _inside(self, work: Callable[[], Scores]) -> Scores:
        def tensors() -> tuple[Tensor, ...]:
            found = work()
            return found.logprobs_E, found.entropy_E, found.hidden_EH

        return Scores(*self._sharded(tensors))

    def _head(self, hidden_EH: Tensor, probe: PackedBatch) -> Tensor:
        above = super()._head
        return self._sharded(lambda: (above(hidden_EH, probe),))[0]

    def _divergence(self, probes: Sequence[PackedBatch], old_EV: Tensor) -> float:
        """All ranks compute it, and all go by the first one's: no rounding may lead them apart."""
        found = torch.tensor([super()._divergence(probes, old_EV)], dtype=torch.float64)
        dist.broadcast(found, 0)
        return float(found[0])


def _rows(reason: str) -> str:
    return (
        f"This model cannot be trained over several ranks, which compute trees only: {reason.rstrip('.')}. Set ranks=1."
    )


_BY_HEAD = "replicated_with_grad_allreduce"
"""The style of a norm that is the same for all heads. Each rank computes it for its own heads; gradients are summed."""
_STYLES: Mapping[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    _BY_HEAD: SequenceParallel(sequence_dim=2, use_local_output=True),
}
_ADAPTERS = {"colwise": "lora_B", "rowwise": "lora_A"}
"""The half of a low-rank adapter that is cut like the layer it is on; the other half is whole on each rank."""


def _check_parallel(model: PreTrainedModel, ranks: int) -> None:
    """Raises ConfigError where so many ranks cannot share a model's layers."""
    if ranks > 1 and (reason := _why_not(model, ranks)):
        raise ConfigError(f"tensor_parallel={ranks} does not go with this model: {reason}. Leave it out.")


def _spread(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut the model's layers, which have been checked, over the ranks of a mesh; each keeps its share of their
    parameters.
    """
    decoder, plan = decoder_of(model), _plan(model)
    for name, module in list(decoder.named_modules()):
        style = next((style for layers, style in plan.items() if fnmatch.fnmatchcase(name, layers)), None)
        if style is None:
            continue
        if isinstance(base := getattr(module, "base_layer", None), nn.Module):
            _cut(base, mesh, style)
            for half in getattr(module, _ADAPTERS.get(style, ""), {}).values():
                _cut(half, mesh, style)
        else:
            _cut(module, mesh, style)


def _why_not(model: PreTrainedModel, ranks: int) -> str | None:
    config = model.config.get_text_config()
    plan = _plan(model)
    if not plan:
        return f"{type(model).__name__} has no plan for it"
    if unknown := sorted(set(plan.values()) - set(_STYLES)):
        return f"its layers are to be cut in a way that is not known here ({', '.join(unknown)})"
    heads = (config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if "colwise" in plan.values() and any(number % ranks for number in heads):
        return f"its {heads[0]} heads, and {heads[1]} of keys and values, are not multiples of {ranks}"
    if any(getattr(module, "lora_magnitude_vector", None) for module in model.modules()):
        return "its adapter is a DoRA"
    return None


def _plan(model: PreTrainedModel) -> Mapping[str, str]:
    return getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}


def _cut(module: nn.Module, mesh: DeviceMesh, style: str) -> None:
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    parallelize_module(module, mesh, _STYLES[style], src_data_rank=None)  # all ranks have loaded the same
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name])
