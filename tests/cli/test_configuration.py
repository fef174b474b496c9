"""`agl train --algorithm … --config … --set …`: what comes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.cli.configuration import FAMILY, make_algorithm


def test_the_family_is_known_by_name() -> None:
    assert {"GRPO", "DAPO", "RLOO", "PPO", "SFT", "DPO"} <= set(FAMILY)
    assert "Baseline" not in FAMILY
    assert type(make_algorithm("dapo", "calc", None, [])) is agl.DAPO
    with pytest.raises(agl.ConfigError, match=r"no algorithm 'A3C'; there are: .*GRPO"):
        make_algorithm("A3C", None, None, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"algorithm": "RLOO", "steps": 7, "learning_rate": 0.001, "model": "calc"}'),
        ("run.yaml", "algorithm: RLOO\nsteps: 7\nlearning_rate: 1.0e-3\nmodel: calc\n"),
        ("run.toml", 'algorithm = "RLOO"\nsteps = 7\nlearning_rate = 1e-3\nmodel = "calc"\n'),
    ],
)
def test_a_file_of_settings_and_the_command_line_wins(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    made = make_algorithm(None, None, tmp_path / name, ["steps=9", "schedule=linear"])
    assert type(made) is agl.RLOO
    assert (made.steps, made.learning_rate, made.schedule, made.model) == (9, 1e-3, "linear", "calc")
    assert type(make_algorithm("GRPO", None, tmp_path / name, [])) is agl.GRPO


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.json", '{"lr": 1}', "Did you mean learning_rate?"),
        ("run.json", "{", "cannot be read"),
        ("run.json", "[1]", "holds a list, not settings"),
        ("run.ini", "", "none of .json, .yaml, .toml"),
        ("run.yaml", "a: [", "cannot be read"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(agl.ConfigError) as caught:
        make_algorithm(None, "calc", tmp_path / name, [])
    assert words in str(caught.value)


def test_settings_that_are_wrong() -> None:
    for text, words in [("lr=1", "did you mean learning_rate"), ("steps", "give NAME=VALUE"), ("zzz=1", "one of")]:
        with pytest.raises(agl.ConfigError, match=words):
            make_algorithm(None, "calc", None, [text])
    with pytest.raises(agl.ConfigError, match=r"no file 'none\.json'"):
        make_algorithm(None, "calc", Path("none.json"), [])
