"""What crosses over to a verifier apart: which files, from which service, and to which place."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.harbor import HarborEnvironment
from agentlightning.environments.harbor.artifacts import declared
from agentlightning.environments.harbor.format import Artifact, read_task
from agentlightning.environments.harbor.trial import run_trial
from agentlightning.errors import ConfigError
from agentlightning.litagent.process import Captured
from tests.environments.compose_tasks import composes, services, write_composed
from tests.environments.harbor_tasks import ENGINES, IMAGE, OPTIONS, engine_or_skip, write_task

APART = '[verifier]\nenvironment_mode = "separate"\n'


def seen(task: Path, script: str, **options: Any) -> tuple[dict[str, float], list[Any]]:
    """The rewards of somebody who runs a script, and what was recorded besides."""
    env = HarborEnvironment(str(task), **options)
    recorded: list[Any] = []

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        return (await box.run(["sh", "-c", script], captured=captured)).exit_code

    found = asyncio.run(run_trial(read_task(task), work, env.settings, record=recorded.append))
    return found.rewards, [one for one in recorded if not set(one) & {"program", "verifier"}]


def expects(place: str, files: str) -> str:
    """A verifier that is content with these files in a folder alone."""
    return (
        f"#!/bin/sh\ncd {place} && found=$(find . -type f | sort | tr '\\n' ' ')\n"
        f'[ "$found" = {shlex.quote(files)} ] && R=1 || R=0\n'
        "find . -type f | sort\necho $R > /logs/verifier/reward.txt\n"
    )


MAKES = (
    "mkdir -p out/sub/cache out/node_modules/x; for f in out/a.txt out/b.pyc out/sub/c.pyc out/sub/d out/sub/cache/e "
)
MAKES += "out/node_modules/x/f; do echo 1 > $f; done"
EXCLUDED = {
    "nothing": ([], "./a.txt ./b.pyc ./node_modules/x/f ./sub/c.pyc ./sub/cache/e ./sub/d "),
    "an ending": (["*.pyc"], "./a.txt ./node_modules/x/f ./sub/cache/e ./sub/d "),
    "folders": (["node_modules", "./sub/cache"], "./a.txt ./b.pyc ./sub/c.pyc ./sub/d "),
    "a path": (["sub/d", "other"], "./a.txt ./b.pyc ./node_modules/x/f ./sub/c.pyc ./sub/cache/e "),
}


@pytest.mark.quick_with("bubblewrap-folders")
@pytest.mark.parametrize("kind", EXCLUDED)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_what_a_pattern_fits_stays(engine: str, kind: str, tmp_path: Path) -> None:
    patterns, files = EXCLUDED[kind]
    task = write_task(
        tmp_path / "task",
        top=f'artifacts = [{{ source = "/app/out", destination = "kept", exclude = {patterns} }}]',
        more=APART,
        test=expects("/app/out", files),
    )
    assert seen(task, MAKES, **engine_or_skip(engine)) == ({"reward": 1.0}, [])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_and_what_is_not_there_and_what_is_taken_already(engine: str, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        top='artifacts = [{ source = "/app/out/a.txt", exclude = ["a.txt"] }, "/app/out", "/app/nothing"]',
        more=APART,
        test=expects("/app/out", "./a.txt "),
    )
    rewards, recorded = seen(task, MAKES, **engine_or_skip(engine))
    assert rewards == {"reward": 1.0}
    assert recorded == [{"artifacts": {"not_there_or_taken_before": ["/app/out", "/app/nothing"]}}]


@pytest.mark.slow
def test_a_folder_is_the_agents_alone(tmp_path: Path) -> None:
    """What the verifier's own image has at its place is not mixed into it."""
    task = write_task(
        tmp_path / "task",
        top='artifacts = ["/app"]',
        more=APART,
        dockerfile=f"FROM {IMAGE}\nWORKDIR /app\nCOPY given.txt .\n",
        files={"environment/given.txt": "given"},
        test=expects("/app", "./out.txt "),
    )
    options = engine_or_skip("bubblewrap")
    assert seen(task, "rm given.txt; echo 1 > out.txt", **options)[0] == {"reward": 1.0}
    assert seen(task, "echo 1 > out.txt", **options)[0] == {"reward": 0.0}


