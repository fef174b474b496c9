"""Programs as agents: how they are given their task and graded, and that none leaves anything running."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.litagent import Limits, Program, ProgramRun
from agentlightning.litagent.isolation import Container
from agentlightning.litagent.program import parse_reward
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import LLM, AttemptedRollout, EnqueueRolloutRequest, Outcome, RolloutConfig
from agentlightning.types.reward import find_final_reward
from tests.litagent.test_attacks import as_user

RESOURCES: Any = {"llm": LLM(endpoint="http://127.0.0.1:9/rollout/r/attempt/a/v1", model="m", api_key="secret-key")}


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    await store.add_resources(RESOURCES)
    yield store
    await store.close()


async def run(store: InMemoryLightningStore, agent: Any, *tasks: Any, seconds: float = 20) -> list[AttemptedRollout]:
    """Run the agent on the tasks beside each other and return the finished rollouts in their order."""
    runner = LitAgentRunner(DummyTracer(), max_rollouts=len(tasks))
    runner.init(agent)
    runner.init_worker(0, store)
    config = RolloutConfig(timeout_seconds=seconds)
    asked = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=t, config=config) for t in tasks])
    await asyncio.wait_for(runner.iter(), 60)
    runner.teardown()
    found = [await store.get_rollout_by_id(r.rollout_id) for r in asked]
    return [r for r in found if isinstance(r, AttemptedRollout)]


async def reward_of(store: InMemoryLightningStore, rollout: AttemptedRollout) -> float | None:
    return find_final_reward((await store.query_spans(rollout.rollout_id)).items)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def sh(code: str) -> list[str]:
    return ["/bin/sh", "-c", code]


TASK_READERS = {
    "stdin": "import json, sys; task = json.load(sys.stdin)",
    "file": "import json, os; task = json.load(open(os.environ['AGL_TASK_FILE']))",
    "env": "import json, os; task = json.loads(os.environ['AGL_TASK'])",
}


@pytest.mark.parametrize("task_as", list(TASK_READERS))
async def test_the_task_arrives_where_it_was_asked_for(store: InMemoryLightningStore, task_as: Any) -> None:
    agent = Program(python(f"{TASK_READERS[task_as]}; print('thinking'); print(task['x'] * 2)"), task_as=task_as)
    rollouts = await run(store, agent, {"x": 3}, {"x": 4})
    assert [r.attempt.outcome for r in rollouts] == [Outcome.OK, Outcome.OK]
    assert [await reward_of(store, r) for r in rollouts] == [6.0, 8.0]


async def test_the_endpoint_is_in_the_variables_and_our_secrets_are_not(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_CLOUD_PASSWORD", "hunter2")
    check = """
        test "$OPENAI_BASE_URL" = http://127.0.0.1:9/rollout/r/attempt/a/v1 &&
        test "$OPENAI_API_BASE" = "$OPENAI_BASE_URL" && test "$OPENAI_API_KEY" = secret-key &&
        test "$ANTHROPIC_BASE_URL" = http://127.0.0.1:9/rollout/r/attempt/a && test "$ANTHROPIC_API_KEY" = secret-key &&
        test "$GOOGLE_GEMINI_BASE_URL" = "$ANTHROPIC_BASE_URL" && test "$GEMINI_API_KEY" = secret-key &&
        test "$GEMINI_MODEL" = m && test "$OPENAI_MODEL" = m &&
        test "$MORE" = yes && test -z "$MY_CLOUD_PASSWORD" && echo 1"""
    (rollout,) = await run(store, Program(sh(check), env={"MORE": "yes"}), None)
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error


async def test_each_attempt_has_a_folder_of_its_own_with_the_given_files(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "data.txt").write_text("7")
    agent = Program(
        sh('test ! -e mine && touch mine && cat data.txt > "$AGL_REWARD_FILE"'),
        reward="file",
        files=tmp_path / "files",
        workspaces=tmp_path / "kept",
    )
    rollouts = await run(store, agent, 1, 2, 3)
    assert [await reward_of(store, r) for r in rollouts] == [7.0] * 3
    assert len(list((tmp_path / "kept").glob("*/mine"))) == 3


async def test_a_script_named_from_here_is_found_from_there(
    store: InMemoryLightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text("print(0.25)")
    monkeypatch.chdir(tmp_path)
    (rollout,) = await run(store, Program(f"{sys.executable} agent.py"), None)
    assert await reward_of(store, rollout) == 0.25


async def test_a_function_grades_output_workspace_and_trace(store: InMemoryLightningStore) -> None:
    seen: list[ProgramRun] = []

    def grade(run: ProgramRun) -> float:
        seen.append(run)
        return float((run.workspace / "answer").read_text()) * run.task

    (rollout,) = await run(store, Program(sh("echo 3 > answer; echo done"), grader=grade), 2)
    assert await reward_of(store, rollout) == 6.0
    assert seen[0].stdout == "done\n"
    assert seen[0].spans[0].attributes["program.exit_code"] == 0
    assert not seen[0].workspace.exists()


async def test_a_command_grades(store: InMemoryLightningStore) -> None:
    grader = python("import json, sys; run = json.load(sys.stdin); print(float(run['stdout']) + run['task'])")
    (rollout,) = await run(store, Program(sh("echo 3"), grader=grader), 2)
    assert await reward_of(store, rollout) == 5.0


@pytest.mark.slow
async def test_no_program_keeps_its_grader_in_a_container_from_running(store: InMemoryLightningStore) -> None:
    step = "d/" * 50
    deep = f"for n in $(seq 30); do mkdir -p {step} && cd -P {step} || exit; done"
    long = "n=$(printf %0250d 0); for i in $(seq 20); do mkdir $n && cd -P $n || exit; done"
    left = f"mkfifo pipe; echo 3 > answer; ({deep}); ({long}); echo done"
    grader = python("import json, sys; print(open(json.load(sys.stdin)['workspace'] + '/answer').read())")
    program = Program(sh(left), grader=grader, isolation=Container(["env"]))  # which isolates nothing
    (rollout,) = await run(store, program, 2)
    assert await reward_of(store, rollout) == 3.0, rollout.attempt.error


async def test_holes_that_a_program_leaves_take_no_space_in_its_graders_copy(store: InMemoryLightningStore) -> None:
    grader = python("import json, os, sys; f = os.stat(json.load(sys.stdin)['workspace'] + '/f'); print(f.st_blocks)")
    program = Program(sh("truncate -s 1G f; echo end >> f"), grader=grader, isolation=Container(["env"]))
    (rollout,) = await run(store, program, 2)
    reward = await reward_of(store, rollout)
    assert reward is not None
    assert reward < 10_000, rollout.attempt.error


NOT_READ = """
import asyncio, sys
from agentlightning.litagent import Container, Program
from tests.litagent.attacks import run
grader = [sys.executable, "-c", "import json, os, sys; print(len(os.listdir(json.load(sys.stdin)['workspace'])))"]
_, reward = asyncio.run(run(Program(["sh", "-c", sys.argv[1]], grader=grader, isolation=Container(["env"]))))
print(reward, os.listdir(sys.argv[2]))
"""


@pytest.mark.quick_with("closed")
@pytest.mark.parametrize(
    ("left", "reward"),
    [("mkdir a; touch a/f b; chmod 0 a b", 1.0), ("mkdir a; touch a/f; chmod 0500 a", 2.0), ("chmod 0 .", 0.0)],
    ids=["closed", "read-only", "the whole"],
)
def test_what_a_user_may_not_read_keeps_no_grader_from_running_and_is_removed(left: str, reward: float) -> None:
    with tempfile.TemporaryDirectory(prefix="agl-") as folder:
        os.chmod(folder, 0o777)
        command = [*as_user("not root"), sys.executable, "-c", f"import os{NOT_READ}", left, folder]
        env = {**os.environ, "TMPDIR": folder, "HOME": "/nowhere"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.stdout == f"{reward} []\n", done.stderr


@pytest.mark.parametrize(
    "grader", [lambda run: 1 / 0, sh("exit 3"), sh("echo hello")], ids=["raises", "exits", "talks"]
)
async def test_a_grader_that_fails_is_a_judge_error(store: InMemoryLightningStore, grader: Any) -> None:
    (rollout,) = await run(store, Program(sh("echo 3"), grader=grader), 2)
    assert rollout.attempt.outcome in (Outcome.JUDGE_ERROR,), rollout.attempt.error
    assert await reward_of(store, rollout) is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("echo oops >&2; exit 4", "exit code 4"),
        ("kill -9 $$", "signal 9"),
        ("echo no number", "holds no reward"),
        ("true", "holds no reward"),
        ("echo NaN", "finite number"),
        ("no-such-program-anywhere", "could not be started"),
    ],
)
async def test_what_went_wrong_is_said(store: InMemoryLightningStore, code: str, message: str) -> None:
    (rollout,) = await run(store, Program(sh(code)), None)
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert message in (rollout.attempt.error or "")


def test_rewards_in_the_last_line() -> None:
    assert parse_reward("thinking\n0.5\n\n") == 0.5
    assert parse_reward('{"reward": 1, "why": "right"}') == 1.0
    with pytest.raises(agl.AgentError):
        parse_reward('{"score": 1}')


# ---- programs that behave badly -------------------------------------------------------------------------------------


def alive(marker: str) -> list[str]:
    """The processes whose command line holds the marker."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marker in line and state != "Z" and int(entry.name) != os.getpid():
            found.append(line)
    return found


