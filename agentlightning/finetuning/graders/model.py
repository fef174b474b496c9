"""Graders that ask a model: `score_model` for a number, `label_model` for one of several labels.

The model is shown the grader's messages and a schema of its answer. An endpoint that knows no schemas is asked without:
the first message says the form as well.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentlightning.algorithm.parts.group_judge import refused_field
from agentlightning.algorithm.prompts.critic import CriticFailure, HttpCritic, Question, complete
from agentlightning.errors import JudgeError
from agentlightning.finetuning.graders.base import (
    MOST_FILLED,
    Grader,
    GraderFailed,
    GraderFields,
    Grading,
    Score,
    Template,
)
from agentlightning.finetuning.graders.settings import GraderSettings
from agentlightning.gateway import Provider

_SAMPLING = ("max_completions_tokens", "temperature", "top_p", "seed", "reasoning_effort")
_TEXTS = ("input_text", "output_text", "text")

Message = tuple[str, tuple[tuple[Template, Mapping[str, Any]], ...]]
"""A role, and the parts of the content: a text or an image's address with its variables, and the part it is in."""


@dataclass(frozen=True, kw_only=True)
class ModelGrader(Grader):
    """What both have in common."""

    messages: tuple[Message, ...]
    model: str
    sampling: Mapping[str, Any]

    @property
    def models(self) -> frozenset[str]:
        return frozenset([self.model])

    @property
    @abstractmethod
    def result(self) -> Mapping[str, Any]:
        """The schema of the answer's `result`."""

    @abstractmethod
    def reward_of(self, result: Any) -> float:
        """The reward for a result. Raises ValueError for one that was not asked for."""

    async def score(self, grading: Grading) -> Score:
        if grading.models is None:
            raise GraderFailed("model_grader_server_error", f"There is no model {self.model!r} to ask here.")
        messages = _chat(self.messages, grading, self.result)
        properties = {"steps": {"type": "string"}, "result": self.result}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "grade", "strict": True, "schema": schema}}
        try:
            answer = await grading.models.chat(self.model, messages, {**self.sampling, "response_format": form})
            choice = answer["choices"][0]
            message, took = choice["message"], Score(0.0, _usage(self.model, answer), answer.get("model") or self.model)
        except Exception as error:  # whatever stands between us and the model, and what it says
            raise GraderFailed("model_grader_server_error", f"{type(error).__name__}: {error}") from error
        if message.get("refusal") or choice.get("finish_reason") == "content_filter":
            raise GraderFailed("model_grader_refusal_error", str(message.get("refusal") or "content_filter"), took)
        try:
            return Score(self.reward_of(_result(message.get("content"))), took.tokens, took.model)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            cut = " It was cut: raise max_completions_tokens." if choice.get("finish_reason") == "length" else ""
            why = f"The answer of {self.model!r} is of no use: {error}.{cut}"
            raise GraderFailed("model_grader_parse_error", why, took) from error


@dataclass(frozen=True, kw_only=True)
class ScoreModel(ModelGrader):
    """A number that a model gives, within a range."""

    type: ClassVar[str] = "score_model"
    low: float
    high: float

    @classmethod
    def read(cls, fields: GraderFields, name: str, settings: GraderSettings) -> ScoreModel:
        found = fields.get("range")
        low, high = found if isinstance(found, list) and len(found) == 2 else (0, 1) if found is None else (0, 0)
        numbers = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in (low, high))
        if not numbers or low >= high:
            raise fields.refused("range", "is no pair of numbers of which the second is larger.")
        sampling = GraderFields(fields.get("sampling_params") or {}, fields.path("sampling_params"))
        given = {key: sampling.get(key) for key in _SAMPLING}
        if unknown := sorted(sampling.given.keys() - given.keys()):
            raise sampling.refused(unknown[0], f"is none of {', '.join(_SAMPLING)}.")
        given["max_completion_tokens"] = given.pop("max_completions_tokens")
        given = {key: value for key, value in given.items() if value is not None}
        about, model = _read_common(fields, settings)
        fields.end("pass_threshold")
        limits = {"low": float(low), "high": float(high)}
        return cls(name=name, given=fields.given, messages=about, model=model, sampling=given, **limits)

    @property
    def lowest(self) -> float:
        return self.low

    @property
    def result(self) -> Mapping[str, Any]:
        return {"type": "number", "description": f"a number from {self.low:g} to {self.high:g}"}

    def reward_of(self, result: Any) -> float:
        if not isinstance(result, int | float) or isinstance(result, bool) or not self.low <= result <= self.high:
            raise ValueError(f"{str(result)[:100]!r} is no number from {self.low:g} to {self.high:g}")
        return float(result)


