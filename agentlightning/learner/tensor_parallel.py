"""Tensor parallelism: ranks that share a row, each with some of every layer's heads and of its MLP's width.

Which linear layers are cut, and which way, is in a model's own plan (transformers' `base_model_tp_plan`; Shoeybi et
al., Megatron-LM, arXiv 1909.08053): "colwise" ones have some of their outputs on each rank, the "rowwise" ones behind
them some of their inputs, and what they give is summed over the ranks. All else each rank computes alike.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError
from agentlightning.learner.forward import decoder_of

BY_HEAD = "replicated_with_grad_allreduce"
"""Of a norm that is the same for all heads, and that each rank computes for its own: gradients are summed."""
STYLES: Mapping[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    BY_HEAD: SequenceParallel(sequence_dim=2, use_local_output=True),
}
ADAPTERS = {"colwise": "lora_B", "rowwise": "lora_A"}
"""Which half of a low-rank adapter is cut as the layer that it is on is; the other one is whole on each rank."""


def check_parallel(model: PreTrainedModel, ranks: int) -> None:
    """Raises ConfigError where so many ranks cannot share a model's layers."""
    if ranks > 1 and (reason := _why_not(model, ranks)):
        raise ConfigError(f"tensor_parallel={ranks} does not go with this model: {reason}. Leave it out.")


def spread(model: PreTrainedModel, mesh: DeviceMesh) -> None:
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
            for half in getattr(module, ADAPTERS.get(style, ""), {}).values():
                _cut(half, mesh, style)
        else:
            _cut(module, mesh, style)


def _why_not(model: PreTrainedModel, ranks: int) -> str | None:
    config = model.config.get_text_config()
    plan = _plan(model)
    if not plan:
        return f"{type(model).__name__} has no plan for it"
    if unknown := sorted(set(plan.values()) - set(STYLES)):
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
    parallelize_module(module, mesh, STYLES[style], src_data_rank=None)  # all ranks have loaded the same
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name])
