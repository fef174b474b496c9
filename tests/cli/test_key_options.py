"""Keys on a command line: every command that takes one reads it from a file, and says who sees one that is typed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from agentlightning.cli.app import app
from agentlightning.errors import ConfigError

KEY = "a key that is long enough"


def options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Every option for a key: the command's names, the command, the option."""
    for parameter in command.params:
        if (
            (parameter.name or "").split("_")[-1]
            in (
                "key",
                "token",
                "password",
            )
            and parameter.param_type_name == "option"
            and not parameter.is_flag
        ):
            yield path, command, parameter
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, (*path, name))


FOUND = list(options(typer.main.get_command(app)))


def parsed(command: Any, option: Any, *given: str) -> Any:
    """What the command gets for the option."""
    others = [
        part
        for parameter in command.params
        if parameter.required
        for part in (["x"] if parameter.param_type_name == "argument" else [parameter.opts[0], "x"])
    ]
    whole = [*given, *others, *(["stats"] if hasattr(command, "commands") else [])]
    return command.make_context("agl", whole).params[option.name]


def test_the_commands_that_take_keys() -> None:
    names = {f"{' '.join(path)} {option.opts[0]}" for path, _, option in FOUND}
    assert {"store --key", "gateway --upstream-key", "optimize --critic-key", "run --api-key"} <= names


@pytest.mark.parametrize(("path", "command", "option"), FOUND, ids=[f"{' '.join(p)} {o.name}" for p, _, o in FOUND])
def test_a_key_comes_from_a_file_or_the_environment_and_not_from_the_list_of_processes(
    tmp_path: Path,
    path: tuple[str, ...],
    command: Any,
    option: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "key.txt"
    file.write_text(f"{KEY}\n")
    name = option.opts[0]
    assert parsed(command, option, name, f"@{file}") == KEY
    monkeypatch.setenv(option.envvar, f"@{KEY}")
    assert parsed(command, option) == f"@{KEY}", "the environment holds the key itself"
    assert capsys.readouterr().err == ""

    assert parsed(command, option, name, KEY) == KEY
    told = capsys.readouterr().err
    assert name in told
    assert option.envvar in told.replace("\n", "")
    assert KEY not in told
    with pytest.raises(ConfigError, match=name):
        parsed(command, option, name, f"@{tmp_path / 'none'}")
