"""What a run came to, where it is recorded, and what else people look for around it."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import agentlightning as agl
from agentlightning.algorithm.parts.curriculum import TaskHistory
from agentlightning.gateway.dialects.fields import Reading
from agentlightning.gateway.dialects.tables.common import FORMATS
from agentlightning.gateway.exchange import Refusal
from agentlightning.runner.endings import describe, hint_for
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
        ("project_name", r"sinks=\[WandbSink\(project=…\)\]"),
        ("experiment_name", "run_dir='runs/name'"),
    ],
)
def test_other_trainers_records_and_callbacks(make: Any, given: str, words: str) -> None:
    with pytest.raises(agl.ConfigError, match=words):
        make(**{given: 1})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("add_callback", "class Mine(agl.metrics.Sink), Trainer(sinks=[Mine()])"),
        ("load", "Trainer(resume='runs/NAME', algorithm=…)"),
        ("state", "result = trainer.fit(agent, tasks)"),
        ("log", "Metrics are recorded by themselves"),
    ],
)
def test_other_trainers_methods(name: str, words: str) -> None:
    for asked in (agl.Trainer(), agl.Trainer):
        with pytest.raises(AttributeError) as caught:
            getattr(asked, name)
        assert words in str(caught.value)


def test_an_algorithm_is_not_loaded() -> None:
    with pytest.raises(AttributeError, match="Settings are its arguments, and a model is named"):
        agl.GRPO.from_config("a.yaml")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(agl.ConfigError, match=r"RolloutConfig\(timeout_seconds=600\)"):
        agl.Trainer(timeout=5)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("gpu_memory_utilization", "backend_options={'gpu_memory_utilization': 0.45}"),
        ("deepspeed", "ranks=2 spreads the learner"),
        ("timeout", "GRPO(rollout_config=RolloutConfig(timeout_seconds=600))"),
        ("early_stopping", "Training takes the steps it is given"),
        ("n_gpus_per_node", "ranks=2 spreads the learner"),
        ("num_workers", "Trainer(algorithm=…, n_runners=…)"),
        ("temp", "Did you mean temperature?"),
        ("actor_lr", "Did you mean learning_rate?"),
        ("kl_loss_type", "Did you mean kl_estimator?"),
        ("rollout_n", "Did you mean group_size?"),
        ("save_total_limit", "Did you mean keep_checkpoints?"),
    ],
)
def test_other_trainers_settings(setting: str, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        agl.GRPO(**{"model": "calc", setting: 1})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from agentlightning.callbacks import Callback", "There is no agentlightning.callbacks. Rollouts are seen by"),
        ("from agentlightning import Callback", "class Mine(agl.Hook), Trainer(hooks=[Mine()])"),
        ("from agentlightning.metrics import WandbLogger", "from agentlightning.metrics.trackers import WandbSink"),
        ("from agentlightning.metrics import WandbSink", "It is in agentlightning.metrics.trackers"),
        ("agl.log({'loss': 1})", "emit_reward({'correct': 1.0, 'length': 12}, primary_key='correct')"),
    ],
)
def test_names_of_records_and_callbacks(line: str, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        exec(line, {"agl": agl})
    assert words in str(caught.value)


def test_an_agents_line_is_named_and_none_of_ours() -> None:
    with pytest.raises(AttributeError) as caught:
        exec("agl.zzz", {"agl": agl})
    assert "compat" not in describe(caught.value)


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


def test_a_reward_that_a_hook_looks_for() -> None:
    span = agl.Span.from_attributes(rollout_id="r", attempt_id="a", attributes={})
    with pytest.raises(AttributeError) as caught:
        span.reward  # pyright: ignore  # noqa: B018
    assert "agl.find_final_reward(spans)" in describe(caught.value)


def test_a_sinks_metric_by_another_name(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(agl.metrics.Sink):
        def step(self, metrics: Any) -> None:
            metrics["mean_reward"]

    agl.metrics.Reporter(guests=[Mine()]).step({"step": 1, "reward": 0.5})
    assert "Did you mean reward?" in caplog.text


def test_a_curriculum_that_gives_tasks() -> None:
    history = TaskHistory(lambda records: [{"q": 1}, {"q": 2}], 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(agl.ConfigError, match="must give a finite weight of at least 0 for each of 2 tasks"):
        history.draw(1, np.random.default_rng(0))


def a_result() -> RunResult:
    rows = [{"step": 0, "val_reward": 0.1}, {"step": 1, "reward": 0.5, "rollouts": 8}]
    return RunResult(Path("runs/a"), Path("runs/a/checkpoints/step-000001"), False, metrics=rows)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("rows[0]", "result.metrics[-1]['reward']"),
        ("history['loss']", "[row.get('reward') for row in result.metrics]"),
        ("val_reward", "result.metrics[-1]['val_reward']"),
        ("best.reward", "key=lambda row: row['val_reward']"),
        ("model.generate('hi')", "runs/a/checkpoints/step-000001/model: load it with transformers' from_pretrained"),
        ("save('out')", "agl export runs/a --to FOLDER"),
        ("plot()", "runs/a/curve.png"),
        ("rollouts[0]", "agl show runs/a prints what was said"),
        ("to_pandas()", "pandas.DataFrame(result.metrics)"),
        ("output_dir", "result.run_dir, runs/a"),
        ("zzz", "It has run_dir, checkpoint, stopped"),
        ("metrics[-1].reward", "A row of metrics is a dict: row['reward']"),
        ("metrics.to_pandas()", "pandas.DataFrame(result.metrics)"),
        ("metrics.last()", "result.metrics[-1]['reward']"),
        ("metrics[1]['val_reward']", "This step has none, and others do"),
        ("metrics[0]['mean_reward']", "Did you mean reward?"),
        ("metrics[0]['val_accuracy']", "Did you mean val_reward?"),
    ],
)
def test_where_a_result_is(asked: str, words: str) -> None:
    with pytest.raises((AttributeError, KeyError)) as caught:
        eval(f"result.{asked}", {"result": a_result()})
    assert words in str(caught.value)


def test_a_result_is_one_object_as_it_was_made() -> None:
    with pytest.raises(TypeError, match="one object, no list of rows or pair"):
        _, _ = a_result()  # pyright: ignore[reportGeneralTypeIssues]
    assert copy.deepcopy(pickle.loads(pickle.dumps(a_result()))) == a_result()
    assert len(pandas.DataFrame(a_result().metrics)) == 2


RESULT = "from pathlib import Path\nresult = agl.RunResult(Path('run'), Path('run/checkpoints/step-000001'), False)\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("result > result", "RunResult is what fit() returns"),
        ("f'{result:.3f}'", "The last reward: result.metrics[-1]['reward']"),
        (
            "import os\nfrom_pretrained = os.stat\nfrom_pretrained(result)",
            "from_pretrained(result.checkpoint / 'model')",
        ),
        ("json.dumps(result)", "RunResult is what fit() returns"),
        ("json.dumps(vars(result))", "default=str"),
        ("result.reward = 1", "This object stays as it was made"),
        ("json.loads('{}\\n{}')", "[json.loads(line) for line in file]"),
        ("result.checkpoint.load()", "from_pretrained(result.checkpoint / 'model')"),
        ("result.run_dir + '/metrics.jsonl'", "result.run_dir / 'metrics.jsonl'"),
        ("{'a': 1}['b']", None),
    ],
)
def test_what_python_says_of_a_result(tmp_path: Path, line: str, words: str | None) -> None:
    done = script(tmp_path, f"import json\n{RESULT}{line}\n")
    assert done.returncode == 1
    said(done, words or "Error: ")
    assert words or "result.metrics has" not in done.stderr


@pytest.mark.quick_with("run.json")
@pytest.mark.parametrize("mark", ["run.json", "checkpoint.json"])
def test_a_run_is_no_folder_of_transformers(tmp_path: Path, mark: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / mark).write_text("{}")
    load = "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('run')\n"
    done = script(tmp_path, load, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    said(done, "This is the folder of a run or a checkpoint. Its model is in the folder model")
