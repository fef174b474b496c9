"""What an agent's own lines raise: patterns, queries, commands, requests by hand; each with what mends it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.runner.endings import NOT_AS_EXPECTED, Ending, describe, with_gateway
from agentlightning.types import Outcome

TASK = {"mail": "Where is my lamp?", "queue": "shipping"}


def raised_by(folder: Path, lines: str, task: object = TASK) -> BaseException:
    """What `agent(task)` of a file of the user's own raises."""
    file = folder / "my_agent.py"
    file.write_text(lines)
    spec = importlib.util.spec_from_file_location("my_agent", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.agent(task)
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def agent(body: str, imports: str = "import re") -> str:
    return f"{imports}\ndef agent(task):\n" + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize(
    ("lines", "hint"),
    [
        (agent("return re.search('queue: (.*)', 'none').group(1)"), "where the text has no match"),
        (agent("match = re.match('x', 'y')\nreturn match[1]"), "where the text has no match"),
        (agent("return os.environ['SEARCH_API_KEY']", "import os"), "no such variable: set it before you start"),
        (agent("return os.environ['OPENAI_API_KEY']", "import os"), "give the client the key of the rollout"),
        (
            agent(
                "return GivenResources({'llm': 1}).llm", "from agentlightning.litagent.litagent import GivenResources"
            ),
            "resources['llm']",
        ),
        (agent("global count\ncount = 0\ndef add():\n    count += 1\nadd()"), "`global NAME`"),
        (agent("return '4' > 3"), "float(…) of it is a number"),
        (agent("return 4.0 - '3'"), "float(…) of it is a number"),
        (
            agent("return Rollout(rollout_id='r', input=1, start_time=0.0).task", "from agentlightning import Rollout"),
            "The task is rollout.input",
        ),
        (agent("cache = {}\nreturn cache[task]"), "A dict is no key"),
        (agent("return 1.0", "import functools\n@functools.lru_cache"), "functools.cache on the agent"),
        (
            agent("return work(task)", "def ask(task, llm): ...\ndef work(*args):\n    return ask(*args)"),
            "functools.wraps",
        ),
        (
            agent(
                "urllib.request.urlopen(urllib.request.Request('http://127.0.0.1:9', data='{}'))",
                "import urllib.request",
            ),
            "json.dumps(…).encode()",
        ),
        (agent("return json.loads('{\"error\": 1}')['choices']", "import json"), "response.raise_for_status()"),
    ],
)
def test_a_line_is_told_what_mends_it(tmp_path: Path, lines: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert hint in describe(raised_by(tmp_path, lines), TASK)


def test_a_none_that_is_searched_is_no_match_that_failed(tmp_path: Path) -> None:
    said = describe(raised_by(tmp_path, agent("return re.search('x', None).group(1)")), TASK)
    assert "where the text has no match" not in said


@pytest.mark.parametrize(
    ("body", "is_the_tasks"),
    [
        ("return task['label']", True),
        ("row = task\nreturn row['label']", True),
        ("said = {'queue': 1}\nreturn said['label']", False),
        ("return dict(queue=1)['label']", False),
        ("return {'a': {}}['a']['label']", False),
    ],
)
def test_only_a_tasks_own_field_is_looked_for_among_its_fields(tmp_path: Path, body: str, is_the_tasks: bool) -> None:
    said = describe(raised_by(tmp_path, agent(body)), TASK)
    assert ("The task has no such field; it has mail, queue." in said) is is_the_tasks


def test_a_row_of_a_csv_without_a_heading(tmp_path: Path) -> None:
    row = {"Where is my lamp?": "It is late", "shipping": "billing"}
    assert "its CSV lacks a first line" in describe(raised_by(tmp_path, agent("return task['mail']"), row), row)
    assert "its CSV" not in describe(raised_by(tmp_path, agent("return task['label']")), TASK)


def command(program: str) -> str:
    return agent(
        f"subprocess.run([sys.executable, '-c', {program!r}], capture_output=True, check=True)",
        "import subprocess, sys",
    )


def test_a_command_that_failed_is_quoted(tmp_path: Path) -> None:
    said = describe(raised_by(tmp_path, command("raise SystemExit('no such mailbox')")), TASK)
    assert "It said: no such mailbox" in said
    assert "OPENAI_BASE_URL" not in said


def test_a_command_without_a_model_is_told_of_its_variables(tmp_path: Path) -> None:
    program = "raise SystemExit('OpenAIError: The api_key client option must be set')"
    said = describe(raised_by(tmp_path, command(program)), TASK)
    assert "It said: OpenAIError: The api_key" in said
    assert "'OPENAI_BASE_URL': llm.endpoint" in said


@pytest.mark.parametrize("summary", [AttemptSummary(calls=1), AttemptSummary(forwarded=1)], ids=["trained", "provider"])
@pytest.mark.parametrize(
    "lines",
    [
        agent("return sqlite3.connect(':memory:').execute('selec 1')", "import sqlite3"),
        agent("exec('answer = undefined_name')"),
        agent("return int('forty-two')"),
    ],
    ids=["query", "code", "number"],
)
def test_what_a_model_wrote_is_for_a_low_reward_whoever_answered(
    tmp_path: Path, lines: str, summary: AttemptSummary
) -> None:
    error = raised_by(tmp_path, lines)
    ending = Ending(Outcome.AGENT_ERROR, describe(error, TASK), exception=error)
    assert NOT_AS_EXPECTED in (with_gateway(ending, summary).error or "")


@pytest.mark.parametrize("answered", [AttemptSummary(calls=1), AttemptSummary(forwarded=1)])
def test_a_reward_that_is_none_is_not_what_the_model_wrote(tmp_path: Path, answered: AttemptSummary) -> None:
    error = raised_by(tmp_path, agent("agl.emit_reward('0.5')", "import agentlightning as agl"))
    ending = Ending(Outcome.AGENT_ERROR, describe(error, TASK), exception=error)
    assert NOT_AS_EXPECTED not in (with_gateway(ending, answered).error or "")


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        (AttemptSummary(), "Its client talks to another address than the model's"),
        (AttemptSummary(forwarded=1), "A provider's model had answered already"),
        (AttemptSummary(calls=1), "The model in training had answered already"),
    ],
    ids=["none", "provider", "trained"],
)
def test_an_address_where_nothing_answers(tmp_path: Path, summary: AttemptSummary, words: str) -> None:
    error = raised_by(tmp_path, agent("httpx.get('http://127.0.0.1:9/search', trust_env=False)", "import httpx"))
    ending = Ending(Outcome.AGENT_ERROR, describe(error, TASK), exception=error)
    assert words in (with_gateway(ending, summary).error or "")


def test_a_query_that_fails_before_any_answer_is_not_the_models(tmp_path: Path) -> None:
    error = raised_by(tmp_path, agent("return sqlite3.connect(':memory:').execute('selec 1')", "import sqlite3"))
    ending = Ending(Outcome.AGENT_ERROR, describe(error, TASK), exception=error)
    assert NOT_AS_EXPECTED not in (with_gateway(ending, AttemptSummary()).error or "")
