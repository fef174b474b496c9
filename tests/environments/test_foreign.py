"""Environments in an interpreter of their own: what a worker lists and earns, and what goes wrong there."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.foreign import (
    ForeignEnvironment,
    _what_was_raised,  # pyright: ignore[reportPrivateUsage]
)
from agentlightning.environments.inspect import InspectEnvironment
from agentlightning.environments.verifiers import VerifiersEnvironment
from agentlightning.errors import AgentError, ConfigError, ExecutorError
from agentlightning.types import Span
from tests.environments.harbor_tasks import engine_or_skip
from tests.environments.interpreters import interpreter
from tests.environments.model import Answer, answering, attempted

VERSION = "0.3.285"
WORKER = """\
import json, os, sys
what, name, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if name == "broken":
    raise SystemExit("it is broken")
if what == "list":
    print("a line of somebody's own")
    for n in range(settings["count"]):
        print(json.dumps({"id": n}))
else:
    task = json.load(sys.stdin)
    print("working at", os.environ["OPENAI_BASE_URL"])
    print({0: '{"rewards": {"right": 1, "style": 0.5}}', 1: '{"error": "no score"}', 2: "nothing",
           3: '{"rewards": {"right": "much"}}', 4: '{"rewards": {}}'}.get(task["id"], ""))
    sys.exit(3 if task["id"] == 5 else 0)
"""


class Own(ForeignEnvironment):
    """With a worker of the tests."""

    scheme, summary, tested, install = "own", "", "", "pip install own"

    def __init__(self, worker: Path, name: str = "good", count: int = 6, **given: Any) -> None:
        self.worker = worker  # pyright: ignore[reportAttributeAccessIssue]
        whole: dict[str, Any] = {"python": None, "reward_key": None, "val_tasks": 0, **given}
        super().__init__(name, settings={"count": count}, **whole)


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return file


async def earned(env: ForeignEnvironment, task: Any, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The rewards of an attempt, and the one that trains."""
    rewards: list[Any] = []
    monkeypatch.setattr("agentlightning.environments.foreign.emit_reward", lambda *given: rewards.append(given))
    with answering(answer) as llm:
        await env.agent.rollout_async(task, {"main": llm}, attempted(task))
    return rewards[0]


def test_tasks_are_listed_once_and_the_last_are_to_validate_on(worker: Path) -> None:
    env = Own(worker, val_tasks=2)
    assert [task["id"] for task in env.tasks()] == [0, 1, 2, 3]
    worker.unlink()
    assert [task["id"] for task in env.val_tasks()] == [4, 5]


