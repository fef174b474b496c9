"""The critic: what a policy's hidden states say of the return, by ridge regression on whitened states.

It reads the hidden states without sending gradients into the policy, so one model in memory serves both. States of
different rollouts differ by little of their size, and in few directions. So they are whitened by their running mean and
covariance, with shrinkage, and the regression is solved in closed form when the policy makes its step: there is no rate
to choose, and nothing to go through several times. What is kept of the past are moments, and they fade as the policy
moves on.

Shape letters: E states, H hidden size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

FADING = 0.9
"""What a step leaves of the weight of those before it."""
SHRINKAGE = 0.01
"""Of the mean variance, added to the variance of each direction before states are divided by it."""
RIDGE, RIDGE_OF_FEW = 0.03, 0.5
"""The ridge on whitened states: the first, and the second over the number of steps that are remembered. One step has
many tokens, and few rollouts."""


@dataclass(slots=True)
class _Moments:
    """Of states and their returns, all centred."""

    weight: float
    mean_H: Tensor
    scatter_HH: Tensor
    """Σ (h − mean)(h − mean)ᵀ."""
    cross_H: Tensor
    """Σ (h − mean)(return − mean return)."""
    mean_return: float

    def joined(self, other: _Moments) -> _Moments:
        """Of both together (Chan, Golub & LeVeque, 1979)."""
        weight = self.weight + other.weight
        share = self.weight * other.weight / weight
        apart_H, apart = other.mean_H - self.mean_H, other.mean_return - self.mean_return
        return _Moments(
            weight,
            self.mean_H + apart_H * (other.weight / weight),
            self.scatter_HH + other.scatter_HH + torch.outer(apart_H, apart_H) * share,
            self.cross_H + other.cross_H + apart_H * (apart * share),
            self.mean_return + apart * other.weight / weight,
        )

    def faded(self, share: float) -> _Moments:
        return _Moments(
            self.weight * share, self.mean_H, self.scatter_HH * share, self.cross_H * share, self.mean_return
        )


class ValueHead:
    """Predicts the return from each state. Before its first step it predicts 0 everywhere."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "mps" else device  # float64 is needed
        self._known: _Moments | None = None
        self._new: _Moments | None = None
        self._error = 0.0
        """Sum of the squared errors of what is predicted now, of the new states."""
        self._remembered = 0.0
        """Steps, each with its faded weight."""
        self._slope_H = torch.zeros(hidden_size, dtype=torch.float64, device=self._device)
        self._offset = 0.0

    def values(self, hidden_EH: Tensor) -> Tensor:
        """Expected return, shape [E]."""
        return (hidden_EH.to(self._device, torch.float64) @ self._slope_H + self._offset).float()

    def keep(self, hidden_EH: Tensor, returns_E: Tensor) -> None:
        """Take states to learn from at the next step; those whose return is NaN are never asked for and left out."""
        valued_E = returns_E.isfinite()
        if not valued_E.any():
            return
        hidden_EH = hidden_EH.detach()[valued_E].to(self._device, torch.float64)
        returns_E = returns_E[valued_E].to(self._device, torch.float64)
        self._error += float((self.values(hidden_EH) - returns_E).square().sum())
        mean_H, mean_return = hidden_EH.mean(0), float(returns_E.mean())
        centred_EH, apart_E = hidden_EH - mean_H, returns_E - mean_return
        found = _Moments(len(returns_E), mean_H, centred_EH.T @ centred_EH, centred_EH.T @ apart_E, mean_return)
        self._new = found if self._new is None else self._new.joined(found)

    def step(self) -> dict[str, float]:
        """Learn the states that were kept: `critic_loss`, the mean squared error of what was predicted before."""
        if self._new is None:
            return {}
        loss = self._error / self._new.weight
        self._known = self._new if self._known is None else self._known.faded(FADING).joined(self._new)
        self._remembered = self._remembered * FADING + 1
        self._new, self._error = None, 0.0
        self._solve(self._known)
        return {"critic_loss": loss}

    def _solve(self, known: _Moments) -> None:
        """Minimise Σ (return − w·z)² + n ridge |w|² for whitened states z = (C + s I)^-½ (h − mean).

        s is the shrinkage times the mean variance tr C / H. In the states themselves it is the solution of
        (C + ridge (C + s I)) slope = cross / n.
        """
        covariance_HH = known.scatter_HH / known.weight
        ridge = RIDGE + RIDGE_OF_FEW / self._remembered
        floor = float(covariance_HH.diagonal().mean()) * SHRINKAGE
        if floor <= 0:
            self._slope_H = torch.zeros_like(self._slope_H)
        else:
            identity_HH = torch.eye(len(covariance_HH), dtype=torch.float64, device=self._device)
            system_HH = (1 + ridge) * covariance_HH + ridge * floor * identity_HH
            self._slope_H = torch.linalg.solve(system_HH, known.cross_H / known.weight)
        self._offset = known.mean_return - float(known.mean_H @ self._slope_H)

    def state(self) -> dict[str, Any]:
        return {"known": None if self._known is None else asdict(self._known), "remembered": self._remembered}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave. What older versions kept is of another critic, and left out."""
        if state.get("known") is None:
            return
        moved: dict[str, Any] = {
            k: v.to(self._device) if isinstance(v, Tensor) else v for k, v in state["known"].items()
        }
        self._known, self._remembered = _Moments(**moved), state["remembered"]
        self._solve(self._known)
