"""Rewards as span attributes: how they are written, and how they are read back. Pure functions over spans.

A span carries rewards as `agentlightning.reward.{i}.name` and `agentlightning.reward.{i}.value`, numbered from 0; the
first one is the primary reward, the one that trains. Two other forms are read, and never written: what AgentOps'
operations gave as their output, and version 0.2's attribute `reward`.

A reward is a finite number within ±`largest_reward()`, wherever it enters, so that whatever adds rewards up stays
finite too. Code may give a bool, as a comparison does; in JSON and in attributes `true` and `"1"` are no numbers.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, SupportsFloat, TypeVar

from agentlightning.errors import RewardError, VariableError
from agentlightning.types.names import REWARD, REWARD_AGENT, REWARD_RESPONSE
from agentlightning.types.span import Attributes, Span

PRIMARY = "primary"
"""Name of a reward that was given without one."""
MOST_AGENTS = 1000
"""So many agents of an attempt are rewarded apart."""
MOST_CHARACTERS = 200
"""How much of its name distinguishes an agent from others."""
LARGEST = "AGL_LARGEST_REWARD"
"""The environment variable that sets another range; the same for runners, gateways, the store and the training."""
LARGEST_REWARD = 1e6
_SHOWN = 100
"""Characters of something that is no reward."""
AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")
"""Attributes that hold the output of an AgentOps operation; a reward is the JSON `{"type": "reward", "value": 0.5}`."""


def largest_reward() -> float:
    """By absolute value. Raises VariableError where the environment says nonsense."""
    text = os.environ.get(LARGEST, "")
    try:
        found = float(text) if text else LARGEST_REWARD
    except ValueError:
        found = math.nan
    if not 0 < found <= 1e100:
        raise VariableError(f"{LARGEST} is {text!r}; give a number above 0 and up to 1e100.")
    return found


def reward_attributes(
    value: SupportsFloat | Mapping[str, SupportsFloat], primary_key: str | None = None, *, is_json: bool = False
) -> Attributes:
    """The span attributes of a reward, or of several named ones of which `primary_key` trains.

    Raises RewardError when there is no primary reward to be found or when a value is none (in JSON, bools are none).
    """
    rewards = _by_name(value, primary_key)
    attributes: Attributes = {}
    for index, (name, number) in enumerate(rewards.items()):
        attributes[f"{REWARD}.{index}.name"] = name
        attributes[f"{REWARD}.{index}.value"] = checked_reward(number, name, is_json=is_json)
    return attributes


def _by_name(value: SupportsFloat | Mapping[str, SupportsFloat], primary_key: str | None) -> dict[str, SupportsFloat]:
    """All rewards by name, the primary one first."""
    if not isinstance(value, Mapping):
        return {primary_key or PRIMARY: value}
    if primary_key is None:
        if len(value) != 1:
            raise RewardError(
                f"A reward with the parts {sorted(value)} needs primary_key=…: the name of the one that trains."
            )
        primary_key = next(iter(value))
    if primary_key not in value:
        raise RewardError(f"The primary reward '{primary_key}' is not among the parts given: {sorted(value)}.")
    return {primary_key: value[primary_key], **{k: v for k, v in value.items() if k != primary_key}}


_TEXTS = ("final_output", "output", "raw", "content", "text")
"""What frameworks call the part of a result that has the answer's text."""


def _instead(value: Any) -> str:
    """What to return in place of something that is no number; nothing where that is not known."""
    if isinstance(value, Generator | AsyncGenerator):
        return "The function has `yield`: let it return the reward."
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[\d.]+\s*", value):
        return "Return float(…) of it."
    if isinstance(value, list) and len(value) == 1 and not hasattr(value[0], "content"):
        return "Give the number itself, without brackets."
    if isinstance(value, tuple) and any(isinstance(part, int | float) for part in value):
        return "Return the number alone; agl.emit_annotation({…}) records the rest."
    return f"Return what the answer is worth, for example float(task['answer'] {_where_its_text_is(value)})."


