"""`agl fork`: a rollout again from one of its calls on, as it is typed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.cli.fork import _check_edits, edits_in  # pyright: ignore[reportPrivateUsage]
from agentlightning.errors import ConfigError
from agentlightning.gateway.replay import EDITABLE
from tests.typed import agl

AGENT = """\
import time
import agentlightning as agl
from openai import AsyncOpenAI

@agl.rollout
async def three(task, llm):
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    clock = str(time.time()) if task["clock"] else ""
    messages = [{"role": "user", "content": f"What is 2 + 3? {clock}"}]
    for n in range(3):
        answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
        said = answer.choices[0].message
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": f"And {n}?"}]
    return float(len(said.content or "") % 2)
"""

TALLY = """\
from pathlib import Path
import agentlightning as agl
from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "tally",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]},
    },
}

def tally(name, n):
    with Path(__file__).with_name(name).open("a") as file:
        file.write("x")
    return len(Path(__file__).with_name(name).read_text())

replayed_tally = agl.replayed(name="tally")(tally)

@agl.rollout
async def tallies(task, llm):
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages = [{"role": "user", "content": "Call it."}]
    for n in range(3):
        answer = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=60
        )
        said = answer.choices[0].message
        call = said.tool_calls[0]
        number = (replayed_tally if task["file"] == "replayed.txt" else tally)(task["file"], 1)
        messages += [said.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": str(number)}]
    return float(number)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the agent on two tasks, of which one asks for the time."""
    folder = tmp_path_factory.mktemp("fork")
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text('{"clock": false}\n{"clock": true}\n')
    given = ("--agent", "agent.py:three", "--tasks", "tasks.jsonl", "--model", "calc", "--run-dir", "run", "--json")
    done = agl(folder, "run", *given)
    assert done.returncode == 0, done.stderr
    (folder / "each.json").write_text(json.dumps(json.loads(done.stdout)["each"]))
    return folder


def rollout(folder: Path, *, clock: bool) -> str:
    each: list[Any] = json.loads((folder / "each.json").read_text())
    return next(one["rollout_id"] for one in each if one["task"]["clock"] is clock)


def forked(folder: Path, which: str, *given: str) -> Any:
    times = () if "--times" in given else ("--times", "2")
    done = agl(folder, "fork", "run", which, "--model", "calc", *times, *given, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_so_many_calls_are_from_the_record(folder: Path) -> None:
    which = rollout(folder, clock=False)
    found = forked(folder, which, "--at", "2", "--trust")
    assert [(row["replayed"], row["sampled"], row["diverged"]) for row in found["forks"]] == [(2, 1, None)] * 2
    assert found["original"]["rollout"] == which


@pytest.mark.slow  # as the one above
def test_a_fork_at_the_end_is_the_record(folder: Path) -> None:
    which = rollout(folder, clock=False)
    whole = forked(folder, which, "--at", "3", "--agent", "agent.py:three")
    assert [row["sampled"] for row in whole["forks"]] == [0, 0]
    assert [row["reward"] for row in whole["forks"]] == [whole["original"]["reward"]] * 2


@pytest.mark.slow  # test_so_many_calls_are_from_the_record has a whole command; gateway and emitter have the parts
def test_an_edited_message_is_told_and_shown(folder: Path) -> None:
    which = rollout(folder, clock=False)
    found = forked(folder, which, "--at", "2", "--times", "1", "--edit", "user=What is 9 + 9?", "--trust")
    assert [(row["replayed"], row["sampled"], row["edited"]) for row in found["forks"]] == [(2, 1, 1)]
    assert found["edits"] == {"user": "What is 9 + 9?"}
    shown = agl(folder, "show", found["run_dir"])
    assert "What is 9 + 9?" in shown.stdout
    assert "edited by the fork: message 5 (user), calls: 1" in shown.stdout
    edited = found["run_dir"], found["forks"][0]["rollout"]
    again = agl(folder, "fork", *edited, "--model", "calc", "--at", "3", "--trust")
    assert "Call 3 of rollout" in again.stderr


@pytest.mark.slow  # tests/gateway/test_replay.py has its parts
def test_an_edit_without_its_message_is_told(folder: Path) -> None:
    given = ("fork", "run", rollout(folder, clock=False), "--model", "calc", "--times", "1", "--trust")
    done = agl(folder, *given, "--edit", "tool=7")
    assert done.returncode == 1, "before any fork runs"
    words = " ".join(done.stderr.split())
    assert "--edit tool: This fork edits the last tool result" in words
    assert "it has messages of the roles user, assistant" in words
    assert "Traceback" not in words


def called_with(*roles: str) -> Any:
    return SimpleNamespace(messages=[{"role": role, "content": ""} for role in roles])


@pytest.mark.parametrize("role", EDITABLE)
def test_an_edit_of_a_role_that_the_first_call_lacks_is_refused_before_the_forks(role: Any) -> None:
    others = [each for each in EDITABLE if each != role]
    with pytest.raises(ConfigError, match=rf"--edit {role}: .* it has messages of the roles {', '.join(others)}\."):
        _check_edits({role: "x"}, called_with(*others))
    _check_edits({role: "x"}, called_with("developer" if role == "system" else role, "user"))
    _check_edits({role: "x"}, None)
    _check_edits({role: "x"}, called_with())


def test_edits_are_read_by_role_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Be terse.\nÄh.\n", encoding="utf-8")
    given = [f"system=@{tmp_path / 'prompt.txt'}", "tool=", "user=a=b"]
    assert edits_in(given) == {"system": "Be terse.\nÄh.\n", "tool": "", "user": "a=b"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["user"], "--edit 'user' has no '='"),
        (["human=Hello."], "system, user, assistant, tool"),
        (["user=a", "user=b"], "--edit user is given twice"),
        (["user=@/nowhere/at/all"], "--edit user=@/nowhere/at/all cannot be read"),
    ],
)
def test_edits_of_another_form_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        edits_in(given)
    assert words in str(refused.value)


@pytest.mark.slow  # tests/gateway/test_replay.py has its parts
def test_one_that_asks_for_the_time_leaves_it_and_says_where(folder: Path) -> None:
    which = rollout(folder, clock=True)
    done = agl(folder, "fork", "run", which, "--model", "calc", "--times", "2", "--agent", "agent.py:three")
    assert "2 of 2 left the record, because the prompt differs from the recorded one at token" in done.stdout
    refused = forked(folder, which, "--agent", "agent.py:three", "--refuse")
    assert {row["outcome"] for row in refused["forks"]} == {"agent_error"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("run", "ro-nothing", "--model", "calc"), "There is no rollout ro-nothing"),
        (("run", "FIRST", "--model", "calc", "--at", "4", "--trust"), "has 3 calls"),
        (("run", "FIRST", "--trust"), "say which model goes on"),
        (("run", "FIRST", "--model", "calc"), "--trust"),
        (("nowhere", "FIRST"), "nowhere"),
    ],
)
def test_what_cannot_be_is_said(folder: Path, given: tuple[str, ...], words: str) -> None:
    first = rollout(folder, clock=False)
    done = agl(folder, "fork", *(first if one == "FIRST" else one for one in given))
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "setting"), [("train", "temperature=0.7"), ("val", "val_temperature=0.3")])
def test_a_rollout_of_a_training_is_sampled_as_it_was(folder: Path, mode: str, setting: str) -> None:
    """Training has sampling settings of its own, whatever the agent asks for."""
    run = f"trained-{mode}"
    settings = (
        "steps=1",
        "tasks_per_step=1",
        "group_size=2",
        "preflight=warn",
        "flat_steps=0",
        "val_before=true",
        setting,
    )
    given = ("--agent", "agent.py:three", "--tasks", "tasks.jsonl", "--val-tasks", "tasks.jsonl", "--model", "calc")
    done = agl(folder, "train", *given, *(f"--set={one}" for one in settings), "--run-dir", run)
    assert (folder / run / "store.db").exists(), done.stderr
    with closing(sqlite3.connect(folder / run / "store.db")) as store:
        asked = "select rollout_id from rollouts where mode = ? and input like '%false%'"
        (which,) = store.execute(asked, [mode]).fetchone()
    forks = agl(folder, "fork", run, which, "--times", "2", "--agent", "agent.py:three", "--json")
    assert forks.returncode == 0, forks.stderr
    found = json.loads(forks.stdout)["forks"]
    assert [(one["replayed"], one["diverged"]) for one in found] == [(2, None)] * 2


@pytest.fixture(scope="module")
def tallied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the agent that tallies, on a task with the decorated tool and on one with the other."""
    folder = tmp_path_factory.mktemp("tally")
    (folder / "tally.py").write_text(TALLY)
    (folder / "tasks.jsonl").write_text('{"file": "replayed.txt"}\n{"file": "plain.txt"}\n')
    given = ("--agent", "tally.py:tallies", "--tasks", "tasks.jsonl", "--model", "calc", "--run-dir", "run", "--json")
    done = agl(folder, "run", *given)
    assert done.returncode == 0, done.stderr
    each = {one["task"]["file"]: one for one in json.loads(done.stdout)["each"]}
    assert [one["reward"] for one in each.values()] == [3.0, 3.0]
    (folder / "each.json").write_text(json.dumps({file: one["rollout_id"] for file, one in each.items()}))
    return folder


def tally_fork(folder: Path, run: str, which: str, *given: str) -> tuple[Any, str]:
    """The one fork of a rollout, by its number or the file it writes to, and what was said on stderr."""
    ids: dict[str, str] = json.loads((folder / "each.json").read_text())
    agent = ("--model", "calc", "--times", "1", "--agent", "tally.py:tallies", "--json")
    done = agl(folder, "fork", run, ids.get(which, which), *given, *agent)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["forks"]
    return row, done.stderr


@pytest.mark.slow  # test_so_many_calls_are_from_the_record has a whole command; gateway and emitter have the parts
def test_replayed_tools_do_not_run_again(tallied: Path) -> None:
    count = tallied / "replayed.txt"
    count.write_text("xxx")
    row, said = tally_fork(tallied, "run", "replayed.txt", "--at", "2", "--run-dir", "fork")
    assert not said
    assert (row["replayed"], row["sampled"], row["reward"]) == (2, 1, 4.0)
    assert count.read_text() == "xxxx", "two of three were from the record, and the last one ran"
    shown = json.loads(agl(tallied, "show", "fork", row["rollout"], "--json").stdout)
    assert shown[0]["replayed_tools"] == ["tally", "tally"]
    assert "from the record: tally, tally" in agl(tallied, "show", "fork", row["rollout"]).stdout
    again, _ = tally_fork(tallied, "fork", row["rollout"], "--at", "3")
    assert (again["replayed"], again["sampled"], again["reward"]) == (3, 0, 4.0)
    assert count.read_text() == "xxxx", "a fork of the fork has its tools' results too"


@pytest.mark.slow  # test_so_many_calls_are_from_the_record has a whole command; gateway and emitter have the parts
def test_tools_that_run_again_are_said(tallied: Path) -> None:
    (tallied / "plain.txt").write_text("xxx")
    row, said = tally_fork(tallied, "run", "plain.txt")
    assert " ".join(said.split()) == (
        "The agent's tools run again, with their side effects; @agl.replayed makes them answer from the record."
    )
    assert (tallied / "plain.txt").read_text() == "xxxxxx"
    assert row["diverged"] is not None, "the tool's result is another"


@pytest.mark.slow
def test_tools_run_again_where_that_is_wanted(tallied: Path, folder: Path) -> None:
    (tallied / "replayed.txt").write_text("xxx")
    row, said = tally_fork(tallied, "run", "replayed.txt", "--tools-again")
    assert (row["reward"], said) == (6.0, "")
    given = ("run", rollout(folder, clock=False), "--model", "calc", "--times", "1", "--tools-again")
    assert agl(folder, "fork", *given, "--agent", "sh -c 'cd /usr; echo 1'").returncode == 0


def test_a_program_whose_attempts_share_a_folder_is_refused(folder: Path) -> None:
    given = ("run", rollout(folder, clock=False), "--model", "calc", "--times", "1", "--run-dir", "shared")
    done = agl(folder, "fork", *given, "--agent", "sh -c 'cd /usr; echo 1'")
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "works in /usr, which all its attempts share" in said
    assert "--tools-again" in said
    assert not (folder / "shared").exists()
