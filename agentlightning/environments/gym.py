"""`gym:ID`: an environment of Gymnasium, played in words by the model itself.

The model reads each observation as a message and answers with an action. An episode is a rollout, and its reward is
the sum of the rewards.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from agentlightning.environments.base import Environment, Probe
from agentlightning.environments.playing import ActionResult, PlayedEpisode, Player, last_number, seeds_of
from agentlightning.errors import AgentError, ConfigError, ExecutorError, missing_extra
from agentlightning.types.reward import checked_reward

_COLOURED = re.compile(r"\x1b\[(?:[01]?;)?(?P<code>[34][0-7])(?:;[01])?m(?P<text>[^\x1b]*)\x1b\[0?m")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class GymEnvironment(Environment):
    """An environment of Gymnasium with actions that can be said: one of several, a number of a range, or a text."""

    summary = "an environment of Gymnasium, played in words: text, or one of several actions"
    tested = "gymnasium 1.4.0"

    def __init__(
        self,
        name: str,
        *,
        tasks: int = 64,
        val_tasks: int = 0,
        first_seed: int = 0,
        actions: Sequence[str] | Mapping[str, int] | None = None,
        instructions: str | None = None,
        remembers: bool = True,
        answer_tokens: int | None = None,
        **arguments: Any,
    ) -> None:
        """
        Args:
            name: An id of Gymnasium's registry; `module:ID` imports the module that registers it.
            tasks: How many there are. A task is a seed, which decides how its episode begins.
            val_tasks: How many further ones there are to validate on.
            first_seed: The seed of the first task.
            actions: Names for the numbers of a discrete action space: a list from its first number on, or a mapping.
                Without them the model answers with the number.
            instructions: What the model is told first; what the actions are if not given.
            remembers: Whether the model sees the episode so far, or the newest observation alone.
            answer_tokens: So many tokens an answer may have; what the run's settings say if not given.
            arguments: Further arguments of `gymnasium.make`, such as `is_slippery=False`.
        """
        self._seeds, self._val_seeds = seeds_of("gym", tasks, val_tasks, first_seed)
        self.name = name
        module, _, self._name = name.rpartition(":")
        self._arguments = arguments
        _gymnasium()
        if module:
            _register(module)
        with closing(self.make()) as made:
            self._actions = _actions_of(made.action_space, actions, name)
        self.instructions = instructions or f"You act in {name}. {self._actions.how_to_answer}"
        self.agent = Player(f"gym:{name}", self._open, remembers=remembers, answer_tokens=answer_tokens)

    def tasks(self) -> Sequence[Any]:
        return [self._task(seed) for seed in self._seeds]

    def val_tasks(self) -> Sequence[Any]:
        return [self._task(seed) for seed in self._val_seeds]

    def _task(self, seed: int) -> Any:
        return {"environment": self.name, "seed": seed}

    async def probes(self, tasks: Sequence[Any]) -> AsyncIterator[Probe]:
        for task in tasks:
            began = time.perf_counter()
            reward, why = None, ""
            try:
                reward = await asyncio.to_thread(self._played_at_random, task["seed"])
            except Exception as error:  # it is somebody's environment, which is what is tried here
                why = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - began
            yield Probe(
                task=f"seed {task['seed']}",
                by="random actions",
                reward=reward,
                expected="a number",
                good=reward is not None,
                why=why,
                seconds=seconds,
            )

    @asynccontextmanager
    async def _open(self, seed: int) -> AsyncIterator[PlayedEpisode]:
        with closing(await asyncio.to_thread(self.make)) as made:
            yield _GymEpisode(self, made, seed)

    def make(self) -> Any:
        """The environment of one episode. Raises ConfigError where Gymnasium makes none."""
        gymnasium = _gymnasium()
        given = dict(self._arguments)
        try:
            modes = gymnasium.spec(self._name).kwargs.get("render_mode", given.get("render_mode"))
            if modes is None and "ansi" in _render_modes(gymnasium, self._name):
                given["render_mode"] = "ansi"
            return gymnasium.make(self._name, disable_env_checker=True, **given)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            words = str(error).rstrip(".")
            words += f"{'' if words.endswith('?') else '.'}{self._otherwise(error)}"
            raise ConfigError(f"gym:{self._name} cannot be made: {words}") from error

    def _otherwise(self, error: Exception) -> str:
        """What to give in place of a name or an option that Gymnasium does not know."""
        gymnasium = _gymnasium()
        if isinstance(error, gymnasium.error.NamespaceNotFound):
            module = "ale_py" if self._name.startswith("ALE/") else "MODULE"
            return f" A package registers its names when it is imported: gym:{module}:{self._name}"
        if type(error) in (gymnasium.error.Error, gymnasium.error.NameNotFound) and "Did you mean" not in str(error):
            registered = sorted(name for name in gymnasium.registry if name.startswith(f"{self._name}-v"))
            like = f" Did you mean {', '.join(f'gym:{name}' for name in registered)}?" if registered else ""
            return like or " All names:  python -c 'import gymnasium; gymnasium.pprint_registry()'"
        creator = gymnasium.spec(self._name).entry_point if isinstance(error, TypeError) else None
        if creator is None:
            return ""
        creator = gymnasium.envs.registration.load_env_creator(creator) if isinstance(creator, str) else creator
        ours = [p.name for p in inspect.signature(type(self)).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return f" Its options are {', '.join(inspect.signature(creator).parameters)}; those of gym: {', '.join(ours)}."

    def shown(self, made: Any, observation: Any) -> str:
        """An observation in words: itself, if it is a text, else what is drawn, else JSON."""
        if isinstance(observation, str):
            return observation
        drawn = made.render() if made.render_mode == "ansi" else None
        return _without_escapes(drawn).strip() if isinstance(drawn, str) else json.dumps(_plain(observation))

    def action(self, answer: str) -> Any:
        """The action that an answer names; None for none."""
        return self._actions.read(answer)

    @property
    def instruction(self) -> str:
        """What the actions are, in a sentence."""
        return self._actions.how_to_answer

    def _played_at_random(self, seed: int) -> float:
        with closing(self.make()) as made:
            seen, _ = _parts(made.reset(seed=seed), "reset", _RESET)
            self.shown(made, seen)
            made.action_space.seed(seed)
            total, ended, chosen = 0.0, False, random.Random(seed)
            limit = 10_000
            while not ended and (limit := limit - 1):
                action = self._actions.any(made.action_space, chosen)
                _, reward, terminated, truncated, _ = _parts(made.step(action), "step", _STEP)
                total, ended = total + checked_reward(reward), terminated or truncated
            if not ended:
                raise AgentError("An episode has not ended after 10,000 steps. Give max_episode_steps=….")
            return total


class _GymEpisode(PlayedEpisode):
    def __init__(self, environment: GymEnvironment, made: Any, seed: int) -> None:
        self._environment, self._made, self._seed = environment, made, seed
        self.instructions = environment.instructions

    async def begin(self) -> str:
        with _failures():
            observation, _ = _parts(await asyncio.to_thread(self._made.reset, seed=self._seed), "reset", _RESET)
            return self._environment.shown(self._made, observation)

    async def act(self, answer: str) -> ActionResult:
        action = self._environment.action(answer)
        if action is None:
            return ActionResult(f"That names no action. {self._environment.instruction}", 0.0, over=False, taken=False)
        with _failures():
            found = await asyncio.to_thread(self._made.step, action)
            observation, reward, terminated, truncated, _ = _parts(found, "step", _STEP)
            over = bool(terminated or truncated)
            seen = "" if over else self._environment.shown(self._made, observation)
            return ActionResult(seen, checked_reward(reward), over)


_RESET, _STEP = "observation, info", "observation, reward, terminated, truncated, info"


def _parts(found: Any, method: str, names: str) -> tuple[Any, ...]:
    """What an environment returns. Raises TypeError for what is not so many values, as of gym before 0.26."""
    if not isinstance(found, tuple) or len(found) != names.count(",") + 1:
        shown = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise TypeError(f"{method} returned {shown}; Gymnasium's returns {names}")
    return found


def _without_escapes(drawn: str) -> str:
    """A drawing in which colours are words: they may be all that says where the player stands."""
    found = 1
    while found:  # one in another, from the inmost
        drawn, found = _COLOURED.subn(lambda one: f"[{_COLOURS[int(one['code'][1])]}:{one['text']}]", drawn)
    return _ESCAPE.sub("", drawn)


@contextmanager
def _failures() -> Iterator[None]:
    """What fails in an environment is no fault of whoever plays it."""
    try:
        yield
    except Exception as error:  # somebody's code, which may raise anything
        raise ExecutorError(f"The environment failed: {type(error).__name__}: {error}") from error


class _Actions:
    """How an action is written and read."""

    how_to_answer: str
    """What they are, in a sentence."""

    def read(self, answer: str) -> Any:
        """The action that the answer names; None for none."""
        raise NotImplementedError

    def any(self, space: Any, chosen: random.Random) -> Any:
        """An action of the space at random."""
        return space.sample()


class _Texts(_Actions):
    how_to_answer = "Answer with your next words; they are taken as they are."

    def read(self, answer: str) -> str | None:
        return answer.strip() or None


class _Numbers(_Actions):
    """A number of a range: the last one that is named."""

    def __init__(self, start: int, count: int) -> None:
        self._range = range(start, start + count)
        self.how_to_answer = f"Answer with the number of your action, from {start} to {start + count - 1}."

    def read(self, answer: str) -> int | None:
        found = last_number(answer)
        return int(found) if found is not None and "." not in found and int(found) in self._range else None


class _Names(_Actions):
    """One of several names: the last one that occurs, as a word, in any case."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = {name.lower(): number for name, number in numbers.items()}
        longest = sorted(map(re.escape, self._numbers), key=len, reverse=True)
        self._name = re.compile(rf"(?<!\w)(?:{'|'.join(longest)})(?!\w)")
        self.how_to_answer = f"Answer with one of these actions: {', '.join(numbers)}."

    def read(self, answer: str) -> int | None:
        found = self._name.findall(answer.lower())
        return self._numbers[found[-1]] if found else None

    def any(self, space: Any, chosen: random.Random) -> int:
        return chosen.choice(list(self._numbers.values()))


