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


class Wrong(gymnasium.Env[Any, Any]):
    """Returns what no environment should, in one of these ways."""

    WAYS = ("old reset", "old step", "no reward", "nan", "bytes")

    def __init__(self, way: str) -> None:
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Text(max_length=100)
        self._way = way

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        seen: Any = b"Go on." if self._way == "bytes" else "Go on."
        return seen if self._way == "old reset" else (seen, {})

    def step(self, action: int) -> Any:
        reward = {"no reward": None, "nan": float("nan")}.get(self._way, 1.0)
        return ("Done.", reward, True, {}) if self._way == "old step" else ("Done.", reward, True, False, {})


if "Wrong-v0" not in gymnasium.registry:
    gymnasium.register("Wrong-v0", entry_point=f"{__name__}:Wrong", disable_env_checker=True)
for _name, _kind in {"Echo-v0": Echo, "Spelling-v0": Spelling, "Endless-v0": Endless}.items():
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point=_kind)
