"""Values of settings as other libraries, shells and files write them: each refusal says how it is written here."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.unusual import unusual
from agentlightning.errors import AgentLightningError
from agentlightning.models import resolve_model
from agentlightning.trainer.tasks import load_tasks
from agentlightning.variables import that_break_clients
from tests.first_day.day import agl as command


class Rate(enum.Enum):
    LOW = 1e-5


def grpo(**given: Any) -> Any:
    return agl.GRPO(model="calc", **given)


VALUES: list[tuple[Callable[..., Any], str, Any, str]] = [
    (grpo, "learning_rate", np.float32(1e-4), "numpy's float32, whose .item()"),
    (grpo, "learning_rate", Decimal("1e-5"), "It is a Decimal: give float(…) of it."),
    (grpo, "learning_rate", Fraction(1, 10), "It is a Fraction"),
    (grpo, "learning_rate", "1e-5", "write it without quotes, 1e-5"),
    (grpo, "learning_rate", [1e-5], "Give it without brackets: 1e-05."),
    (grpo, "learning_rate", Rate.LOW, "Give its value: Rate.LOW.value."),
    (grpo, "stall_seconds", datetime.timedelta(minutes=5), "Give its seconds: 300."),
    (grpo, "group_size", np.int64(4), "numpy's int64"),
    (grpo, "group_size", 4.0, "Write it without a point: 4."),
    (grpo, "steps", 1e3, "Write it without a point: 1000."),
    (grpo, "tasks_per_step", "8", "write it without quotes, 8"),
    (grpo, "deterministic", np.bool_(True), "whose .item()"),
    (grpo, "dtype", np.float32, "Give its name: 'float32'."),
    (grpo, "val_every", [], "it must be a whole number"),
    (grpo, "backend_options", "a=1", "it takes values by name"),
    (grpo, "loss", agl.CISPO, "Did you mean 'cispo'? An algorithm takes the place of GRPO: CISPO(model=…)."),
    (agl.Trainer, "concurrency", "8", "write it without quotes, 8"),
    (agl.Trainer, "n_runners", 2.0, "Write it without a point: 2."),
    (agl.Trainer, "run_dir", "s3://bucket/run", "a path of this machine is needed"),
    (agl.Trainer, "run_dir", Path("gs://bucket/run"), "a path of this machine is needed"),
    (agl.Trainer, "run_dir", "file:///data/run", "Give the path alone: '/data/run'."),
    (agl.Trainer, "run_dir", "$HOME/run", "os.path.expandvars"),
    (agl.Trainer, "run_dir", "runs/${USER}/1", "os.path.expandvars"),
    (agl.Trainer, "run_dir", "%USERPROFILE%/run", "os.path.expandvars"),
    (agl.Trainer, "resume", "$HOME/run", "os.path.expandvars"),
    (agl.Provider, "base_url", None, "it begins with http:// or https://"),
    (agl.APO, "beam_rounds", "5", "it must be a whole number"),
    (agl.GEPA, "budget_rollouts", "many", "it must be a whole number"),
    (agl.RolloutConfig, "timeout_seconds", datetime.timedelta(minutes=5), "Give its seconds: 300."),
]


@pytest.mark.parametrize(("make", "name", "value", "words"), VALUES)
def test_a_value_of_another_kind(make: Callable[..., Any], name: str, value: Any, words: str) -> None:
    with pytest.raises(AgentLightningError) as raised:
        make(**{name: value})
    assert words in str(raised.value)


WHOLE = [
    "group_size",
    "tasks_per_step",
    "steps",
    "epochs",
    "minibatches",
    "save_every",
    "keep_checkpoints",
    "lora_rank",
]


@pytest.mark.parametrize("name", WHOLE)
def test_no_whole_number_is_taken_with_a_point(name: str) -> None:
    with pytest.raises(agl.ConfigError, match=r"Write it without a point: 4\."):
        grpo(**{name: 4.0})


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3://bucket/x", "a path of this machine is needed"),
        ("file:///data/x", "Give the path alone: '/data/x'."),
        ("$HOME/x", "os.path.expandvars"),
    ],
)
def test_a_place_that_is_no_path(place: str, words: str) -> None:
    with pytest.raises(AgentLightningError) as raised:
        load_tasks(f"{place}.jsonl")
    assert words.replace("x'", "x.jsonl'") in str(raised.value)
    with pytest.raises(AgentLightningError) as raised:
        resolve_model(place)
    assert words in str(raised.value)


def test_a_folder_with_a_dollar_in_its_name_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "$x").mkdir()
    assert agl.Trainer(run_dir=tmp_path / "$x").run_dir == tmp_path / "$x"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 5, "epochs": 3}, "leave one out"),
        ({"val_every": 0, "val_repeats": 4}, "val_every=0 never validates"),
    ],
)
def test_settings_of_which_one_makes_the_other_idle(settings: dict[str, Any], words: str) -> None:
    assert any(words in said for said in unusual(grpo(**settings)))
    assert not any(words in said for name in settings for said in unusual(grpo(**{name: settings[name]})))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("profiler=1", "backend='inprocess'"),
        ("run_dir=x", "It is a setting of the trainer"),
        ("models=judge", "Models that agents ask besides the policy"),
        ("groupsize=4", "did you mean group_size=…?"),
    ],
)
def test_a_setting_of_the_command_line(setting: str, words: str, tmp_path: Path) -> None:
    done = command(tmp_path, "train", "--print-config", "--model", "calc", "--set", setting)
    assert words in done.stderr


def test_certificates_that_are_not_there_are_named_at_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    assert [missing in words for words in that_break_clients({"SSL_CERT_FILE": missing})] == [True]
    assert not [*that_break_clients({"SSL_CERT_FILE": __file__, "REQUESTS_CA_BUNDLE": ""})]
