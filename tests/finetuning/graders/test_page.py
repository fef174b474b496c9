"""The section on graders of docs/fine-tuning-api.md has every grader, field and flag that the official client knows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import openai.types.graders as known
import pytest
from openai.types.fine_tuning.alpha.grader_run_response import MetadataErrors

from agentlightning.errors import ConfigError, GraderRefused
from agentlightning.finetuning.graders import Errors, parse_grader, read_settings, validate_grader
from agentlightning.finetuning.graders.parse import KINDS
from agentlightning.finetuning.graders.settings import owners_settings
from agentlightning.litagent.bubblewrap import Bubblewrap

PAGE = (Path(__file__).parents[3] / "docs" / "fine-tuning-api.md").read_text()
SECTION = PAGE.split("## Graders")[1]
PARAMS = {
    get_type_hints(kind)["type"].__args__[0]: kind for name, kind in vars(known).items() if name.endswith("GraderParam")
}
"""The client's typed dictionary of each grader by its `type`."""


def documented() -> dict[tuple[str, str], str]:
    rows = re.findall(r"^\| (?:`(\w+)`|all) \| `(\w+)` \| (honoured|refused)", SECTION, re.M)
    return {(grader, field): said for grader, field, said in rows}


def test_every_field_of_every_grader_is_in_the_table() -> None:
    known_fields = {(kind, name) for kind, param in PARAMS.items() for name in get_type_hints(param)}
    common = {(kind, name) for kind in PARAMS for name in ("name", "type")}
    assert {key for key in documented() if key[0]} == known_fields - common
    assert {name for kind, name in documented() if not kind} == {"name", "type"}


def test_every_grader_of_the_client_is_read() -> None:
    assert PARAMS.keys() == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_acts_or_is_refused_by_its_name(kind: str) -> None:
    """A field of the wrong kind is refused, so none goes by unread."""
    for name in {*get_type_hints(PARAMS[kind]), "nonsense"} - {"type"}:
        with pytest.raises(GraderRefused) as refused:
            parse_grader({**valid(kind), name: 3.5})
        assert refused.value.param.startswith(f"grader.{name}"), (kind, name)


def valid(kind: str) -> dict[str, Any]:
    ask = [{"role": "user", "content": "?"}]
    given: dict[str, dict[str, Any]] = {
        "string_check": {"operation": "eq", "input": "", "reference": ""},
        "text_similarity": {"evaluation_metric": "bleu", "input": "", "reference": ""},
        "python": {"source": "def grade(sample, item): return 1"},
        "score_model": {"model": "m", "input": ask},
        "label_model": {"model": "m", "input": ask, "labels": ["a"], "passing_labels": ["a"]},
        "multi": {"calculate_output": "x", "graders": {"x": {"type": "score_model", "model": "m", "input": ask}}},
    }
    parse_grader({"type": kind, "name": "n", **given[kind]})
    return {"type": kind, "name": "n", **given[kind]}


def test_every_flag_is_explained() -> None:
    flags = {name for name, value in Errors().as_dict().items() if value is False}
    assert set(re.findall(r"^\| `(\w+_error)` \|", SECTION, re.M)) == flags
    of_client = {field.alias or name for name, field in MetadataErrors.model_fields.items()}
    assert of_client == Errors().as_dict().keys()


def test_the_settings_of_the_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", SECTION, re.S)
    (tmp_path / "graders.toml").write_text(block.replace("/data/dictionary", str(tmp_path)))
    monkeypatch.setenv("AGL_GRADERS", str(tmp_path / "graders.toml"))
    settings = owners_settings()
    assert settings.isolation == Bubblewrap(read=[str(tmp_path)])
    assert (settings.seconds, settings.images) == (30, {"2025-05-08": "/opt/graders-2025/bin/python"})
    for param, change in (("grader.model", {"model": "other"}), ("grader.image_tag", {"image_tag": "no"})):
        with pytest.raises(GraderRefused) as refused:
            parse_grader({**valid_of(param), **change})
        assert refused.value.param == param


def valid_of(param: str) -> dict[str, Any]:
    if param == "grader.image_tag":
        return {"type": "python", "source": "def grade(sample, item): return 1"}
    return {"type": "score_model", "input": [{"role": "user", "content": "?"}]}


WRONG: list[dict[str, Any]] = [
    *(
        {"memory": 1},
        {"embeddings_url": "http://x/v1"},
        {"seconds": 0},
        {"seconds": "1"},
        {"processes": 1.5},
        {"python": 3},
        {"models": "judge"},
    ),
    *({"isolation": "docker"}, {"isolation": {"write": []}}, {"isolation": None}, {"images": {"x": 1}}, {"images": []}),
]


@pytest.mark.parametrize("given", WRONG, ids=str)
def test_wrong_settings_are_refused_by_their_names(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "graders.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=f"{next(iter(given))}|write"):
        read_settings(tmp_path / "graders.json")
    for text in ("[1]", "{", "3"):
        (tmp_path / "graders.json").write_text(text)
        with pytest.raises(ConfigError):
            read_settings(tmp_path / "graders.json")
    with pytest.raises(ConfigError):
        read_settings(tmp_path / "none.toml")


def test_the_graders_of_the_page_are_valid() -> None:
    for block in re.findall(r"```json\n(.*?)```", SECTION, re.S):
        validate_grader({"grader": json.loads(block)})
