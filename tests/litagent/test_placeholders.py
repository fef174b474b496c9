"""A task's fields as arguments of a command, and what only a shell would understand."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.litagent.placeholders import fill, has_places, split

SAYS = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
NASTY = st.sampled_from(["a; rm -rf /", "$(id)", "`id`", "' \" '", "{task.b}", "{task}", "--help", "", "a\nb", "é\t|&"])


@settings(max_examples=25, deadline=None)
@given(TEXT | NASTY, TEXT | NASTY)
def test_a_field_is_one_argument_whatever_is_in_it(first: str, second: str) -> None:
    """Seen by a real process; what is put in is neither split nor replaced again."""
    task = {"a": first, "b": {"c": second}, "n": 3}
    command = fill([*SAYS, "{task.a}", "x={task.b.c};{task.a}", "{task.n}"], task)
    done = subprocess.run(command, capture_output=True, check=True)
    assert json.loads(done.stdout) == [first, f"x={second};{first}", "3"]


@pytest.mark.parametrize(
    ("task", "word"),
    [
        ({"question": "?"}, "question"),
        ("text", "no object"),
        ({"prompt": {"x": 1}}, None),
        ({"prompt": "a\0b"}, "NUL"),
        ({"prompt": "é" * 70_000}, "131071 bytes"),
    ],
)
def test_what_cannot_be_put_in_is_said(task: Any, word: str | None) -> None:
    if word is None:
        assert fill(["{task.prompt}"], task) == ['{"x": 1}']
        return
    with pytest.raises(ConfigError, match=word):
        fill(["{task.prompt}"], task)


def test_a_whole_task_is_text_or_json() -> None:
    assert fill(["{task}"], "text") == ["text"]
    assert fill(["{task}"], [1, "é"]) == ['[1, "\\u00e9"]']
    assert not has_places(["{x}", "{tasks}", "{task.}", "task.a"])


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("p.py | head -1", "sh -c"),
        ("python p.py > out", "sh -c"),
        ("python p.py 2>&1", "sh -c"),
        ("a && b", "sh -c"),
        ("a; b", "sh -c"),
        ("python p.py $HOME", "sh -c"),
        ('python p.py "$(date)"', "sh -c"),
        ("python p.py `date`", "sh -c"),
        ("DEBUG=1 python p.py", "env DEBUG=1 python p.py"),
        ("python 'p.py", "quotes"),
        ("sh -c 'agent {task.prompt}'", "as an argument"),
        ("bash -ec 'agent {task.prompt}'", "as an argument"),
    ],
)
def test_shell_syntax_is_refused_with_what_to_write_instead(command: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        agl.Program(command)


@pytest.mark.parametrize(
    "command",
    [
        "python p.py 'a | b' \"c > d\"",
        "sh -c 'a | b && c > $HOME'",
        "python -c 'print(1); print(2)'",
        "env DEBUG=1 python p.py",
        "agent --re=^a$ {task.q}",
        "sh -c 'agent \"$1\"' sh {task.q}",
    ],
)
def test_quoted_syntax_is_text(command: str) -> None:
    assert len(split(command)) > 2
    agl.Program(command)


def test_a_task_without_the_field_is_refused_before_the_run_begins(tmp_path: Any) -> None:
    agent = agl.Program([*SAYS, "{task.question}"], reward="file")
    trainer = agl.Trainer(algorithm=agl.Baseline(model="calc"), run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"number 2 .*\{task.question\}.* It has prompt\."):
        trainer.fit(agent, [{"question": "?"}, {"prompt": "?"}])
    assert not (tmp_path / "run").exists()
