"""The critic: a small value head on the policy's hidden states, with an optimiser of its own.

It reads the hidden states without sending gradients into the policy, so one model in memory serves both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Critic:
    """Predicts the return from each state. Its first prediction is 0 everywhere."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        generator_state = torch.random.get_rng_state()
        torch.manual_seed(0)
        self._net = nn.Sequential(
            nn.LayerNorm(hidden_size), nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.Linear(hidden_size, 1)
        )
        torch.random.set_rng_state(generator_state)
        nn.init.zeros_(self._net[-1].weight)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(self._net[-1].bias)  # pyright: ignore[reportArgumentType]
        self._net.to(device)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=0.0, weight_decay=0.0)

    def values(self, hidden_EH: Tensor) -> Tensor:
        """Expected return, shape [E]."""
        return self._net(hidden_EH.float())[:, 0]

    def learn(self, hidden_EH: Tensor, returns_E: Tensor, weights_E: Tensor) -> dict[str, float]:
        """Add the gradients of the weighted squared error."""
        values_E = self.values(hidden_EH)
        loss = (weights_E * (values_E - returns_E).square()).sum()
        loss.backward()
        with torch.no_grad():
            spread = returns_E.var(unbiased=False)
            unexplained = (returns_E - values_E).var(unbiased=False)
            explained = float(1 - unexplained / spread) if float(spread) > 1e-8 else 0.0
        return {"critic_loss": loss.item(), "explained_variance": explained}

    def step(self, learning_rate: float) -> None:
        """One optimiser step; zeroes the gradients."""
        nn.utils.clip_grad_norm_(self._net.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {"net": self._net.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])
