"""Template drift: prompts that the model's own chat template would have written otherwise, on a real tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentlightning.adapter.conversations import Conversation
from agentlightning.algorithm.episode import Episode
from agentlightning.cli.why import decoder_of_model, template_of_model
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.template import FIXES, template_findings
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.types import Rollout
from tests.algorithm.test_credit import make_call

from .recorded import TOOL

USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
OF_CALC = Path(resolve_model("calc"))
TEMPLATE = (OF_CALC / "chat_template.jinja").read_text()

DRIFTS: dict[str, tuple[str, list[dict[str, str]], bool, Callable[[str], str], str | None]] = {
    "a default system prompt": (
        "system_prompt",
        [USER],
        False,
        lambda t: "<|im_start|>system\nYou are helpful.<|im_end|>\n" + t,
        None,
    ),
    "a date": ("date", [SYSTEM, USER], False, lambda t: "Today is 2026-01-02.\n" + t, None),
    "the tools' form": ("tools", [SYSTEM, USER], True, lambda t: t.replace("<tools>", "<tool functions>"), None),
    "a renderer by name": ("renderer", [SYSTEM, USER], False, lambda t: t.replace("user", "human") + " ", "qwen3"),
    "an edited template": ("template", [SYSTEM, USER], False, lambda t: t + "\nWell, ", None),
}


def model(folder: Path, edit: Callable[[str], str]) -> Path:
    """The model that ships, with another chat template and a renderer that is taken on trust."""
    shutil.copytree(OF_CALC, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(edit(TEMPLATE))
    (folder / "agentlightning.json").write_text('{"renderer": "qwen3"}')
    return folder


def evidence(path: Path, messages: list[dict[str, str]], tools: bool, **settings: Any) -> Evidence:
    """Rollouts whose first prompts are rendered as the gateway does it."""
    offered: Any = [TOOL] if tools else []
    ids = load_rendering(str(path)).render(messages, offered or None)  # pyright: ignore[reportArgumentType]
    episodes, talks = [], {}
    for n in range(4):
        call = make_call(0, 3, tuple(np.array(ids).tolist()), None, None, f"r{n}")
        episodes.append(Episode(Rollout(rollout_id=f"r{n}", input=1), None, 1.0, [call]))
        talk = Conversation(None, call.info.call_id, None, None, None, messages, None, offered)  # pyright: ignore
        talks[f"r{n}"] = [talk]
    found = Evidence(episodes=episodes, settings=settings)
    found.__dict__["talks"] = talks  # as read from the spans
    return found


def drifts(path: Path, *given: Any, **settings: Any) -> list[Any]:
    return list(
        template_findings(evidence(path, *given, **settings), template_of_model(str(path)), decoder_of_model(str(path)))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", DRIFTS)
def test_drift_and_its_cause_are_named(tmp_path: Path, name: str) -> None:
    cause, messages, tools, edit, renderer = DRIFTS[name]
    (found,) = drifts(model(tmp_path / "model", edit), messages, tools, renderer=renderer)
    assert (found.code, found.evidence["cause"]) == ("template_drift", cause)
    assert found.fix == FIXES[cause]
    assert found.evidence["was"] != found.evidence["wanted"]
    assert "4 of 4" in found.words


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER]])
def test_a_model_as_it_ships_does_not_drift(messages: list[dict[str, str]], tools: bool) -> None:
    assert drifts(OF_CALC, messages, tools) == []


def test_what_cannot_be_compared_is_no_drift(tmp_path: Path) -> None:
    path = model(tmp_path / "model", lambda t: t + "x")
    found = evidence(path, [USER], False)
    assert not list(template_findings(found, None, decoder_of_model(str(path)))), "a provider's model"
    assert not list(template_findings(found, lambda m, t: None, decoder_of_model(str(path)))), "the template refuses"
