"""An error that a user can mend ends in words: in a script, on the command line and in a notebook."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.errors import in_words

from .day import agl as agl_command
from .day import answers, said, script, typed

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


def test_the_shell_can_complete(tmp_path: Path) -> None:
    here = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # whichever shell runs the tests
    done = typed(tmp_path, "-m", "agentlightning", "--show-completion", "bash", environment=here)
    assert done.returncode == 0, done.stderr
    assert "COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.GRPO(model='calc', lr=1e-4)", "GRPO has no setting 'lr'. Did you mean learning_rate?"),
        ("agl.GRPO(model='calc', num_generations=8)", "Did you mean group_size?"),
        ("agl.GRPO(model='calc', batch_size=8)", "Did you mean tasks_per_step?"),
        ("agl.GRPO(model='calc', max_seq_length=8)", "Did you mean max_context?"),
        ("agl.PPO(model='calc', beta=0.1)", "PPO has no setting 'beta'. Did you mean kl_coef?"),
        ("agl.DAPO(model='calc', rank=8)", "Did you mean lora_rank?"),
        ("agl.GRPO('calc')", "GRPO takes its settings by name"),
        ("agl.GRPO(model='calc', frobnicate=1)", "They are: advantage, "),
        ("agl.Trainer(agl.GRPO(model='calc'))", "Trainer takes its settings by name, for example Trainer(algorithm=…)"),
        ("agl.Trainer(model='calc')", "Trainer(algorithm=GRPO(model=…"),
        ("agl.Trainer(algoritm=None)", "Did you mean algorithm?"),
        ("agl.Trainer(output_dir='x')", "Did you mean run_dir?"),
    ],
)
def test_a_setting_that_does_not_exist(wrong: str, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        eval(wrong, {"agl": sys.modules["agentlightning"]})
    assert words in str(caught.value)
