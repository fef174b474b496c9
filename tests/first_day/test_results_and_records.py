"""What a run came to, where it is recorded, and what else people look for around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.parts.curriculum import TaskHistory
from agentlightning.gateway.dialects.fields import Reading
from agentlightning.gateway.dialects.tables.common import FORMATS
from agentlightning.gateway.exchange import Refusal
from agentlightning.runner.endings import hint_for
from agentlightning.trainer.result import RunResult
from tests.first_day.day import said, script


@pytest.mark.parametrize(
    ("asked", "words"),
    [("mean_reward", "Did you mean reward?"), ("zzz", "The row has step, reward.")],
)
def test_a_metric_by_another_name(asked: str, words: str) -> None:
    result = RunResult(Path("run"), None, False, metrics=[{"step": 1, "reward": 0.5}])
    with pytest.raises(KeyError, match=words):
        result.metrics[-1][asked]
    assert result.metrics[-1].get(asked) is None
    assert json.loads(json.dumps(result.metrics)) == [{"step": 1, "reward": 0.5}]


@pytest.mark.parametrize("make", [agl.Trainer, agl.GRPO])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("callbacks", r"hooks=\[Mine\(\)\]"),
        ("wandb_project", r"sinks=\['wandb'\]"),
        ("logger", r"sinks=\['wandb'\]"),
        ("report_to", r"sinks=\['wandb'\]"),
    ],
)
def test_other_trainers_records_and_callbacks(make: Any, given: str, words: str) -> None:
    with pytest.raises(agl.ConfigError, match=words):
        make(**{given: 1})


def test_a_model_for_each_agent() -> None:
    with pytest.raises(agl.ConfigError, match=r"policies=\{'solver': None, 'critic': None\}"):
        agl.GRPO(model={"solver": "calc", "critic": "calc"})  # pyright: ignore[reportArgumentType]


def test_a_format_that_is_its_name() -> None:
    with pytest.raises(Refusal, match=r"such as \{'type': 'json_object'\}"):
        Reading().known("json_object", FORMATS, "response_format")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("TypeError('x').choices", "the error of a call"),
        ("None.total_tokens", "stream_options={'include_usage': True}"),
    ],
)
def test_an_answer_that_is_none(wrong: str, words: str) -> None:
    with pytest.raises(AttributeError) as caught:
        eval(wrong)
    assert words in str(hint_for(caught.value))


def test_a_curriculum_that_gives_tasks() -> None:
    history = TaskHistory(lambda records: [{"q": 1}, {"q": 2}], 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(agl.ConfigError, match="must give a finite weight of at least 0 for each of 2 tasks"):
        history.draw(1, np.random.default_rng(0))


def test_a_run_is_no_folder_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    load = "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('run')\n"
    done = script(tmp_path, load, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    said(done, "This is the folder of a run. Its model: result.checkpoint")
