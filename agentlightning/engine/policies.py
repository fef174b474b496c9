"""The policies that one engine samples from: which rows of a pass are whose, with which weight version, by which draws.

A policy that is alone is the model as it is. Several are adapters on it: a pass computes rows of all of them at once
where their adapters allow it, and else one policy after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np

from agentlightning.engine.events import POLICY
from agentlightning.errors import ConfigError

_GONE = ""
"""In place of the name of a policy that was removed."""


class Adapters(Protocol):
    """What the layers of a model compute with."""

    names: list[str]
    """Of the policies."""

    def use(self, name: str) -> None:
        """Compute with this policy's adapter from now on."""
        ...

    def mixes(self, name: str) -> bool:
        """Whether rows of this policy can be in a pass with rows of others."""
        ...

    def rows(self, names: Sequence[str], which: np.ndarray) -> AbstractContextManager[None]:
        """Within the block the model computes row r of a pass for the policy `names[which[r]]`."""
        ...

    def changed(self) -> None:
        """Weights of adapters are others now."""
        ...


class Policies:
    """Policies by number, in the order of their names."""

    def __init__(self, adapters: Adapters | None, version: int, seed: int | None) -> None:
        """Without adapters there is one policy. `seed` is for requests that bring none; each policy draws by itself."""
        self.names = [POLICY] if adapters is None else [*adapters.names]
        self.versions = [version] * len(self.names)
        self.mixes = True
        """Whether a pass computes its rows together."""
        self._adapters = adapters
        self._seed = seed
        self._random = [np.random.default_rng(seed) for _ in self.names]

    def add(self, name: str, version: int) -> None:
        """One more policy, with a number of its own: that of one that was removed, or the next."""
        if name in self.names:
            raise ConfigError(f"There is a policy '{name}' already.")
        if _GONE not in self.names:
            self.names.append(_GONE)
            self.versions.append(0)
            self._random.append(np.random.default_rng())
        number = self.names.index(_GONE)
        self.names[number], self.versions[number] = name, version
        self._random[number] = np.random.default_rng(self._seed)

    def remove(self, name: str) -> None:
        """The others keep their numbers."""
        self.names[self.find(name)] = _GONE

    def find(self, name: str) -> int:
        """The number of a policy. Raises `ConfigError` if there is none of this name."""
        if name not in self.names:
            raise ConfigError(f"There is no policy '{name}' here; there are: {', '.join(filter(None, self.names))}.")
        return self.names.index(name)

    def among(self, numbers: np.ndarray, names: Collection[str]) -> np.ndarray:
        """Which of these numbers are of policies with these names."""
        return np.isin(numbers, [self.find(name) for name in names])

    def changed(self, name: str, version: int) -> None:
        """A policy has other weights now."""
        self.versions[self.find(name)] = version
        if self._adapters is not None:
            self._adapters.changed()

    def reseed(self, name: str, seed: int) -> None:
        """Draw for this policy as a fresh engine with this seed would."""
        self._random[self.find(name)] = np.random.default_rng(seed)

    def draws(self, numbers: np.ndarray) -> np.ndarray:
        """A number from 0 to 1 for each row of a pass, given whose the rows are."""
        if len(self.names) == 1:
            return self._random[0].random(len(numbers))
        drawn = np.empty(len(numbers))
        for number in np.unique(numbers):
            mine = numbers == number
            drawn[mine] = self._random[number].random(int(mine.sum()))
        return drawn

    def passes(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Indices of rows for the passes of the model that they take, given whose each row is: one where their adapters
        mix."""
        everything = np.arange(len(numbers))
        if self._adapters is None or (numbers == numbers[0]).all():
            return [everything]
        present = np.unique(numbers).tolist()
        mixed = [n for n in present if self.mixes and self._adapters.mixes(self.names[n])]
        groups = [mixed, *([n] for n in present if n not in mixed)]
        return [everything[np.isin(numbers, group)] for group in groups if group]

    def computing(self, numbers: np.ndarray) -> AbstractContextManager[None]:
        """Within the block each row of the model's pass is computed for the policy that it is of."""
        if self._adapters is None:
            return nullcontext()
        if (numbers != numbers[0]).any():
            return self._adapters.rows(self.names, numbers)
        self._adapters.use(self.names[numbers[0]])
        return nullcontext()
