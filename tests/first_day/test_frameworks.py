"""Agents written with frameworks: what is wrong is said with the framework's own line for its model."""

from __future__ import annotations

import ast
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.runner.endings import (
    IN_ANOTHER_THREAD,
    NOT_AS_EXPECTED,
    OUT_OF_TURNS,
    OWN_ADDRESS,
    OWN_KEY,
    OWN_MODEL,
    Ending,
    describe,
    hint_for,
    hint_with_calls,
    hint_without_calls,
    with_gateway,
)
from agentlightning.runner.frameworks import FRAMEWORKS, framework_of
from agentlightning.types import Outcome

AGENTS = Path(__file__).parents[1] / "clients" / "agents"


def through(package: str, error: BaseException) -> BaseException:
    """The error as it comes out of a file of an installed package."""
    file = f"/usr/lib/python3/site-packages/{package.replace('.', '/')}/models.py"
    here: dict[str, Any] = {"error": error}
    exec(compile("def call():\n    raise error", file, "exec"), here)
    try:
        here["call"]()
    except BaseException as raised:
        return raised
    raise AssertionError("it raises")


def like(name: str, said: str, *bases: type[Exception]) -> Exception:
    return type(name, bases or (Exception,), {"__module__": "framework.errors"})(said)


def ended(error: BaseException, calls: int = 0) -> str:
    ending = Ending(Outcome.AGENT_ERROR, describe(error), exception=error)
    return with_gateway(ending, AttemptSummary(calls=calls)).error or ""


def changes() -> set[str]:
    """What the agents of the tests with the real packages have for a line."""
    found: set[str] = set()
    for file in AGENTS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign):
                names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                if names == ["CHANGE"]:
                    found.add(str(ast.literal_eval(node.value)).replace('"dummy"', "llm.api_key"))
    return found


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_each_line_is_one_that_is_tried_with_the_real_package(package: str) -> None:
    assert FRAMEWORKS[package] in changes()


OF_A_CLIENT = type("APIConnectionError", (Exception,), {})
UNREACHED: list[tuple[Callable[[], Exception], str]] = [
    (lambda: like("APIConnectionError", "Connection error."), OWN_ADDRESS),
    (
        lambda: like("ModelConnectionError", "Connection error.", OF_A_CLIENT),
        OWN_ADDRESS,
    ),
    (lambda: like("AuthenticationError", "Incorrect API key provided: sk-mine"), OWN_ADDRESS),
    (lambda: like("OpenAIError", "Missing credentials. Please pass an `api_key`"), OWN_KEY),
    (lambda: like("UserError", "Set the `OPENAI_API_KEY` environment variable"), OWN_KEY),
    (lambda: like("UserError", "Unknown prefix: anthropic"), OWN_MODEL),
    (lambda: like("UserError", "Unknown model: policy"), OWN_MODEL),
    (lambda: ValueError("Unable to infer model provider for model='policy'."), OWN_MODEL),
    (lambda: like("BadRequestError", "LLM Provider NOT provided."), OWN_MODEL),
    (lambda: ImportError("`litellm` is required to use the LitellmModel."), OWN_MODEL),
]


@pytest.mark.parametrize("package", FRAMEWORKS)
@pytest.mark.parametrize(("make", "hint"), UNREACHED, ids=[str(make()) for make, _ in UNREACHED])
def test_a_call_that_never_came_is_mended_in_the_frameworks_words(
    package: str, make: Callable[[], Exception], hint: str
) -> None:
    error = through(package, make())
    assert hint in (hint_for(error), hint_without_calls(error))
    said = ended(error)
    assert FRAMEWORKS[package] in said
    assert hint.split(":")[0] in said
    assert said.count("llm.endpoint") == 1, "once, and no other client's line"


def test_what_a_framework_wraps_counts() -> None:
    wrapped = like("AgentGenerationError", "Error while generating output:")
    wrapped.__cause__ = like("APIConnectionError", "Connection error.")
    assert FRAMEWORKS["smolagents"] in ended(through("smolagents", wrapped))
    wrapped.__cause__ = TypeError("Completions.create() got an unexpected keyword argument 'base_url'")
    assert FRAMEWORKS["smolagents"] in ended(through("smolagents", wrapped))


def test_a_framework_that_calls_by_litellm_is_named_itself() -> None:
    inner = through("litellm", like("BadRequestError", "LLM Provider NOT provided."))
    assert framework_of(inner) == "litellm"
    assert framework_of(through("smolagents", inner)) == "smolagents"


@pytest.mark.parametrize("value", ["b'Bearer '", "b''"])
def test_a_key_without_characters(value: str) -> None:
    error = like("APIConnectionError", "Connection error.")
    error.__cause__ = like("LocalProtocolError", f"Illegal header value {value}")
    said = ended(error)
    assert OWN_KEY in said
    assert OWN_ADDRESS not in said


@pytest.mark.parametrize("name", ["MaxTurnsExceeded", "GraphRecursionError", "UsageLimitExceeded"])
def test_an_agents_own_limit_of_turns_is_no_failure_to_mend(name: str) -> None:
    error = through("agents", like(name, "Max turns (10) exceeded"))
    assert hint_with_calls(error) == OUT_OF_TURNS
    assert OUT_OF_TURNS in ended(error, calls=10)


@pytest.mark.parametrize("name", ["UnexpectedModelBehavior", "ModelBehaviorError", "LengthFinishReasonError"])
def test_what_the_model_wrote_is_for_a_low_reward(name: str) -> None:
    error = through("pydantic_ai", like(name, "Exceeded maximum output retries (1)"))
    assert hint_with_calls(error) == NOT_AS_EXPECTED


def test_a_refused_connection_of_requests_is_no_long_wait() -> None:
    timeout = type("TimeoutError", (Exception,), {"__module__": "urllib3.exceptions"})
    cause = like("NewConnectionError", "Connection refused", type("ConnectTimeoutError", (timeout,), {}))
    error = like("ConnectionError", "Max retries exceeded with url: /v1")
    error.__cause__ = cause
    assert hint_without_calls(error) == OWN_ADDRESS


def test_a_checkpointer_that_another_thread_made() -> None:
    shared = sqlite3.connect(":memory:")
    said: list[BaseException] = []

    def rollout() -> None:
        try:
            shared.execute("SELECT 1")
        except sqlite3.ProgrammingError as error:
            said.append(error)

    thread = threading.Thread(target=rollout)
    thread.start()
    thread.join()
    shared.close()
    assert hint_for(said[0]) == IN_ANOTHER_THREAD