def _where_its_text_is(value: Any) -> str:
    """How what a framework returns is compared: by the part that has the answer's text."""
    if isinstance(value, list) and value and isinstance(getattr(value[-1], "content", None), str):
        return "in result['messages'][-1].content"
    parts = getattr(value, "__dict__", {})
    part = next((name for name in _TEXTS if isinstance(parts.get(name), str)), None)
    return f"in result.{part}" if part else "== answer"


def checked_reward(value: Any, name: str = PRIMARY, *, is_json: bool = False) -> float:
    """The reward as a float. Raises RewardError for anything that is not a finite number within the range."""
    if not isinstance(value, SupportsFloat) or (is_json and isinstance(value, bool)):
        shown = text if len(text := repr(value)) <= _SHOWN else f"{text[:_SHOWN]}…"
        of = "" if name == PRIMARY else f" '{name}'"
        words = f"The reward{of} must be a number, not {type(value).__name__}: {shown}."
        raise RewardError(f"{words} {_instead(value)}".rstrip())
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # arrays and tensors, of more than one number or on their way
        raise RewardError(
            f"The reward '{name}' must be a number, not {type(value).__name__}: {error}. For an array take .item() or "
            ".mean()."
        ) from error
    if not abs(number) <= (largest := largest_reward()):
        raise RewardError(
            f"The reward '{name}' is {number:g}; a reward must be a finite number from -{largest:g} to {largest:g} "
            f"({LARGEST} sets another range)."
        )
    return number


def reward_error(name: str, attributes: Attributes) -> str | None:
    """What is wrong with the rewards that a span's attributes hold; None where all are good, or there are none."""
    for index in count():
        key = f"{REWARD}.{index}.value"
        given = in_one_form(name, attributes) if index == 0 else attributes
        if key not in given:
            return None
        try:
            checked_reward(given[key], str(given.get(f"{REWARD}.{index}.name", index))[:MOST_CHARACTERS], is_json=True)
        except RewardError as error:
            return str(error)
    return None


def is_reward_span(span: Span) -> bool:
    """Does this span carry a reward?"""
    return get_reward_value(span) is not None


def get_reward_value(span: Span) -> float | None:
    """The primary reward of a span, None if it carries none."""
    return _finite_at(in_one_form(span.name, span.attributes), 0)


def in_one_form(name: str, attributes: Attributes) -> Attributes:
    """The attributes of a span, with a reward in one of the other forms written as it is today."""
    if f"{REWARD}.0.value" in attributes:
        return attributes
    given = attributes.get("reward") if name == REWARD else None
    for key in AGENTOPS_OUTPUTS:
        if given is None and key in attributes:
            given = _of_output(attributes[key])
    if given is None:
        return attributes
    return {**attributes, f"{REWARD}.0.name": PRIMARY, f"{REWARD}.0.value": given}


def _of_output(output: Any) -> Any:
    """The reward that an operation of AgentOps gave; None for any other output."""
    try:
        value = json.loads(output) if isinstance(output, str) else output
    except (ValueError, RecursionError):
        return None
    return value.get("value") if isinstance(value, Mapping) and value.get("type") == "reward" else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _finite_at(attributes: Attributes, index: int) -> float | None:
    """A reward as it was written; what `checked_reward` would refuse is none (spans may come from anywhere)."""
    given = attributes.get(f"{REWARD}.{index}.value")
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= largest_reward():
        return None
    return float(given)


def get_rewards(span: Span) -> dict[str, float]:
    """All rewards of a span by name, the primary one first."""
    return _parts(in_one_form(span.name, span.attributes))


