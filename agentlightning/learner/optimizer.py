"""The optimiser of a policy's weights: AdamW in float32 at least, whatever the weights are kept in.

bfloat16 has three decimal digits: a usual step is less than half of the last one, so weights that were stepped directly
would mostly stay as they are, and gradients added up over many passes would lose the small ones. So short types are
trained through float32 copies.

Copies may be kept on another device than the weights (`keep_on`): then gradients go there after each pass, the moments
are there, AdamW steps there, and what becomes of the weights comes back (Rajbhandari et al., ZeRO-Offload,
arXiv 2101.06840). A device that computes has room for weights and the gradients of one pass then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from agentlightning.learner.base import OptimParams


class Optimizer:
    """Owns the gradients between two steps and the copies that are stepped."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        adamw: torch.optim.Optimizer | None = None,
        *,
        keep_on: str | None = None,
    ) -> None:
        """`adamw`: one that there is, of these parameters in this order. `keep_on`: the device of the copies; None:
        that of the weights, and those that need no copies are stepped themselves."""
        self._parameters = parameters
        self._stepped: list[Tensor] = [_stepped(p, keep_on) for p in parameters]
        self._adamw = _adamw(self._stepped) if adamw is None else adamw

    @property
    def _copied(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, s) for p, s in zip(self._parameters, self._stepped, strict=True) if p is not s]

    def gather(self) -> None:
        """Take over the gradients of a pass, so that the next pass's are added up in float32. Call after each."""
        for parameter, stepped in self._copied:
            if parameter.grad is not None:
                gradient = parameter.grad.to(stepped.device, stepped.dtype)
                stepped.grad = gradient if stepped.grad is None else stepped.grad.add_(gradient)
                parameter.grad = None

    def clip(self, limit: float) -> float:
        """Scale the gradients down to this norm (0: leave them); the norm before."""
        most = limit or float("inf")
        by_mesh = _by_mesh([g for g in self.gradients() if g is not None])
        if len(by_mesh) < 2:
            return float(whole(nn.utils.clip_grad_norm_(self._stepped, most)))
        norm = nn.utils.get_total_norm([whole(nn.utils.get_total_norm(alike)) for alike in by_mesh.values()])
        nn.utils.clip_grads_with_norm_(self._stepped, most, norm, foreach=False)
        return float(norm)

    def step(self, params: OptimParams) -> None:
        """One AdamW step; zeroes the gradients."""
        for group in self._adamw.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self._adamw.step()
        self.zero()
        with torch.no_grad():
            for parameter, stepped in self._copied:
                parameter.copy_(stepped)

    def weights(self) -> list[Tensor]:
        """A copy of what is stepped, for `halve_step`."""
        return [s.detach().clone() for s in self._stepped]

    def halve_step(self, before: Sequence[Tensor]) -> None:
        """Take half of what became of the weights since then back. The moments stay."""
        with torch.no_grad():
            for stepped, earlier in zip(self._stepped, before, strict=True):
                stepped.lerp_(earlier, 0.5)
            for parameter, stepped in self._copied:
                parameter.copy_(stepped)

    def gradients(self) -> list[Tensor | None]:
        """Added up so far, of each tensor that is stepped; None where nothing reached it."""
        return [s.grad for s in self._stepped]

    def zero(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """For `load`; the copies belong to it. The same, however many ranks there are."""
        adamw = self._adamw.state_dict()
        moments = {n: {k: whole(v) for k, v in one.items()} for n, one in adamw["state"].items()}
        copies = [whole(s.detach()) for p, s in self._copied if is_short(p)]  # others are the weights themselves
        return {"adamw": {**adamw, "state": moments}, "copies": copies}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of other parameters."""
        adamw = state["adamw"]
        for number, one in adamw["state"].items():
            shapes = {tuple(one[name].shape) for name in ("exp_avg", "exp_avg_sq")}
            if shapes != {tuple(self._stepped[number].shape)} or not all(one[n].is_floating_point() for n in one):
                raise ValueError(f"moments of the shapes {sorted(shapes)}")
        moments = {n: {k: spread(v, self._stepped[n]) for k, v in one.items()} for n, one in adamw["state"].items()}
        self._adamw.load_state_dict({**adamw, "state": moments})
        with torch.no_grad():
            short = [stepped for parameter, stepped in self._copied if is_short(parameter)]
            for stepped, saved in zip(short, state["copies"], strict=True):
                stepped.copy_(spread(saved, stepped))
            for parameter, stepped in self._copied:
                if not is_short(parameter):
                    stepped.copy_(parameter)


def _by_mesh(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """By the ranks that they are spread over: what computes on several tensors at once takes those of the same."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return found


def _adamw(stepped: Sequence[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(stepped, lr=0.0, foreach=None if len(_by_mesh(stepped)) == 1 else False)


def optimizer_bytes(parameters: Sequence[Tensor], *, offload: bool = False) -> int:
    """What learning adds to these weights on their device: gradients, AdamW's two moments, and float32 copies of short
    types; with `offload` the gradients of one pass."""
    if offload:
        return sum(p.numel() * p.itemsize for p in parameters)
    return sum(p.numel() * (3 * p.itemsize if p.itemsize >= 4 else 16) for p in parameters)


def _stepped(parameter: nn.Parameter, keep_on: str | None) -> nn.Parameter:
    """What is stepped for a parameter: itself, or a copy."""
    if keep_on is None and not is_short(parameter):
        return parameter
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(keep_on or parameter.device, dtype, copy=True))


def is_short(parameter: Tensor) -> bool:
    """Whether it is trained through a copy in float32."""
    return parameter.dtype.itemsize < 4


def whole(value: Any) -> Any:
    """A tensor that is spread over ranks, as each of them would hold it alone; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def spread(value: Any, like: Tensor) -> Any:
    """A whole tensor spread as another of the same shape is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)
