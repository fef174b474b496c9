"""What a grader is given and what it finds: `Sample`, `Grade`, and the errors that OpenAI's API knows.

A grader that fails has no reward: `Grade.reward` is None and a flag of `Errors` says why. What the graded model did
wrong is no failure of the grader: an output that is no JSON, where the grader wants JSON, earns the lowest reward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from agentlightning.types.reward import largest_reward


class Models(Protocol):
    """The models that model graders ask. Both methods may raise anything: it becomes `model_grader_server_error`."""

    async def chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The chat completion, as JSON has it, of a request with these messages and these further fields."""
        ...

    async def embed(self, model: str, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """A vector for each text."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """An output of the graded model."""

    output_text: str = ""
    """The text; empty where there are tool calls only."""
    output_json: Any = None
    """The text read as JSON; None where it is none."""
    output_tools: Sequence[Any] = ()
    """The tool calls, as chat completions have them."""
    choices: Sequence[Any] = ()
    """The choices of the chat completion."""

    @classmethod
    def of_text(cls, text: str) -> Sample:
        """A text that some model wrote."""
        message = {"role": "assistant", "content": text}
        return cls(text, _json_or_none(text), (), [{"index": 0, "message": message, "finish_reason": "stop"}])

    @classmethod
    def of_completion(cls, completion: Mapping[str, Any]) -> Sample:
        """The first choice of a chat completion."""
        choices = completion.get("choices") or []
        message = (choices[0].get("message") if choices else None) or {}
        text = message.get("content") or ""
        return cls(text, _json_or_none(text), message.get("tool_calls") or [], choices)

    def as_dict(self) -> dict[str, Any]:
        """What templates and Python graders see as `sample`."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {
            "output_tools": list(self.output_tools),
            "choices": list(self.choices),
        }


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Errors:
    """What went wrong in grading, by the names of the API."""

    formula_parse_error: bool = False
    """The formula of a `multi` gives no number: a division by zero, an overflow."""
    invalid_variable_error: bool = False
    """A template names what the item or the sample does not have."""
    sample_parse_error: bool = False
    """The grader wants JSON and the output is none. It earns the lowest reward."""
    truncated_observation_error: bool = False
    """What a model grader was to be shown was cut. Never set: nothing is cut here."""
    unresponsive_reward_error: bool = False
    """The reward is no finite number within the range of rewards."""
    other_error: bool = False
    python_grader_server_error: bool = False
    """No sandbox could be made for a Python grader."""
    python_grader_runtime_error: bool = False
    """A Python grader raised, took too much time or memory, or returned no number."""
    model_grader_parse_error: bool = False
    """The answer of a model grader is not what it was asked for."""
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    """The model did not answer."""
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error_type: str | None = None
    model_grader_server_error_details: str | None = None

    @classmethod
    def of(cls, flag: str, why: str) -> Errors:
        """One flag is set, with its reason where the API has a field for it."""
        details = {name: why for name in (f"{flag}_details", f"{flag}_type") if name in _NAMES}
        given: dict[str, Any] = {flag: True, **details}
        return cls(**given)

    @classmethod
    def merged(cls, all_of_them: Iterable[Errors]) -> Errors:
        """Every flag that is set in any of them; the first reason of each kind."""
        errors, found = list(all_of_them), dict[str, Any]()
        for name in _NAMES:
            found[name] = next(filter(None, (getattr(one, name) for one in errors)), getattr(cls(), name))
        return cls(**found)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _NAMES}

    @property
    def flags(self) -> list[str]:
        """The names of those that are set."""
        return [name for name in _NAMES if getattr(self, name) is True]


_NAMES = tuple(one.name for one in fields(Errors))


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader says of a sample."""

    name: str
    type: str
    reward: float | None
    """None where the grader failed: nothing is learned from the sample."""
    errors: Errors = field(default_factory=Errors)
    why: str | None = None
    """What went wrong, for people."""
    seconds: float = 0.0
    """The time that grading took."""
    parts: Mapping[str, Grade] = field(default_factory=dict)
    """Of a `multi`: the grade of each of its graders."""
    tokens: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For each model that was asked: `prompt_tokens`, `completion_tokens` and `total_tokens`."""
    model: str | None = None
    """The model that answered."""

    @property
    def sub_rewards(self) -> dict[str, float | None]:
        """The reward of each grader of a `multi`."""
        return {name: part.reward for name, part in self.parts.items()}

    def as_response(self) -> dict[str, Any]:
        """The answer of `POST /v1/fine_tuning/alpha/graders/run`, where a reward is always a number."""
        rewards = {name: reward or 0.0 for name, reward in self.sub_rewards.items()}
        used = sum(usage["total_tokens"] for usage in self.tokens.values())
        metadata = {
            "name": self.name,
            "type": self.type,
            "errors": self.errors.as_dict(),
            "execution_time": self.seconds,
            "scores": rewards or {self.name: self.reward or 0.0},
            "token_usage": used or None,
            "sampled_model_name": self.model,
        }
        return {
            "reward": self.reward or 0.0,
            "sub_rewards": rewards,
            "metadata": metadata,
            "model_grader_token_usage_per_model": {model: dict(usage) for model, usage in self.tokens.items()},
        }

    def checked(self) -> Grade:
        """The same, failed where the reward is none that can train."""
        if self.reward is None or (math.isfinite(self.reward) and abs(self.reward) <= largest_reward()):
            return self
        why = f"The reward of {self.name!r} is {self.reward}, outside of ±{largest_reward():g}."
        errors = Errors.merged([self.errors, Errors.of("unresponsive_reward_error", why)])
        return replace(self, reward=None, errors=errors, why=why)
