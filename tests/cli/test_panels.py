"""The help stands in panels: each command in one, each option of the large commands in exactly one."""

from __future__ import annotations

import re
from itertools import chain

import pytest
import typer
from typer.testing import CliRunner

from agentlightning.cli.app import COMMANDS, app
from agentlightning.cli.panels import GROUPED, OPTIONS

GROUP = typer.main.get_command(app)
CONTEXT = typer.Context(GROUP)
NAMES = [name for name in GROUP.list_commands(CONTEXT) if not GROUP.get_command(CONTEXT, name).hidden]  # pyright: ignore


def test_every_command_stands_in_a_panel() -> None:
    panels = {name: getattr(GROUP.get_command(CONTEXT, name), "rich_help_panel", None) for name in NAMES}  # pyright: ignore
    assert {name for name, panel in panels.items() if panel not in COMMANDS} == set()


@pytest.mark.parametrize("name", GROUPED)
def test_every_option_of_a_large_command_stands_in_a_panel(name: str) -> None:
    command = GROUP.get_command(CONTEXT, name)  # pyright: ignore
    own = {p.name for p in command.params} - {"help"}
    listed = [*chain.from_iterable(OPTIONS.values())]
    assert own - set(listed) == set()
    assert len(listed) == len(set(listed))


def test_no_panel_names_an_option_that_is_gone() -> None:
    known = {p.name for name in GROUPED for p in GROUP.get_command(CONTEXT, name).params}  # pyright: ignore
    assert {*chain.from_iterable(OPTIONS.values())} - known == set()


@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_the_help_is_broken_in_two(name: str) -> None:
    """On 80 columns: a list of choices, or a type, ends in the line that it begins in."""
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [name, "--help"]).output
    broken = [line for line in shown.splitlines() if re.search(r"│ --.*<[^>=][^>]*(  |│)", line)]
    assert broken == []
