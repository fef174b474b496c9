"""Resources: the named, versioned things an algorithm tunes and an agent is given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self
from urllib.parse import quote, urlsplit

from pydantic import Field, SerializeAsAny, field_validator

from agentlightning.errors import ConfigError, PromptTemplateError
from agentlightning.keys import redacted
from agentlightning.types.rollout import GivenRecord, Record


class Resource(GivenRecord):
    """Base of all resources. A user may define a type of their own by subclassing it."""

    resource_type: str = "resource"
    """Names the type in what is stored."""


class LLM(Resource):
    """An OpenAI-compatible endpoint: base URL, model name, and how to sample."""

    resource_type: str = "llm"
    endpoint: str
    """The base URL, with /v1."""
    model: str
    """What requests name as their model."""
    api_key: str | None = None
    """What requests carry as their key."""
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)
    """Fields for the requests, such as temperature, that the agent may pass on."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The URL to give to a client as its base URL; the ids matter to a `ProxyLLM` only."""
        return self.endpoint

    def for_agent(self, name: str) -> Self:
        """The same endpoint under the name of one of several agents, for clients that cannot send a header.

        The gateway records the name with each call, and `train_agents` selects by it. Only the gateway's URLs may be
        extended like this, so do it inside the rollout.
        """
        if not name:
            raise ConfigError("for_agent('') names no agent: give the name that train_agents chooses by.")
        base = re.sub(r"/v1/?$", "", self.endpoint.rstrip("/"))
        return self.model_copy(update={"endpoint": f"{base}/agent/{quote(name, safe='')}/v1"})

    def for_model(self, name: str) -> Self:
        """The same endpoint for another model behind it, such as a judge of `Trainer(models={"judge": …})`.

        What is asked of it is recorded in the same rollout and never trained. Training's sampling settings stay behind.
        """
        return self.model_copy(update={"model": name, "sampling_parameters": {}})

    def with_key_in_url(self) -> Self:
        """The same endpoint for clients that are told no model either: a name that is not known means the policy there.

        The gateway's URLs only.
        """
        if not self.api_key:
            return self
        parts = urlsplit(self.endpoint)
        path = re.sub(r"/key/[^/]+", "", parts.path)
        return self.model_copy(update={"endpoint": parts._replace(path=f"/key/{self.api_key}{path}").geturl()})

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Keys are not printed whole."""
        for name, value in super().__repr_args__():
            yield name, redacted(value) if isinstance(value, str) else value


class ProxyLLM(LLM):
    """The gateway's endpoint. Its base URL names the rollout and attempt, so that every call is attributed."""

    resource_type: str = "proxy_llm"
    val_sampling_parameters: dict[str, Any] | None = None
    """What `sampling_parameters` are in validation and test; None: the same."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """`{host}/rollout/{id}/attempt/{id}/v1`; without ids, the plain endpoint."""
        if rollout_id is None or attempt_id is None:
            if rollout_id is not attempt_id:
                raise ValueError("Give both rollout_id and attempt_id, or neither.")
            return self.endpoint
        base = re.sub(r"/v1/?$", "", self.endpoint.rstrip("/"))
        return f"{base}/rollout/{rollout_id}/attempt/{attempt_id}/v1"

    def for_attempt(self, rollout_id: str, attempt_id: str, api_key: str | None, url_key: str | None = None) -> LLM:
        """The plain `LLM` an agent is given: its URL names its attempt, and its keys open nothing else.

        With `url_key` the URL alone is enough, whatever API key a client sends.
        """
        endpoint = self.get_base_url(rollout_id, attempt_id)
        if url_key is not None:
            endpoint = f"{endpoint.removesuffix('/v1')}/key/{url_key}/v1"
        return LLM(
            endpoint=endpoint,
            model=self.model,
            api_key=api_key,
            sampling_parameters=self.sampling_parameters,
        )


class PromptTemplate(Resource):
    """A prompt with placeholders."""

    resource_type: str = "prompt_template"
    template: str
    """The text with its placeholders."""
    engine: Literal["f-string", "jinja", "poml"] = "f-string"
    """How placeholders are written: {name}, Jinja's {{ name }}, or POML."""

    @property
    def literal(self) -> bool:
        """Whether it is used as it stands, so that braces mean nothing in it."""
        return False

    def format(self, *args: Any, **kwargs: Any) -> str:
        """The prompt with its placeholders filled. Jinja runs sandboxed: templates are data, not programs. POML has no
        sandbox; it reads files and evaluates expressions, so give it templates of your own only.

        Raises PromptTemplateError for a placeholder without a value, ConfigError where the engine's package is missing.
        """
        if args:
            raise PromptTemplateError(
                f"format was given {args[0]!r:.60} without a name. Name each value: format(question=…), or "
                "format(**task) for the fields of a dict."
            )
        if self.engine == "f-string":
            return _filled(self.template, kwargs)
        if self.engine == "poml":
            return _poml(self.template, kwargs)
        try:
            from jinja2.sandbox import SandboxedEnvironment
        except ImportError:
            from agentlightning.errors import missing_extra

            raise missing_extra("torch", "jinja2") from None
        return SandboxedEnvironment().from_string(self.template).render(**kwargs)


