"""`harbor:`: tasks are set up, worked on and verified as Harbor does it, in a sandbox and in containers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.harbor import HarborEnvironment
from agentlightning.environments.harbor.format import read_task
from agentlightning.environments.harbor.trial import Verified, read_rewards, run_trial
from agentlightning.errors import ConfigError, ExecutorError
from agentlightning.litagent.process import Captured
from agentlightning.types.ids import random_hex
from tests.environments.harbor_tasks import (
    APART,
    ENGINES,
    FIVE,
    IMAGE,
    TEST,
    engine_or_skip,
    five_tasks,
    tasks_verified_apart,
    write_task,
)
from tests.environments.model import answering, attempted


def tried(folder: Path, engine: str, **options: Any) -> dict[tuple[str, str], Any]:
    """What the solution and nothing earn, by task and who; the reason, where that failed."""
    env = agl.load_environment(f"harbor:{folder}", **engine_or_skip(engine), **options)

    async def probes() -> dict[tuple[str, str], Any]:
        return {
            (p.task.removeprefix("tests/"), p.by): p.why if p.reward is None else p.reward
            async for p in env.probes(env.tasks())
        }

    return asyncio.run(probes())


def done(folder: Path, engine: str, script: str, **options: Any) -> Verified:
    """What a shell script in the box comes to."""
    env = HarborEnvironment(str(folder), **engine_or_skip(engine), **options)

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        return (await box.run(["sh", "-c", script], user=stage.agent.user, captured=captured)).exit_code

    return asyncio.run(run_trial(read_task(folder), work, env.settings))


@pytest.mark.slow
def test_what_prepares_the_box_is_not_in_the_agents_time(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more="[agent]\ntimeout_sec = 5\n")
    recorded: list[Any] = []

    async def install(box: Any, stage: Any) -> None:
        await box.shell("sleep 6; printf hello > greeting")

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        return (await box.run(["cp", "greeting", "out.txt"], user=None, captured=captured)).exit_code

    settings = HarborEnvironment(str(task), **engine_or_skip("bubblewrap")).settings
    found = asyncio.run(run_trial(read_task(task), work, settings, prepare=install, record=recorded.append))
    assert found.rewards == {"reward": 1.0}
    [program] = [one["program"] for one in recorded if "program" in one]
    assert "timed_out" not in program
    assert program["seconds"] < 5


@pytest.mark.slow  # tests/cli/test_environments.py has one task with its solution, and without
@pytest.mark.parametrize("engine", ENGINES)
def test_five_tasks_are_solved_by_their_solutions_and_by_nobody_else(engine: str, tmp_path: Path) -> None:
    five_tasks(tmp_path)
    steps = tmp_path / "steps"
    expected = {(name, by): float(by == "solution") for name in FIVE for by in ("solution", "nothing")}
    assert tried(tmp_path, engine) == expected
    half = done(steps, engine, "if [ -e ready.txt ]; then printf wrong > out.txt; else printf 1 > out.txt; fi")
    assert half.rewards == {"reward": 0.5}
    assert half.stages == {"one": {"reward": 1.0}, "two": {"reward": 0.0}}
    assert done(steps, engine, "printf wrong > out.txt").stages == {"one": {"reward": 0.0}}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_agent_did_in_its_time_is_verified(engine: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "late", more="[agent]\ntimeout_sec = 2\n")
    assert done(task, engine, "printf hello > out.txt; sleep 60").rewards == {"reward": 1.0}
    assert done(task, engine, "printf hello > out.txt; exit 3").rewards == {"reward": 1.0}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_tests_come_after_the_agent_and_its_rewards_are_taken_away(engine: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "sly")
    sly = "cat /tests/test.sh > seen.txt; echo 1 > /logs/verifier/reward.txt; [ -s seen.txt ] && printf hello > out.txt"
    assert done(task, engine, sly).rewards == {"reward": 0.0}


NONE = "#!/bin/sh\necho broken >&2\n"
WRONG = {
    "nothing": (NONE, "broken"),
    "words": ("#!/bin/sh\necho good > /logs/verifier/reward.txt\n", "good"),
    "empty": ("#!/bin/sh\n: > /logs/verifier/reward.txt\n", "reward.txt"),
    "nan": ("#!/bin/sh\necho nan > /logs/verifier/reward.txt\n", "nan"),
    "a list": ("#!/bin/sh\necho '[1]' > /logs/verifier/reward.json\n", "[1]"),
    "true": ("#!/bin/sh\necho '{\"reward\": true}' > /logs/verifier/reward.json\n", "true"),
    "a link": ("#!/bin/sh\nln -s /etc/passwd /logs/verifier/reward.txt\n", "neither"),
    "two names": ('#!/bin/sh\necho \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n', "reward_key"),
    "it takes long": ("#!/bin/sh\nsleep 60\n", "verifier.timeout_sec"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_a_verifier_without_a_reward_is_no_reward_of_0(kind: str, tmp_path: Path) -> None:
    test, words = WRONG[kind]
    write_task(tmp_path / "task", test=test, more="[verifier]\ntimeout_sec = 2\n")
    found = tried(tmp_path, "bubblewrap")
    assert words in found["task", "solution"]
    if kind == "two names":
        assert tried(tmp_path, "bubblewrap", reward_key="a")["task", "solution"] == 1.0


def test_a_number_of_json_wins() -> None:
    assert read_rewards((b'{"reward": 0.5}', b"1"), "t") == {"reward": 0.5}
    assert read_rewards((None, b" 1e0\n"), "t") == {"reward": 1.0}
    with pytest.raises(ExecutorError, match="neither"):
        read_rewards((None, None), "t")


REFUSED = {
    "an unknown key": ("[environment]\nmemroy_mb = 5\n", "environment.memroy_mb"),
    "a GPU": ("[environment]\ngpus = 1\n", "environment.gpus"),
    "Windows": ('[environment]\nos = "windows"\n', "environment.os"),
    "a list in a sandbox": ('[environment]\nnetwork_mode = "allowlist"\n', "network_mode is allowlist"),
    "hosts": ('[agent]\nallowed_hosts = ["example.org"]\n', "agent.allowed_hosts"),
    "a host's URL": (
        '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://example.org"]\n',
        "agent.allowed_hosts.0: 'https://example.org' is no name of a host",
    ),
    "MCP": ('[[environment.mcp_servers]]\nname = "x"\n', "environment.mcp_servers"),
    "a time": ("[agent]\ntimeout_sec = -1\n", "agent.timeout_sec"),
    "a variable of ours": ('[environment]\nenv = { KEY = "${HOME}" }\n', "HOME"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_key_that_cannot_be_honoured_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    more, words = REFUSED[kind]
    write_task(tmp_path / "task", more=more)
    options = engine_or_skip("bubblewrap")
    if kind == "a variable of ours":
        assert words in tried(tmp_path, "bubblewrap")["task", "solution"]
        assert tried(tmp_path, "bubblewrap", variables=["HOME"])["task", "solution"] == 1.0
        return
    with pytest.raises(ConfigError) as caught:
        agl.load_environment(f"harbor:{tmp_path}", **options).tasks()
    assert words in str(caught.value)
    assert "task.toml" in str(caught.value)


@pytest.mark.parametrize("size", ["storage_mb = 10240", 'storage = "10G"'])
def test_a_box_has_the_disk_that_there_is(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nearly every task of the public data sets names a size, and Harbor's own containers do not limit it either."""
    write_task(tmp_path / "a", more=f"[environment]\n{size}\n")
    write_task(tmp_path / "b", more=f"[environment]\n{size}\n")
    write_task(tmp_path / "c", more="[environment]\nstorage_mb = 15360\n")
    options = engine_or_skip("bubblewrap")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=20 << 30))
    assert len(agl.load_environment(f"harbor:{tmp_path}", **options).tasks()) == 3
    assert not caplog.messages
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3000 << 20))
    assert len(agl.load_environment(f"harbor:{tmp_path}", **options).tasks()) == 3
    assert [said.partition(" MiB of disk")[0] for said in caplog.messages] == [
        "tests/a asks for 10,240",
        "tests/c asks for 15,360",
    ]
    assert all("3,000 MiB free" in said for said in caplog.messages)


