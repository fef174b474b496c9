"""docs/fine-tuning-api.md names every route and field that the official client knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import openai
import pytest
from openai.types.fine_tuning.job_create_params import JobCreateParams
from typing_extensions import is_typeddict

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.finetuning.models import read_bases
from agentlightning.finetuning.recipe import BaseModel, check
from agentlightning.finetuning.requests import JobRequest
from agentlightning.finetuning.routes import ROUTES

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning-api.md").read_text()
VARIES = re.compile(r"\{\w+(:path)?\}")
OF_GRADERS = "method.reinforcement.grader."
EXTENSIONS = {"method.reinforcement.response_format", "method.reinforcement.agent"}
"""Fields that clients send and the client's types do not know."""


def parts_of(kind: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    yield kind
    for part in get_args(kind):
        yield from parts_of(part)


def fields_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """The fields of the client's typed dictionaries, by their paths."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield f"{prefix}{name}"
        for part in parts_of(hint):
            if is_typeddict(part) and not f"{prefix}{name}.".startswith(OF_GRADERS):
                yield from fields_of(part, f"{prefix}{name}.")


def ours(kind: type, prefix: str = "") -> Iterator[str]:
    """The fields of our records, by their paths."""
    for field in msgspec.structs.fields(kind):
        yield f"{prefix}{field.name}"
        for part in parts_of(field.type):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from ours(part, f"{prefix}{field.name}.")


def documented() -> dict[str, str]:
    """What the table says of each field."""
    return dict(
        re.findall(r"^\| `([a-z_.]+)` \| (honoured|extended|refused)", PAGE.split("## Fields of a job")[1], re.M)
    )


def test_every_field_that_the_client_knows_is_in_the_table() -> None:
    assert set(documented()) - EXTENSIONS == set(fields_of(JobCreateParams))


def test_every_field_that_is_honoured_is_read_and_no_other_is() -> None:
    said = documented()
    assert set(ours(JobRequest)) >= {name for name, what in said.items() if what != "refused"}
    assert set(ours(JobRequest)) <= set(said) | EXTENSIONS


def test_every_route_of_the_client_is_served_or_said_to_be_refused() -> None:
    resources = Path(openai.__file__).parent / "resources"
    files = [resources / "files.py", resources / "models.py", *(resources / "uploads").glob("*.py")]
    sources = [file.read_text() for file in (*files, *(resources / "fine_tuning").rglob("*.py"))]
    known = {VARIES.sub("{id}", path) for text in sources for path in re.findall(r'"(/[a-z_]+[^"\s]*)"', text)}
    assert "/fine_tuning/jobs/{id}/pause" in known
    served = {VARIES.sub("{id}", route.path) for route in ROUTES}
    refused = set(re.findall(r"`(/[^`]+)`", PAGE.split("Refused with 404:")[1].split("\n\n")[0]))
    assert known <= served | refused
    assert not served & refused


def test_the_table_of_routes_is_that_of_the_server() -> None:
    rows = re.findall(r"^\| `([A-Z]+) (/[^`]+)` \| (.*) \|$", PAGE, re.M)
    assert rows == [(r.method, r.path.replace(":path", ""), r.says) for r in ROUTES]


def test_the_models_of_the_page_are_read(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE, re.S)
    assert block is not None
    file = tmp_path / "models.toml"
    file.write_text("\n".join(line.strip() for line in block[1].splitlines()))
    found = read_bases(file, ["calc"])
    assert {name: base.model for name, base in found.items()} == {
        "calc": "calc",
        "gpt-4.1-mini": "Qwen/Qwen3-0.6B",
        "gpt-4.1": "Qwen/Qwen3-4B",
    }
    assert found["gpt-4.1"].settings == {"lora_rank": 16, "dtype": "bfloat16"}
    for wrong in (BaseModel("a", "no-such-model"), BaseModel("a", "calc", {"colour": "red"})):
        with pytest.raises(AgentLightningError, match="base model 'a'"):
            check(wrong)
    check(BaseModel("a", "calc", {"lora_rank": 4}))
    file.write_text('[a]\nmodel = "calc"\nstable_reinforce = "cispo"')
    assert read_bases(file, [])["a"] == BaseModel("a", "calc", {}, "cispo")
    wrong_loss = '[a]\nmodel = "calc"\nstable_reinforce = "dpo"'
    for wrong in ("a = 1", "[a]\nlora_rank = 1", '"a:b" = "calc"', "= 1", wrong_loss):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            read_bases(file, [])
