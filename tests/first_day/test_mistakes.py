"""Mistakes that are answered before anything is loaded, each with the words that mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.store import location_of
from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.metrics import SilentConsole
from agentlightning.runner.endings import Ending, with_gateway
from agentlightning.trainer.example import load_agent
from agentlightning.types import Outcome

FILES = {
    "lines.json": '{"a": 1}\n{"a": 2}\n',
    "one.json": '{"question": 1}',
    "part.json": '{"tasks": [1, 2]}',
    "none.json": "[]",
    "array.jsonl": '[{"a": 1}, {"a": 2}]',
    "pretty.jsonl": '[\n{"a": 1}\n]\n',
    "broken.jsonl": '{"a": 1}\n{"a": 2\n',
    "empty.jsonl": "",
    "notes.txt": "a task",
    "commas.csv": "q,a\n1,2,3\n",
}


class Mine(agl.LitAgent[Any]):
    """An agent that is never made."""


def no_task() -> float:
    return 1.0


@agl.rollout
def agent(task: Any, llm: agl.LLM) -> float:
    return 1.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with every file that somebody might give."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read at its import
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("no_model").mkdir()
    return tmp_path


def fit(what: Any, tasks: Any, model: Any = "calc") -> None:
    algorithm = agl.GRPO(model=model, steps=1)
    agl.Trainer(algorithm=algorithm, run_dir="run", console=SilentConsole()).fit(what, tasks)


TASKS: list[tuple[Any, str]] = [
    ("lines.json", "must end in .jsonl"),
    ("one.json", "put it in brackets"),
    ("part.json", "Its part 'tasks' is one"),
    ("none.json", "holds no tasks"),
    ("array.jsonl", "Rename it to array.json"),
    ("pretty.jsonl", "let its name end in .json"),
    ("broken.jsonl", "line 2 is not JSON"),
    ("empty.jsonl", "holds no tasks"),
    ("missing.jsonl", "There is no file 'missing.jsonl'"),
    ("notes.txt", "ends in none of .jsonl"),
    ("commas.csv", "Quote fields that hold commas"),
    ([], "Give at least one task"),
    ({"q": 1}, "Give a list with one JSON value per task"),
    ({1, 2}, "list(tasks)"),
    ({"q": [1, 2], "a": [3, 4]}, "zip(*tasks.values())"),
    ({"q": {0: 1, 1: 2}}, "df.to_dict('records')"),
    ((n for n in [1]), "list(tasks)"),
    (5, "Give a list of them"),
]


@pytest.mark.parametrize(("tasks", "words"), TASKS, ids=[str(tasks)[:20] for tasks, _ in TASKS])
def test_tasks(folder: Path, tasks: Any, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        fit(agent, tasks)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (Mine, "give an instance of it: Mine(…)"),
        (None, "There is no agent"),
        ("agent.py:agent", "give the function itself: import it"),
        (no_task, "its first one must be the task"),
    ],
    ids=["a class", "nothing", "a name", "no task"],
)
def test_agents(folder: Path, what: Any, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        fit(what, [1])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no_model", "it has no config.json"),
        ("../none/here", "Give an existing directory, a Hugging Face id"),
        ("cal", "or a model that ships with the package: calc"),
        ("gpt-4o", "'gpt-4o' is a provider's model"),
        ("Qwen/none", "HF_HUB_OFFLINE=1 forbids to look for it"),
        ("", "model is ''; give a directory"),
        (None, "model is None; give a directory"),
        (["calc"], "model is ['calc']; give a directory"),
    ],
)
def test_models(folder: Path, model: Any, words: str) -> None:
    with pytest.raises(agl.AgentLightningError) as caught:
        fit(agent, [1], model=model)
    assert words in str(caught.value)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps is 0; it must be a number at least 1"),
    ({"steps": "3"}, "steps is '3'"),
    ({"learning_rate": -1}, "must be a number at least 0"),
    ({"learning_rate": "1e-4"}, "learning_rate is '1e-4'"),
    ({"group_size": 2.5}, "group_size is 2.5; it must be a whole number"),
    ({"tasks_per_step": 0}, "tasks_per_step is 0"),
    ({"temperature": 0}, "above 0 and at most 10"),
    ({"advantage": "gae2"}, "it can be "),
    ({"loss": "dpo"}, "agl.DPO(…)"),
    ({"schedule": "step"}, "'constant', 'linear' or 'cosine'"),
    ({"dtype": "fp16"}, "'float32', 'bfloat16'"),
    ({"credit": "none"}, "'broadcast', 'return_to_go'"),
    ({"loss": "gspoo"}, "Did you mean 'gspo'?"),
    ({"advantage": "dr-grpo"}, "Did you mean 'drgrpo'?"),
    ({"advantage": "groop"}, "Did you mean 'grpo'?"),
    ({"credit": "return-to-go"}, "Did you mean 'return_to_go'?"),
    ({"curriculum": "learnable"}, "Did you mean 'learnability'?"),
    ({"gamma": 2}, "at most 1"),
    ({"lora_rank": -1}, "lora_rank is -1; it must be a number at least 1 (or None)"),
    ({"val_every": -1}, "val_every is -1"),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=[str(settings) for settings, _ in SETTINGS])
def test_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        agl.GRPO(model="calc", **settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": agl.GRPO}, "Give an object: agl.GRPO(model='calc')"),
        ({"algorithm": "grpo"}, "Give an object: agl.GRPO(model='calc')"),
        ({"n_runners": 0}, "must be a whole number, and at least 1"),
        ({"concurrency": 0}, "must be a whole number, and at least 1"),
        ({"tracer": "otel"}, "agl.OtelTracer()"),
        ({"store": "sqlite"}, "agl.SqliteLightningStore('store.db')"),
        ({"strategy": "threads"}, "'inline', 'processes', 'ray' or 'remote'"),
        ({"resume": "none"}, "no checkpoint to resume from in none"),
        ({"hooks": print}, "which is no Hook"),
    ],
    ids=str,
)
def test_trainers(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        agl.Trainer(**settings)
    assert words in str(caught.value)


def test_a_judge_that_refuses_is_no_failure_of_the_agent() -> None:
    raised = Ending(Outcome.AGENT_ERROR, "AuthenticationError: 401")
    refused = AttemptSummary(calls=1, refused_by_provider="The provider of 'judge' answered 401.")
    judged = with_gateway(raised, refused)
    assert judged.outcome is Outcome.JUDGE_ERROR
    assert judged.error == "The provider of 'judge' answered 401.\nAuthenticationError: 401"
    alone = AttemptSummary(refused_by_provider="The provider of 'main' answered 401.")
    assert with_gateway(raised, alone).outcome is Outcome.AGENT_ERROR, "it was the agent's own model"


@pytest.mark.parametrize(
    ("name", "meant"), [("Grpo", "GRPO"), ("Trainner", "Trainer"), ("emit_rewards", "emit_reward")]
)
def test_names(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"Did you mean: '{meant}'"):
        getattr(agl, name)


def test_an_agent_that_is_spelled_otherwise(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def agent(task, llm):\n    return 1.0\n")
    with pytest.raises(agl.ConfigError, match=r"mine\.py has no 'agnet' at its top level\. Did you mean 'agent'\?"):
        load_agent(f"{tmp_path / 'mine.py'}:agnet")


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(agl.ConfigError, match=r"no store in '.+': it has no store\.db\. Give a run's folder"):
        location_of(tmp_path)
