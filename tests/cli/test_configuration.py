"""`agl train --algorithm … --config … --set …`: what comes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.app import app
from agentlightning.cli.configuration import FAMILY, make_algorithm, read_config, run_of_config
from agentlightning.cli.opened import described
from agentlightning.cli.trust import code_in


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
    for text, words in [("lr=1", "did you mean learning_rate"), ("steps", "give NAME=VALUE"), ("zzz=1", "no such")]:
        with pytest.raises(agl.ConfigError, match=words):
            make_algorithm(None, "calc", None, [text])
    with pytest.raises(agl.ConfigError, match=r"no file 'none\.json'"):
        make_algorithm(None, "calc", Path("none.json"), [])


def test_what_is_printed_is_read_back(tmp_path: Path) -> None:
    given = ["train", "--algorithm", "dapo", "--model", "calc", "--set", "steps=7", "--set", "clip_high=0.3"]
    first = CliRunner().invoke(app, [*given, "--print-config"])
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    assert (told["algorithm"], told["steps"], told["clip_high"], told["dynamic_sampling"]) == ("DAPO", 7, 0.3, 2)
    assert told["group_size"] == 8, "defaults too"
    (tmp_path / "all.json").write_text(first.stdout)
    again = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "all.json"), "--print-config"])
    assert again.stdout == first.stdout
    changed = ["train", "--config", str(tmp_path / "all.json"), "--set", "steps=9", "--print-config"]
    assert json.loads(CliRunner().invoke(app, changed).stdout) == told | {"steps": 9}


def test_every_command_shows_how_it_is_used() -> None:
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    told = {name: f"{c.help}{c.epilog}" for name, c in commands.items() if not c.hidden}
    assert {name for name, text in told.items() if f"agl {name} " not in text and f"agl {name}\n" not in text} == set()


@pytest.mark.parametrize(("typed", "known"), [("agl da", "dashboard"), ("agl why --br", "--breaks")])
def test_a_shell_completes_commands_and_options(typed: str, known: str) -> None:
    asked = {"_AGL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = CliRunner(env=asked).invoke(app, prog_name="agl")
    assert known in done.stdout.split(), done.output


@pytest.mark.quick_with("steps")
@pytest.mark.parametrize("last", ["steps: *y9", "algorithm: *y9", "own: &x [*x, *x]", "model: [" + "*y0, " * 20 + "]"])
def test_parts_that_name_each_other_without_end_are_refused(tmp_path: Path, last: str) -> None:
    file = tmp_path / "a.yaml"
    parts = [f"y{n}: &y{n} [{', '.join([f'*y{n - 1}'] * 9)}]" for n in range(1, 10 if "y9" in last else 1)]
    file.write_text("\n".join([f"y0: &y0 {'x' * 10**6}", *parts, last]))
    with pytest.raises(agl.ConfigError, match=r"a\.yaml cannot be read: its parts name each other too often"):
        read_config(file)


def test_parts_may_name_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("steps: &n 3\ngroup_size: *n\n")
    assert read_config(tmp_path / "a.yaml") == {"steps": 3, "group_size": 3}


@pytest.mark.parametrize(("name", "value"), [("settings", [1]), ("environment", ["a:b"]), ("environment", "a:b")])
def test_a_run_of_another_shape_is_told(tmp_path: Path, name: str, value: Any) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"run_id": "r", "algorithm": "GRPO", "settings": None, name: value}))
    for read in (read_config, run_of_config):
        with pytest.raises(agl.ConfigError, match=f"'{name}' is no object"):
            read(file)
    assert described(tmp_path)[name] == described(tmp_path)["settings"] == {}


def test_a_loss_that_is_no_text_is_looked_at_likewise() -> None:
    assert code_in({"loss": ["ppo"]}) == []
    assert code_in({"loss": ["module:loss"]}) == ["loss=['module:loss']"]


@pytest.mark.parametrize(("name", "text"), [("a.json", "["), ("a.toml", "a = " + "["), ("a.yaml", "[")])
def test_settings_nested_without_end_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text + "[" * (5_000 if name == "a.yaml" else 100_000))
    with pytest.raises(agl.ConfigError, match=rf"{name} cannot be read: .*nested too deeply"):
        make_algorithm(None, None, tmp_path / name, [])