class _Literal(PromptTemplate):
    """A text that the gateway puts into the requests of an agent that cannot be edited."""

    agent: str | None = None
    """A regular expression: only requests of agents whose name it finds something in; None is all requests."""

    @property
    def literal(self) -> bool:
        return True


class SystemPrompt(_Literal):
    """The system prompt of an agent that cannot be edited; an empty text changes nothing."""

    resource_type: str = "system_prompt"
    how: Literal["replace", "before", "after"] = "replace"
    """Instead of the agent's own, or before or after it."""


class ToolDescription(_Literal):
    """The description of one of an agent's tools."""

    resource_type: str = "tool_description"
    tool: str
    """The tool's name."""


class Demonstrations(_Literal):
    """Few-shot demonstrations: answered examples, as turns of the conversation, before the agent's own question.

    The gateway puts them behind the system prompt of each request, so the agent's code need not know of them. A prompt
    optimiser chooses them from the agent's own good runs on training tasks, or from all of them with the right answers
    put in, and needs no critic for it (as BootstrapFewShot and LabeledFewShot do; Khattab et al., "DSPy", arXiv
    2310.03714).
    """

    resource_type: str = "demonstrations"
    template: str = ""
    """The messages, each a JSON object with `role` (user or assistant) and `content` on a line of its own; an empty
    line is between two demonstrations."""
    most: int = Field(default=4, ge=1)
    """How many demonstrations a prompt optimiser may choose."""
    good_reward: float | None = None
    """What a run earns at least to be chosen from; None is the highest of the optimiser's `reward_range`."""
    answer: str | None = None
    """The field of a task that holds the right answer. It is shown in place of what the agent answered, so every run
    can be chosen from, whatever it earned."""

    @field_validator("template")
    @classmethod
    def _is_messages(cls, text: str) -> str:
        for line in filter(str.strip, text.split("\n")):
            _turn(line)
        return text

    @classmethod
    def of(cls, demonstrations: Sequence[Sequence[Mapping[str, str]]], **others: Any) -> Self:
        """Each demonstration as its messages; `others` are the other fields."""
        text = "\n\n".join(
            "\n".join(json.dumps({"role": m["role"], "content": m["content"]}, ensure_ascii=False) for m in messages)
            for messages in demonstrations
        )
        return cls(template=text, **others)

    @property
    def demonstrations(self) -> list[list[dict[str, str]]]:
        """The messages of each."""
        parts = re.split(r"\n\s*\n", self.template.strip())
        return [[_turn(line) for line in part.split("\n")] for part in parts if part]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns of all, for an agent that puts them in by itself."""
        return [message for messages in self.demonstrations for message in messages]


def _turn(line: str) -> dict[str, str]:
    """A message of a line. Raises ValueError for anything else."""
    try:
        message: Any = json.loads(line)
    except (ValueError, RecursionError):
        message = {}
    whole = isinstance(message, dict) and set(message) == {"role", "content"}
    if not whole or message["role"] not in ("user", "assistant") or not isinstance(message["content"], str):
        raise ValueError(f'a line is {{"role": "user" or "assistant", "content": "…"}}, not {line[:80]}')
    return message


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """An f-string's placeholders, filled."""
    doubled = re.search(r"\{\{\s*(\w+)\s*\}\}", template)
    if doubled and doubled[1] in values and not re.search(rf"(?<!\{{)\{{{doubled[1]}\W", template):
        raise PromptTemplateError(
            f"The prompt template has {doubled[0]}, which is plain text in an f-string, and format was given "
            f"{doubled[1]}. Write {{{doubled[1]}}}, or make it PromptTemplate(template=…, engine='jinja')."
        )
    try:
        return template.format(**values)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        start = template if len(template) <= _SHOWN else f"{template[:_SHOWN]}…"
        there = ", ".join(values) or "nothing"
        missing = f"needs {error.args[0]!r}" if isinstance(error, KeyError) else f"cannot be filled: {error}"
        if isinstance(error, IndexError):
            missing = f"has a placeholder without a name (write {{{next(iter(values), 'question')}}}, not {{}})"
        raise PromptTemplateError(
            f"The prompt template {start!r} {missing}, and format was given: {there}. Give every placeholder a value, "
            "format(name=…); braces that are text, as in JSON, are written twice: {{ and }}."
        ) from error


_SHOWN = 60
"""Characters of a template that a message shows."""


def _poml(template: str, values: dict[str, Any]) -> str:
    """The text of all messages that the template makes."""
    try:
        from poml import poml  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("Prompts in POML need the package 'poml'. Install it with:  pip install poml") from None
    return "\n\n".join(message["content"] for message in poml(template, context=values))


NamedResources = dict[str, SerializeAsAny[Resource]]
"""Resources by name, for example {"main_llm": ProxyLLM(...), "prompt_template": PromptTemplate(...)}."""


class ResourcesUpdate(Record):
    """One stored version of the resources."""

    resources_id: str
    version: int
    """Grows by one with every update."""
    create_time: float
    update_time: float
    resources: NamedResources