FOREVER = "import time\nwhile True: time.sleep(1)"
BAD: dict[str, tuple[str, Outcome]] = {
    "loops": ("while True: pass", Outcome.TIMEOUT),
    "sleeps": (FOREVER, Outcome.TIMEOUT),
    "ignores SIGTERM": (f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FOREVER}", Outcome.TIMEOUT),
    "forks and ends": (f"import os\nif os.fork():\n    print(1.0, flush=True); os._exit(0)\n{FOREVER}", Outcome.OK),
    "leaves its group": (
        "import os\nif os.fork():\n    print(1.0, flush=True); os._exit(0)\n"
        f"os.setsid()\nif os.fork(): os._exit(0)\n{FOREVER}",
        Outcome.OK,
    ),
    "leaves its group and wipes its environment": (
        "import os, sys\nif os.fork():\n    print(1.0, flush=True); os._exit(0)\n"
        "os.setsid()\nif os.fork(): os._exit(0)\n"
        f"os.execve(sys.executable, [sys.executable, '-S', '-c', {FOREVER!r}, *sys.argv[1:]], {{}})",
        Outcome.OK,
    ),
    "the same, and stays": (
        "import os, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        f"    os.execve(sys.executable, [sys.executable, '-S', '-c', {FOREVER!r}, *sys.argv[1:]], {{}})\n{FOREVER}",
        Outcome.TIMEOUT,
    ),
    "ends its own group": ("import os, signal\nos.killpg(0, signal.SIGTERM)", Outcome.AGENT_ERROR),
    "forks and stays": (f"import os\nfor _ in range(5): os.fork() or os.setsid()\n{FOREVER}", Outcome.TIMEOUT),
    "writes gigabytes": ("import os\nwhile True: os.write(1, b'x' * 2**20)", Outcome.AGENT_ERROR),
    "a thread raises": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); print(1.0)",
        Outcome.OK,
    ),
    "takes all memory": ("x = bytearray(8 * 2**30); print(1.0)", Outcome.AGENT_ERROR),
    "says NaN": ("print(float('nan'))", Outcome.AGENT_ERROR),
    "is good": ("print(1.0)", Outcome.OK),
}


