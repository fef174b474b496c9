"""What a client may ask of `POST /v1/fine_tuning/jobs`, as records.

An unknown field is refused by its name, and so is a value that would have no effect.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.finetuning.wire import bad
from agentlightning.metrics.trackers import as_sink

T = TypeVar("T")
METHODS = ("supervised", "dpo", "reinforcement")
_WHERE = re.compile(r" - at `\$(.*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`|required field `(.*?)`")

_TAKES = {
    ("n_epochs", "batch_size", "eval_interval", "eval_samples"): 'a whole number from 1 to 10000, or "auto"',
    ("learning_rate_multiplier", "beta", "compute_multiplier"): 'a number above 0, or "auto"',
    ("suffix",): "up to 64 letters, digits and . _ -",
    ("method.type",): "supervised, dpo or reinforcement",
}
"""The words for values that a field does not take, by its name."""

Auto = Literal["auto"] | None
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e4)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a request's body."""


class Hyperparameters(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Those of every method. What is left out is "auto"."""

    n_epochs: Count | Auto = None
    batch_size: Count | Auto = None
    learning_rate_multiplier: Positive | Auto = None

    def value(self, name: str) -> Any:
        """What was asked for; None: "auto"."""
        found = getattr(self, name, None)
        return None if found == "auto" else found


class DpoHyperparameters(Hyperparameters, frozen=True, kw_only=True, omit_defaults=True):
    """Those of `dpo`."""

    beta: Positive | Auto = None


class ReinforcementHyperparameters(Hyperparameters, frozen=True, kw_only=True, omit_defaults=True):
    """Those of `reinforcement`."""

    compute_multiplier: Positive | Auto = None
    eval_interval: Count | Auto = None
    eval_samples: Count | Auto = None
    reasoning_effort: Literal["default", "low", "medium", "high"] | None = None


class Supervised(Body, frozen=True, kw_only=True):
    """Learn what is said in conversations."""

    hyperparameters: Hyperparameters = Hyperparameters()


class Dpo(Body, frozen=True, kw_only=True):
    """Learn which of two answers is preferred."""

    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class Reinforcement(Body, frozen=True, kw_only=True):
    """Learn from what a grader says of answers, or from what an agent earns."""

    grader: dict[str, Any] | None = None
    agent: Text | None = None
    """Ours: an agent that the server's owner registered, which is run on the lines of the file, and rewards itself."""
    hyperparameters: ReinforcementHyperparameters = ReinforcementHyperparameters()
    response_format: dict[str, Any] | None = None


class Method(Body, frozen=True, kw_only=True):
    """How a job learns: `type`, and the record of that name."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    reinforcement: Reinforcement | None = None

    @property
    def lines(self) -> str:
        """What the lines of its files are: a key of `lines.READERS`."""
        return "agent" if self.reinforcement and self.reinforcement.agent else self.type

    @property
    def hyperparameters(self) -> Hyperparameters:
        chosen = getattr(self, self.type)
        return {"dpo": DpoHyperparameters()}.get(self.type, Hyperparameters()) if not chosen else chosen.hyperparameters


class Wandb(Body, frozen=True, kw_only=True):
    """Where the job's metrics go besides."""

    project: Text
    name: Text | None = None
    entity: Text | None = None
    tags: list[Text] | None = None


class Integration(Body, frozen=True, kw_only=True):
    """A service that is told of a job."""

    type: Literal["wandb"]
    wandb: Wandb


class JobRequest(Body, frozen=True, kw_only=True):
    """The body of a request to create a job."""

    model: Text
    training_file: Text
    validation_file: Text | None = None
    suffix: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: dict[str, str] | None = None
    integrations: list[Integration] | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None

    @property
    def chosen(self) -> Method:
        """How the job learns; the older `hyperparameters` are those of `supervised`."""
        older = Supervised(hyperparameters=self.hyperparameters or Hyperparameters())
        return self.method or Method(type="supervised", supervised=older)


def read(kind: type[T], body: bytes | Mapping[str, Any]) -> T:
    """The record in a body. Raises `Refusal`, which names the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind) if isinstance(body, bytes) else msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        words = str(error)
        where = _WHERE.search(words)
        inner = _UNKNOWN.search(words)
        path = [
            p
            for p in (
                (where[1].lstrip(".").replace("[...]", "") if where else ""),
                (inner[1] or inner[2]) if inner else "",
            )
            if p
        ]
        code = "missing_required_parameter" if inner and inner[2] else "unknown_parameter" if inner else "invalid_value"
        name = ".".join(path)
        sentence = _takes(name, body) if code == "invalid_value" else ""
        sentence = sentence or f"{_WHERE.sub('', words)}.{_meant(path[-1]) if code == 'unknown_parameter' else ''}"
        raise bad(sentence, name or None, code) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad(f"The body is no JSON: {error}.", None, "invalid_json") from None


def _takes(name: str, body: bytes | Mapping[str, Any]) -> str:
    """What a field takes and what it was given; nothing where msgspec's own words have to do."""
    try:
        given: Any = msgspec.json.decode(body) if isinstance(body, bytes) else body
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""
    for part in name.split("."):
        given = given.get(part) if isinstance(given, Mapping) else None
    last = name if name == "method.type" else name.rpartition(".")[2]
    takes = next((words for names, words in _TAKES.items() if last in names), None)
    return "" if takes is None or given is None else f"{name} is {str(given)[:80]!r}; it is {takes}."


def _meant(name: str) -> str:
    kinds = (JobRequest, Method, Reinforcement, DpoHyperparameters, ReinforcementHyperparameters)
    known = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    if name in Hyperparameters.__struct_fields__:
        return " It is one of hyperparameters."
    like = difflib.get_close_matches(name, known - {name}, n=1)
    return f" Did you mean {like[0]}?" if like else ""


def read_job(body: bytes) -> JobRequest:
    """What a client asks. Raises `Refusal` for what cannot be honoured, whatever the files hold."""
    job = read(JobRequest, body)
    check_metadata(job.metadata or {})
    if job.method is not None and job.hyperparameters not in (None, Hyperparameters()):
        raise bad("Give hyperparameters in method, not beside it.", "hyperparameters")
    method = job.chosen
    for name in METHODS:
        if name != method.type and getattr(method, name) is not None:
            raise bad(f"method.type is '{method.type}', so method.{name} has no effect.", f"method.{name}")
    if method.type == "reinforcement":
        _check_reinforcement(job, method)
    _check_integrations(job.integrations or [])
    return job


def check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise bad("metadata has at most 16 pairs, of a key of 64 characters and a value of 512 at most.", "metadata")


def _check_reinforcement(job: JobRequest, method: Method) -> None:
    if method.reinforcement is None:
        raise bad("A reinforcement job needs method.reinforcement, with a grader.", "method.reinforcement")
    _check_agent(method.reinforcement)
    if job.validation_file is None:
        raise bad("A reinforcement job needs a validation_file.", "validation_file", "missing_required_parameter")
    effort = method.reinforcement.hyperparameters.reasoning_effort
    if effort not in (None, "default"):
        raise bad(
            "Models here have no levels of reasoning: leave reasoning_effort out, or give 'default'.",
            "method.reinforcement.hyperparameters.reasoning_effort",
        )
    form = method.reinforcement.response_format
    if form is not None and form.get("type") not in ("text", "json_object", "json_schema"):
        raise bad(
            "response_format has the type text, json_object or json_schema.", "method.reinforcement.response_format"
        )


def _check_agent(method: Reinforcement) -> None:
    where = "method.reinforcement"
    if (method.grader is None) == (method.agent is None):
        needed = "A reinforcement job needs a grader, or an agent that rewards itself, and not both."
        raise bad(needed, f"{where}.grader", "missing_required_parameter" if method.agent is None else "invalid_value")
    if method.agent is not None and method.response_format is not None:
        raise bad("An agent asks for its own response_format.", f"{where}.response_format")


def _check_integrations(integrations: list[Integration]) -> None:
    if len(integrations) > 1:
        raise bad("A job reports to one run of wandb.", "integrations")
    try:
        for one in integrations:
            as_sink(one.type)
    except ConfigError as error:
        raise bad(f"This server cannot report to wandb: {error}", "integrations", "integration_unavailable") from None