@dataclass(frozen=True, kw_only=True)
class LabelModel(ModelGrader):
    """1 where a model gives a label that passes, else 0."""

    type: ClassVar[str] = "label_model"
    labels: tuple[str, ...]
    passing: tuple[str, ...]

    @classmethod
    def read(cls, fields: GraderFields, name: str, settings: GraderSettings) -> LabelModel:
        labels, passing = fields.texts("labels"), fields.texts("passing_labels")
        if others := sorted(set(passing) - set(labels)):
            raise fields.refused("passing_labels", f"has {others[0]!r}, which is none of the labels.")
        about, model = _read_common(fields, settings)
        fields.end()
        common = {"name": name, "given": fields.given, "messages": about, "model": model, "sampling": {}}
        return cls(**common, labels=labels, passing=passing)

    @property
    def result(self) -> Mapping[str, Any]:
        return {"type": "string", "enum": list(self.labels), "description": f"one of {', '.join(self.labels)}"}

    def reward_of(self, result: Any) -> float:
        if result not in self.labels:
            raise ValueError(f"{str(result)[:100]!r} is none of the labels")
        return float(result in self.passing)


def _read_common(fields: GraderFields, settings: GraderSettings) -> tuple[tuple[Message, ...], str]:
    model, given = fields.text("model"), fields.get("input")
    if settings.models is not None and model not in settings.models:
        raise fields.refused("model", f"is {model!r}; graders may ask {', '.join(settings.models) or 'none'} here.")
    if not isinstance(given, list) or not given:
        raise fields.refused("input", "has no message.")
    return tuple(_message(GraderFields(one, fields.path(f"input[{n}]"))) for n, one in enumerate(given)), model


def _message(fields: GraderFields) -> Message:
    role = fields.one_of("role", ["user", "assistant", "system", "developer"])
    content, path = fields.get("content"), fields.path("content")
    fields.end()
    parts = content if isinstance(content, list) else [content]
    return role, tuple(_part({"type": "text", "text": p} if isinstance(p, str) else p, path) for p in parts)


def _part(given: Any, path: str) -> tuple[Template, Mapping[str, Any]]:
    fields = GraderFields(given, path)
    kind = fields.one_of("type", [*_TEXTS, "input_image", "input_audio"])
    if kind == "input_audio":
        return Template(()), {"type": kind, "input_audio": fields.get("input_audio")}
    if kind == "input_image":
        return fields.template("image_url"), {"type": "image_url", "detail": fields.text("detail", "auto")}
    return fields.template("text"), {"type": "text"}


