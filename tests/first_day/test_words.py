"""An error that a user can mend ends in words: in a script, on the command line and in a notebook."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.app import app
from agentlightning.errors import in_words

from .day import agl as agl_command, answers, said, script, typed

WRONG = 'agl.GRPO(model="calc", group_size=1)\n'


def test_a_script(tmp_path: Path) -> None:
    done = script(tmp_path, WRONG)
    answers(done, "Error: group_size must be at least 2", "train.py, line 2", "AGL_DEBUG=1")
    assert "agentlightning/" not in done.stderr, "none of our frames"


def test_a_script_that_trains(tmp_path: Path) -> None:
    done = script(tmp_path, 'agl.Trainer(algorithm=agl.GRPO(model="./none")).fit(lambda task, llm: 1.0, [1])\n')
    answers(done, "There is no model at './none'", "train.py, line 2")


def test_the_rest_is_shown_when_it_is_asked_for(tmp_path: Path) -> None:
    done = script(tmp_path, WRONG, AGL_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    done = agl_command(tmp_path, "show", "nothing", AGL_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_the_command_line(tmp_path: Path) -> None:
    answers(agl_command(tmp_path, "show", "nothing"), "Error: There is no store 'nothing'")


def test_a_notebook(tmp_path: Path) -> None:
    done = typed(
        tmp_path, "-m", "IPython", "--simple-prompt", "--no-banner", stdin=f"import agentlightning as agl\n{WRONG}"
    )
    said(done, "group_size must be at least 2")
    assert "Traceback" not in done.stdout


def test_an_error_of_the_users_own_stays_as_it_is(tmp_path: Path) -> None:
    done = script(tmp_path, "raise ValueError('mine')\n")
    assert done.returncode == 1
    said(done, "Traceback", "ValueError: mine")


def test_notes_belong_to_the_message() -> None:
    error = agl.ConfigError("What happened.")
    error.add_note("And where.")
    assert in_words(error) == "Error: What happened.\nAnd where."


def test_help_has_a_short_form(tmp_path: Path) -> None:
    done = agl_command(tmp_path, "train", "-h")
    assert done.returncode == 0
    said(done, "Usage", "--agent")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["train", "--lr", "1e-4"], "--set learning_rate=…"),
        (["train", "--num-generations", "8"], "--set group_size=…"),
        (["train", "--learning-rate", "1"], "--set learning_rate=…"),
        (["train", "--output-dir", "x"], "--run-dir"),
        (["demo", "calc", "--lr", "1"], "--learning-rate"),
        (["demo", "calc", "--lora-r", "8"], "--lora-rank"),
        (["store", "--db-path", "x"], "--path"),
    ],
)
def test_an_option_that_does_not_exist(typed: list[str], meant: str) -> None:
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == 2
    assert f"(Possible options: {meant})" in " ".join(done.output.replace("│", " ").split())


def test_the_shell_can_complete(tmp_path: Path) -> None:
    here = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # whichever shell runs the tests
    done = typed(tmp_path, "-m", "agentlightning", "--show-completion", "bash", environment=here)
    assert done.returncode == 0, done.stderr
    assert "COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.GRPO(model='calc', lr=1e-4)", "GRPO has no setting 'lr'. Did you mean learning_rate?"),
        (
            "agl.GRPO(model='calc', models={})",
            "GRPO has no setting 'models'. Models that agents ask besides the policy",
        ),
        ("agl.GEPA(models={})", "are the trainer's: Trainer(algorithm=…, models={'judge': …})"),
        ("agl.GRPO(model='calc', num_generations=8)", "Did you mean group_size?"),
        ("agl.GRPO(model='calc', batch_size=8)", "Did you mean tasks_per_step?"),
        ("agl.GRPO(model='calc', max_seq_length=8)", "Did you mean max_context?"),
        ("agl.PPO(model='calc', beta=0.1)", "PPO has no setting 'beta'. Did you mean kl_coef?"),
        ("agl.DAPO(model='calc', rank=8)", "Did you mean lora_rank?"),
        ("agl.GRPO('calc')", "GRPO takes its settings by name"),
        ("agl.GRPO(model='calc', frobnicate=1)", "help(agl.GRPO) explains them"),
        ("agl.Trainer(agl.GRPO(model='calc'))", "Trainer takes its settings by name, for example Trainer(algorithm=…)"),
        ("agl.Trainer(model='calc')", "Trainer(algorithm=GRPO(model=…"),
        ("agl.Trainer(algoritm=None)", "Did you mean algorithm?"),
        ("agl.Trainer(output_dir='x')", "Did you mean run_dir?"),
        ("agl.GRPO()", "GRPO needs model: GRPO(model=…). model is a directory, a Hugging Face id"),
        (
            "agl.Trainer().fit(print, [1], validation=[2])",
            "no argument 'validation'. Did you mean val_dataset?",
        ),
        ("agl.Trainer().fit(print, tasks=[2])", "Did you mean train_dataset?"),
        ("agl.Trainer().fit(print, [1], epochs=3)", "of the algorithm: Trainer(algorithm=GRPO(model=…, epochs=…))"),
        ("agl.Trainer().fit(print, [1], batch_size=8)", "tasks_per_step here, a setting of the algorithm: Trainer("),
        ("agl.Trainer().fit(print, [1], run_dir='x')", "It is a setting of Trainer: Trainer(run_dir=…)."),
        ("agl.Trainer().dev(print, [1], n_runners=2)", "It is a setting of Trainer: Trainer(n_runners=…)."),
        ("agl.GRPO(model='calc', dtype='fp16')", "Did you mean 'float16'?"),
        ("agl.GRPO(model='calc', dtype='torch.bfloat16')", "Did you mean 'bfloat16'?"),
        ("agl.GRPO(model='calc', dtype='half')", "Did you mean 'float16'?"),
        ("agl.GRPO(model='calc', dtype='double')", "Did you mean 'float64'?"),
        ("agl.Trainer().fit()", "fit needs agent: fit(agent=…)"),
        ("agl.Trainer().dev(print)", "dev needs train_dataset"),
        ("agl.Trainer().dev(print, [1], [2])", "given 3 arguments without a name, and takes 2"),
        ("agl.RolloutConfig(timeout=3)", "RolloutConfig has no field 'timeout'. Did you mean timeout_seconds?"),
        ("agl.RolloutConfig(max_retries=3)", "Did you mean max_attempts?"),
        (
            "agl.RolloutConfig(timeout_seconds=-1)",
            "timeout_seconds is -1; it must be above 0",
        ),
        ("agl.RolloutConfig(timeout_seconds='5m')", "timeout_seconds is '5m'; it must be a number."),
        ("agl.LLM(base_url='x', model='m')", "LLM has no field 'base_url'. Did you mean endpoint?"),
        ("agl.LLM(endpoint='x')", "LLM needs model: LLM(model=…)"),
        ("agl.PromptTemplate('hi')", "for example PromptTemplate(template=…)"),
        ("agl.PromptTemplate(template='{x}', engine='fstring')", "'f-string', 'jinja' or 'poml'"),
        ("agl.SqliteLightningStore()", "SqliteLightningStore needs path"),
        ("agl.SqliteLightningStore(db_path='x')", "Did you mean path?"),
        ("agl.emit_reward(score=1)", "Did you mean value?"),
        ("agl.rollout(timeout=3)", "rollout has no argument 'timeout'"),
        ("agl.rollout(3)", "An agent is a function of a task, not 3"),
        ("agl.Provider(endpoint='x')", "Provider has no setting 'endpoint'. Did you mean base_url?"),
        ("agl.Provider(model='gpt')", "Provider needs base_url: Provider(base_url=…)"),
        ("agl.Provider('http://x')", "Provider takes its settings by name, for example Provider(base_url=…)"),
        ("agl.TokenPrice(inputs=1.0)", "TokenPrice has no setting 'inputs'. Did you mean input?"),
        ("agl.SpendingLimits(run_costs=1.0)", "Did you mean run_cost?"),
        ("agl.OtelTracer(flush_second=1)", "OtelTracer has no argument 'flush_second'. Did you mean flush_seconds?"),
        ("agl.DummyTracer(agent='x')", "DummyTracer has no argument 'agent'. They are: flush_seconds."),
        ("agl.TracerTraceToTriplet(agent='x')", "Did you mean agent_match?"),
        ("agl.Container()", "Container needs "),
        ("agl.Limits(memory=1)", "Did you mean "),
    ],
)
def test_a_setting_that_does_not_exist(wrong: str, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        eval(wrong, {"agl": sys.modules["agentlightning"]})
    assert words in str(caught.value)


def test_copies_are_made_without_arguments() -> None:
    algorithm = agl.GRPO(model="calc", group_size=3)
    assert copy.copy(algorithm).group_size == pickle.loads(pickle.dumps(algorithm)).group_size == 3
    assert str(inspect.signature(agl.GRPO)).startswith("(*, model")
    assert str(inspect.signature(agl.Trainer.dev)).startswith("(self, agent")


def test_a_mistake_inside_a_function_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="emit_message takes text"):
        agl.emit_message(3)  # pyright: ignore[reportArgumentType]


def every_command() -> list[tuple[str, Any]]:
    """What is typed for each command, and the command."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    inner = [
        (f"{name} {sub}", c) for name, group in commands.items() for sub, c in getattr(group, "commands", {}).items()
    ]
    return [(name, c) for name, c in [*commands.items(), *inner] if not c.hidden]


