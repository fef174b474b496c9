"""What agents do beside asking the model: processes, signals, clients of their own; and how their files are written."""

from __future__ import annotations

import datetime
import decimal
import ssl
import urllib.error
import uuid
from email.message import Message
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.rollout_verdicts import never_called
from agentlightning.algorithm.sampling.examples import check_examples, messages_of, pair_of
from agentlightning.cli.agents import find_agent
from agentlightning.cli.app import app
from agentlightning.errors import ConfigError, StoreError
from agentlightning.runner.endings import (
    CLOSED_CLIENT,
    IN_A_THREAD,
    NO_HTTPS,
    OTHER_LOOP,
    SAY_JSON,
    TOO_HASTY,
    hint_for,
    hint_with_calls,
    hint_without_calls,
)
from agentlightning.store.operations.codec import encode_task
from agentlightning.trainer.tasks import load_tasks
from agentlightning.types import Attempt, Rollout
from agentlightning.types.names import NO_SUCH_PATH
from tests.first_day.day import said, script

FORKS = """
import asyncio, multiprocessing, signal, time
from agentlightning.runner.executor import new_event_loop
from agentlightning.trainer.sync import stop_on_interrupt

async def training():
    stop = asyncio.Event()
    with stop_on_interrupt(stop, print) as heard:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        await asyncio.to_thread(worker.start)
        worker.terminate()
        await asyncio.to_thread(worker.join, 20)
        for _ in range(10):
            await asyncio.sleep(0)
        print("ended by", worker.exitcode, "heard", heard)

asyncio.Runner(loop_factory=new_event_loop).run(training())
"""


def test_a_worker_that_an_agent_ends_does_not_stop_the_training(tmp_path: Path) -> None:
    said(script(tmp_path, FORKS), "ended by -15 heard []")


def request() -> Any:
    return httpx.Request("POST", "http://127.0.0.1:1/v1")


def of(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("signal only works in main thread of the main interpreter", IN_A_THREAD),
        ("Math-Verify doesn't support threaded environment due to usage of signal.alarm() in timeout", IN_A_THREAD),
        ("Cannot send a request, as the client has been closed.", CLOSED_CLIENT),
        ("Session is closed", CLOSED_CLIENT),
        ("Event loop is closed", OTHER_LOOP),
        ("Lock is bound to a different event loop", OTHER_LOOP),
        ("Task <Task pending> got Future <Future> attached to a different loop", OTHER_LOOP),
    ],
)
def test_what_is_shared_between_rollouts(said: str, hint: str) -> None:
    assert hint_for(RuntimeError(said)) == hint


