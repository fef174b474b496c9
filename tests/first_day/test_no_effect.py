"""What is typed acts, or is refused by the name that was typed; and what is advised can be typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.app import app
from agentlightning.cli.options import value_in
from agentlightning.errors import StoreError, in_words
from agentlightning.litagent.decorator import FunctionAgent
from agentlightning.store.transfer.records import from_line
from agentlightning.trainer.checks import as_tasks
from agentlightning.trainer.words import closing

AGENT = "def agent(task, llm):\n    return 1.0\n"
WORK = "--agent agent.py:agent --tasks tasks.jsonl"
CRITIC = f"optimize {WORK} --prompt prompt.txt --model calc --critic-url http://127.0.0.1:9/v1 --critic-model c"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "AGL_STORE_KEY", "AGL_UPSTREAM_KEY", "AGL_CRITIC_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {"agent.py": AGENT, "tasks.jsonl": "1\n2\n", "prompt.txt": "Hi", "key": "k"}.items():
        Path(name).write_text(text)
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    for name, steps in (("first", 2), ("second", 0)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "run.json").write_text("{}")
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "reward": 1.0}) + "\n" for n in range(steps)))
    return tmp_path


def answer(command: str) -> str:
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code != 0, done.output
    return in_words(done.exception) if isinstance(done.exception, agl.AgentLightningError) else done.output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("eval runs/first --passing 0.5", "--passing has no effect: it is for --pass-at."),
        ("export runs/first --to m --format openai", "--format has no effect: it is for --jsonl or --parquet."),
        (f"run {WORK} --model calc --endpoint-model gpt", "--endpoint-model has no effect: it is for --endpoint."),
        (f"run {WORK} --model calc --api-key @key", "--api-key has no effect: it is for --endpoint."),
        (f"doctor {WORK} --endpoint-model gpt", "--endpoint-model has no effect: it is for --endpoint."),
        (f"{CRITIC} --endpoint-model gpt", "--endpoint-model has no effect: it is for --endpoint."),
        (f"{CRITIC} --prompt-place before", "--prompt-place has no effect: it is for --system-prompt."),
        (f"{CRITIC} --budget-cost 1", "--budget-cost needs --prices"),
        (f"{CRITIC} --prompt prompt.txt", "Name each: --prompt NAME=FILE"),
        (f"{CRITIC} --set group_size=3", "there is no such setting; they are: apply_edit_model, "),
        (f"train {WORK} --key-file key", "--key-file has no effect: it is for --server."),
        (f"train {WORK} --upstream-key @key", "--upstream-key has no effect: it is for --upstream."),
        (f"train {WORK} --address auto", "--address has no effect: it is for --backend ray."),
        ("train --data chats.jsonl --timeout 5", "--timeout has no effect: it is for an agent's rollouts"),
        ("train --data chats.jsonl --n-runners 2", "--n-runners has no effect: it is for an agent's rollouts"),
        ("gateway --upstream a=http://h/v1 --name n", "--name has no effect: it is for --model."),
        ("gateway --upstream a=http://h/v1 --key @key", "--key has no effect: it is for --server."),
        ("gateway --upstream a=http://h/v1 --path a.db --server http://h:1", "(--path) or in the store of --server"),
        ("judge runs/first --write-labels l.jsonl --labels reward", "so --labels would have no effect"),
        ("judge runs/first --write-labels l.jsonl --set part=x", "so --set would have no effect"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_option_that_would_do_nothing(command: str, words: str) -> None:
    assert words in answer(command)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"train {WORK} --set steps=1 --set steps=2", "--set steps=… is given twice"),
        (f"train {WORK} --steps 1 --set steps=2", "--steps 1 and --set steps=2 are the same setting"),
        ("gateway --upstream a=http://h/v1 --upstream a=http://g/v1", "--upstream a=… is given twice"),
        ("env check gym:X-v0 --env-option tasks=1 --env-option tasks=2", "--env-option tasks=… is given twice"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_same_name_twice(command: str, words: str) -> None:
    assert words in answer(command)


@pytest.mark.usefixtures("folder")
def test_what_may_be_in_the_environment_for_another_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert "has no effect" not in answer("run --agent agent.py:none --tasks tasks.jsonl --model calc")
    assert "twice" not in answer("whatif runs/none --set 'loss=gspo' --set 'loss=cispo'")
    assert "twice" not in answer("import a=1.json a=2.json")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("gradient_checkpointing=yes", "Error: gradient_checkpointing is 'yes'; it must be True or False."),
        ("learning_rate=0,001", "A number has a point here: 0.001."),
        ("clip_low=20%", "Write 20% as 0.2."),
        ("lora_rank=none", "it must be a whole number (or None)."),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_value_is_refused_by_the_name_that_was_written(setting: str, words: str) -> None:
    assert words in answer(f"train {WORK} --set {setting}")


@pytest.mark.parametrize(("setting", "value"), [("gradient_checkpointing=True", True), ("lora_rank=None", None)])
@pytest.mark.usefixtures("folder")
def test_what_a_message_says_of_a_value_can_be_typed(setting: str, value: Any) -> None:
    done = CliRunner().invoke(app, shlex.split(f"train {WORK} --set {setting} --print-config"))
    assert json.loads(done.output)[setting.partition("=")[0]] is value
    assert [value_in(text) for text in ("False", "false", "none", "1e-3")] == [False, False, "none", 0.001]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compare runs/first runs/first --metric rewrd", "neither run has such a metric. Did you mean reward?"),
        ("export runs/first --jsonl a.jsonl --agent '*x'", "--agent *x is no regular expression"),
        ("report runs/first --to runs", "--to runs is a folder. Give a file, such as runs/report.html"),
        ("fork ro-1 runs/first", "The run comes first, and the rollout behind it: runs/first ro-1"),
        ("show ro-1 runs/first", "The run comes first, and the rollout behind it: runs/first ro-1"),
        ("store --dsn mysql://u@h/d", "--dsn begins with postgresql://"),
        (f"run {WORK} --endpoint http://h/v1 --run-dir runs/first", "Give another run_dir (--run-dir)."),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_cause_is_the_one_that_is_named(command: str, words: str) -> None:
    assert words in answer(command)


def test_what_filters_leave_is_named_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = agl.Trainer(algorithm=agl.Baseline(), run_dir="my run", console=agl.metrics.SilentConsole())
    trainer.fit(lambda task: 1.0, [1])
    assert "no finished rollout with --step 40 --reward-min 1.0 in" in answer("show 'my run' --step 40 --reward-min 1")
    assert "no failed rollout with --task 1 in" in answer("show 'my run' --failed --task 1")
    assert "The last 1 earned 1 to 1; ended ok (1)." in answer("show 'my run' --outcome timeout")
    assert "in my run. The last one is ro-" in answer("show 'my run' nope")
    assert "Did you mean --step 3?" in answer("show 'my run' 3")
    assert "Did you mean --group 3-0?" in answer("show 'my run' 3-0")


def test_commands_that_are_advised_keep_a_folder_with_a_blank_whole(tmp_path: Path) -> None:
    run = tmp_path / "my runs" / "1"
    run.mkdir(parents=True)
    said = closing("agl", agl.RunResult(run, run / "checkpoints" / "step-000001", False), agent_known=True)
    for command in ("show", "eval", "serve"):
        (line,) = [line for line in said.splitlines() if f" {command} " in line]
        assert any(word.startswith(str(run)) for word in shlex.split(line.partition("     ")[0]))


async def yields(task: Any):
    yield 1.0


async def agent(task: Any) -> float:
    return 1.0


def rows() -> Any:
    yield 1


def test_an_agent_that_can_be_no_agent() -> None:
    with pytest.raises(agl.ConfigError, match="has `yield`"):
        FunctionAgent(yields)  # pyright: ignore[reportArgumentType]
    with pytest.raises(agl.ConfigError, match=r"Give the function itself: fit\(agent, tasks\)"):
        agl.Trainer().fit(agent(1), [1])  # pyright: ignore[reportArgumentType]


def test_tasks_that_list_would_not_make(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("1\n")
    with pytest.raises(agl.ConfigError, match=r"list\(rows\(\)\)"):
        as_tasks("training", rows)
    with (tmp_path / "tasks.jsonl").open() as file, pytest.raises(agl.ConfigError, match=r"fit\(agent, '.*tasks.jsonl"):
        as_tasks("training", file)


def test_a_file_that_no_store_wrote() -> None:
    with pytest.raises(StoreError, match=r"as `agl store export` writes them \(it has no 'rollout'\): \{\"a\": 1\}"):
        from_line(b'{"a": 1}\n')
