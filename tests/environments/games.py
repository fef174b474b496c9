"""Small environments of Gymnasium for the tests."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces


class Echo(gymnasium.Env[str, Any]):
    """Say the number that you see."""

    def __init__(self, numbers: int = 10) -> None:
        self.action_space = spaces.Discrete(numbers)
        self.observation_space = spaces.Text(max_length=100)
        self._numbers, self._number = numbers, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(self._numbers))
        return f"The number is {self._number}.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "Done.", float(action == self._number), True, False, {}


class Spelling(gymnasium.Env[str, str]):
    """Say the letters of a word one after another; each right one earns 0.5, and a wrong one ends it."""

    def __init__(self, word: str = "ab") -> None:
        self.action_space = spaces.Text(max_length=10)
        self.observation_space = spaces.Text(max_length=100)
        self._word, self._at = word, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._at = 0
        return f"Spell {self._word}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == self._word[self._at]
        self._at += right
        return f"{self._at} letters.", 0.5 * right, not right or self._at == len(self._word), False, {}


class Endless(gymnasium.Env[str, Any]):
    """Never ends, and breaks where it is told to."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Text(max_length=100)
        self._breaks_at, self._steps = breaks_at, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "Go on.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        if self._steps == self._breaks_at:
            raise RuntimeError("it broke")
        return "Go on.", 0.0, False, False, {}


for _name, _kind in {"Echo-v0": Echo, "Spelling-v0": Spelling, "Endless-v0": Endless}.items():
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point=_kind)
