"""Whatever others wrote, every command prints it without a control character and without a whole key of an attempt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from agentlightning.cli.app import app
from agentlightning.keys import sign_attempt_key, sign_url_key
from agentlightning.types import Outcome
from tests.cli.test_looking import WELL, Recording, Said, Told, record
from tests.typed import agl

KEY = sign_attempt_key(b"secret", "ro-1", "at-1")
URL = f"http://127.0.0.1:1/attempt/at-1/key/{sign_url_key(b'secret', 'ro-1', 'at-1', ['calls'])}/v1"
ESCAPES = (
    "\x1b[2J\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x9b31m\x90q\x9c\rover\x08\x08 \u202etxt\u2066 \x7f [bold]x[/bold]"
)
EVIL = f"{ESCAPES} {KEY} {URL} "
NAME = ESCAPES.replace("/", "_")

PROGRAM = f"""import os, sys
print({EVIL!r}, os.environ.get("OPENAI_API_KEY"), os.environ.get("OPENAI_BASE_URL"))
sys.exit({EVIL!r} + str(os.environ.get("OPENAI_API_KEY")) + str(os.environ.get("OPENAI_BASE_URL")))
"""
AGENT = f"""def agent(task, llm):
    raise ValueError({EVIL!r} + str(llm.api_key) + llm.endpoint)
"""
ENDPOINT = ("--endpoint", "http://127.0.0.1:9/v1")
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "agents": [("--path", NAME)],
    "compare": [("evil", "evil"), (NAME, "evil")],
    "dashboard": [(NAME,)],
    "demo": [(NAME,)],
    "doctor": [("--agent", "agent.py:agent", "--tasks", "tasks.jsonl"), ("--agent", NAME, "--tasks", NAME)],
    "env": [("list",), ("check", NAME), ("check", f"gym:{NAME}"), ("check", f"harbor:{NAME}")],
    "eval": [("evil",), (NAME,), ("calc", "--agent", NAME, "--tasks", NAME)],
    "export": [("evil", "--jsonl", "out.jsonl"), (NAME, "--to", "x")],
    "fork": [("evil", "ro-x"), (NAME, NAME), ("evil", NAME, "--model", NAME)],
    "gateway": [("--model", NAME, "--port", "0"), ("--upstream", NAME)],
    "import": [(NAME,), ("tasks.jsonl",)],
    "judge": [
        ("evil", "--write-labels", NAME),
        ("evil", "--labels", NAME, "--url", "http://127.0.0.1:9/v1", "--model", "j"),
        ("evil", "--url", "http://127.0.0.1:9/v1", "--model", NAME),
        (NAME,),
    ],
    "models": [(), ("--gpus", NAME)],
    "optimize": [("--agent", NAME, "--tasks", NAME)],
    "plan": [("--model", NAME)],
    "report": [("evil",), (NAME,)],
    "run": [
        ("--agent", "python program.py", "--tasks", "tasks.jsonl", *ENDPOINT),
        ("--agent", "python program.py", "--tasks", "tasks.jsonl", *ENDPOINT, "--json"),
        ("--agent", "agent.py:agent", "--tasks", "tasks.jsonl", *ENDPOINT),
        ("--agent", f"agent.py:{NAME}", "--tasks", NAME),
    ],
    "runner": [("--server", "http://127.0.0.1:9", "--agent", NAME)],
    "runs": [(), (".",), (".", "--json"), (NAME,)],
    "serve": [(NAME, "--port", "0")],
    "show": [("evil", "--full"), ("evil", "--failed"), ("evil", "--json"), ("evil", "--log"), (NAME,)],
    "store": [("--path", "evil/store.db", "stats"), ("statistics", "evil"), ("--path", NAME, "stats")],
    "train": [("--config", NAME), ("--agent", NAME, "--tasks", NAME), ("--config", "evil/run.json")],
    "watch": [("evil", "--once"), ("evil", "--once", "--json"), (NAME, "--once")],
    "whatif": [("evil",), (NAME,)],
    "why": [("evil",), ("evil", "--json"), ("evil", "--breaks"), (NAME,)],
}
"""Of every command: on a run that holds such texts, and with such a text as its argument."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("printing")
    said = Said(text=EVIL, tool={"a": EVIL}, results=[EVIL], tools=True)
    good = [Told(reward=float(n % 2), calls=(said,), task={"q": EVIL}) for n in range(4)]
    failed = Told(outcome=Outcome.AGENT_ERROR, error=EVIL, task=EVIL, calls=(said,))
    record(folder / "evil", Recording(groups=[[*good, failed, failed]], steps=WELL.steps, settings={"note": EVIL}))
    about = {"run_id": EVIL, "algorithm": EVIL, "agent": EVIL, "source": EVIL, "settings": {"note": EVIL}}
    (folder / "evil" / "run.json").write_text(json.dumps(about))
    (folder / "tasks.jsonl").write_text(json.dumps(EVIL) + "\n")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "agent.py").write_text(AGENT)
    return folder


def test_every_command_is_here() -> None:
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert {name for name, command in commands.items() if not command.hidden} == set(COMMANDS)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        pytest.param(
            command, arguments, marks=pytest.mark.slow if command == "doctor" and NAME not in arguments else ()
        )
        for command, given in COMMANDS.items()
        for arguments in given
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_nothing_of_it_reaches_the_terminal(folder: Path, command: str, arguments: tuple[str, ...]) -> None:
    done = agl(folder, command, *arguments)
    for text in (done.stdout, done.stderr):
        controls = {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E} - {"\n", "\t"}
        assert not controls, text
        assert KEY not in "".join(text.split()), text
        assert URL not in "".join(text.split()), text
    assert done.stdout + done.stderr, "it says something"
