"""The critic: a small value head on the policy's hidden states, with an optimiser of its own.

It reads the hidden states without sending gradients into the policy, so one model in memory serves both. It learns in
its own time: a step's states are kept, and gone through several times when the policy makes its step, which costs no
pass of the model.

Shape letters: E states, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MOST_STATES = 1 << 15
"""How many states of one step are kept; of more, some by chance."""
MINIBATCH = 256


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
        self._states: list[tuple[Tensor, Tensor]] = []
        self._steps = 0

    def values(self, hidden_EH: Tensor) -> Tensor:
        """Expected return, shape [E]."""
        return self._net(hidden_EH.float())[:, 0]

    def keep(self, hidden_EH: Tensor, returns_E: Tensor) -> None:
        """Take states to learn from at the next step; those whose return is NaN are never asked for and left out."""
        asked_E = returns_E.isfinite()
        hidden_EH, returns_E = hidden_EH.detach()[asked_E], returns_E[asked_E]
        room = max(MOST_STATES - sum(len(r) for _, r in self._states), 0)
        if len(returns_E) > room:
            chosen_E = torch.randperm(len(returns_E), generator=self._chance())[:room].to(returns_E.device)
            hidden_EH, returns_E = hidden_EH[chosen_E], returns_E[chosen_E]
        self._states.append((hidden_EH, returns_E))

    def step(self, learning_rate: float, epochs: int = 1, clip: float | None = None) -> dict[str, float]:
        """Go through the states so many times in minibatches, minimise the squared error, and forget them.

        `clip` bounds how far a prediction may move in a step, as PPO's reference implementation does: the error is the
        larger one of max((V − R)², (V_old + clamp(V − V_old, ±clip) − R)²).
        """
        if not self._states:
            return {}
        hidden_EH, returns_E = (torch.cat(parts) for parts in zip(*self._states, strict=True))
        self._states.clear()
        if not len(returns_E):
            return {}
        with torch.no_grad():
            old_E = self.values(hidden_EH)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        chance = self._chance()
        for _ in range(epochs):
            for some in torch.randperm(len(returns_E), generator=chance).to(returns_E.device).split(MINIBATCH):
                value_error(self.values(hidden_EH[some]), old_E[some], returns_E[some], clip).backward()
                nn.utils.clip_grad_norm_(self._net.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        return {"critic_loss": (old_E - returns_E).square().mean().item()}

    def state(self) -> dict[str, Any]:
        return {"net": self._net.state_dict(), "optimizer": self._optimizer.state_dict(), "steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        self._net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps = state.get("steps", 0)

    def _chance(self) -> torch.Generator:
        """A resumed run draws what the other would have drawn."""
        return torch.Generator().manual_seed(self._steps)


def value_error(values_E: Tensor, old_E: Tensor, returns_E: Tensor, clip: float | None) -> Tensor:
    """Mean squared error of values, with PPO's value clip if there is one."""
    error_E = (values_E - returns_E).square()
    if clip is not None:
        bounded_E = old_E + (values_E - old_E).clamp(-clip, clip)
        error_E = torch.maximum(error_E, (bounded_E - returns_E).square())
    return error_E.mean()
