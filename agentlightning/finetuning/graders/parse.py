"""From JSON to graders, and the two routes of the API that try them: `run` and `validate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentlightning.errors import GraderRefused
from agentlightning.finetuning.graders.base import Grader, GraderFields, Grading
from agentlightning.finetuning.graders.model import LabelModel, ScoreModel
from agentlightning.finetuning.graders.multi import Multi, graders_of
from agentlightning.finetuning.graders.python import PythonGrader
from agentlightning.finetuning.graders.result import Grade, Models, Sample
from agentlightning.finetuning.graders.settings import GraderSettings, owners_settings
from agentlightning.finetuning.graders.text import StringCheck, TextSimilarity

_SINGLE: Mapping[str, Callable[[GraderFields, str, GraderSettings], Grader]] = {
    one.type: one.read for one in (StringCheck, TextSimilarity, PythonGrader, ScoreModel, LabelModel)
}
KINDS = (*_SINGLE, Multi.type)
"""Every `type` of a grader."""


def parse_grader(grader: Mapping[str, Any], param: str = "grader", settings: GraderSettings | None = None) -> Grader:
    """The grader that JSON means, whichever class a client took it for: `type` decides.

    Raises GraderRefused, which names the field by its path below `param`, for what is wrong, and for what cannot be
    honoured under the owner's `settings`; None: those of `AGL_GRADERS`.
    """
    settings = settings or owners_settings()
    fields = GraderFields(grader, param)
    kind = fields.one_of("type", KINDS)
    if kind != Multi.type:
        return _SINGLE[kind](fields, fields.text("name", kind), settings)
    parts: dict[str, Grader] = {}
    for name, given in graders_of(fields).items():
        below = GraderFields(given, fields.path(f"graders.{name}"))
        kind = below.one_of("type", list(_SINGLE))
        parts[name] = _SINGLE[kind](below, below.text("name", name), settings)
    return Multi.of(fields, fields.text("name", "multi"), parts)


async def grade(grader: Grader, item: Mapping[str, Any], sample: Sample, models: Models | None = None) -> Grade:
    """What a grader says of a sample. Without `models` a grader that asks a model fails."""
    return await grader.grade(Grading(item, sample, models))


async def run_grader(
    body: Mapping[str, Any], models: Models | None = None, settings: GraderSettings | None = None
) -> dict[str, Any]:
    """Answer `POST /v1/fine_tuning/alpha/graders/run`. Raises GraderRefused; a grader that fails is an answer."""
    fields = GraderFields(body, "body")
    for name, kind in (("model_sample", str), ("item", Mapping | None)):
        if not isinstance(body.get(name), kind):
            raise GraderRefused(f"{name} is missing, or not what it should be.", name)
    _refuse_others(fields, "grader", "model_sample", "item")
    grader = parse_grader(body.get("grader") or {}, settings=settings)
    return (await grade(grader, body.get("item") or {}, Sample.of_text(body["model_sample"]), models)).as_response()


def validate_grader(body: Mapping[str, Any], settings: GraderSettings | None = None) -> dict[str, Any]:
    """Answer `POST /v1/fine_tuning/alpha/graders/validate`: the grader as it was sent. Raises GraderRefused."""
    _refuse_others(GraderFields(body, "body"), "grader")
    return {"grader": dict(parse_grader(body.get("grader") or {}, settings=settings).given)}


def _refuse_others(fields: GraderFields, *known: str) -> None:
    for name in fields.given:
        if name not in known:
            raise GraderRefused(f"{name} is no field of this request; it has {', '.join(known)}.", str(name))