def _chat(messages: Sequence[Message], grading: Grading, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of the request: the grader's, and in the first one how to answer."""
    form = 'Answer with a JSON object and nothing else: {"steps": "your reasoning, in short", "result": {{}}}'
    system = [form.replace("{{}}", result["description"])]
    made: list[dict[str, Any]] = []
    size = 0

    def fill(template: Template) -> str:
        nonlocal size
        text = grading.fill(template)
        size += len(text)
        if size > MOST_FILLED:
            raise GraderFailed("other_error", f"The messages have more than {MOST_FILLED:,} characters.")
        return text

    for role, parts in messages:
        filled = [_filled(fill(template), part) for template, part in parts]
        texts = "\n".join(part["text"] for part in filled if part["type"] == "text")
        if role in ("system", "developer") and not made:
            system.insert(-1, texts)
            continue
        role = "system" if role == "developer" else role
        made.append({"role": role, "content": texts if all(p["type"] == "text" for p in filled) else filled})
    return [{"role": "system", "content": "\n\n".join(system)}, *made]


def _filled(text: str, part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "image_url":
        return {"type": "image_url", "image_url": {"url": text, "detail": part["detail"]}}
    return dict(part) if part["type"] == "input_audio" else {"type": "text", "text": text}


def _result(content: Any) -> Any:
    """The `result` of the answer's object, which may stand in a block of code."""
    text = re.sub(r"^\s*```\w*\s*|\s*```\s*$", "", content) if isinstance(content, str) else ""
    return json.loads(text)["result"]


def _usage(model: str, answer: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    used = answer.get("usage") or {}
    prompt, written = int(used.get("prompt_tokens") or 0), int(used.get("completion_tokens") or 0)
    return {model: {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}}


class HttpModels:
    """The models of an OpenAI-compatible endpoint, as a gateway of a run is one. Close it after use."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        seconds: float = 300.0,
        provider: Callable[[str], Provider | None] = lambda name: None,
    ) -> None:
        """`base_url` has /v1; `seconds` is the time to wait for an answer before it is asked again; `provider` says
        which names are models of another endpoint."""
        self._provider = provider
        self.base_url = base_url
        self._chat = HttpCritic(base_url, api_key)
        self._embed = HttpCritic(base_url, api_key, "embeddings")
        self._seconds = seconds
        self._without: dict[str, frozenset[str]] = {}
        """For each model: fields that its endpoint is known to refuse."""

    async def chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Ask, again without a schema where that is refused. Raises JudgeError where no answer comes."""
        if (provider := self._provider(model)) is not None:
            url = provider.base_url if isinstance(provider.base_url, str) else provider.base_url[0]
            there = HttpModels(url, provider.api_key, provider.timeout_seconds)
            try:
                return await there.chat(provider.model or model, messages, {**provider.extra_body, **sampling})
            finally:
                await there.close()
        without = self._without.get(model, frozenset())
        while True:
            fields = {name: value for name, value in sampling.items() if name not in without}
            found = await self._ask(self._chat, {"model": model, "messages": messages, **fields})
            refused = refused_field(found.why) if isinstance(found, CriticFailure) else None
            if refused not in fields:
                break
            without |= {refused}
        answer = _answered(found, model)
        self._without[model] = without
        return answer

    async def chat_exactly(
        self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Ask with every field, or not at all. Raises JudgeError where no answer comes."""
        return _answered(await self._ask(self._chat, {"model": model, "messages": messages, **sampling}), model)

    async def embed(self, model: str, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """A vector for each text. Raises JudgeError where none come."""
        found = await self._ask(self._embed, {"model": model, "input": list(texts)})
        return [one["embedding"] for one in _answered(found, model)["data"]]

    async def _ask(self, endpoint: HttpCritic, body: Mapping[str, Any]) -> Mapping[str, Any] | CriticFailure:
        question = Question(model="", messages=(), temperature=0.0, max_tokens=0, besides={**_NO_DEFAULTS, **body})
        return await complete(endpoint, question, self._seconds, lambda answer: answer)

    async def close(self) -> None:
        await self._chat.close()
        await self._embed.close()


def _answered(found: Mapping[str, Any] | CriticFailure, model: str) -> Mapping[str, Any]:
    if isinstance(found, CriticFailure):
        raise JudgeError(f"The model {model!r} did not answer: {found.why}")
    return found


_NO_DEFAULTS = dict.fromkeys(("model", "messages", "temperature", "max_tokens"))