def test_the_published_folder_may_be_declared() -> None:
    assert [one.source for one in declared([Artifact(source="/a")])] == ["/logs/artifacts", "/a"]
    own = Artifact(source="/logs/artifacts/", exclude=["*.log"])
    assert declared([Artifact(source="/a"), own]) == [Artifact(source="/a"), own]
    assert len(declared([Artifact(source="/logs/artifacts", service="db")])) == 2


def test_commands_of_a_task_and_of_its_steps_run_and_may_fail(tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        more='[[verifier.collect]]\ncommand = "printf 1 >> /app/out.txt"\n'
        '[[verifier.collect]]\ncommand = "sleep 60"\ntimeout_sec = 0.5\n'
        '[[steps]]\nname = "one"\n[[steps.verifier.collect]]\ncommand = "printf 2 >> /app/out.txt; echo no; exit 4"\n',
        files={"steps/one/instruction.md": "One."},
        test='#!/bin/sh\n[ "$(cat /app/out.txt)" = 12 ] && R=1 || R=0\necho $R > /logs/verifier/reward.txt\n',
    )
    rewards, recorded = seen(task, "true", **engine_or_skip("bubblewrap"))
    assert rewards == {"reward": 1.0}
    assert recorded == [
        {"collect": {"command": "sleep 60", "service": "main", "timed_out": True}},
        {
            "collect": {
                "command": "printf 2 >> /app/out.txt; echo no; exit 4",
                "service": "main",
                "exit_code": 4,
                "output": "no\n",
            }
        },
    ]


WRONG = {
    "a path out": ('artifacts = ["/app/../etc"]', "artifacts.0.source"),
    "a destination out": ('artifacts = [{ source = "/a", destination = "../b" }]', "artifacts.0.destination"),
    "a destination of the system": ('artifacts = [{ source = "/a", destination = "/b" }]', "artifacts.0.destination"),
    "a relative path of a service": ('artifacts = [{ source = "a", service = "db" }]', "has to begin with /"),
    "a service that is not there": ('artifacts = [{ source = "/a", service = "db" }]', "no service db. There is main"),
    "a name that is none": ('artifacts = [{ source = "/a", service = "-x" }]', "artifacts.0.service"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_artifact_that_cannot_be_is_refused(kind: str, tmp_path: Path) -> None:
    top, words = WRONG[kind]
    write_task(tmp_path / "task", top=top)
    with pytest.raises(ConfigError) as caught:
        agl.load_environment(f"harbor:{tmp_path}", **engine_or_skip("bubblewrap")).tasks()
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_another_service_knows_is_taken_when_main_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (why := composes()) is not None:
        pytest.skip(why)
    wrapper = tmp_path / "bin" / "podman"  # limits that a verifier's container may have here
    wrapper.parent.mkdir()
    limits = " ".join(word for word in OPTIONS if "=" in word or word == "--ulimit")
    real = shutil.which("podman")
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = run ] && shift && exec {real} run {limits} "$@"\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    document = services()
    document["services"]["main"]["volumes"] = ["words:/words"]
    task = write_composed(tmp_path / "task", document)
    file = task / "task.toml"
    looks = 'mkdir /seen; a=$(cat /words/beat); sleep 1; [ -n "$a" ] && [ "$a" = "$(cat /words/beat)" ] && '
    looks += "cat /words/word > /seen/word"
    file.write_text(
        'artifacts = [{ source = "/seen", service = "words", exclude = ["*.tmp"] }]\n'
        + file.read_text()
        + APART
        + f"[[verifier.collect]]\nservice = \"words\"\ncommand = '''{looks}; touch /seen/x.tmp'''\n"
        + '[[verifier.collect]]\ncommand = "mkdir /seen; echo main > /seen/of-main"\n'
    )
    check = '[ "$(find /seen -type f)" = /seen/word ] && [ "$(cat /seen/word)" = hel ] && R=1 || R=0'
    (task / "tests" / "test.sh").write_text(f"#!/bin/sh\n{check}\necho $R > /logs/verifier/reward.txt\n")
    beats = "(while :; do echo 1 >> /words/beat; sleep 0.1; done) < /dev/null > /dev/null 2>&1 & sleep 1"
    assert seen(task, beats, engine="podman") == ({"reward": 1.0}, [])
