"""The commands of the documentation, typed as they stand into a shell of a reader who has what the pages speak of."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agentlightning.models import shipped_models
from tests.source.commands import SERVING, TYPED

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "200",
    "BROWSER": "true",  # the dashboard opens one
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),  # a reader types `python -m examples.…` in a clone
    "PYTHONUNBUFFERED": "1",
}
TASKS = 8
RUN, OTHER = "runs/calc-20250101-120000", "runs/grpo-20250101-120000"
AGENT = """
import json
import os
import sys

import agentlightning as agl
from openai import OpenAI

number = {"type": "number"}
parts = {"a": number, "op": {"type": "string", "enum": ["+", "-", "*", "/"]}, "b": number}
parameters = {"type": "object", "properties": parts, "required": ["a", "op", "b"]}
CALC = {"name": "calc", "description": "One operation on two numbers.", "parameters": parameters}


def solve(task, client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "Answer the question. Use the calc tool for every operation."},
            {"role": "user", "content": task["question"]},
        ],
        tools=[{"type": "function", "function": CALC}],
        max_tokens=48,
    )
    calls = answer.choices[0].message.tool_calls
    asked = json.loads(calls[0].function.arguments) if calls else {}
    wanted = next(sign for sign in "+-*/" if f" {sign} " in task["question"])
    return float(asked.get("op") == wanted)


@agl.rollout
def agent(task, llm):
    return solve(task, OpenAI(base_url=llm.endpoint, api_key=llm.api_key), llm.model)


if __name__ == "__main__":
    print(solve(json.load(sys.stdin), OpenAI(), os.environ["OPENAI_MODEL"]))
"""
TRAIN = (
    "agl train --agent my_agent.py:agent --tasks tasks.jsonl --val-tasks tasks.jsonl "
    f"--set steps=12 --set tasks_per_step=4 --set group_size=4 --set val_every=12 --set flat_steps=0 --run-dir {RUN} "
    "--set learning_rate=1e-6"  # its last step still has rollouts that fail
)
KEYED = {"AGL_STORE_KEY": "a-key-of-the-reader"}
ALSO_1 = ("agl why", "agl doctor", "agl plan", "agl show runs/calc-20250101-120000 --failed")
"""Commands whose status 1 says what they found: something that is wrong, or no rollout that failed."""
TYPED_ONCE = [(page, command) for page, commands in TYPED.items() for command in commands]
PRINTED = {
    "agl eval": "Gain on the same tasks",
    "agl run ": f"{TASKS} rollouts, mean reward",
    "agl runs": "calc-20250101-120000",
    "agl show": "ro",
    "agl doctor": "rollout",
    "agl whatif": "gradient",
    "agl store key": "agl-",
}
"""What commands print at least."""


def typed(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**ENVIRONMENT, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def span(question: str, answer: str) -> dict[str, Any]:
    """A model call as OpenTelemetry's SDK prints it."""

    def messages(role: str, text: str) -> str:
        return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])

    return {
        "name": "chat",
        "context": {"trace_id": f"0x{hash(question) % 2**128:032x}", "span_id": f"0x{hash(question) % 2**64:016x}"},
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": messages("user", question),
            "gen_ai.output.messages": messages("assistant", answer),
        },
    }


