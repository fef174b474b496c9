"""A program as an agent, and what it gets wrong: where its reward is, how it ends, which model it asks."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.rollout_verdicts import never_called
from agentlightning.errors import AgentError, kind_of
from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.litagent.placeholders import fill
from agentlightning.litagent.program import parse_reward
from agentlightning.litagent.program_words import ended_badly, shown
from agentlightning.metrics import SilentConsole
from agentlightning.runner.endings import Ending, with_gateway
from agentlightning.types import Outcome

WRITES = "import os; open(os.environ['AGL_REWARD_FILE'], 'w').write('1.0');"

LIBRARY = """Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/httpx/_transports/default.py", line 101, in map_httpcore_exceptions
    yield
httpx.ConnectError: [Errno 111] Connection refused

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "{folder}/my_agent.py", line 5, in <module>
    client.chat.completions.create(model="m")
  File "/usr/lib/python3/site-packages/openai/_base_client.py", line 1474, in post
    return self.request(options)
           ^^^^^^^^^^^^^^^^^^^^^
openai.APIConnectionError: Connection error.
"""


@pytest.mark.parametrize(
    ("stdout", "stderr", "words"),
    [
        ("", "1.0\n", "print the reward to stdout"),
        ("thinking\n", 'warning\n{"reward": 0.5}\n', "print the reward to stdout"),
        ("0.5\ndone\n", "", "Line 1 of 2 is '0.5': print the reward last"),
        ('{"reward": 1}\nBye.\n\n', "", "print the reward last"),
        ("reward: 0.5\n", "", "Print the number alone, 0.5"),
        ("Score = 1\n", "", "Print the number alone, 1"),
        ("0,5\n", "", "A number has a point here: 0.5"),
        ("50%\n", "", "Write 50% as 0.5"),
        ("True\n", "", "print(int(right))"),
        ('{"score": 1}\n', "", 'Its key is "reward"'),
        ("done\n", "loading…\n", 'Print a number or {"reward": number}'),
        ("", "", 'Print a number or {"reward": number}'),
    ],
)
def test_a_reward_that_is_somewhere_else(stdout: str, stderr: str, words: str) -> None:
    with pytest.raises(AgentError) as caught:
        parse_reward(stdout, stderr)
    assert words in str(caught.value)


@pytest.mark.parametrize("last", ["1.0", '{"reward": 1.0}', "0"])
def test_a_reward_of_a_program_that_ends_badly(tmp_path: Path, last: str) -> None:
    said = ended_badly(1, f"work\n{last}\n", "", reward="last_line", folder=tmp_path, files=None)
    assert "must end with exit code 0" in said
    for stdout, reward in (("no number\n", "last_line"), (f"{last}\n", "file"), (f"{last}\n", "grader")):
        said = ended_badly(1, stdout, "", reward=reward, folder=tmp_path, files=None)
        assert said == "The program ended with exit code 1."


@pytest.mark.parametrize("reward", ["last_line", "file", "grader"])
def test_a_reward_that_is_posted_and_not_asked_for(tmp_path: Path, reward: str) -> None:
    stderr = "post(os.environ['AGL_REWARD_URL'])\nurllib.error.HTTPError: HTTP Error 403: Forbidden"
    assert "--reward http" in ended_badly(1, "", stderr, reward=reward, folder=tmp_path, files=None)
    assert "--reward http" not in ended_badly(1, "", stderr, reward="http", folder=tmp_path, files=None)


def test_what_it_said_has_the_users_paths_and_no_frames_of_libraries(tmp_path: Path) -> None:
    text = LIBRARY.replace("{folder}", str(tmp_path))
    said = shown(text, tmp_path, Path("my_project"))
    assert "site-packages" not in said
    assert str(tmp_path) not in said
    assert said.splitlines() == [
        "Traceback (most recent call last):",
        '  File "my_project/my_agent.py", line 5, in <module>',
        '    client.chat.completions.create(model="m")',
        "openai.APIConnectionError: Connection error.",
    ]
    assert '"./my_agent.py"' in shown(text, tmp_path)
    assert shown("node:fs:1\nError: no such file\n", tmp_path) == "node:fs:1\nError: no such file"
    assert len(shown("a line\n" * 10_000, tmp_path)) < 2100


@pytest.mark.parametrize(
    "said",
    [
        LIBRARY,
        "Error: connect ECONNREFUSED 127.0.0.1:80",
        "requests.exceptions.ConnectionError: HTTPConnectionPool(host='x')",
        "openai.AuthenticationError: Error code: 401",
        "getaddrinfo ENOTFOUND api.example",
    ],
    ids=["openai", "node", "requests", "key", "name"],
)
def test_a_program_that_asks_somebody_else_is_told_of_its_variables(said: str) -> None:
    ending = Ending(Outcome.AGENT_ERROR, f"The program ended with exit code 1.\n{said}", exception=AgentError(said))
    error = with_gateway(ending, AttemptSummary()).error or ""
    assert "OPENAI_BASE_URL" in error
    assert "llm.endpoint" not in error
    assert with_gateway(ending, AttemptSummary(calls=1)).error == ending.error, "its model had answered"


def test_an_agent_that_never_calls_is_told_both_ways() -> None:
    for words in ("llm.endpoint", "OPENAI_BASE_URL", "waits for it"):
        assert words in str(never_called([], {}))


@pytest.mark.parametrize(
    ("command", "grader"),
    [
        (["python", "nope.py"], None),
        (["python3", "-u", "src/nope.py"], None),
        ("node nope.mjs --fast", None),
        (["python", "agent.py"], ["python", "nope.py"]),
    ],
)
def test_a_script_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str] | str, grader: list[str] | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").touch()
    with pytest.raises(agl.ConfigError, match=r"nope\.m?.*no such file"):
        agl.Program(command, grader=grader).check_machine()


@pytest.mark.parametrize(
    "command",
    [
        ["python", "agent.py"],
        ["python", "-m", "package.py"],
        ["python", "-c", "import x"],
        ["python", "/image/agent.py"],
        ["true", "nope.py"],
        ["python", "{task.file}.py"],
        ["bash", "-c", "python nope.py"],
    ],
)
def test_what_is_no_missing_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").touch()
    if command[0] != "bash":
        agl.Program(command).check_machine()
    agl.Program(["python", "inside.py"], files=tmp_path).check_machine()


def test_a_grader_that_fails_shows_no_temporary_folder(tmp_path: Path) -> None:
    """It runs in an empty folder of its own, and the program in another."""
    grader = [sys.executable, "-c", "import json, sys, pathlib; open(pathlib.Path.cwd() / 'none.txt')"]
    program = agl.Program([sys.executable, "-c", "print('done')"], grader=grader)
    algorithm = agl.Baseline()
    agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", console=SilentConsole()).fit(program, [1])
    (episode,) = algorithm.episodes
    assert episode.outcome is Outcome.JUDGE_ERROR
    error = (episode.attempt and episode.attempt.error) or ""
    assert "FileNotFoundError" in error
    assert "/tmp/agl-grader" not in error


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KeyError: 'a7'", "KeyError: 'b12'"),
        ("task 12 failed after 0.31 s", "task 4 failed after 12 s"),
        ("can't open file '/tmp/agl-program-x1/a.py'", "can't open file '/tmp/agl-program-zz/a.py'"),
        ("at 0x7f10 of 3fa85f64-5717-4562-b3fc-2c963f66afa6", "at 0x7f99 of 9b2d5f64-5717-4562-b3fc-2c963f66aaaa"),
    ],
)
def test_equal_failures_are_counted_together(one: str, other: str) -> None:
    assert kind_of(one) == kind_of(other)
    assert kind_of(one) != kind_of("ValueError: no such order")


def earned(folder: Path, code: str, caplog: pytest.LogCaptureFixture, **settings: Any) -> tuple[list[Any], str]:
    """The rewards of a program on two tasks, and what was said meanwhile."""
    program = agl.Program([sys.executable, "-c", code], **settings)
    algorithm = agl.Baseline(model="calc", backend="inprocess", max_context=64)
    with caplog.at_level(logging.WARNING):
        agl.Trainer(algorithm=algorithm, run_dir=folder / "run", console=SilentConsole()).fit(program, [1, 2])
    errors = [(e.attempt and e.attempt.error) or "" for e in algorithm.episodes]
    return [e.reward for e in algorithm.episodes], caplog.text + "".join(errors)


POSTS = """
import json, os, urllib.request
from contextlib import suppress
from urllib.error import HTTPError
with suppress(HTTPError):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    data = json.dumps({"reward": 0.25}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["AGL_REWARD_URL"], data, headers))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("reward", "counts", "words"),
    [("http", 0.25, "with reward='http'"), ("last_line", 0.75, "A program posted a reward, which does not count")],
)
def test_a_reward_that_is_posted_and_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reward: str, counts: float, words: str
) -> None:
    rewards, said = earned(tmp_path, f"{POSTS}\nprint(0.75)", caplog, reward=reward)
    assert rewards == [counts, counts]
    assert said.count(words) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "code", "words"),
    [("file", WRITES + "print(0.5)", "with reward='file'"), ("http", "print('done')", "The program posted no reward")],
)
def test_a_reward_that_is_somewhere_else_than_it_was_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reward: str, code: str, words: str
) -> None:
    _, said = earned(tmp_path, code, caplog, reward=reward)
    assert words in said