@pytest.mark.slow
async def test_bad_programs_end_as_they_should_and_leave_nothing(store: InMemoryLightningStore) -> None:
    marker = f"agl-test-{os.getpid()}"
    code = "import sys, json; exec(json.load(sys.stdin))"
    agent = Program(
        [sys.executable, "-S", "-c", code, marker],
        limits=Limits(output_bytes=64 * 2**20, memory_bytes=2 * 2**30),
    )
    began = time.monotonic()
    rollouts = await run(store, agent, *[code for code, _ in BAD.values()], seconds=4)
    outcomes = {name: r.attempt.outcome for name, r in zip(BAD, rollouts, strict=True)}
    assert outcomes == {name: expected for name, (_, expected) in BAD.items()}, [r.attempt.error for r in rollouts]
    assert time.monotonic() - began < 30
    assert alive(marker) == []


async def test_what_is_kept_of_the_output_is_bounded(store: InMemoryLightningStore) -> None:
    agent = Program(python("print('begin'); print('x' * 10**7); print(0.5)"))
    (rollout,) = await run(store, agent, None)
    span = (await store.query_spans(rollout.rollout_id)).items[0]
    kept = span.attributes["program.stdout"]
    assert span.attributes["program.stdout_bytes"] > 10**7
    assert len(kept) < 70_000
    assert kept.startswith("begin")
    assert "bytes left out" in kept
    assert await reward_of(store, rollout) == 0.5


