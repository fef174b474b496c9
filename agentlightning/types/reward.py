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
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, SupportsFloat

from agentlightning.errors import RewardError, VariableError
from agentlightning.types.names import REWARD, REWARD_AGENT, REWARD_RESPONSE
from agentlightning.types.span import Attributes, Span

PRIMARY = "primary"
"""Name of a reward that was given without one."""
MOST_AGENTS = 1000
"""So many agents of an attempt are rewarded apart."""
MOST_CHARACTERS = 200
"""By so much of its name an agent is told from others."""
LARGEST = "AGL_LARGEST_REWARD"
"""The environment variable that sets another range; the same for runners, gateways, the store and the training."""
LARGEST_REWARD = 1e6
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


def _instead(value: Any) -> str:
    """What to return in place of something that is no number; nothing where that is not known."""
    if isinstance(value, Generator | AsyncGenerator):
        return "The function has `yield`: let it return the reward."
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[\d.]+\s*", value):
        return "Return float(…) of it."
    if isinstance(value, tuple) and any(isinstance(part, int | float) for part in value):
        return "Return the number alone; agl.emit_annotation({…}) records the rest."
    return ""


def checked_reward(value: Any, name: str = PRIMARY, *, is_json: bool = False) -> float:
    """The reward as a float. Raises RewardError for anything that is not a finite number within the range."""
    if not isinstance(value, SupportsFloat) or (is_json and isinstance(value, bool)):
        said = f"The reward '{name}' must be a number, not {type(value).__name__}: {value!r:.100}."
        raise RewardError(f"{said} {_instead(value)}".rstrip())
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
        told = json.loads(output) if isinstance(output, str) else output
    except (ValueError, RecursionError):
        return None
    return told.get("value") if isinstance(told, Mapping) and told.get("type") == "reward" else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _finite_at(attributes: Attributes, index: int) -> float | None:
    """A reward as it was written; what `checked_reward` would refuse is none (spans may come from anywhere)."""
    given = attributes.get(f"{REWARD}.{index}.value")
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= largest_reward():
        return None
    return float(given)


def get_rewards(span: Span) -> dict[str, float]:
    """All rewards of a span by name, the primary one first."""
    attributes = in_one_form(span.name, span.attributes)
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


def find_final_reward(spans: Iterable[Span]) -> float | None:
    """The last primary reward among the spans, in the order given; None if there is none.

    One that names the model call it is for is an intermediate reward, and final only where there is no other.
    """
    found = find_reward_spans(spans)
    whole = [span for span in found if REWARD_RESPONSE not in span.attributes]
    return get_reward_value((whole or found)[-1]) if found else None


@dataclass(slots=True)
class LastRewards:
    """The last rewards among an attempt's spans, taken in as the spans come: its final one is found from these alone.

    A span counts by its sequence number; of equal ones the one that came later.
    """

    whole: tuple[int, float] | None = None
    """The attempt's: the sequence number of its span, and the value."""
    of_call: tuple[int, float] | None = None
    """One that names the model call it is for."""
    of_agents: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    """Those of agents that are rewarded apart; of the first `MOST_AGENTS`."""

    def add(self, sequence_id: int, attributes: Attributes) -> None:
        """Take in a span's attributes, with a reward in today's form (`in_one_form`)."""
        if (value := _finite_at(attributes, 0)) is None:
            return
        agent = attributes.get(REWARD_AGENT)
        if agent is not None:
            name = str(agent)[:MOST_CHARACTERS]
            if name in self.of_agents or len(self.of_agents) < MOST_AGENTS:
                self.of_agents[name] = _later(self.of_agents.get(name), (sequence_id, value))
        elif REWARD_RESPONSE in attributes:
            self.of_call = _later(self.of_call, (sequence_id, value))
        else:
            self.whole = _later(self.whole, (sequence_id, value))

    def final(self) -> float | None:
        """As `find_final_reward`; where agents are rewarded apart, the mean of their last ones."""
        if (common := self.whole or self.of_call) is not None:
            return common[1]
        own = [value for _, value in self.of_agents.values()]
        return sum(own) / len(own) if own else None


def _later(known: tuple[int, float] | None, new: tuple[int, float]) -> tuple[int, float]:
    return new if known is None or new[0] >= known[0] else known


def final_of(attributes: Iterable[Attributes]) -> float | None:
    """The final reward of an attempt, from the attributes of its spans in their order."""
    last = LastRewards()
    for number, given in enumerate(attributes):
        last.add(number, given)
    return last.final()
