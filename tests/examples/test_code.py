"""The coding example: what its sandbox gives and refuses, what its grader believes, what its tasks are made of."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from pathlib import Path

import pytest

from agentlightning.cli.configuration import make_algorithm
from agentlightning.errors import ConfigError
from agentlightning.litagent.isolation import check_isolation
from agentlightning.metrics import read_metrics
from examples.code.code_agent import PASSED, code_in, failed_tests, right, score, tried, verdict
from examples.code.problems import SIZES, as_task, make_problem, make_tasks, solve
from examples.code.sandbox import Answer, run_code
from tests.typed import typed

ROOT = Path(__file__).parents[2]
TASK = {"problem": "the sum of the numbers", "tests": [[[1, 2], 3]], "hidden": [[[4, 5], 9], [[], 0]]}


@pytest.fixture
def sandbox() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed here")
    try:
        check_isolation("bubblewrap")
    except ConfigError as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("sandbox")
async def test_the_right_code_earns_one() -> None:
    assert await score("def f(xs): return sum(xs)", TASK) == 1.0
    assert await tried("def f(xs): return sum(xs) + 1", TASK["tests"]) == "Error: f([1, 2]) is 4, not 3"


HOSTILE = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "threads": "import threading\nwhile True: threading.Thread(target=input).start()",
    "endless": "def f(xs):\n    while True: pass",
    "memory": "def f(xs): return sum(xs) + len('x' * 10**10)",
    "output": "import os\ndef f(xs):\n    while True: os.write(1, b'x' * 65536)",
    "files": "def f(xs):\n    while True: open('/tmp/x', 'ab').write(b'x' * 10**6)",
    "forged": "import os\nos.write(1, b'[3]'); os._exit(0)",
    "forged and more": "import os\ndef f(xs):\n    os.write(1, b'[[3], [9, 0], 1.0, true]')\n    os._exit(0)",
    "equal to all": "class A(int):\n    def __eq__(self, other): return True\ndef f(xs): return A(7)",
    "patched": "import json\njson.dumps = lambda *_: '[true]'\ndef f(xs): return 1",
    "learnt by heart": "def f(xs): return {'[1, 2]': 3}.get(str(xs), 7)",
    "raises": "def f(xs): raise SystemExit(0)",
    "deep": "def f(xs): return f(xs)",
    "no code": "\0",
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_code_earns_nothing_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    before = processes()
    assert await score(f"{HOSTILE[name]}  # {tmp_path.name}", TASK) == 0.0
    assert not [p for p in processes() - before if "judge.py" in _command(p)]


def processes() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit()}


def _command(process: str) -> str:
    try:
        return Path("/proc", process, "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.usefixtures("sandbox")
async def test_the_grader_is_neither_seen_nor_reached(tmp_path: Path) -> None:
    """Files of others, the network of this machine and the folder with the grader: of none is anything left to use."""
    reward = tmp_path / "reward.txt"
    reward.write_text("0.0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tried = {
            "read": f"open({str(reward)!r}).read()",
            "write": f"open({str(reward)!r}, 'w').write('1.0')",
            "own folder": f"open({str(ROOT / 'examples/code/inside/judge.py')!r}, 'a').write('#')",
            "connect": f"__import__('socket').create_connection(('127.0.0.1', {port}), 2)",
            "kill": "__import__('os').kill(-1, 9)",
        }
        for what, code in tried.items():
            answer = await run_code(f"def f(xs): return str({code})", [[1]])
            assert answer.error is not None, (what, answer)
    assert reward.read_text() == "0.0"


async def test_without_code_nothing_is_earned() -> None:
    assert await score(None, TASK) == 0.0


@pytest.mark.parametrize("arguments", ["", "[]", "{}", '{"code": 1}', "null", '{"code":'])
def test_what_is_no_code_is_none(arguments: str) -> None:
    assert code_in(arguments) is None


def test_values_are_compared_with_their_types() -> None:
    assert right([1, 2], [1, 2])
    assert not right(True, 1)
    assert not right("1", 1)
    assert verdict(Answer([3]), [[[1, 2], 3]]) == PASSED
    assert verdict(Answer([], "it took too long"), [[[1], 1]]) == "Error: it took too long"


def test_no_problem_is_in_two_parts_and_each_has_a_solution() -> None:
    parts = make_tasks()
    assert {part: len(tasks) for part, tasks in parts.items()} == SIZES
    words = [task["problem"] for tasks in parts.values() for task in tasks]
    assert len(set(words)) == len(words)
    assert all(len(task["tests"]) == 2 and len(task["hidden"]) == 8 for task in parts["val"])
    assert json.loads(json.dumps(parts)) == parts
    assert make_tasks() == parts, "the same each time"


def test_the_code_of_a_problem_is_right() -> None:
    rng = random.Random(0)
    for _ in range(50):
        problem = make_problem(rng)
        task = as_task(problem, rng)
        pairs = task["tests"] + task["hidden"]
        assert verdict(Answer([solve(problem)(given) for given, _ in pairs]), pairs) == PASSED


def test_a_rule_makes_each_failed_run_cost_a_little() -> None:
    assert failed_tests("run_tests", "Error: f([1]) is 2, not 3") == -0.05
    assert failed_tests("run_tests", "Error: SyntaxError: invalid syntax") == -0.1
    assert failed_tests("search", "Error: no") is None


def test_the_settings_for_a_gpu_are_settings() -> None:
    algorithm = make_algorithm(None, None, ROOT / "examples" / "code" / "config.gpu.yaml", [])
    assert (algorithm.model, algorithm.credit) == ("Qwen/Qwen3-1.7B", "return_to_go")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("sandbox")
def test_two_steps_of_it(tmp_path: Path) -> None:
    """The calculator's model knows no code, so nothing is learned; every rollout is carried out and graded."""
    tasks = make_tasks()["train"][:4]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {"model": "calc", "steps": 2, "tasks_per_step": 2, "group_size": 4}
    short |= {"credit": "return_to_go", "max_context": 512, "preflight": "warn"}
    (tmp_path / "config.json").write_text(json.dumps(short))
    agent = ROOT / "examples" / "code" / "code_agent.py"
    command = f"train --agent {agent}:code_agent --tasks tasks.jsonl --config config.json --run-dir run"
    done = typed(tmp_path, "-m", "agentlightning", *command.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Nothing was learned" in done.stdout
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [(row["failed"], row["reward"]) for row in rows] == [(0, 0), (0, 0)]