async def test_what_it_earns_by_name(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await earned(Own(worker), {"id": 0}, lambda _: "", monkeypatch) == ({"right": 1.0, "style": 0.5}, "right")
    chosen = Own(worker, reward_key="style")
    assert await earned(chosen, {"id": 0}, lambda _: "", monkeypatch) == ({"right": 1.0, "style": 0.5}, "style")
    with pytest.raises(ExecutorError, match="no reward 'other'"):
        await earned(Own(worker, reward_key="other"), {"id": 0}, lambda _: "", monkeypatch)


@pytest.mark.parametrize(("task", "words"), [(1, "no score"), (2, "no reward"), (3, "no reward"), (5, "exit code 3")])
async def test_no_reward_is_not_a_reward_of_0(
    worker: Path, task: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExecutorError, match=words):
        await earned(Own(worker), {"id": task}, lambda _: "", monkeypatch)


def test_what_cannot_be_loaded_says_why(worker: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is broken"):
        Own(worker, name="broken").tasks()
    with pytest.raises(ConfigError, match="cannot be run"):
        Own(worker, python=str(tmp_path / "nowhere")).tasks()
    with pytest.raises(ConfigError, match=r"6 tasks are there"):
        Own(worker, val_tasks=6).tasks()
    for absent, needs in (("own", "needs  pip install own"), ("no_such.package", "imports no_such: install")):
        worker.write_text(f"raise ModuleNotFoundError(\"No module named '{absent}'\")")
        with pytest.raises(ConfigError, match=needs):
            Own(worker).tasks()


async def test_it_is_tried_out_by_loading(worker: Path) -> None:
    env = Own(worker)
    [probe] = [probe async for probe in env.probes(env.tasks())]
    assert (probe.task, probe.good) == ("6 tasks", True)
    with pytest.raises(ConfigError, match="has an id"):
        env.agent.check_task({"question": 1})
    with pytest.raises(AgentError, match="no model"):
        await env.agent.rollout_async({"id": 0}, {}, attempted({"id": 0}))


TASKS = """\
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, includes, match, scorer
from inspect_ai.solver import generate, solver, system_message

def samples(n):
    return [Sample(input=f"What is {a} + {a}?", target=str(a + a), id=f"s{a}") for a in range(1, n + 1)]

@task
def sums(n: int = 4):
    return Task(dataset=samples(n), solver=[system_message("Answer."), generate()], scorer=[includes(), match()])

@solver
def breaking():
    async def solve(state, generate):
        raise RuntimeError("it broke")
    return solve

@task
def broken():
    return Task(dataset=samples(1), solver=[breaking()], scorer=[includes()])

@scorer(metrics=[accuracy()])
def several():
    async def score(state, target):
        return Score(value={"length": len(state.output.completion), "right": "C"})
    return score

@task
def parts():
    return Task(dataset=samples(1), solver=[generate()], scorer=[several()])

@task
def shell():
    return Task(dataset=samples(1), solver=[generate()], scorer=[includes()], sandbox="local")

@task
def shuffled():
    import random
    return Task(dataset=[Sample(input=str(random.random()), target="1")], solver=[generate()], scorer=[includes()])
"""


@pytest.fixture(scope="module")
def inspect_python() -> str:
    """An interpreter with inspect_ai: INSPECT_PYTHON, or one that is made."""
    return interpreter("INSPECT_PYTHON", (f"inspect-ai=={VERSION}", "openai>=3.4"), (sys.executable,))


def doubled(messages: list[dict[str, Any]]) -> str:
    number = int(messages[-1]["content"].split()[2])
    return f"It is {2 * number}, I think." if number % 2 else "No idea."


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_with_inspect_itself(inspect_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    place = f"{tmp_path}/tasks.py"
    env = InspectEnvironment(f"{place}@sums", python=inspect_python, arguments={"n": 5}, val_tasks=2)
    assert [task["id"] for task in (*env.tasks(), *env.val_tasks())] == ["s1", "s2", "s3", "s4", "s5"]
    found = await asyncio.gather(*(earned(env, task, doubled, monkeypatch) for task in env.tasks()[:1]))
    assert found == [({"includes": 1.0, "match": 0.0}, "includes")]
    assert await earned(env, {"id": "s2"}, doubled, monkeypatch) == ({"includes": 0.0, "match": 0.0}, "includes")
    parts = InspectEnvironment(f"{place}@parts", python=inspect_python)
    assert (await earned(parts, {"id": "s1"}, doubled, monkeypatch))[0] == {
        "several/length": 17.0,
        "several/right": 1.0,
    }
    broken = InspectEnvironment(f"{place}@broken", python=inspect_python)
    with pytest.raises(ExecutorError, match="it broke"):
        await earned(broken, {"id": "s1"}, doubled, monkeypatch)
    moving = InspectEnvironment(f"{place}@shuffled", python=inspect_python)
    with pytest.raises(ExecutorError, match="another one now"):
        await earned(moving, moving.tasks()[0], lambda _: "1", monkeypatch)
    with pytest.raises(ConfigError, match="sandbox=local"):
        InspectEnvironment(f"{place}@shell", python=inspect_python).tasks()
    local = InspectEnvironment(f"{place}@shell", python=inspect_python, sandbox="local")
    assert (await earned(local, local.tasks()[0], doubled, monkeypatch))[1] == "includes"
    for name, words in ((f"{place}@nothing", "no task nothing"), (place, "name one"), (f"{place}x@sums", "no file")):
        with pytest.raises(ConfigError, match=words):
            agl.load_environment(f"inspect:{name}", python=inspect_python).tasks()


SHOUTED = """\
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver
from inspect_ai.util import sandbox

@solver
def written():
    async def solve(state, generate):
        state = await generate(state)
        await sandbox().write_file("/tmp/said.txt", state.output.completion)
        return state
    return solve

@scorer(metrics=[accuracy()])
def shouted():
    async def score(state, target):
        found = await sandbox().exec(["sh", "-c", "test ! -e THIS_FILE && tr a-z A-Z < /tmp/said.txt"])
        return Score(value="C" if found.stdout == target.text else "I")
    return score

@task
def shout():
    samples = [Sample(input="Say hello", target="HELLO", id="a")]
    return Task(dataset=samples, solver=[written()], scorer=[shouted()], sandbox=("docker", "compose.yaml"))
"""
COMPOSED = """\
services:
  default:
    image: localhost/agl-busybox-test
    command: [tail, -f, /dev/null]
    network_mode: none
    ulimits: {nofile: {soft: 1000, hard: 1000}, nproc: {soft: 1000, hard: 1000}, sigpending: {soft: 1000, hard: 1000}}
    x-local: true
"""
CLIENT = """\
#!/bin/sh
if [ "$*" = "version --format json" ]; then echo '{"Server": {"Version": "THE_VERSION"}}'; exit; fi
exec "THE_CLIENT" "$@"
"""
"""inspect asks for Docker's engine, and has podman here, whose version is another's."""


def docker_with_busybox(folder: Path) -> None:
    """An image of one program that needs no library: inspect mounts nothing of a machine whose engine is an old one."""
    engine_or_skip("docker")
    program = shutil.which("busybox")
    if program is None or b"static" not in subprocess.run(["file", "-L", program], capture_output=True).stdout:
        pytest.skip("there is no busybox that needs no library (on Debian: busybox-static)")
    version = subprocess.run(["docker", "compose", "version", "--short"], capture_output=True, text=True).stdout
    if [int(part) for part in re.findall(r"\d+", version)[:2]] < [2, 22]:
        pytest.skip("there is no Docker Compose of version 2.22 or later")
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for place in ("bin", "tmp", "usr", "root", "etc", "proc", "dev", "sys"):
        (folder / place).mkdir(parents=True)
    (folder / "usr" / "bin").symlink_to("../bin")
    shutil.copy(program, folder / "bin" / "busybox")
    for name in {*names} - {"busybox"}:
        (folder / "bin" / name).symlink_to("busybox")
    packed = subprocess.run(["tar", "-C", str(folder), "-c", "."], capture_output=True, check=True).stdout
    subprocess.run(
        ["docker", "import", "-", "localhost/agl-busybox-test"], input=packed, capture_output=True, check=True
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_inspect_acts_in_dockers_sandbox(
    inspect_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_with_busybox(tmp_path / "image")
    (tmp_path / "compose.yaml").write_text(COMPOSED)
    (tmp_path / "tasks.py").write_text(SHOUTED.replace("THIS_FILE", str(tmp_path)))
    client = tmp_path / "bin" / "docker"
    client.parent.mkdir()
    script = CLIENT.replace("THE_CLIENT", str(shutil.which("docker")))
    client.write_text(script.replace("THE_VERSION", "24.0.5"))
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    env = InspectEnvironment(f"{tmp_path}/tasks.py@shout", python=inspect_python)
    with pytest.raises(ExecutorError, match=r"require Docker Engine >= "):
        await earned(env, env.tasks()[0], lambda _: "hello", monkeypatch)
    client.write_text(script.replace("THE_VERSION", "24.0.6"))
    assert await earned(env, env.tasks()[0], lambda _: "hello", monkeypatch) == ({"shouted": 1.0}, "shouted")
    assert await earned(env, env.tasks()[0], lambda _: "help", monkeypatch) == ({"shouted": 0.0}, "shouted")


SUMS = """\
import asyncio, json, urllib.request
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

class SumData(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if self.data.idx == 3:
            raise RuntimeError("the reward broke")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class SumsConfig(vf.TasksetConfig):
    first: int = 1

class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + 5):
            yield SumTask(SumData(prompt=f"What is {n} + {n}?", answer=str(2 * n), name=f"sum-{n}"), self.config.task)

class Asking(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        if data.idx == 4:
            raise RuntimeError("the agent broke")
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        call = urllib.request.Request(endpoint + "/chat/completions", json.dumps(body).encode(), headers)
        await asyncio.to_thread(lambda: urllib.request.urlopen(call).read())
        return ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Sums", "Asking"]
"""
ENDLESS = (
    SUMS.replace("class Sums(", "class Endless(")
    .replace('"Sums"', '"Endless"')
    .replace("    def load", "    INFINITE = True\n\n    def load")
)
PAIRED = (
    SUMS.replace('"Asking"]', '"Asking", "Paired"]')
    + """
class PairedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()

class Paired(vf.Env[PairedConfig]):
    async def run(self, task, agents):
        await agents.solver.run(task)
"""
)
CONTAINED = (
    SUMS.replace('"Asking"]', '"Asking", "Contained"]')
    + """
class ContainedConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "podman", "image": "localhost/no-such-image"})

class Contained(vf.Env[ContainedConfig]):
    async def run(self, task, agents):
        await agents.agent.run(task)
"""
)
EXECUTING = SUMS.replace("EXECUTES_CODE = False", "EXECUTES_CODE = True")
BARE = SUMS.replace('"Sums", "Asking"', '"Sums"')
IMAGED = SUMS.replace("name=f", 'image="an-image", name=f')
MOVING = "import random\n" + SUMS.replace("prompt=f", "prompt=str(random.random()) + f")


@pytest.fixture(scope="module")
def verifiers_python() -> str:
    """An interpreter with verifiers: VERIFIERS_PYTHON, or one that is made."""
    return interpreter("VERIFIERS_PYTHON", ("verifiers==0.4.0",), (sys.executable,))


def write_tasksets(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_with_verifiers_itself(verifiers_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tasksets(tmp_path, monkeypatch, sums=SUMS, endless=ENDLESS, paired=PAIRED)
    env = VerifiersEnvironment("sums", python=verifiers_python, val_tasks=1, tasks=4, arguments={"first": 2})
    assert [task["name"] for task in (*env.tasks(), *env.val_tasks())] == ["sum-2", "sum-3", "sum-4", "sum-5"]
    env = VerifiersEnvironment("sums", python=verifiers_python)
    right = {"reward": 2.0, "right": 1.0, "short": 0.0, "length": 17.0}
    assert await earned(env, {"id": 0}, doubled, monkeypatch) == (right, "reward")
    wrong = {"reward": 0.5, "right": 0.0, "short": 1.0, "length": 8.0}
    assert await earned(env, {"id": 1}, doubled, monkeypatch) == (wrong, "reward")
    for task, words in ((3, "the reward broke"), (4, "the agent broke"), (9, "no task 9")):
        with pytest.raises(ExecutorError, match=words):
            await earned(env, {"id": task}, doubled, monkeypatch)
    endless = agl.load_environment("verifiers:endless", python=verifiers_python, tasks=3)
    assert len(endless.tasks()) == 3
    refused: dict[str, tuple[dict[str, Any], str]] = {
        "endless": ({}, "tasks=100"),
        "paired": ({}, "solver, judge"),
        "no-such-taskset": ({}, "no_such_taskset"),
        "sums": ({"arguments": {"unknown": 1}}, "unknown"),
    }
    for name, (options, words) in refused.items():
        with pytest.raises(ConfigError, match=words):
            VerifiersEnvironment(name, python=verifiers_python, **options).tasks()


ROWS = """\
import verifiers as vf
from datasets import Dataset

def load_environment(first=1, together=False, broken=False, failing=False):
    rows = [{"question": f"What is {a} + {a}?", "answer": str(2 * a)} for a in range(first, first + 4)]

    def right(completion, answer, **others):
        if broken:
            raise RuntimeError("the reward broke")
        return float(answer in completion[-1]["content"])

    async def short(completion):
        return float(len(completion[-1]["content"]) < 10)

    def compared(completions, answers, states):
        assert len({*answers}) == 1 and all(state["prompt"] for state in states)
        if broken:
            raise RuntimeError("the comparison broke")
        lengths = [len(completion[-1]["content"]) for completion in completions]
        return [float(sum(other > length for other in lengths)) for length in lengths]

    class Failing(vf.SingleTurnEnv):
        async def rollout(self, *given, **others):
            raise vf.Error("the agent broke")

    inner = vf.Rubric(funcs=[right, compared] if together else [right], weights=[2.0, 1.0][: 1 + together])
    rubric = vf.RubricGroup([inner, vf.Rubric(funcs=[short], weights=[0.5])])
    kept = [{"question": "What is 0 + 0?", "answer": "0"}, {"question": "What is 9 + 9?", "answer": "18"}]
    return (Failing if failing else vf.SingleTurnEnv)(
        dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(kept), rubric=rubric, system_prompt="Answer."
    )
"""


@pytest.fixture(scope="module")
def first_verifiers_python() -> str:
    """An interpreter with the first API of verifiers: FIRST_VERIFIERS_PYTHON, or one that is made."""
    return interpreter("FIRST_VERIFIERS_PYTHON", ("verifiers==0.1.14",), (sys.executable,))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_with_the_first_api_of_verifiers(
    first_verifiers_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasksets(tmp_path, monkeypatch, asked_sums=ROWS)

    def made(val_tasks: int = 0, **given: Any) -> VerifiersEnvironment:
        options = {name: given.pop(name) for name in ("tasks", "max_turns", "harness", "runtime") if name in given}
        return VerifiersEnvironment(
            "asked-sums", python=first_verifiers_python, val_tasks=val_tasks, arguments=given, **options
        )

    env = made(val_tasks=1, first=5, tasks=3)
    assert [task["input"] for task in env.tasks()] == [f"What is {n} + {n}?" for n in (5, 6, 7)]
    assert [task["input"] for task in env.val_tasks()] == ["What is 0 + 0?"]
    right = {"reward": 2.0, "right": 1.0, "short": 0.0, "num_turns": 1.0}
    assert await earned(env, env.tasks()[0], doubled, monkeypatch) == (right, "reward")
    wrong = {"reward": 0.5, "right": 0.0, "short": 1.0, "num_turns": 1.0}
    assert await earned(env, env.val_tasks()[0], doubled, monkeypatch) == (wrong, "reward")
    for given, task, words in (
        ({"broken": True}, "train-0", "the reward broke"),
        ({"failing": True}, "train-0", "the agent broke"),
        ({"tasks": 2}, "train-2", "no task train-2"),
    ):
        with pytest.raises(ExecutorError, match=words):
            await earned(made(**given), {"id": task}, doubled, monkeypatch)
    with pytest.raises(ExecutorError, match="another one now"):
        await earned(made(first=2), made().tasks()[0], doubled, monkeypatch)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"harness": "bash"}, "harness is for tasksets"),
        ({"runtime": "docker"}, "runtime is for tasksets"),
        ({"unknown": 1}, "unknown"),
        ({"val_tasks": 3}, "2 to validate on"),
    ]
    for given, words in refused:
        with pytest.raises(ConfigError, match=words):
            made(**given).tasks()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_functions_of_groups_of_the_first_api(
    first_verifiers_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each function runs once: those of one rollout in its process, those of a group when all have finished."""
    write_tasksets(tmp_path, monkeypatch, asked_sums=ROWS)
    env = VerifiersEnvironment("asked-sums", python=first_verifiers_python, arguments={"together": True})
    plain = VerifiersEnvironment("asked-sums", python=first_verifiers_python)
    assert plain.agent.group_reward is None
    alone, own = {"right": 1.0, "short": 0.0, "num_turns": 1.0}, list[Any]()
    assert await earned(env, env.tasks()[0], doubled, monkeypatch) == (
        {"reward": 2.0, **alone, "compared": 0.0},
        "reward",
    )

    said = ["It is 2, I think.", "2", "No idea at all."]
    kept = list[Any]()
    monkeypatch.setattr("agentlightning.environments.foreign.emit_annotation", kept.append)
    monkeypatch.setattr("agentlightning.environments.foreign.emit_reward", lambda *given: own.append(given))
    task, siblings = env.tasks()[0], list[agl.Sibling]()
    for text in said:
        rollout = attempted(task)
        rollout = rollout.model_copy(update={"metadata": {"rewarded_later": True}})
        with answering(lambda _, text=text: text) as llm:
            await env.agent.rollout_async(task, {"main": llm}, rollout)
        spans = [Span.from_attributes(name="a", attributes=kept[-1], rollout_id="r", attempt_id="a")]
        siblings.append(agl.Sibling(rollout=rollout, conversations=(), rewards=own[-1][0], spans=spans))
    assert [rewards["reward"] for rewards, _ in own] == [2.0, 2.5, 0.0]
    assert not any("compared" in rewards for rewards, _ in own)
    function = env.agent.group_reward
    assert function is not None
    found: list[Any] = await function(siblings)  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    assert [(next(iter(one)), one["reward"], one["compared"]) for one in found] == [
        ("reward", 2.0, 0.0),
        ("reward", 4.5, 2.0),
        ("reward", 1.0, 1.0),
    ]
    assert [(one["right"], one["short"]) for one in found] == [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    broken = VerifiersEnvironment(
        "asked-sums", python=first_verifiers_python, arguments={"together": True, "broken": True}
    )
    with pytest.raises(ExecutorError, match="the comparison broke"):
        await broken.agent.group_reward(siblings)  # pyright: ignore[reportOptionalCall, reportGeneralTypeIssues]


EXECUTED = "executes what the model writes"


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_where_the_program_of_a_taskset_runs(
    verifiers_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that the model writes is executed on this machine unless the user says so, whoever chose the program."""
    write_tasksets(tmp_path, monkeypatch, sums=SUMS, bare=BARE, executing=EXECUTING, contained=CONTAINED, imaged=IMAGED)
    pinned = CONTAINED.replace('{"type": "podman", "image": "localhost/no-such-image"}', '{"type": "subprocess"}')
    write_tasksets(tmp_path, monkeypatch, pinned=pinned.replace("EXECUTES_CODE = False", "EXECUTES_CODE = True"))
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("executing", {}, EXECUTED),
        ("pinned", {}, EXECUTED),
        ("sums", {"harness": "bash"}, EXECUTED),
        ("bare", {"harness": {"id": "bash"}}, EXECUTED),
        ("imaged", {}, "requires image"),
        ("sums", {"runtime": "kitchen"}, "kitchen"),
        ("contained", {"runtime": "subprocess", "harness": "no-such-program"}, "no_such_program"),
    ]
    for name, options, words in refused:
        with pytest.raises(ConfigError, match=words):
            VerifiersEnvironment(name, python=verifiers_python, **options).tasks()
    for name, options in [("bare", {}), ("contained", {}), ("executing", {"runtime": "podman"})]:
        assert VerifiersEnvironment(name, python=verifiers_python, **options).tasks()
    here = VerifiersEnvironment("executing", python=verifiers_python, runtime="subprocess")
    assert (await earned(here, {"id": 0}, doubled, monkeypatch))[1] == "reward"
    contained = VerifiersEnvironment("contained", python=verifiers_python)
    with pytest.raises(ExecutorError, match=r"podman|no-such-image"):
        await earned(contained, {"id": 0}, doubled, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_taskset_whose_order_does_not_stay(
    verifiers_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasksets(tmp_path, monkeypatch, sums=SUMS, moving=MOVING)
    for name, words in {"sums": None, "moving": "another one now"}.items():
        env = VerifiersEnvironment(name, python=verifiers_python)
        task = env.tasks()[0]
        if words is None:
            assert (await earned(env, task, doubled, monkeypatch))[1] == "reward"
            continue
        with pytest.raises(ExecutorError, match=words):
            await earned(env, task, doubled, monkeypatch)


@pytest.mark.parametrize("option", ["tasks", "max_turns"])
def test_a_number_that_is_none_is_refused_by_its_name(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 0"):
        agl.load_environment("verifiers:sums", agent=None, **{option: 0})


@pytest.mark.parametrize("given", ["", "1, 2, c=3"])
def test_arguments_that_are_missing_or_too_many_say_how_they_are_given(given: str, worker: Path) -> None:
    worker.write_text(f"def load(a, b): pass\nload({given})\n")
    with pytest.raises(ConfigError, match="Its arguments: --env-option arguments="):
        Own(worker).tasks()


def test_no_key_is_needed_to_list_tasks(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of judges refuse to be made without one."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    worker.write_text('import os\nprint(\'{"key": "\' + os.environ["OPENAI_API_KEY"] + \'"}\')\n')
    assert Own(worker).tasks() == [{"key": "none"}]
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    assert Own(worker).tasks() == [{"key": "mine"}]


TRACEBACK = """\
a warning of a library
Traceback (most recent call last):
  File "worker.py", line 3, in <module>
    load()
    ^^^^^^
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "worker.py", line 3, in load
  |     return future.result()
  |            ^^^^^^^^^^^^^^^
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "worker.py", line 4, in connect
    | ConnectionError: it was closed
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (TRACEBACK + "KeyError: 'unknown'\n", "KeyError: 'unknown'"),
        (
            TRACEBACK + "ValidationError: 1 validation error for Sums\nunknown\n  Extra inputs are not permitted\n"
            "    For further information visit https://errors.example\n",
            "ValidationError: 1 validation error for Sums\nunknown\n  Extra inputs are not permitted",
        ),
        (
            TRACEBACK + "RuntimeError: it is broken\nException ignored in atexit callback: <function f>\n"
            'Traceback (most recent call last):\n  File "a.py", line 1, in f\nAttributeError: no sandboxes\n',
            "RuntimeError: it is broken",
        ),
        (
            GROUP
            + "\nThe above exception was the direct cause of the following exception:\n\n"
            + TRACEBACK
            + "RuntimeError: "
            "not loaded: unhandled errors in a TaskGroup (1 sub-exception)\n",
            "RuntimeError: not loaded: unhandled errors in a TaskGroup (1 sub-exception)\n"
            "ConnectionError: it was closed",
        ),
        (GROUP, "ConnectionError: it was closed"),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
)
def test_of_a_traceback_the_error_is_said(stderr: str, said: str) -> None:
    assert _what_was_raised(stderr) == said