@pytest.mark.parametrize(
    "error",
    [
        of(openai.APITimeoutError(request()), httpx.ReadTimeout("")),
        httpx.ReadTimeout("timed out"),
        httpx.ConnectTimeout("timed out"),
        of(urllib.error.URLError("timed out"), TimeoutError("timed out")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_client_that_waits_no_longer(error: Exception) -> None:
    assert hint_without_calls(error) == hint_with_calls(error) == TOO_HASTY


def test_https_where_the_model_speaks_http() -> None:
    cause = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
    assert hint_without_calls(of(openai.APIConnectionError(request=request()), cause)) == NO_HTTPS


def test_an_answer_is_no_other_address() -> None:
    answer = urllib.error.HTTPError("http://h/v1", 415, "Unsupported Media Type", Message(), None)
    assert hint_for(answer) == SAY_JSON
    assert hint_without_calls(answer) is None


def test_a_path_that_is_not_served_does_not_say_that_the_address_is_right() -> None:
    where: Any = {"rollout_id": "ro-1"}
    refused = [f"{NO_SUCH_PATH}/chat/completions/chat/completions here."]
    attempt = Attempt(attempt_id="at-1", sequence_id=1, start_time=0.0, **where)
    found = never_called([Episode(Rollout(input=1, **where), attempt, None, [], refused=refused)], {})
    assert "llm.endpoint is the base URL" in found.fix
    assert "base URL is right" not in found.fix


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (datetime.datetime(2025, 1, 1), "value.isoformat()"),
        (type("Series", (), {})(), "df.to_dict('records')"),
        (b"bytes", "base64.b64encode(value).decode()"),
        ({1, 2}, "list(value)"),
        (decimal.Decimal(1), "float(value)"),
        (uuid.UUID(int=1), "str(value)"),
        (Path("x"), "str(value)"),
        (object(), ".model_dump()"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_no_json_is_written_otherwise(value: Any, written: str) -> None:
    with pytest.raises(StoreError) as caught:
        encode_task({"a": value}, "A task")
    assert written in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", '[{"q": 1},\n{"q": 2}]', "let its name end in .json"),
        ("t.json", '[{"q": 1},\n {"q": 2},\n]', "no comma before a closing bracket"),
        ("t.json", '[{"q": 1,}, {"q": 2}]', "no comma before a closing bracket"),
        ("t.json", "[{'q': 1}]", "json.dump(tasks, file)"),
    ],
)
def test_files_that_are_nearly_json(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tasks(tmp_path / name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("n_samples_per_prompt", "group_size"),
        ("trajectories_per_group", "group_size"),
        ("groups_per_step", "tasks_per_step"),
        ("rollout_batch_size", "tasks_per_step"),
        ("init_kl_coef", "kl_coef"),
        ("eps_clip", "clip_low"),
        ("sequence_len", "max_context"),
        ("total_epochs", "epochs"),
        ("adv_estimator", "advantage"),
        ("generate_max_len", "max_context bounds"),
        ("actor_rollout_ref", "VERL(config)"),
        ("system_prompt", "the agent's"),
        ("run_name", "run_dir"),
    ],
)
def test_names_of_other_trainers(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        agl.GRPO(model="calc", **{name: 1})  # pyright: ignore[reportArgumentType]
    assert meant in str(caught.value)


def test_all_examples_that_are_refused_are_named_at_once() -> None:
    def pair(preferred: str, other: str) -> dict[str, Any]:
        one, two = ([{"role": "assistant", "content": text}] for text in (preferred, other))
        chat = {"messages": [{"role": "user", "content": "q"}]}
        return {"input": chat, "preferred_output": one, "non_preferred_output": two}

    with pytest.raises(ConfigError) as caught:
        check_examples([pair("a", "b"), pair("a", "a"), pair("b", "a"), pair("b", "b")] * 2, pair_of, "preferences")
    assert str(caught.value).startswith("Of the preferences, number 2 (counted from 1): Both answers are the same")
    assert str(caught.value).endswith("Of the 8, 4 are refused; the others are 4, 6, 8.")
    with pytest.raises(ConfigError, match=r"which agl\.DPO"):
        messages_of(pair("a", "b"))


CLOSES = """
import sys
from agentlightning.metrics.console import RichConsole
terminal = RichConsole()
sys.stdout.close()
terminal.note("a note")
terminal.step({"step": 1})
sys.stderr.write("went on")
"""


def test_a_standard_output_that_the_agent_closed(tmp_path: Path) -> None:
    done = script(tmp_path, CLOSES)
    said(done, "went on")
    assert "Traceback" not in done.stderr


def test_an_agent_that_is_named_like_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match=r"named by its file: train\.py:agent"):
        find_agent("train.agent")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["judge", "run", "--equal", "50"], "it must be at most 0.9"),
        (["optimize", "--agent", "a", "--model", "calc", "--critic-model", "m"], "Give one of them, too"),
    ],
)
def test_options(command: list[str], words: str) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code != 0
    assert words in " ".join(f"{done.output} {done.exception}".replace("│", "").split())


WARNS = """
import logging, resource
from pathlib import Path
from agentlightning.trainer.log import logged
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))  # so much is the warning, and not what is in the file
with logged(Path("log.txt")):
    logging.getLogger("agentlightning.part").info("a detail")
    logging.getLogger("agentlightning.part").warning("an event")
"""


def test_warnings_are_on_the_terminal_of_a_script_also_where_its_disk_is_full(tmp_path: Path) -> None:
    done = script(tmp_path, WARNS)
    assert done.stderr.splitlines() == ["WARNING agentlightning.part: an event"]


NESTED = """
from agentlightning.metrics import SilentConsole

def trainer():
    return agl.Trainer(algorithm=agl.Baseline(), console=SilentConsole())

def inner(task):
    return 1.0

def outer(task):
    try:
        trainer().fit(inner, [1])
    except agl.ConfigError as error:
        print("refused:", error)
    return 1.0

if __name__ == "__main__":
    trainer().fit(outer, [1])
    trainer().fit(inner, [1])
    print("went on")
"""


def test_an_agent_that_trains(tmp_path: Path) -> None:
    said(script(tmp_path, NESTED), "refused: fit was called inside an agent", "went on")