def test_older_spellings_mean_what_they_meant(tmp_path: Path) -> None:
    task = write_task(tmp_path / "old")
    (task / "task.toml").write_text('version = "1.0"\n[environment]\nmemory = "2G"\nallow_internet = false\n')
    found = read_task(task)
    assert (found.name, found.file.environment.memory_mb, found.file.environment.network) == ("old", 2048, "no-network")


OF_TASK = '[verifier]\nenvironment_mode = "{}"\n{}[[steps]]\nname = "one"\n[steps.verifier]\n{}'
CPUS, IMAGES = "environment = {{ cpus = {} }}\n", 'environment = {{ docker_image = "{}:1" }}\n'
RECIPES: dict[str, tuple[str, set[str], tuple[str, str | None, float | None] | None]] = {
    "nothing": (OF_TASK.format("shared", "", ""), {"steps/one/tests"}, None),
    "the task's mode": (OF_TASK.format("separate", "", ""), set(), ("environment", "theirs:1", None)),
    "the step's mode": (OF_TASK.format("separate", "", 'environment_mode = "shared"\n'), {"tests"}, None),
    "a step's section": (OF_TASK.format("shared", "", CPUS.format(2)), set(), ("environment", "theirs:1", 2)),
    "the task's section": (OF_TASK.format("separate", CPUS.format(3), ""), {"tests"}, ("tests", None, 3)),
    "the task's image": (
        OF_TASK.format("separate", IMAGES.format("tasks"), CPUS.format(2)),
        {"tests"},
        ("tests", "tasks:1", 2),
    ),
    "a step's Dockerfile": (
        OF_TASK.format("separate", IMAGES.format("tasks"), ""),
        {"tests", "steps/one/tests"},
        ("steps/one/tests", None, None),
    ),
    "a step's image": (
        OF_TASK.format("separate", IMAGES.format("tasks"), IMAGES.format("own")),
        {"steps/one/tests"},
        ("steps/one/tests", "own:1", None),
    ),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_verifiers_box_is_looked_for_as_harbor_does(kind: str, tmp_path: Path) -> None:
    more, recipes, expected = RECIPES[kind]
    files = {f"{place}/Dockerfile": f"FROM {IMAGE}\n" for place in recipes}
    files |= {"steps/one/instruction.md": "One.", "steps/one/tests/test.sh": "#!/bin/sh\n"}
    task = write_task(tmp_path / "task", more=f'[environment]\ndocker_image = "theirs:1"\n{more}', files=files)
    apart = read_task(task).stages[0].apart
    found = apart and (str(apart.build.relative_to(task)), apart.section.docker_image, apart.section.cpus)
    assert found == expected


def test_tests_that_an_image_holds_need_not_lie_here(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more='[verifier.environment]\ndocker_image = "theirs:1"\n')
    (task / "tests" / "test.sh").unlink()
    assert read_task(task).stages[0].apart is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("engine", [one for one in ENGINES if one != "bubblewrap"])
def test_a_verifiers_own_image_keeps_the_tests_that_it_holds(engine: str, name: str, tmp_path: Path) -> None:
    tasks_verified_apart(tmp_path)
    assert tried(tmp_path / name, engine) == {(name, by): float(by == "solution") for by in ("solution", "nothing")}


@pytest.mark.parametrize("place", ["tests", "solution", "tests/deep"])
def test_a_list_of_what_is_left_out_is_refused(place: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", files={f"{place}/.harborignore": "*.md\n"})
    with pytest.raises(ConfigError, match=r"\.harborignore"):
        read_task(task)


MISSING = {
    "tests": ("tests/test.sh", "tests/test.sh"),
    "instruction": ("instruction.md", "instruction.md"),
    "task": ("task.toml", "task.toml"),
}


@pytest.mark.parametrize("kind", MISSING)
def test_what_is_missing_is_named(kind: str, tmp_path: Path) -> None:
    file, words = MISSING[kind]
    (write_task(tmp_path / "task") / file).unlink()
    with pytest.raises(ConfigError, match=words):
        agl.load_environment(f"harbor:{tmp_path}", **engine_or_skip("bubblewrap")).tasks()


def test_what_needs_a_container_engine_says_so(tmp_path: Path) -> None:
    write_task(tmp_path / "task", dockerfile="FROM x\nRUN apt-get install -y gcc\n")
    assert "RUN apt-get install" in tried(tmp_path, "bubblewrap")["task", "solution"]


def test_no_engine_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(tmp_path / "task")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="apt-get install podman"):
        agl.load_environment(f"harbor:{tmp_path}")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="'bubblewarp'"):
        agl.load_environment(f"harbor:{tmp_path}", engine="bubblewarp")