@pytest.mark.parametrize(
    ("name", "command"), every_command(), ids=lambda given: given if isinstance(given, str) else ""
)
def test_every_commands_help_has_an_example_that_can_be_typed(name: str, command: Any) -> None:
    text = f"{command.help}\n{command.epilog or ''}"
    examples = re.findall(rf"^ *agl {name.split()[0]}\b(.*(?:\n  --.*)*)", text, flags=re.MULTILINE)
    assert examples, "no example"
    known = {opt for c in (command, *getattr(command, "commands", {}).values()) for p in c.params for opt in p.opts}
    assert {option for e in examples for option in re.findall(r"(?<= )--[a-z][\w-]*", e)} <= known


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.GRPO('calc')", r"for example GRPO\(model=…\)"),
        ("agl.GRPO(model='calc').fit(print, [1])", r"Trainer\(algorithm=…\).fit\(agent, tasks\)"),
        ("agl.Trainer().train(print, [1])", "It trains with fit"),
        ("agl.Trainer().evaluate(print, [1])", "agl eval RUN"),
        ("agl.Trainer().save_model('x')", "agl export RUN"),
    ],
)
def test_what_is_looked_for_in_the_wrong_place(wrong: str, words: str) -> None:
    with pytest.raises((agl.ConfigError, AttributeError), match=words):
        eval(wrong, {"agl": sys.modules["agentlightning"]})


@pytest.mark.parametrize("command", [("serve", "runs/none"), ("eval", "runs/none")])
def test_a_run_that_is_not_there(tmp_path: Path, command: tuple[str, str]) -> None:
    (tmp_path / "runs").mkdir()
    answers(agl_command(tmp_path, *command), "The folder 'runs' is here, but there is no 'none' in it")


def test_a_file_of_settings_that_is_not_there(tmp_path: Path) -> None:
    answers(agl_command(tmp_path, "train", "--config", "none.yaml"), "There is no file 'none.yaml' with settings")


def test_all_wrong_arguments_are_named_at_once() -> None:
    with pytest.raises(agl.ConfigError) as caught:
        agl.Trainer(algorithm=agl.GRPO(model="calc")).fit(lambda task: 1.0, train=[1], val=[2])  # pyright: ignore[reportCallIssue]
    assert str(caught.value) == "fit has no arguments 'train', 'val'. Did you mean train_dataset, val_dataset?"
