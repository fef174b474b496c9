"""The optimiser of a policy's weights: AdamW in float32 at least, whatever the weights are kept in.

bfloat16 has three decimal digits: a usual step is less than half of the last one, so weights that were stepped directly
would mostly stay as they are, and gradients added up over many passes would lose the small ones. So short types are
trained through float32 copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from agentlightning.learner.base import OptimParams


class Optimizer:
    """Owns the gradients between two steps and the copies that are stepped."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._stepped: list[Tensor] = [
            p if p.dtype.itemsize >= 4 else nn.Parameter(p.detach().float()) for p in parameters
        ]
        self._adamw = torch.optim.AdamW(self._stepped, lr=0.0)

    @property
    def _copied(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, s) for p, s in zip(self._parameters, self._stepped, strict=True) if p is not s]

    def gather(self) -> None:
        """Take over the gradients of a pass, so that the next pass's are added up in float32. Call after each."""
        for parameter, stepped in self._copied:
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                stepped.grad = gradient if stepped.grad is None else stepped.grad.add_(gradient)
                parameter.grad = None

    def clip(self, limit: float) -> float:
        """Scale the gradients down to this norm (0: leave them); the norm before."""
        return float(nn.utils.clip_grad_norm_(self._stepped, limit or float("inf")))

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

    def zero(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """For `load`; the copies belong to it."""
        return {"adamw": self._adamw.state_dict(), "copies": [s.detach() for _, s in self._copied]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of other parameters."""
        self._adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for (_, stepped), saved in zip(self._copied, state["copies"], strict=True):
                stepped.copy_(saved)