def _parts(attributes: Attributes) -> dict[str, float]:
    rewards: dict[str, float] = {}
    for index in count():
        value = _finite_at(attributes, index)
        if value is None:
            break
        rewards[str(attributes.get(f"{REWARD}.{index}.name", index))] = value
    return rewards


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans that carry a reward, in the order given."""
    return [span for span in spans if is_reward_span(span)]


@dataclass(frozen=True, slots=True)
class GivenReward:
    """One reward of an attempt, as its span says it."""

    value: float
    """The number that trains: the primary one, or the weighted sum of its parts."""
    agent: str | None = None
    """The agent that it is for; None: everybody."""
    named: bool = False
    """Whether it names the model call that it is for."""


def whole_parts(spans: Iterable[Span]) -> dict[str, float]:
    """The parts, by name, of the last reward that an attempt as a whole was given for everybody; {} without one."""
    found = [
        one
        for one in find_reward_spans(spans)
        if not one.attributes.get(REWARD_AGENT) and not names_call(one.attributes)
    ]
    return get_rewards(found[-1]) if found else {}


def given_reward(attributes: Attributes, weights: Mapping[str, float] | None = None) -> GivenReward | None:
    """The reward in a span's attributes, in today's form (`in_one_form`); None if there is none.

    One of several parts is its primary part, or, with `weights`, the weighted sum of those that have a weight.
    """
    value = _finite_at(attributes, 0)
    if value is None:
        return None
    parts = _parts(attributes) if weights and has_parts(attributes) else {}
    if weights and weights.keys() & parts.keys():
        value = sum(weights.get(name, 0.0) * part for name, part in parts.items())
    agent = attributes.get(REWARD_AGENT)
    return GivenReward(value, None if agent in (None, "") else str(agent), names_call(attributes))


def names_call(attributes: Attributes) -> bool:
    """Whether a reward says itself which model call it is for."""
    return attributes.get(REWARD_RESPONSE) not in (None, "")


def weights_in(settings: Mapping[str, Any]) -> Mapping[str, float]:
    """The weights of parts of rewards in the settings of a run; none where it has none."""
    found = settings.get("reward_weights")
    given: Mapping[Any, Any] = found if isinstance(found, Mapping) else {}
    return {str(name): float(weight) for name, weight in given.items() if isinstance(weight, int | float)}


def has_parts(attributes: Attributes) -> bool:
    """Whether a reward was given by the names of its parts, and not as a mere number."""
    return f"{REWARD}.1.value" in attributes or attributes.get(f"{REWARD}.0.name", PRIMARY) != PRIMARY


# ---- which of a rollout's rewards count ------------------------------------------------------------------------------


class Rewarding(Protocol):
    """What is asked of a reward to know whether it counts."""

    @property
    def agent(self) -> str | None:
        """The agent that it is for; None: everybody."""
        ...

    @property
    def named(self) -> bool:
        """Whether it names the model call that it is for."""
        ...


Reward = TypeVar("Reward", bound=Rewarding)


@dataclass(frozen=True, slots=True)
class Callers:
    """Who called a model in a rollout, by the names of agents and of policies."""

    trained: Set[str] = frozenset()
    others: Set[str] = frozenset()
    """Those without a call that is trained."""


_NOBODY = Callers()


def callers_of(calls: Iterable[tuple[str | None, bool]]) -> Callers:
    """From the names of who called (None: it has no name), each with whether the call is trained."""
    named = [(name, trained) for name, trained in calls if name]
    trained = {name for name, trained in named if trained}
    return Callers(trained, {name for name, _ in named} - trained)


def of_trained(rewards: Sequence[Reward], callers: Callers) -> Sequence[Reward]:
    """The rewards of agents that are trained, and everybody's. Where no such agent is rewarded: all but those of agents
    that called a model and are not trained; and all, where nothing else is there.
    """
    if any(r.agent in callers.trained for r in rewards):
        return [r for r in rewards if r.agent is None or r.agent in callers.trained]
    return [r for r in rewards if r.agent not in callers.others] or rewards


def which_count(
    rewards: Sequence[Reward], *, callers: Callers = _NOBODY, agents: Collection[str | None] | None = None
) -> list[Reward]:
    """Which of a rollout's rewards, given in their order, count: what was earned is their mean. [] where none does.

    One that names a call is intermediate, and counts only where there is no other. For the rollout as a whole the last
    one for everybody counts; where there is none, the last one of each agent that is trained (`callers`, `of_trained`).
    For some of its `agents` the last one of each of them counts; where there is none, the last one for everybody.
    """
    if agents is None:
        rewards = of_trained(rewards, callers)
    else:
        rewards = [r for r in rewards if r.agent is None or r.agent in agents]
    left = [r for r in rewards if not r.named] or rewards
    common = [r for r in left if r.agent is None][-1:]
    own = list({r.agent: r for r in left if r.agent is not None}.values())
    return common or own if agents is None else own or common


def mean_value(values: Collection[float]) -> float | None:
    """Their mean, in whatever order they are; None where there are none."""
    return math.fsum(values) / len(values) if values else None


def find_final_reward(spans: Iterable[Span]) -> float | None:
    """What an attempt earned by its spans, in the order given (`which_count`); None if they hold no reward."""
    return final_of(in_one_form(span.name, span.attributes) for span in spans)


def final_of(attributes: Iterable[Attributes]) -> float | None:
    """The final reward from the attributes of its spans, with rewards in today's form."""
    found = [given for one in attributes if (given := given_reward(one)) is not None]
    return mean_value([r.value for r in which_count(found)])


