"""What code of the user's lacks where it runs: a variable, a file, a method by its name, a prompt that it takes."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.checkpoint import latest_checkpoint
from agentlightning.algorithm.parts.curriculum import TaskHistory
from agentlightning.cli.agents import find_agent
from agentlightning.litagent.placeholders import check_places
from agentlightning.litagent.program_words import missed
from agentlightning.metrics import SilentConsole
from agentlightning.rendering.tokenizer import load_tokenizer
from agentlightning.runner.endings import close_unawaited, hint_for
from agentlightning.trainer.checks import check_agents_resources
from tests.first_day.day import answers, script

HERE = [sys.executable, "agent.py"]


# ---- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("KeyError: 'MY_KEY'", "env={'MY_KEY': …}, or in the command:  env MY_KEY=… "),
        ("Error: TAVILY_API_KEY is not set", "TAVILY_API_KEY is not among its variables"),
        ("KeyError: 'question'", None),
        ("KeyError: 'OPENAI_MODEL'", None),
        ("SOME_CONSTANT is 3", None),
    ],
)
def test_a_variable_that_a_program_does_not_see(
    monkeypatch: pytest.MonkeyPatch, stderr: str, words: str | None
) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "x")
    monkeypatch.setenv("OPENAI_MODEL", "mine")
    said = missed(stderr, {"PATH", "OPENAI_MODEL"}, HERE)
    assert words in said[0] if words else not said


@pytest.mark.parametrize(
    "stderr",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'rules.txt'",
        "Error: ENOENT: no such file or directory, open 'rules.txt'",
        "cat: rules.txt: No such file or directory",
    ],
)
def test_a_file_that_lies_beside_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert missed(stderr, (), HERE) == []
    Path("rules.txt").touch()
    (said,) = missed(stderr, (), HERE)
    assert f"'rules.txt' is in {tmp_path}" in said
    assert "--files FOLDER (files=…)" in said
    monkeypatch.chdir("/")
    assert missed(stderr, (), ["python", f"{tmp_path}/agent.py"]) == [said]


def test_a_file_that_a_program_looks_for_in_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.txt").touch()
    (tmp_path / "agent.py").write_text("import os\nopen(os.path.join(os.getcwd(), 'rules.txt'))\n")
    program, baseline = agl.Program([sys.executable, "agent.py"]), agl.Baseline()
    agl.Trainer(algorithm=baseline, run_dir=tmp_path / "run", console=SilentConsole()).fit(program, [1])
    (episode,) = baseline.episodes
    assert f"'rules.txt' is in {tmp_path}" in (
        episode.attempt.error if episode.attempt and episode.attempt.error else ""
    )


def test_a_package_that_a_program_lacks() -> None:
    (said,) = missed("ModuleNotFoundError: No module named 'tools_of_mine.mail'", (), HERE)
    assert "has no package 'tools_of_mine': install it there" in said
    assert missed("Error: No module", (), HERE) == []


@pytest.mark.parametrize(
    "argument",
    ["{task[question]}", "{task['question']}", "{{task.question}}", "{{ task.question }}", "--q={Task:question}"],
)
def test_a_field_as_python_or_jinja_writes_it(argument: str) -> None:
    with pytest.raises(agl.ConfigError, match=r"A field of the task is \{task\.question\} there"):
        agl.Program(["my-agent", argument])


@pytest.mark.parametrize(
    "argument",
    ["{task.question}", "--q={task.question}", "print(f'{task[0]}')", "{'task': 1}", "{}", "{task}", '{"q": {task}}'],
)
def test_what_is_no_other_way_to_write_a_field(argument: str) -> None:
    check_places(["my-agent", argument])


def two(task: Any, output: str) -> float:
    return 1.0


def optional(run: agl.ProgramRun, strict: bool = False) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("grader", "words"),
    [
        (
            two,
            "The grader two(task: 'Any', output: 'str') -> 'float' is called with the finished run alone: def two(run)",
        ),
        (lambda: 1.0, "called with the finished run alone: def lambda(run)"),
        ("grade.py:grade", "such as 'python grade.py'. In a script the function itself is one: grader=grade."),
    ],
)
def test_a_grader_that_cannot_be_called(grader: Any, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        agl.Program(["true"], grader=grader)
    assert words in str(caught.value)
    agl.Program(["true"], grader=optional)


@pytest.mark.parametrize(("command", "grader"), [(["nowhere-1"], None), (["true"], ["nowhere-1"])])
def test_a_command_that_is_not_there(command: list[str], grader: list[str] | None) -> None:
    program = agl.Program(command, grader=grader)
    with pytest.raises(agl.ConfigError, match=f"There is no {'grader' if grader else 'program'} 'nowhere-1'"):
        program.check_machine()
    program.check_task({})  # runners elsewhere may have it


def test_a_grader_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grade.py").write_text("print(1)\n")
    with pytest.raises(agl.ConfigError, match=r"'python grade\.py --strict'"):
        agl.Program(["true"], grader="grade.py --strict").check_machine()


def test_a_program_that_only_its_own_path_has(tmp_path: Path) -> None:
    (tool := tmp_path / "my-own-tool").write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    agl.Program(["my-own-tool"], env={"PATH": str(tmp_path)}).check_machine()


# ---- agents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (
            "self, tools",
            "A() wants more: missing a required argument: 'tools'. Make the object in the file, agent = A(…)",
        ),
        ("self, tools=1 / 0", "cannot be loaded"),
        ("self, tools=open('/nowhere/x')", "cannot be loaded"),
    ],
)
def test_a_class_that_is_not_made_without_arguments(tmp_path: Path, init: str, words: str) -> None:
    (file := tmp_path / "mine.py").write_text(
        f"import agentlightning as agl\nclass A(agl.LitAgent):\n    def __init__({init}):\n        super().__init__()\n"
    )
    with pytest.raises(agl.ConfigError) as caught:
        find_agent(f"{file}:A")
    assert words in str(caught.value)


def test_a_class_that_fails_when_it_is_made(tmp_path: Path) -> None:
    (file := tmp_path / "own.py").write_text(
        "import agentlightning as agl\nclass A(agl.LitAgent):\n    def __init__(self):\n        self.x = {}['key']\n"
    )
    with pytest.raises(agl.ConfigError, match=r"A\(\) of .*own.py:A cannot be made: KeyError: 'key'"):
        find_agent(f"{file}:A")


def test_an_agent_without_a_name() -> None:
    with pytest.raises(agl.ConfigError, match="names no agent"):
        agl.LLM(endpoint="http://h/v1", model="m").for_agent("")


def test_a_file_beside_the_command_has_the_name_of_a_package(tmp_path: Path) -> None:
    """In a process of its own: what it imports first is imported already in a fork."""
    (tmp_path / "typer.py").write_text("raise RuntimeError('mine')\n")
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_name_by_which_an_agent_is_nearly_known() -> None:
    with pytest.raises(agl.ConfigError, match="The agent that has a name here is claude-code"):
        find_agent("claude")


def test_a_call_that_was_answered_wants_no_key() -> None:
    refused = type("BadRequestError", (Exception,), {"__module__": "openai", "status_code": 400})
    assert hint_for(refused("Name a provider, agl.Provider(api_key=…)")) is None
    assert hint_for(type("OpenAIError", (Exception,), {"__module__": "openai"})("give api_key")) is not None


def test_a_coroutine_that_is_not_awaited_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    async def ask() -> float:
        return 1.0

    def agent() -> Any:
        answer: Any = ask()
        return answer.choices

    with pytest.raises(AttributeError) as caught:
        agent()
    close_unawaited(caught.value)
    caught.value.__traceback__ = None
    del caught
    assert not recwarn.list


# ---- classes with methods that are called ----------------------------------------------------------------------------


async def nothing(self: Any, **others: Any) -> None: ...


async def narrow(self: Any, *, rollout: Any) -> None: ...


def at_once(self: Any, *given: Any, **others: Any) -> None: ...


HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    ("on_rollout_ends", nothing, "Did you mean on_rollout_end?"),
    ("on_zzz", nothing, "is called by nothing. A Hook has on_rollout_end, "),
    ("zzz", nothing, "is called by nothing. A Hook has on_rollout_end, "),
    ("on_step_end", nothing, "class Mine(agl.metrics.Sink), Trainer(sinks=[Mine()])"),
    ("on_train_end", nothing, "stands below fit(…)"),
    ("on_rollout_end", at_once, "is awaited: write async def on_rollout_end"),
    ("on_rollout_end", narrow, "is called with agent, runner, spans, too"),
]
SINKS: list[tuple[str, Callable[..., Any], str]] = [
    ("log_metrics", at_once, "After each step a sink's step(self, metrics) is called"),
    ("steps", at_once, "Did you mean step?"),
    ("step", lambda self, step, metrics: None, "is called with other arguments: write def step(self, metrics"),
    ("step", nothing, "is not awaited: write def step, without async"),
]


@pytest.mark.parametrize(
    ("base", "name", "method", "words"),
    [*((agl.Hook, *case) for case in HOOKS), *((agl.metrics.Sink, *case) for case in SINKS)],
)
def test_a_method_that_would_be_called_by_nothing(
    base: type, name: str, method: Callable[..., Any], words: str
) -> None:
    given: Mapping[str, Any] = {"hooks" if base is agl.Hook else "sinks": [type("Mine", (base,), {name: method})()]}
    with pytest.raises(agl.ConfigError) as caught:
        agl.Trainer(**given)
    assert f"{name} of Mine" in str(caught.value)
    assert words in str(caught.value)


def test_methods_of_ones_own_are_left_alone() -> None:
    decorated = functools.wraps(nothing)(lambda self, **others: nothing(self, **others))
    for end in (nothing, decorated):
        own = type("Mine", (agl.Hook,), {"on_rollout_end": end, "write": at_once, "count": 3})()
        assert agl.Trainer(hooks=own, sinks=type("Its", (agl.metrics.Sink,), {"step": at_once})()).hooks == [own]


class Counts(agl.Hook):
    pass


class Feature(agl.Part):
    pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hooks": [Counts]}, r"hook is the class Counts. Give an object: Counts\(…\)"),
        ({"parts": (Feature,)}, r"parts has the class Feature. Give an object: Feature\(…\)"),
        ({"initial_resources": {"system": "Be brief"}}, "Of initial_resources, 'system': resource is 'Be brief'"),
    ],
)
def test_what_is_no_object_of_its_kind(given: dict[str, Any], words: str) -> None:
    make: Callable[..., Any] = (
        (lambda parts: agl.GRPO(model="calc", parts=parts).check_parts()) if "parts" in given else agl.Trainer
    )
    with pytest.raises(agl.ConfigError, match=words):
        make(**given)


# ---- prompts, settings, places ---------------------------------------------------------------------------------------


def without(task: Any, llm: agl.LLM) -> float:
    return 1.0


def by_type(task: Any, prompt_template: agl.PromptTemplate) -> float:
    return 1.0


def by_name(task: Any, system: agl.PromptTemplate) -> float:
    return 1.0


def all_of_them(task: Any, resources: agl.NamedResources) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("agent", "unused"),
    [(without, "system"), (by_type, "user"), (by_name, "user"), (all_of_them, None)],
)
def test_a_prompt_to_tune_that_the_agent_does_not_take(agent: Callable[..., float], unused: str | None) -> None:
    prompts = {name: agl.PromptTemplate(template="x") for name in ("system", "user")}
    given = {"llm": agl.LLM(endpoint="http://h/v1", model="m"), **prompts, "put_in": agl.SystemPrompt(template="x")}
    tuner = agl.APO(critic_url="http://127.0.0.1:9/v1", gradient_model="c")
    if unused is None:
        check_agents_resources(agl.rollout(agent), tuner, given, ())
        return
    with pytest.raises(agl.ConfigError, match=f"The prompt '{unused}' is to be tuned.*{agent.__name__}"):
        check_agents_resources(agl.rollout(agent), tuner, given, ())


def test_a_range_of_rewards_that_is_none_is_said_before_anything_runs(tmp_path: Path) -> None:
    code = "agl.Trainer(run_dir='r').fit(agl.rollout(lambda task: 1.0), [1])\n"
    answers(script(tmp_path, code, AGL_LARGEST_REWARD="lots"), "AGL_LARGEST_REWARD is 'lots'")
    assert not (tmp_path / "r" / "store.db").exists()


def test_a_curriculum_that_gives_too_few_weights() -> None:
    with pytest.raises(agl.ConfigError, match=r"each of 3 tasks; it gave shape \(1,\)"):
        TaskHistory(lambda records: np.ones(1), 3).draw(1, np.random.default_rng(0))


def test_a_folder_inside_a_run(tmp_path: Path) -> None:
    step = tmp_path / "r" / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    (step / "checkpoint.json").write_text("{}")
    with pytest.raises(agl.ConfigError, match=f"It is inside the run {tmp_path}/r: give that"):
        latest_checkpoint(step.parent)


def test_a_folder_of_runs_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    with pytest.raises(agl.ModelError, match=f"It holds runs, the last of them {tmp_path}/a"):
        agl.resolve_model(str(tmp_path))


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(agl.ModelError, match="There is no tokenizer in") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from agentlightning.trainer import GRPO", "It is in agentlightning: from agentlightning import GRPO"),
        ("from agentlightning.algorithm import Trainr", "Did you mean: 'Trainer'?"),
    ],
)
def test_a_name_of_another_part_of_the_package(line: str, words: str) -> None:
    with pytest.raises(ImportError, match=words.replace("?", r"\?")):
        exec(line)