async def test_stopping_the_runner_kills_the_program(store: InMemoryLightningStore, tmp_path: Path) -> None:
    marker = f"agl-stop-{os.getpid()}"
    started = tmp_path / "started"
    agent = Program([sys.executable, "-S", "-c", f"open({str(started)!r}, 'w')\n{FOREVER}", marker])
    runner = LitAgentRunner(DummyTracer())
    runner.init(agent)
    runner.init_worker(0, store)
    rollout = await store.enqueue_rollout("task")
    running = asyncio.create_task(runner.iter())
    while not started.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    runner.teardown()
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.outcome is Outcome.CANCELLED
    assert alive(marker) == []


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
async def test_a_node_program(store: InMemoryLightningStore) -> None:
    code = "const t = JSON.parse(require('fs').readFileSync(0)); console.log(JSON.stringify({reward: t.x + 1}))"
    (rollout,) = await run(store, Program(["node", "-e", code]), {"x": 1})
    assert await reward_of(store, rollout) == 2.0


def test_a_task_that_no_variable_holds_is_refused_at_the_door() -> None:
    task = {"q": "x" * 3_000_000}
    with pytest.raises(ConfigError, match="stdin"):
        Program("true", task_as="env").check_task(task)
    with pytest.raises(ConfigError, match="stdin"):
        Program(["true", "{task.q}"]).check_task(task)
    for way in ("file", "stdin"):
        Program("true", task_as=way).check_task(task)


# ---- what it leaves in its folder -----------------------------------------------------------------------------------

LEAVES = {
    ".agl is a link": "shutil.rmtree('.agl'); os.symlink(os.environ['OTHER'], '.agl')",
    "the reward is a link": "os.symlink(os.environ['OTHER'] + '/reward', '.agl/reward')",
    "the reward is a pipe": "os.mkfifo('.agl/reward')",
    "the reward is a device": "os.symlink('/dev/zero', '.agl/reward')",
    "the reward is a socket": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('.agl/reward')",
    "the reward is a folder": "os.mkdir('.agl/reward')",
    "the reward is no text": "open('.agl/reward', 'wb').write(bytes(range(128, 256)))",
    "the reward is nested": "open('.agl/reward', 'w').write('[' * 99999)",
    ".agl is a file": "shutil.rmtree('.agl'); open('.agl', 'w').write('1.0')",
    "3,000 folders inside one another": (
        "open('.agl/reward', 'w').write('1.0')\nfor _ in range(3000): os.mkdir('folder'); os.chdir('folder')"
    ),
}


async def test_the_last_line_of_a_long_file_is_the_reward(store: InMemoryLightningStore) -> None:
    code = "import os; open(os.environ['AGL_REWARD_FILE'], 'w').write('1\\n' * 100_000 + '0.25')"
    (rollout,) = await run(store, Program(python(code), reward="file"), 1)
    assert await reward_of(store, rollout) == 0.25


@pytest.mark.parametrize("what", LEAVES)
async def test_the_runner_survives_what_a_program_leaves(
    store: InMemoryLightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    (other / "reward").write_text("1.0")
    agent = Program(python(f"import os, shutil\n{LEAVES[what]}"), reward="file", env={"OTHER": str(other)})
    (rollout,) = await run(store, agent, 1)
    nested = "folders" in what
    assert rollout.attempt.outcome is (Outcome.OK if nested else Outcome.AGENT_ERROR), rollout.attempt.error
    assert os.listdir(tmp_path) == ["other"], "its folder is gone"
    assert (other / "reward").read_text() == "1.0"