@pytest.mark.parametrize("reward", ["file", "http"])
def test_a_grader_and_another_place_for_the_reward(reward: Any) -> None:
    with pytest.raises(agl.ConfigError, match="would have no effect"):
        agl.Program(["true"], reward=reward, grader=["true"])


def test_a_field_in_braces_alone() -> None:
    with pytest.raises(agl.ConfigError, match=r"\{task\.question\} there"):
        fill(["python", "a.py", "{question}"], {"question": "1 + 1"})
    assert fill(["awk", "{print}", "{other}"], {"question": 1}) == ["awk", "{print}", "{other}"]


@pytest.mark.parametrize(
    "program",
    [
        "import json, sys\ntask = json.loads(sys.argv[1])\nprint(1)\n",
        "import sys\n_, question = sys.argv\nprint(1)\n",
        *(
            f"import argparse\np = argparse.ArgumentParser()\np.add_argument({argument})\np.parse_args()\nprint(1)\n"
            for argument in ("'--task', required=True", "'task'")
        ),
    ],
)
def test_a_program_that_looks_for_its_task_among_its_arguments(tmp_path: Path, program: str) -> None:
    (tmp_path / "a.py").write_text(program)
    done = subprocess.run([sys.executable, tmp_path / "a.py"], capture_output=True, text=True, check=False)
    said = ended_badly(done.returncode, done.stdout, done.stderr, reward="last_line", folder=tmp_path, files=None)
    assert "The task is on its stdin, as JSON" in said
    other = ended_badly(1, "", "ValueError: no such answer\n", reward="last_line", folder=tmp_path, files=None)
    assert "stdin" not in other
