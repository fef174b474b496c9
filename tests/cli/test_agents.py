"""What `--agent` may be is settled before a model is loaded, and `agl show` prints what was said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.cli.agents import find_agent, isolation_of
from agentlightning.cli.commands.look import ShowOptions
from agentlightning.cli.options import ProgramOptions
from agentlightning.cli.show import show_rollouts
from agentlightning.cli.transcript import log, transcript
from agentlightning.litagent.decorator import FunctionAgent
from agentlightning.metrics import SilentConsole
from agentlightning.trainer.example import example_dir
from agentlightning.types import Span


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("missing.py:agent", "no file 'missing.py'"),
        ("here.py", "here.py:name"),
        ("here.py:other", "no 'other'"),
        ("broken.py:agent", "No module named 'not_there'"),
        ("pyton here.py", "no program 'pyton'"),
        ("python 'here.py", "quotes"),
    ],
)
def test_what_is_no_agent(reference: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.py").write_text("def agent(task): return 1.0\n")
    Path("broken.py").write_text("import not_there\n")
    with pytest.raises(agl.ConfigError) as error:
        find_agent(reference)
    assert hint in str(error.value)


def test_a_command_of_an_image_is_not_looked_for_here() -> None:
    options = ["image=agent:1", "server=http://127.0.0.1:1", "cpu=2", "user=1000", 'pod={"runtimeClassName": "gvisor"}']
    isolation = isolation_of("kubernetes", options)
    wanted = agl.Kubernetes(
        "agent:1", server="http://127.0.0.1:1", cpu="2", user=1000, pod={"runtimeClassName": "gvisor"}
    )
    assert isolation == wanted
    program = ProgramOptions(isolation="kubernetes", isolation_option=options)
    agent = find_agent("pyton agent.py", program)
    assert isinstance(agent, agl.Program)
    assert agent.command == ["pyton", "agent.py"]
    with pytest.raises(agl.ConfigError, match="quotes"):
        find_agent("pyton 'agent.py", program)


@pytest.mark.parametrize(
    ("kind", "options", "hint"),
    [
        ("kubernetes", [], "needs the image"),
        ("kubernetes", ["image=a", "user=me"], "give NAME=VALUE"),
        ("kubernetes", ["image"], "give NAME=VALUE"),
        ("kubernetes", ["image=a", "memroy=1Gi"], "memory"),
        ("bubblewrap", ["image=a"], "has no effect"),
        (None, ["image=a"], "has no effect"),
    ],
)
def test_settings_of_an_isolation_that_mean_nothing(kind: str | None, options: list[str], hint: str) -> None:
    with pytest.raises(agl.ConfigError, match=hint):
        isolation_of(kind, options)


def test_a_class_in_a_file_is_made(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import agentlightning as agl\nclass Mine(agl.LitAgent):\n    def rollout(*_): return 1.0\n"
    )
    assert type(find_agent(f"{tmp_path}/mine.py:Mine")).__name__ == "Mine"


def test_an_example_without_a_recipe_is_none() -> None:
    with pytest.raises(agl.ConfigError, match=r"There is: .*calc"):
        example_dir("programs")
    assert example_dir("two_policies", "team").is_dir()


def echo(task: str) -> float:
    agl.emit_message("thinking")
    if task == "bad":
        raise ValueError("my bug")
    return 0.5


def test_show_prints_rollouts_with_their_rewards_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agl.Trainer(run_dir=tmp_path, console=SilentConsole()).fit(echo, ["good", "bad"])
    show_rollouts(ShowOptions(run=tmp_path, limit=5))
    shown = capsys.readouterr().out
    assert "reward 0.5, ok" in shown
    assert "no reward, agent_error" in shown
    assert "ValueError: my bug" in shown
    show_rollouts(ShowOptions(run=tmp_path / "store.db", failed=True, limit=5))
    assert '"good"' not in capsys.readouterr().out
    with pytest.raises(agl.ConfigError, match="no rollout 'ro-nothing'"):
        show_rollouts(ShowOptions(run=tmp_path, rollout="ro-nothing"))


def test_a_transcript_in_full_has_system_prompts_and_each_tool_once() -> None:
    messages = [{"role": "system", "parts": [{"type": "text", "content": "Be brief."}]}]
    tools = [{"type": "function", "function": {"name": "calc", "description": "Adds."}}]
    attributes = {"gen_ai.input.messages": json.dumps(messages), "gen_ai.tool.definitions": json.dumps(tools)}
    spans = [Span.from_attributes(attributes=attributes, rollout_id="r", attempt_id="a", name="chat") for _ in "ab"]
    shown = str(transcript(spans, full=True))
    assert shown.count("Be brief.") == 2
    assert shown.count('"name": "calc"') == 1
    assert str(transcript(spans)) == ""


def test_a_transcript_names_several_agents_and_has_what_was_emitted() -> None:
    said = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Ben?"}]}])
    calls = [{"gen_ai.agent.name": name, "gen_ai.output.messages": said} for name in ("Ana", "Ivy")]
    found = [calls[0], {"agentlightning.message.body": "Moderator: Night 1."}, calls[1]]
    spans = [Span.from_attributes(attributes=one, rollout_id="r", attempt_id="a", name="s") for one in found]
    lines = [line.split(maxsplit=1) for line in str(transcript(spans)).splitlines()]
    assert lines == [["Ana", "Ben?"], ["message", "Moderator: Night 1."], ["Ivy", "Ben?"]]
    assert str(transcript(spans[:2])).split() == ["assistant", "Ben?", "message", "Moderator:", "Night", "1."]
    assert str(log(spans)) == "Moderator: Night 1."


def test_a_file_of_a_package_may_import_relatively(tmp_path: Path) -> None:
    """Two packages of one name in one process: each file gets its own neighbours."""
    for place in ("one", "two"):
        folder = tmp_path / place / "agents"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "names.py").write_text(f"NAME = {place!r}\n")
        (folder / "agent.py").write_text("from .names import NAME\n\ndef agent(task, llm):\n    return NAME\n")
    found = [find_agent(f"{tmp_path / place / 'agents' / 'agent.py'}:agent") for place in ("one", "two")]
    assert [agent(None, None) for agent in found if isinstance(agent, FunctionAgent)] == ["one", "two"]


DEFINES = "import agentlightning as agl\n\nlimit = int('3')\n\n\n@agl.rollout\ndef agent(task):\n    return 1.0\n\n\n"


def test_a_program_that_only_defines_an_agent_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "mail.py").write_text(f'"""Mails."""\n{DEFINES}')
    with pytest.raises(agl.ConfigError, match=r"mail\.py defines an agent and runs nothing.*mail\.py:agent"):
        find_agent(f"{sys.executable} {tmp_path / 'mail.py'}")


@pytest.mark.parametrize("runs", ["print(agent(3))", "reward = agent(3)", "if __name__ == '__main__':\n    agent(3)"])
def test_a_program_that_runs_its_agent_itself_is_a_program(tmp_path: Path, runs: str) -> None:
    (tmp_path / "mail.py").write_text(f"{DEFINES}{runs}\n")
    assert isinstance(find_agent(f"{sys.executable} {tmp_path / 'mail.py'}"), agl.Program)