def trajectory(question: str, answer: str) -> dict[str, Any]:
    """A run of an agent as Harbor's ATIF writes it."""
    steps = [
        {"step_id": 1, "source": "user", "message": question},
        {"step_id": 2, "source": "agent", "message": answer},
    ]
    agent = {"name": "my-agent", "version": "1.0"}
    return {"schema_version": "ATIF-v1.4", "session_id": "s", "agent": agent, "steps": steps}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of twelve steps under the names of the pages, agents in Python and Node, and tasks."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_agent.py").write_text(AGENT)
    programs = ROOT / "examples" / "programs"
    shutil.copy(programs / "agent.js", folder)
    tasks = [{"question": f"What is {n + 20} {'+-*/'[n % 4]} {n + 2}?", "answer": 0} for n in range(TASKS)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    done = typed(TRAIN, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "printed.txt").write_text(done.stdout)
    for name in (OTHER, "runs/a", "runs/b", "run"):
        shutil.copytree(folder / RUN, folder / name)
    (folder / "my-folder").symlink_to("runs")
    (folder / "config.yaml").write_text("training:\n  group_size: 4\n")
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "trajectory.json").write_text(json.dumps(trajectory("What is 1 + 2?", "3")))
    spans = [span(f"What is {n} + 2?", str(n + 2)) for n in range(TASKS)]
    (folder / "traces.jsonl").write_text("".join(json.dumps(one) + "\n" for one in spans))
    call = {"traceId": "t", "id": "1", "type": "GENERATION", "input": "What is 1 + 2?", "output": "3"}
    right = {"name": "correctness", "value": 1, "dataType": "NUMERIC"}
    (folder / "scored.json").write_text(json.dumps({"id": "t", "observations": [call], "scores": [right]}))
    (folder / "secret").write_text(os.urandom(32).hex())
    return folder


@pytest.mark.parametrize(("page", "command"), TYPED_ONCE, ids=[command for _, command in TYPED_ONCE])
def test_a_command_that_ends(reader: Path, page: str, command: str) -> None:
    if "node " in command and shutil.which("node") is None:
        pytest.skip("needs Node")
    if "./my-model" in command and not (reader / "my-model").exists():  # when this test runs alone
        shutil.copytree(shipped_models()["calc"], reader / "my-model")
    if command.endswith(" import rollouts/") and not (reader / "rollouts").exists():
        assert typed("agl store --path run/store.db export rollouts/", reader).returncode == 0
    done = typed(command, reader)
    told = done.stdout + done.stderr
    assert done.returncode in ((0, 1) if command.startswith(ALSO_1) else (0,)), told
    assert "Traceback" not in told
    for begins, words in PRINTED.items():
        assert not command.startswith(begins) or words in told or "--json" in command, told
    if command.endswith("--json") or " --json " in command:
        json.loads(done.stdout)
    for made in re.findall(r"(?:--to|--jsonl|export) ([\w/.-]+)$|--(?:to|jsonl) (\S+)", command):
        assert (reader / "".join(made)).exists() or "runs/" in "".join(made)


SERVED = [(page, command, words) for page, given in SERVING.items() for command, words in given.items()]


@pytest.mark.parametrize(("page", "command", "words"), SERVED, ids=[f"{page}: {c}" for page, c, _ in SERVED])
def test_a_command_that_serves(reader: Path, page: str, command: str, words: str) -> None:
    serves_until_ctrl_c(command, words, reader)


def test_what_a_run_says_to_type_next_works(reader: Path) -> None:
    printed = (reader / "printed.txt").read_text()
    show, evaluate, serve = re.findall(r"^  (agl (?:show|eval|serve) \S+(?: --trust)?)", printed, flags=re.MULTILINE)
    assert "reward" in typed(show, reader).stdout
    assert "Gain on the same tasks" in typed(evaluate, reader).stdout
    serves_until_ctrl_c(serve, "Try it:", reader)


def serves_until_ctrl_c(command: str, words: str, folder: Path) -> None:
    """It says the words, and ends with status 130 at Ctrl-C."""
    for port in (8000, 4747):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port} is taken on this machine")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; the command would, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        f"exec {command}",
        shell=True,
        cwd=folder,
        env={**ENVIRONMENT, **KEYED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    late = threading.Timer(120, process.kill)
    late.start()
    told: list[str] = []
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line)
            if words in line:
                break
        process.send_signal(signal.SIGINT)
        told += process.stdout.readlines()
    late.cancel()
    assert words in "".join(told)
    assert process.returncode == (130 if command.startswith("agl ") else 0), "".join(told)
    assert "Traceback" not in "".join(told)