def _actions_of(space: Any, names: Sequence[str] | Mapping[str, int] | None, name: str) -> _Actions:
    """How actions of this space are said. Raises ConfigError for a space whose actions cannot be."""
    spaces = _gymnasium().spaces
    if isinstance(space, spaces.Discrete):
        start, count = int(space.start), int(space.n)
        if names is None:
            return _Numbers(start, count)
        numbers = dict(names) if isinstance(names, Mapping) else {n: start + i for i, n in enumerate(names)}
        wrong = [n for n, number in numbers.items() if number not in range(start, start + count)]
        if wrong or not numbers or not all(map(str.strip, numbers)):
            raise ConfigError(
                f"gym:{name} has the actions {start} to {start + count - 1}: actions names {wrong or 'none'}."
            )
        return _Names(numbers)
    if names is not None:
        raise ConfigError(f"gym:{name} has no numbered actions, so that actions=… has no effect: leave it out.")
    if isinstance(space, spaces.Text):
        return _Texts()
    raise ConfigError(
        f"gym:{name} has actions that cannot be said in words ({space}). Wrap it in one with a Text or Discrete space."
    )


def _plain(value: Any) -> Any:
    """An observation as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _render_modes(gymnasium: Any, name: str) -> Sequence[str]:
    """In which ways it can be drawn."""
    entry = gymnasium.spec(name).entry_point
    kind = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(kind, "metadata", {}).get("render_modes", ())


def _register(module: str) -> None:
    """Import the module that registers an environment, from the folder that we are in, too."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(f"gym: cannot import {module!r}, which is to register the environment: {error}") from error


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise missing_extra("gym", "gymnasium") from error
    return gymnasium
