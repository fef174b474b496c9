"""The coding example: what its sandbox gives and refuses, what its grader believes, what its tasks are made of."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import socket
from pathlib import Path

import pytest

from agentlightning.cli.configuration import make_algorithm
from agentlightning.errors import ConfigError
from agentlightning.metrics import read_metrics
from examples.code import recipe, sandbox as sandboxing
from examples.code.code_agent import earned, failed_tests
from examples.code.demonstrations import END, MIXED, SKILL, demonstrate, held_out, run_here, spoiled
from examples.code.grading import answer_of, code_block, code_in, right, score, tried, verdict
from examples.code.problems import SIZES, as_task, make_problem, make_tasks, solve
from examples.code.prompts import PASSED
from examples.code.sandbox import Answer, run_code
from tests.typed import typed

ROOT = Path(__file__).parents[2]
TASK = {"problem": "the sum of the numbers", "tests": [[[1, 2], 3]], "hidden": [[[4, 5], 9], [[], 0]]}


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


@pytest.fixture
def node() -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed here")


@pytest.mark.usefixtures("sandbox", "node")
async def test_a_task_may_want_another_language() -> None:
    task = {**TASK, "language": "JavaScript"}
    assert await score("const f = (xs) => xs.reduce((a, b) => a + b, 0)", task) == 1.0
    assert await score("function f(xs) { console.log([9]); return xs.length; }", task) == 0.0
    assert await score("def f(xs): return sum(xs)", task) == 0.0, "that is Python"
    assert await score("const f = (xs) => xs.reduce((a, b) => a + b, 0)", TASK) == 0.0, "and that is not"
    with pytest.raises(ConfigError, match="the sandbox runs Python and JavaScript"):
        await score("f", {**TASK, "language": "Cobol"})


@pytest.mark.usefixtures("sandbox", "node")
async def test_a_scripts_memory_is_bounded_and_it_starts_no_process() -> None:
    """Buffers are none of Node's heap."""
    fill = (
        "const f = (xs) => { const a = []; try { for (let i = 0; i < xs; i++) a.push(Buffer.alloc(2e7, 1)) } catch {}"
    )
    answer = await run_code(f"{fill} return a.length }}", [1], "JavaScript")
    assert answer.values == [1], answer.error
    answer = await run_code(f"{fill} return a.length }}", [100], "JavaScript")
    assert answer.error or answer.values[0] < 60, "it is full, or has been ended before"
    start = "const f = (xs) => { const { spawn } = process.getBuiltinModule('child_process'); let n = 0; "
    start += "for (let i = 0; i < xs; i++) { const c = spawn('sleep', ['1']); c.on('error', () => {}); n += !!c.pid }"
    answer = await run_code(f"{start} return n }}", [1, 40], "JavaScript")
    if "getBuiltinModule" in (answer.error or ""):
        pytest.skip("this Node is too old to give code a module")
    assert answer.values == [0, 0]


@pytest.mark.usefixtures("sandbox")
async def test_a_language_that_is_not_installed_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sandboxing.LANGUAGES, "Piet", sandboxing.Language("judge.py", ("no-such-program",)))
    with pytest.raises(ConfigError, match="no-such-program, which is not installed"):
        await score("f", {**TASK, "language": "Piet"})


@pytest.mark.usefixtures("sandbox")
async def test_a_machine_without_a_filter_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxing.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="on x86_64 and aarch64 only"):
        await score("f", {**TASK, "language": "JavaScript"})