Numbered = tuple[int, float]
"""The sequence number of a reward's span, and the reward."""


@dataclass(slots=True)
class LastRewards:
    """The last rewards among an attempt's spans, taken in as the spans come: its final one is found from these alone.

    A span counts by its sequence number; of equal ones the one that came later.
    """

    whole: Numbered | None = None
    """The attempt's."""
    of_call: Numbered | None = None
    """One that names the model call it is for."""
    of_agents: dict[str, Numbered] = field(default_factory=dict[str, Numbered])
    """Those of agents that are rewarded apart; of the first `MOST_AGENTS`."""
    of_agents_calls: dict[str, Numbered] = field(default_factory=dict[str, Numbered])
    """Likewise, of those that name a call."""
    callers: dict[str, bool] | None = None
    """Who called a model, and whether it is trained; None: not looked up, as no reward names an agent."""

    def add(self, sequence_id: int, given: GivenReward) -> None:
        """Take in the reward of a span."""
        new = sequence_id, given.value
        if given.agent is not None:
            known, name = self.of_agents_calls if given.named else self.of_agents, given.agent[:MOST_CHARACTERS]
            if name in known or len(known) < MOST_AGENTS:
                known[name] = _later(known.get(name), new)
        elif given.named:
            self.of_call = _later(self.of_call, new)
        else:
            self.whole = _later(self.whole, new)

    def names_agents(self) -> bool:
        """Whether agents are rewarded apart."""
        return bool(self.of_agents or self.of_agents_calls)

    def know(self, callers: Callers) -> None:
        """Note who called a model."""
        names = [(name, True) for name in sorted(callers.trained)] + [(name, False) for name in sorted(callers.others)]
        self.callers = {name[:MOST_CHARACTERS]: trained for name, trained in names[:MOST_AGENTS]}

    def final(self) -> float | None:
        """What the attempt earned (`which_count`)."""
        kept = [
            *((self.whole, None, False), (self.of_call, None, True)),
            *((last, name, False) for name, last in self.of_agents.items()),
            *((last, name, True) for name, last in self.of_agents_calls.items()),
        ]
        found = [GivenReward(last[1], name, named) for last, name, named in kept if last is not None]
        callers = callers_of((self.callers or {}).items())
        return mean_value([r.value for r in which_count(found, callers=callers)])


def _later(known: Numbered | None, new: Numbered) -> Numbered:
    return new if known is None or new[0] >= known[0] else known
