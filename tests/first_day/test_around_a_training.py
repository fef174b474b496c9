"""The commands around a training: prompts, evaluations, folders that were moved or damaged, traces, and what is said of
agents that go about their model in another way than they seem to.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage as Message, ChatCompletionMessageFunctionToolCall as ToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

import agentlightning as agl
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.rollout_verdicts import asks_itself, most_fail
from agentlightning.cli.configuration import read_config
from agentlightning.cli.evaluate import measure, resolve
from agentlightning.cli.optimize import read_prompts
from agentlightning.cli.store import location_of
from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.gateway.dialects.fields import Refusal, required
from agentlightning.litagent.program_words import ended_badly
from agentlightning.metrics import SilentConsole
from agentlightning.metrics.sink import JsonlSink, read_metrics
from agentlightning.models import resolve_model
from agentlightning.runner.endings import (
    NO_TEXT,
    OF_CHAT,
    OF_RESPONSES,
    OWN_ADDRESS,
    Ending,
    hint_for,
    hint_with_calls,
    hint_without_calls,
    with_gateway,
)
from agentlightning.types import Attempt, Outcome, Rollout
from agentlightning.variables import OF_USERS, misspelt
from tests.cli.test_export_model import make_checkpoint
from tests.cli.test_optimize import options
from tests.first_day.test_near_misses import answer

CHATS = '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "run", Path(resolve_model("calc")))
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "a.py").write_text("def agent(task, llm):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text("1\n2\n")
    return tmp_path


# ---- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("Answer: {question}", "f-string"),
        ("Answer: {{question}}", "jinja"),
        ("Answer: {{ task.question | upper }}", "jinja"),
        ("{% if question %}Answer{% endif %}", "jinja"),
        ('Reply as {{"answer": 1}}: {question}', "f-string"),
        ("Reply as {{}}: {question}", "f-string"),
    ],
)
def test_doubled_braces_around_json_are_braces(text: str, engine: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(text)
    (prompt,) = read_prompts(options(tmp_path, prompt=[str(tmp_path / "p.txt")])).values()
    assert prompt.engine == engine
    assert "{question}" not in prompt.format(question="1 + 1", task={"question": "1 + 1"})


@pytest.mark.parametrize(
    ("content", "words"), [(b"PK\x03\x04\xff\xfe", "Name a file of text in UTF-8"), (b" \n", "the file is empty")]
)
def test_a_file_that_holds_no_prompt(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "p.docx").write_bytes(content)
    with pytest.raises(agl.ConfigError, match=words):
        read_prompts(options(tmp_path, prompt=[str(tmp_path / "p.docx")]))


@pytest.mark.parametrize("kind", [agl.APO, agl.GEPA])
def test_a_critics_prompt_that_is_no_text(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "p.docx").write_bytes(b"PK\x03\x04\xff\xfe")
    file = tmp_path / "p.docx"
    given: Any = {"gradient_prompt_files": [file]} if kind is agl.APO else {"reflection_prompt_file": file}
    with pytest.raises(agl.ConfigError, match="Name a file of text in UTF-8"):
        kind(critic_url="http://h/v1", budget_rollouts=9, **given)


# ---- evaluations ---------------------------------------------------------------------------------------------------


def test_an_agent_that_calls_no_model_measures_nothing() -> None:
    found = measure(resolve(Path(resolve_model("calc")))[0], agl.rollout(lambda task: 1.0), [1, 2])
    assert (found.rewards, found.failed, found.uncalled) == ([1.0, 1.0], 0, 2)


def test_a_checkpoint_whose_run_is_not_known_is_not_tried_on_an_example(folder: Path) -> None:
    (folder / "run" / "run.json").unlink()
    assert "There are no validation tasks of a run: give tasks" in answer("eval run --trust")
    assert "The agent of this run is not known" in answer("eval run --trust --tasks tasks.jsonl")


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("why run", "The run 'run' has no store.db, which holds its rollouts: copy it here"),
        ("show run/checkpoints/step-000001", "It is inside the run run: give that."),
        ("eval run/checkpoints --agent a.py:agent --tasks tasks.jsonl", "Its last checkpoint is run/checkpoints/step-"),
        ("compare run run/../other", "it has no run.json. Give a run's folder; agl runs lists them."),
        ("show run --outcome failed", "--failed is an option of its own."),
        ("import run --to chats.jsonl", "is a run of this program, whose conversations are written by agl export run"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_command(command: str, words: str) -> None:
    said = answer(command)
    assert words in " ".join(said.split())
    assert "inside" in words or "inside" not in said


def test_a_run_whose_checkpoints_are_gone(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")
    assert "It is a run without a checkpoint" in answer("serve run")
    with pytest.raises(agl.ConfigError, match="or its folder 'checkpoints' was moved or deleted"):
        agl.Trainer(resume="run")


@pytest.mark.parametrize("damage", ['{"step": 1, "rew', "\0\0\0", "7", "{}"])
def test_a_damaged_line_of_metrics_is_named(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{damage}\n')
    with pytest.raises(agl.ConfigError, match=r"metrics\.jsonl is damaged: line 2 is no step: .*\. Delete that line"):
        read_metrics(file)
    with pytest.raises(agl.ConfigError, match="line 2"):
        JsonlSink(file, 2)


def test_a_run_does_not_take_the_place_of_the_users_tasks(folder: Path) -> None:
    trainer = agl.Trainer(algorithm=agl.GRPO(model="calc"), run_dir=".", console=SilentConsole())
    with pytest.raises(agl.ConfigError, match=r"holds tasks\.jsonl and is no run's folder"):
        trainer.fit(lambda task, llm: 1.0, [1])
    assert (folder / "tasks.jsonl").read_text() == "1\n2\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.toml", b"steps = 3\nmodel = calc\n", 'Text stands in quotes: model = "calc"'),
        ("c.toml", b"shuffle = true\nsteps = \n", "Invalid value (at line 2, column 9)."),
        ("c.json", b"\xff\xfe{", "Name a file of text in UTF-8"),
    ],
)
def test_a_file_of_settings_that_cannot_be_read(name: str, text: bytes, words: str, folder: Path) -> None:
    (folder / name).write_bytes(text)
    assert words in answer(f"train --agent a.py:agent --tasks tasks.jsonl --config {name}")


def test_a_file_of_settings_that_begins_as_windows_writes_it(folder: Path) -> None:
    (folder / "c.json").write_bytes(b'\xef\xbb\xbf{"steps": 3}')
    assert read_config(folder / "c.json") == {"steps": 3}


# ---- traces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CHATS, "Conversations need no import: agl train --data FILE"),
        ('[{"title": "x", "mapping": {}}]', "Conversations need no import"),
        ('{"resourceSpans": []}', "no call of a model is recorded in them"),
    ],
)
def test_what_is_no_trace(text: str, words: str, folder: Path) -> None:
    (folder / "traces.json").write_text(text)
    said = answer("import traces.json --to chats.jsonl")
    assert words in said
    assert " 0 " not in said


# ---- agents --------------------------------------------------------------------------------------------------------


def test_a_provider_that_refuses_the_key_is_not_taken_for_another_address() -> None:
    class AuthenticationError(Exception):
        """As clients have it."""

    why = "The provider of 'llm' answered 401. Check the key that it is sent"
    raised = Ending(Outcome.AGENT_ERROR, "AuthenticationError: 401", exception=AuthenticationError("401"))
    ended = with_gateway(raised, AttemptSummary(refused_by_provider=why))
    assert why in (ended.error or "")
    assert OWN_ADDRESS not in (ended.error or "")
    assert OWN_ADDRESS in (with_gateway(raised, AttemptSummary()).error or "")


def failed(error: str, outcome: Outcome) -> Episode:
    attempt = Attempt(rollout_id="r", attempt_id="a", sequence_id=1, outcome=outcome, error=error, start_time=0)
    return Episode(Rollout(rollout_id="r", input=1), attempt, None, [])


def test_a_provider_that_does_not_answer_is_what_is_looked_at_first() -> None:
    error = "The provider of 'llm' (http://127.0.0.1:9/v1) did not answer: nothing listens at 127.0.0.1:9."
    assert "Check that provider" in most_fail([failed(error, Outcome.INFRA_ERROR)], 1).fix


def test_a_program_that_raised_says_what_first(tmp_path: Path) -> None:
    stderr = f'Traceback (most recent call last):\n  File "{tmp_path}/a.py", line 2, in <module>\n    import openai\n'
    raised = "ModuleNotFoundError: No module named 'openai'"
    error = ended_badly(1, "", f"{stderr}{raised}\n", reward="last_line", folder=tmp_path, files=None)
    assert error.splitlines()[0] == f"The program ended with exit code 1. {raised}"
    words = most_fail([failed(error, Outcome.AGENT_ERROR)], 1).words
    assert raised in words
    assert "Traceback" not in words


@pytest.mark.parametrize(
    "mistake",
    [
        json.loads,
        re.compile("4").search,
        lambda text: "4" in text,  # in a line of its own: the line is read, too
        lambda text: text.strip(),
    ],
)
def test_an_answer_without_text_that_is_read_as_text(mistake: Any) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        mistake(None)
    assert hint_with_calls(caught.value) == NO_TEXT
    assert hint_without_calls(caught.value) is None, "the model wrote nothing yet"


def test_a_limit_by_the_name_of_another_api() -> None:
    client = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="any")
    with pytest.raises(TypeError) as caught:
        client.responses.create(max_tokens=8)  # pyright: ignore
    assert hint_for(caught.value) == OF_RESPONSES


def test_a_field_of_a_tool_is_named_with_the_tool() -> None:
    with pytest.raises(Refusal, match=r"'tools\[0\]\.function' is required"):
        required({"name": "calc"}, "function", dict, "tools[0]")


def test_an_agent_that_was_changed_on_resuming_is_thought_of() -> None:
    assert "the agent that it began with" in asks_itself(())


# ---- words of other places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.Trainer(print, [1])", "Agent and tasks go to fit: Trainer(algorithm=…).fit(agent, tasks)."),
        ("trainer(agl.SFT(model='calc')).fit([1])", "SFT(source='chats', …), then fit(None, conversations)."),
        ("trainer(agl.DPO(model='calc')).fit(None, [1])", "DPO(source='pairs', …), then fit(None, preferences)."),
        ("trainer(agl.GRPO(model='calc')).fit(None, [1])", "Trainer(strategy='remote')."),
    ],
)
def test_an_agent_that_is_not_where_it_belongs(wrong: str, words: str, tmp_path: Path) -> None:
    def trainer(algorithm: Any) -> agl.Trainer:
        return agl.Trainer(algorithm=algorithm, run_dir=tmp_path, console=SilentConsole())

    with pytest.raises(agl.ConfigError) as caught:
        eval(wrong, {"agl": sys.modules["agentlightning"], "trainer": trainer})
    assert str(caught.value).endswith(words)


def test_an_agent_that_is_called_where_it_is_given() -> None:
    @agl.rollout
    def mine(task: Any) -> float:
        return 1.0

    with pytest.raises(TypeError, match=r"To train it, leave \(\) out: fit\(.*mine, tasks\)\."):
        mine()
    assert mine(1) == 1.0


def test_a_file_of_which_the_agent_is_not_named(folder: Path) -> None:
    (folder / "b.py").write_text("import agentlightning as agl\n\n\n@agl.rollout\ndef mine(task):\n    return 1.0\n")
    assert "Give b.py:mine, or the command" in answer("train --agent b.py --tasks tasks.jsonl --model calc")
    assert "Give a.py:name of a function in it" in answer("train --agent a.py --tasks tasks.jsonl --model calc")


def test_an_algorithm_that_is_misspelt_in_a_file_of_settings(folder: Path) -> None:
    (folder / "c.json").write_text('{"algoritm": "GRPO", "model": "calc"}')
    assert "Did you mean algorithm?" in answer("train --agent a.py:agent --tasks tasks.jsonl --config c.json")


def test_variables_of_the_environment_that_nothing_reads() -> None:
    assert list(misspelt(["AGL_DEBG", "AGL_JUDGE_API_KEY", "AGL_MODEL", "AGL_TASKS", *OF_USERS, "AGL_TASK_FILE"])) == [
        "AGL_DEBG is set, and nothing reads it. Did you mean AGL_DEBUG?",
        "AGL_JUDGE_API_KEY is set, and nothing reads it. Did you mean AGL_JUDGE_KEY?",
        "AGL_MODEL is set, and nothing reads it: give --model, or the same in the script.",
        "AGL_TASKS is set, and nothing reads it: give --tasks, or the same in the script.",
    ]
    pages = "".join(page.read_text() for page in (Path(__file__).parents[2] / "docs").glob("*.md"))
    assert [name for name in OF_USERS if name not in pages] == []
    source = "".join(file.read_text() for file in Path(agl.__file__).parent.rglob("*.py"))
    ours = set(re.findall(r"\bAGL_[A-Z]+(?:_[A-Z]+)*\b", source))
    assert (list(misspelt(ours)), list(misspelt(["AGL_LARGEST_REWARDS"]))) == (
        [],
        ["AGL_LARGEST_REWARDS is set, and nothing reads it. Did you mean AGL_LARGEST_REWARD?"],
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [("FrozenLake", "Did you mean gym:FrozenLake-v1?"), ("Nothing-v0", "gymnasium.pprint_registry()")],
)
def test_a_name_of_gymnasium_without_its_version(name: str, words: str) -> None:
    pytest.importorskip("gymnasium")
    assert words in answer(f"env check gym:{name}")


def test_an_option_of_gymnasium_that_is_not_there() -> None:
    pytest.importorskip("gymnasium")
    assert "those of gym: tasks, val_tasks, first_seed" in answer("env check gym:FrozenLake-v1 --env-option n=3")


# ---- two that look at one run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("commands", [2, 4])
async def test_commands_that_look_at_one_store_wait_for_each_other(tmp_path: Path, commands: int) -> None:
    file = tmp_path / "store.db"
    await agl.SqliteLightningStore(file).close()
    looking: list[int] = []

    async def look() -> None:
        async with location_of(file).reading() as store:
            looking.append(len(await store.query_rollouts()))
            await asyncio.sleep(0.2)

    await asyncio.gather(*(look() for _ in range(commands)))
    assert looking == [0] * commands


async def test_they_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.cli.store.OTHERS_SECONDS", 0.2)
    store = agl.SqliteLightningStore(tmp_path / "store.db")
    with pytest.raises(agl.StoreError, match="already open"):
        async with location_of(tmp_path / "store.db").reading():
            pass
    await store.close()


# ---- which run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for second, name in enumerate(("old", "my new")):
        (described := tmp_path / "runs" / name / "run.json").parent.mkdir(parents=True)
        described.write_text("{}")
        os.utime(described, (second, second))


@pytest.mark.parametrize("command", ["show", "why", "watch", "eval", "export", "report", "whatif", "fork", "serve"])
@pytest.mark.usefixtures("two_runs")
def test_a_command_without_its_run_names_the_latest(command: str) -> None:
    assert f"The latest one here: agl {command} 'runs/my new'" in answer(command)


@pytest.mark.usefixtures("two_runs")
def test_a_comparison_without_its_runs_names_the_latest_two() -> None:
    assert "The latest ones here: agl compare runs/old 'runs/my new'" in answer("compare")


@pytest.mark.parametrize(
    "command",
    ["show old", "why old", "eval old", "serve ./old", "export old --to m", "compare old runs/old", "watch old"],
)
@pytest.mark.usefixtures("two_runs")
def test_a_run_that_is_called_by_its_name(command: str) -> None:
    assert "Did you mean runs/old?" in answer(command)


@pytest.mark.parametrize("command", ["show", "eval"])
def test_no_run_is_named_where_there_is_none(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Did you mean" not in answer(f"{command} old")
    assert "latest" not in answer(command)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --agent a.py agent --tasks tasks.jsonl", "An agent is named with its file: --agent a.py:agent"),
        ("run --agent dir/b.py my_agent --tasks t.jsonl", "An agent is named with its file: --agent dir/b.py:my_agent"),
        ("train grpo --agent a.py:agent", "The algorithm is given by an option: --algorithm grpo"),
        ("optimize apo --agent a.py:agent", "The algorithm is given by an option: --algorithm apo"),
        ("train --agent a.py:agent tasks.jsonl", "Tasks are given by an option: --tasks tasks.jsonl"),
        ("export runs/r --gguf m.gguf", "--gguf takes no name: the file is model.gguf in the folder of --to."),
        ("export runs/r m", "Where it goes is given by an option: --to m"),
        ("train --agent a.py:agent anything", "A setting is given as --set NAME=VALUE"),
    ],
)
def test_a_word_that_stands_by_itself(command: str, words: str) -> None:
    assert words in answer(command)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.completions.create(model="m", messages=[]),
        lambda client: client.responses.create(model="m", messages=[]),
    ],
)
def test_messages_of_another_api(call: Any) -> None:
    with pytest.raises(TypeError) as caught:
        call(AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="any"))
    assert hint_for(caught.value) == OF_CHAT


@pytest.mark.parametrize("part", [ToolCall.model_construct(), Function.model_construct(), Message.model_construct()])
def test_a_part_of_an_answer_in_brackets(part: Any) -> None:
    with pytest.raises(TypeError) as caught:
        part["arguments"]
    assert "call.function.arguments" in (hint_for(caught.value) or "")
