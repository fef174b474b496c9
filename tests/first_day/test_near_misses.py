"""What is nearly right: numbers of another unit, names a letter off, files and folders beside the one that is meant."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.algorithm.unusual import USUAL, unusual
from agentlightning.algorithm.whatif import variant
from agentlightning.cli.app import app
from agentlightning.cli.evaluate import resolve
from agentlightning.errors import in_words
from agentlightning.metrics import Reporter, SilentConsole
from agentlightning.runner.endings import describe
from agentlightning.trainer.tasks import load_tasks
from agentlightning.trainer.words import introduce

NAMES: dict[str, Any] = {"agl": sys.modules["agentlightning"]}
WORK = "--agent agent.py:agent --tasks tasks.jsonl"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs' folders and an agent."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "checkpoints" / "step-000001").mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    Path("agent.py").write_text("def agent(task, llm):\n    return 1.0\n")
    Path("tasks.jsonl").write_text("1\n2\n")
    Path("prompt.txt").write_text("Hi")
    return tmp_path


def answer(command: str) -> str:
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, shlex.split(command))
    assert done.exit_code in (1, 2), done.output
    if isinstance(done.exception, agl.AgentLightningError):
        return in_words(done.exception)
    assert isinstance(done.exception, SystemExit), done.exception
    return " ".join(done.output.replace("│", " ").split())


# ---- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("clip_low=20", "at least 0 and at most 1"),
        ("steps='1_000'", "Write it in digits alone: 1000."),
        ("stall_seconds='15m'", "Write the number alone"),
        ("max_context='8k'", "Write the number alone"),
        ("learning_rate='1e-5f'", "Write the number alone"),
        ("temperature='0.7, top_p=0.9'", "One setting is given at a time"),
        ("group_reward=max", "@agl.rollout(group_reward=…)"),
        ("reward_model='m'", "group_judge=agl.GroupJudge("),
    ],
)
def test_a_setting_that_cannot_be_meant(setting: str, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        eval(f"agl.GRPO(model='calc', {setting})", NAMES)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 0}, "learning_rate is 0, and it is seldom below"),
        ({"learning_rate": 5}, "learning_rate is 5, and it is seldom above 0.5."),
        ({"clip_high": 28, "minibatches": 2}, "such as 0.2 for 20 %"),
        ({"kl": agl.Reference(coef=100)}, "kl.coef is 100, and it is seldom above 1."),
        ({"temperature": 7}, "temperature is 7, and it is seldom above 2."),
        ({"max_context": 4}, "It is in tokens"),
        ({"warmup_steps": 30, "steps": 20}, "never reaches its height"),
        ({"max_tokens": 5000, "max_context": 2048}, "raise max_context, or lower max_tokens"),
    ],
    ids=str,
)
def test_a_setting_that_could_be_meant_and_seldom_is(settings: dict[str, Any], words: str) -> None:
    (said,) = unusual(agl.GRPO(model="calc", **settings))
    assert words in said


@pytest.mark.parametrize("kind", [agl.GRPO, agl.CISPO, agl.GSPO, agl.DAPO, agl.SFT, agl.DPO, agl.PPO])
def test_nothing_is_said_of_defaults(kind: Any) -> None:
    assert list(unusual(kind(model="calc"))) == []
    assert all(usual.low < usual.high and usual.words.endswith(".") for usual in USUAL.values())


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
def test_a_gradient_is_not_asked_under_what_comes_behind_it(name: str) -> None:
    with pytest.raises(agl.ConfigError, match=f"{name} is no part of a gradient"):
        variant(agl.GRPO(model="calc"), {name: 0.1})


# ---- names and places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "meant"), [("rolout", "rollout"), ("Trainr", "Trainer"), ("grpo", "GRPO")])
def test_an_import_that_is_a_letter_off(name: str, meant: str) -> None:
    with pytest.raises(ImportError, match=f"Did you mean: '{meant}'"):
        exec(f"from agentlightning import {name}")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.GroupJudge()", "GroupJudge needs model"),
        ("agl.GroupJudge(modle='m')", "Did you mean model?"),
        ("agl.resolve_model()", "resolve_model needs name"),
        ("agl.algo()", "algo needs function"),
        ("agl.llm_rollout(strip=True)", "llm_rollout has no argument 'strip'"),
        ("agl.SqliteLightningStore('http://h:4747')", "agl.LightningStoreClient('http://h:4747')"),
        *(
            (f"agl.Provider(base_url='http://h/v1', api_key={key!r})", "is a placeholder, not a key")
            for key in ("$OPENAI_API_KEY", "OPENAI_API_KEY", "${KEY}", "sk-...", "your-api-key", "<key>")
        ),
        ("agl.Trainer(run_dir='')", "is a variable not set?"),
        ("agl.APO(critic_url='localhost:8000/v1')", "critic_url is 'localhost:8000/v1'; it begins with http://"),
        (
            "agl.Trainer(initial_resources={'llm': agl.LLM(endpoint='localhost:1', model='m')})",
            "is 'localhost:1'; it begins with http://",
        ),
    ],
)
def test_what_is_made(wrong: str, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        eval(wrong, NAMES)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compare runs/first runs/first/", "are the same run"),
        ("compare runs/first runs/second/checkpoints/step-000001", "It is inside the run runs/second: give that."),
        ("compare runs/first tasks.jsonl", "agl runs lists them."),
        ("why runs/first/checkpoints/step-000001", "It is inside the run runs/first: give that."),
        ("runs runs/first/checkpoints", "It is inside the run runs/first: give that."),
        ("report runs/first --to report.pdf", "should end in .html"),
        ("report runs/first --to runs/first/run.json", "should end in .html"),
        ("show runs/first --reward-min 1 --reward-max 0", "--reward-min 1 is above --reward-max 0"),
        ("plan --model calc --steps 5", "It is an option of agl demo, agl train"),
        ("plan calc", "Type --model calc"),
        ("store backup", "There are: stats, statistics, export"),
        ("store --path runs/first", "--path runs/first/store.db"),
        ("serve calc --name ''", "--name is empty: is a variable not set?"),
        ("eval ''", "CHECKPOINT is empty: is a variable not set?"),
        ("train --agent agent.py:agent --tasks ''", "--tasks is empty"),
        ("train --agent agent.py:agent --tasks tasks.jsonl --set ''", "--set is empty"),
        (f"doctor {WORK} --model calc --group-size 1", "it must be at least 2. Rollouts of a task"),
        (
            f"optimize {WORK} --prompt prompt.txt --model calc --critic-url http://h/v1 --critic-model c "
            "--budget-rollouts 1",
            "budget_rollouts=1 is too small",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_command(command: str, words: str) -> None:
    assert words in answer(command)


def test_a_run_that_goes_on_with_a_model_that_is_nowhere_keeps_its_record(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    trainer = agl.Trainer(algorithm=agl.GRPO(model=str(tmp_path / "no")), run_dir=tmp_path, console=SilentConsole())
    with pytest.raises(agl.ModelError, match="There is no model"):
        trainer.fit(lambda task, llm: 1.0, [1])
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "{}"


def test_a_run_whose_record_is_damaged_can_be_measured(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-000001"
    (saved / "model").mkdir(parents=True)
    (saved / "checkpoint.json").write_text(json.dumps({"step": 1, "base_model": "calc", "seed": 0}))
    (tmp_path / "run.json").write_text("{half")
    assert resolve(tmp_path)[2] == {}


# ---- tasks and agents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("twice.jsonl", '{"q": 1}\n{"a": {"q": 1, "q": 2}}\n', 'line 2: the key "q" stands in it twice'),
        ("twice.json", '[{"q": 1, "q": 2}]', 'twice.json: the key "q" stands in it twice'),
        ("heading.csv", "question,answer\n", "no row below it"),
        ("quote.csv", 'q,a\n"1,2\n3,4\n', "A quote that opens in it may not be closed"),
        ("short.csv", "q,a\n1\n", "leave no field out"),
    ],
)
def test_a_file_of_tasks(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(agl.ConfigError) as caught:
        load_tasks(tmp_path / name)
    assert words in str(caught.value)


class Heard(SilentConsole):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([{"q": 1}, "text", 5], "of several kinds: 1 × dict, 1 × text, 1 × number"),
        (["", ""], "2 are empty"),
        ([{"q": 1}, {}], "1 is empty, number 2 first"),
        ([1, 2.5], None),
        ([{}, {}], None),
        ([{"q": 1}, {"question": 2}], None),
    ],
)
def test_odd_tasks(tasks: list[Any], words: str | None) -> None:
    heard = Heard()
    introduce(Reporter(heard), agl.GRPO(model="calc"), Path("run"), tasks, ["x"])
    assert any(words in said for said in heard.warnings) if words else heard.warnings == []


def of_a_text(task: Any) -> Any:
    return task.question


def of_a_key(task: Any) -> Any:
    return task["question"]


def of_a_file(task: Any) -> Any:
    return Path("answers.txt").read_text()


def of_itself(task: Any) -> Any:
    return of_itself(task)


@pytest.mark.parametrize(
    ("agent", "task", "words"),
    [
        (of_a_text, "1 + 1", "The task is of the kind str, here '1 + 1', and has no fields."),
        (of_a_key, "1 + 1", "The task is of the kind str"),
        (of_a_key, 5, "The task is of the kind int, here 5"),
        (of_a_text, {"question": 1}, "A dict's fields stand in brackets"),
        (of_a_file, "1 + 1", "A relative path starts at"),
        (of_itself, "1 + 1", "A function calls itself without an end."),
    ],
)
def test_an_agent(agent: Any, task: Any, words: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever Python makes of it
        agent(task)
    assert words in describe(caught.value, task)


@pytest.mark.parametrize("name", ["node", "/data/answers.txt", None])
def test_a_command_and_an_absolute_path_are_no_relative_path(name: str | None) -> None:
    assert "relative path" not in describe(FileNotFoundError(2, "No such file or directory", name), {"q": 1})