HOSTILE_SCRIPTS = {
    "fork bomb": "const f = () => { for (;;) process.getBuiltinModule('child_process').spawn('sleep', ['9']) }",
    "endless": "const f = () => { for (;;); }",
    "memory": "const f = () => { const all = []; for (;;) all.push(new Array(1e6).fill(7)) }",
    "forged": "process.getBuiltinModule('fs').writeSync(1, '[3]\n'); process.exit(0)",
    "patched": "JSON.stringify = () => '[9,0]'; const f = () => 1",
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("sandbox", "node")
@pytest.mark.parametrize("name", HOSTILE_SCRIPTS)
async def test_hostile_scripts_earn_nothing_and_leave_nothing(name: str, tmp_path: Path) -> None:
    before = processes()
    task = {**TASK, "language": "JavaScript"}
    assert await score(f"{HOSTILE_SCRIPTS[name]} // {tmp_path.name}", task) == 0.0
    assert not [p for p in processes() - before if "judge.mjs" in _command(p)]


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


@pytest.mark.usefixtures("sandbox")
async def test_what_is_handed_in_counts_and_else_what_was_tested_last() -> None:
    good, bad = "def f(xs): return sum(xs)", "def f(xs): return max(xs)"
    assert await earned([bad, good], None, TASK) == {"correct": 1.0, "tested": 1.0, "first": 0.0, "repaired": 1.0}
    assert await earned([good], bad, TASK) == {"correct": 0.0, "tested": 0.0, "first": 1.0}
    assert await earned([], good, TASK) == {"correct": 1.0, "tested": 0.0, "first": 1.0}
    assert await earned([bad], None, TASK) == {"correct": 0.0, "tested": 1.0, "first": 0.0}
    assert await earned([], None, TASK) == {"correct": 0.0, "tested": 0.0, "first": 0.0}


@pytest.mark.usefixtures("sandbox")
async def test_the_same_code_is_run_once(tmp_path: Path) -> None:
    """A group writes the same code at the same time. Each run of this gives another value."""
    code = f"def f(xs): return open('/dev/urandom', 'rb').read(8).hex()  # {tmp_path.name}"
    impatient = asyncio.create_task(answer_of(code, [1]))
    others = [asyncio.create_task(answer_of(code, [1])) for _ in range(3)]
    await asyncio.sleep(0)
    impatient.cancel()
    answers = await asyncio.gather(*others)
    assert answers[0].error is None
    assert len({answer.values[0] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na = 1\n```", "a = 1"),
        ("So:\n```\na\n```\nor\n```python\nb\n```\nDone.", "b"),
        ("```c++\nint a;\n```", "int a;"),
        ("Done.", None),
        ("```python\na = 1", None),
    ],
)
def test_code_is_found_in_a_last_message(text: str, code: str | None) -> None:
    assert code_block(text) == code


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


@pytest.mark.slow
def test_hidden_tests_tell_neighbours_apart() -> None:
    """Code with another number in its condition passes few of the hidden tests of problems that keep numbers."""
    tasks = [task for task in make_tasks()["train"] if "numbers above 5" in task["problem"]]
    passed = []
    for task in tasks:
        others = [make_problem(random.Random(i)) for i in range(2000)]
        near = [o for o in others if o.words() == task["problem"].replace("above 5", "above 6")]
        passed += [run_here(o.code(), task["hidden"]) == PASSED for o in near[:1]]
    assert len(passed) > 5
    assert sum(passed) / len(passed) < 0.3


@pytest.mark.usefixtures("sandbox")
async def test_right_code_is_right_however_long_its_values_are() -> None:
    """Eight lists of words are far more than a line of an error may be."""
    words = ["elephant"] * 12
    assert await score("def f(xs): return list(xs)", {"tests": [[words, words]], "hidden": [[words, words]] * 8}) == 1.0


def test_spoiled_code_is_wrong() -> None:
    """Mostly: where all words are short, keeping them all is right by chance."""
    rng, found = random.Random(0), []
    for _ in range(100):
        problem = make_problem(rng)
        task = as_task(problem, rng)
        assert spoiled(problem)
        found += [run_here(code, task["hidden"]) == PASSED for code in spoiled(problem)]
    assert sum(found) / len(found) < 0.1


def test_no_held_out_problem_is_demonstrated() -> None:
    rng = random.Random(0)
    assert len(held_out()) == SIZES["val"] + SIZES["test"]
    for _ in range(300):
        assert demonstrate(rng, SKILL).messages[-1]["content"].removeprefix("f(xs): ") not in held_out()


def test_every_behaviour_is_demonstrated() -> None:
    rng = random.Random(0)
    shown = [demonstrate(rng, MIXED) for _ in range(400)]
    assert {len(d.results) for d in shown} == {0, 1, 2, 3}
    untested = [d for d in shown if not d.results]
    assert all(code_block(d.turns[0]) for d in untested)
    assert all(d.turns[-1] == END for d in shown if d.results)
    failed = [d for d in shown if d.results and d.results[-1] != PASSED]
    repaired = [d for d in shown if len(d.results) > 1 and d.results[-1] == PASSED]
    broken = [d for d in shown if any("SyntaxError" in result for result in d.results)]
    assert min(len(untested), len(failed), len(repaired), len(broken)) > 20


@pytest.mark.usefixtures("sandbox")
async def test_demonstrated_results_are_those_of_the_sandbox() -> None:
    rng = random.Random(1)
    for _ in range(4):
        problem = make_problem(rng)
        task = as_task(problem, rng)
        for code in (problem.code(), problem.code()[:-1], spoiled(problem)[0]):
            assert await tried(code, task["tests"]) == run_here(code, task["tests"])


def test_a_rule_makes_each_failed_run_cost_a_little() -> None:
    assert failed_tests("run_tests", "Error: f([1]) is 2, not 3") == -0.05
    assert failed_tests("run_tests", "Error: SyntaxError: invalid syntax") == -0.1
    assert failed_tests("search", "Error: no") is None


def test_the_files_of_settings_are_settings() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load((ROOT / "examples" / "code" / "config.yaml").read_text()) == recipe.SETTINGS
    algorithm = make_algorithm(None, None, ROOT / "examples" / "code" / "config.gpu.yaml", [])
    assert (algorithm.model, algorithm.credit) == ("Qwen/Qwen3-1.7B", "return_to_go")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("sandbox")
def test_two_steps_of_it(tmp_path: Path) -> None:
    """A model that was taught for three steps knows nothing, so nothing is learned; every rollout is graded."""
    make = "from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
    done = typed(tmp_path, "-c", make, "code", "--quick", "--out", "model")
    assert done.returncode == 0, done.stderr
    tasks = make_tasks()["train"][:4]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {"model": "./model", "steps": 2, "tasks_per_step": 2, "group_size": 4, "preflight": "warn"}
    (tmp_path / "config.json").write_text(json.dumps(recipe.SETTINGS | short))
    agent = ROOT / "examples" / "code" / "code_agent.py"
    command = f"train --agent {agent}:code_agent --tasks tasks.jsonl --config config.json --run-dir run"
    done = typed(tmp_path, "-m", "agentlightning", *command.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Nothing was learned" in done.stdout
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [(row["failed"], row["reward"]) for row in rows] == [(0, 0), (0, 0)]
    assert all({"reward/correct", "reward/first", "reward/tested"} <= set(row) for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("sandbox")
def test_it_learns(tmp_path: Path) -> None:
    """On 200 problems that neither training nor validation saw, the gain is above nothing with 95 % confidence."""
    own = {"AGL_CACHE": str(tmp_path / "cache")}
    command = "-m agentlightning demo code --run-dir run"
    done = typed(tmp_path, *command.split(), environment=own, timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    done = typed(tmp_path, "-m", "agentlightning", "eval", "run", environment=own, timeout=900)
    found = re.search(r"95 % interval ([+-]\d\.\d+) to", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) > 0, done.stdout