AGENT = """\
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "What word?"}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("out.txt", "w").write(answer)
"""


@pytest.mark.parametrize("network", ["public", "no-network"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_agent_in_the_box_reaches_its_model_and_nothing_else(engine: str, network: str, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        more=f'[environment]\nnetwork_mode = "{network}"\n',
        dockerfile="FROM localhost/agl-harbor-test\nWORKDIR /app\nCOPY agent.py .\n",
        files={"environment/agent.py": AGENT},
    )
    command = "/usr/bin/python3 agent.py {task.prompt}"
    if not Path("/usr/bin/python3").exists():
        pytest.skip("a Python of the system is not installed")
    env = agl.load_environment(f"harbor:{task}", agent=command, **engine_or_skip(engine))
    one = env.tasks()[0]
    rewards: list[Any] = []
    with answering(lambda _: "hello") as llm:
        found = asyncio.run(rewarded(env, one, llm, rewards))
    assert found is None
    assert rewards == [{"reward": 1.0}]


async def rewarded(env: Any, task: Any, llm: Any, rewards: list[Any]) -> Any:
    """Run the agent, and note the rewards that it emits."""
    from agentlightning.environments.harbor import environment as module

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "emit_reward", lambda value, _: rewards.append(value))
        return await env.agent.rollout_async(task, {"main": llm}, attempted(task))


def test_a_task_needs_an_agent_and_the_agent_its_fields(tmp_path: Path) -> None:
    write_task(tmp_path / "task")
    options = engine_or_skip("bubblewrap")
    env = agl.load_environment(f"harbor:{tmp_path}", **options)
    with pytest.raises(ConfigError, match="needs an agent"):
        env.agent.check_task(env.tasks()[0])
    with pytest.raises(ConfigError, match="no such field"):
        agl.load_environment(f"harbor:{tmp_path}", agent="mine {task.words}", **options).agent.check_task(
            env.tasks()[0]
        )
    with pytest.raises(ConfigError, match="names its folder"):
        env.agent.check_task({"prompt": "x"})


def test_tasks_are_json_and_validation_has_its_own(tmp_path: Path) -> None:
    write_task(tmp_path / "train" / "a")
    write_task(tmp_path / "train" / "b")
    write_task(tmp_path / "val" / "c")
    env = agl.load_environment(f"harbor:{tmp_path}/train", val=f"{tmp_path}/val", **engine_or_skip("bubblewrap"))
    assert [task["name"] for task in env.tasks()] == ["tests/a", "tests/b"]
    assert [task["name"] for task in json.loads(json.dumps(env.val_tasks()))] == ["tests/c"]


def command_lines() -> bytes:
    """What runs on this machine."""
    found = b""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += file.read_bytes()
    return found


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_attempt_that_is_cancelled_leaves_nothing(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = random_hex(8)  # others have containers of theirs meanwhile
    monkeypatch.setattr("agentlightning.environments.harbor.containers.random_hex", lambda _: own)
    task = write_task(tmp_path / "task")
    env = HarborEnvironment(str(task), **engine_or_skip(engine))
    begun = asyncio.Event()

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        begun.set()
        return (await box.run(["sh", "-c", "sleep 86399"], captured=captured)).exit_code

    running = asyncio.create_task(run_trial(read_task(task), work, env.settings))
    await begun.wait()
    await asyncio.sleep(1.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.5)
    assert b"86399" not in await asyncio.to_thread(command_lines)
    if engine != "bubblewrap":
        listed = await asyncio.to_thread(
            subprocess.run, [engine, "ps", "-aq", "--filter", f"name=agl-harbor-{own}"], capture_output=True, check=True
        )
        assert listed.stdout == b""


# ---- tasks and agents that mean harm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_links_that_an_agent_leaves_lead_nowhere_on_this_machine(engine: str, tmp_path: Path) -> None:
    """What the next step and the verifier bring is copied to where links stand."""
    victim = tmp_path / "victim"
    (victim / "sub").mkdir(parents=True)
    (victim / "file").write_text("mine")
    task = write_task(
        tmp_path / "task",
        top='artifacts = ["/app/taken"]',
        more='[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n',
        files={
            "steps/one/instruction.md": "One.",
            "steps/two/instruction.md": "Two.",
            "steps/two/workdir/file": "theirs",
            "steps/two/workdir/sub/other": "theirs",
        },
        test="#!/bin/sh\nprintf theirs > /logs/verifier/note; echo 1 > /logs/verifier/reward.txt\n",
    )
    harm = f"ln -sf {victim}/file file; ln -sfn {victim}/sub sub; ln -s {victim} /tests/deep; "
    harm += f"ln -sf {victim}/file /tests/test.sh; ln -sf {victim}/file /logs/verifier/note; "
    harm += "for d in /tmp/agl-harbor-*; do rm -rf $d/* 2>/dev/null; done; true"
    if engine != "bubblewrap":  # they copy no folder to where a link stands
        with pytest.raises(ExecutorError, match="copy files into a container"):
            done(task, engine, harm)
        assert done(task, engine, harm.replace("ln -sfn", "echo")).rewards == {"reward": 1.0}
    else:
        assert done(task, engine, harm).rewards == {"reward": 1.0}
    assert (victim / "file").read_text() == "mine"
    assert not list((victim / "sub").iterdir())
    assert sorted(path.name for path in victim.iterdir()) == ["file", "sub"]


@pytest.mark.parametrize("engine", ENGINES)
def test_variables_of_a_task_reach_no_program_outside_of_its_box(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = engine_or_skip(engine)
    program = "bwrap" if engine == "bubblewrap" else engine
    real, seen = shutil.which(program), tmp_path / "seen"
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / program
    wrapper.write_text(f'#!/bin/sh\nenv >> {seen}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    task = write_task(
        tmp_path / "task",
        more='[environment]\nenv = { LD_AUDIT = "a.so", DOCKER_HOST = "tcp://x", WORD = "hello" }\n'
        '[solution]\nenv = { BASH_ENV = "b.sh" }\n[verifier]\nenv = { PYTHONSTARTUP = "c.py" }\n',
        solution='#!/bin/sh\n[ "$DOCKER_HOST$BASH_ENV" = tcp://xb.sh ] && printf "$WORD" > out.txt\n',
        test=TEST.format(file="/app/out.txt", right="hello"),
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    env = HarborEnvironment(str(task), **options)
    worker = env.worker_of("oracle", read_task(task))
    assert asyncio.run(run_trial(read_task(task), worker, env.settings)).rewards == {"reward": 1.0}
    lines = seen.read_text().splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert "PATH" in names
    assert not names & {"LD_AUDIT", "WORD", "BASH_ENV", "PYTHONSTARTUP"}
    assert "DOCKER_HOST=tcp://x" not in lines


def test_a_tasks_own_endpoint_opens_no_way_to_this_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        task = write_task(
            tmp_path / "task", more=f'[environment]\nenv = {{ OPENAI_BASE_URL = "http://127.0.0.1:{port}/v1" }}\n'
        )
        script = f"printf hello > out.txt; bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}' && rm out.txt"
        assert done(task, "bubblewrap", script).rewards == {"reward": 1.0}


HARM: dict[str, tuple[dict[str, Any], str]] = {
    "COPY of what lies above": ({"dockerfile": "FROM x\nCOPY ../../secret .\n"}, "does not lie beside it"),
    "COPY of a link": ({"dockerfile": "FROM x\nCOPY link .\n"}, "does not lie beside it"),
    "a working directory of the system": ({"more": '[environment]\nworkdir = "/etc"\n'}, "cannot be /etc"),
    "a name that is none": ({"more": '[verifier]\nenv = { "A=$(id)" = "x" }\n'}, "no name of an environment"),
}


@pytest.mark.parametrize("kind", HARM)
def test_what_would_reach_this_machine_is_refused(kind: str, tmp_path: Path) -> None:
    given, words = HARM[kind]
    (tmp_path / "secret").write_text("secret")
    task = write_task(tmp_path / "task", **given)
    (task / "environment" / "link").symlink_to(tmp_path / "secret")
    assert words in tried(tmp_path, "bubblewrap")["task", "nothing"]


def test_a_task_is_no_way_to_read_or_to_start_something(tmp_path: Path) -> None:
    options = engine_or_skip("bubblewrap")
    (tmp_path / "secret").write_text("secret")
    task = write_task(tmp_path / "tasks" / "task", more='[environment]\ndocker_image = "--privileged"\n')
    with pytest.raises(ConfigError, match=r"environment\.docker_image"):
        agl.load_environment(f"harbor:{task}", **options).tasks()
    task = write_task(tmp_path / "tasks" / "task")
    (task / "instruction.md").unlink()
    (task / "instruction.md").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="a link to another place"):
        agl.load_environment(f"harbor:{task}", **options).tasks()
