"""Agents written with frameworks: what is wrong is said with the framework's own line for its model."""

from __future__ import annotations

import ast
import asyncio
import gc
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.rollout_verdicts import asks_itself, calls_no_longer, first_line, never_called
from agentlightning.errors import ConfigError, RewardError
from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.litagent import LitAgent
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
from agentlightning.runner.executor import new_event_loop
from agentlightning.runner.frameworks import FRAMEWORKS, caches_on, framework_of
from agentlightning.runner.versions import other_version
from agentlightning.trainer.checks import as_agent
from agentlightning.trainer.example import load_agent
from agentlightning.trainer.left_running import left_running, say_who_is_left
from agentlightning.types import Attempt, Outcome, Rollout
from agentlightning.types.names import NO_SUCH_PATH
from agentlightning.types.reward import checked_reward, reward_attributes

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
    (lambda: ImportError("Initializing ChatOllama requires the langchain-ollama package."), OWN_MODEL),
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
    assert f"  {FRAMEWORKS[package]}." in said
    assert hint.split(":")[0] in said
    assert said.count("llm.endpoint") == 1, "once, and no other client's line"


def test_what_a_framework_wraps_counts() -> None:
    wrapped = like("AgentGenerationError", "Error while generating output:\nConnection error.")
    wrapped.__cause__ = like("APIConnectionError", "Connection error.")
    said = ended(through("smolagents", wrapped))
    assert said.startswith("AgentGenerationError: Error while generating output: Connection error.\n")
    assert FRAMEWORKS["smolagents"] in said
    wrapped.__cause__ = TypeError("Completions.create() got an unexpected keyword argument 'base_url'")
    assert FRAMEWORKS["smolagents"] in ended(through("smolagents", wrapped))


def test_a_tool_of_the_wrong_kind_is_no_matter_of_the_model() -> None:
    error = like("UserError", "Hosted tools are not supported with the ChatCompletions API. Got tool type: function")
    assert hint_without_calls(through("agents", error)) is None


def test_a_client_of_another_rollout_has_the_right_address() -> None:
    error: Any = like("ModelAuthenticationError", "status_code: 403, body: This client was made in another rollout.")
    assert hint_without_calls(through("pydantic_ai", error)) == OWN_ADDRESS
    error.status_code = 403
    assert hint_without_calls(through("pydantic_ai", error)) is None


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


TOOLS_PACKAGES = [
    "Could not import wikipedia python package. Please install it with `pip install wikipedia`.",
    "DuckDuckGoSearchTool requires the ddgs package: run `uv add ddgs`",
    "pandas is not installed",
]


@pytest.mark.parametrize("said", TOOLS_PACKAGES)
@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_package_that_a_tool_lacks_is_to_be_installed(said: str, calls: int, *, wrapped: bool) -> None:
    error: BaseException = ImportError(said)
    if wrapped:
        outer = like("ToolException", "The tool failed.")
        outer.__cause__ = error
        error = outer
    told = ended(through("langchain", error), calls)
    assert "Install the package into the environment that runs the agent." in told
    assert "llm.endpoint" not in told


@pytest.mark.parametrize(
    "said",
    [
        "Using SOCKS proxy, but the 'socksio' package is not installed. Make sure to install httpx using "
        "`pip install httpx[socks]`.",
        "Missing dependencies for SOCKS support: install requests[socks]",
    ],
)
@pytest.mark.parametrize("calls", [0, 1])
def test_a_socks_proxy_is_named(said: str, calls: int) -> None:
    told = ended(through("langchain_openai", ImportError(said)), calls)
    assert "unset ALL_PROXY" in told
    assert "llm.endpoint" not in told


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


def test_a_file_that_makes_its_model_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "made_at_import.py"
    file.write_text("import openai\n\nclient = openai.OpenAI()\n")
    with pytest.raises(ConfigError) as caught:
        load_agent(f"{file}:agent")
    said = str(caught.value)
    assert "base_url=agl.GATEWAY_URL" in said
    assert OWN_KEY in said
    assert "line 3" in said
    assert "site-packages" not in said, "the user's own lines alone"


@pytest.mark.parametrize("name", ["types", "random", "logging", "agentlightning", "openai"])
def test_a_file_with_the_name_of_a_module_is_named(tmp_path: Path, name: str) -> None:
    file, before = tmp_path / f"{name}.py", sys.modules.get(name)
    file.write_text("def agent(task, llm):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=rf"{name}\.py has the name of .* '{name}', which it would hide: give the"):
        load_agent(f"{file}:agent")
    assert sys.modules.get(name) is before
    assert str(tmp_path) not in sys.path
    for folder in ("one", "two"):  # files of the user's may be called alike
        own = tmp_path / folder / "my_own_agent.py"
        own.parent.mkdir()
        own.write_text(file.read_text())
        assert load_agent(f"{own}:agent").origin == ("agent", str(own))


def test_a_run_without_an_agent_shows_the_name_of_none() -> None:
    class Mine(LitAgent[Any]):
        pass

    assert LitAgent[Any]().origin == ("", None)
    assert Mine().origin == ("Mine", None)


@pytest.mark.parametrize(
    "line", ["agent = openai.types.Model.model_construct(id='x')", "agent = httpx.URL('http://x')"]
)
def test_a_frameworks_own_object_is_given_a_function_around_it(tmp_path: Path, line: str) -> None:
    file = tmp_path / "own_object.py"
    file.write_text(f"import openai, httpx\n\n{line}\n")
    with pytest.raises(
        ConfigError,
        match=r"is an object of the class (Model|URL) of (openai|httpx) [\d.]+\. Write a function around it",
    ):
        load_agent(f"{file}:agent")
    with pytest.raises(ConfigError, match=r"of httpx [\d.]+\. Write a function around it"):
        as_agent(httpx.URL("http://x"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("from openai import ChatCompletions", ()),
        ("openai.ChatCompletions", ()),
        ("openai.types.Model.model_construct(id='x', object='model').data", ("its parts are id, ",)),
        ("httpx.Client(proxies={})", ("it takes proxy, ",)),
    ],
)
def test_code_for_another_version_of_a_package(wrong: str, words: tuple[str, ...]) -> None:
    with pytest.raises((ImportError, AttributeError, TypeError)) as caught:
        exec(wrong, {"openai": openai, "httpx": httpx, "Client": httpx.Client})
    said = describe(caught.value)
    package = "httpx" if "httpx" in wrong else "openai"
    assert f"{package} {version(package)} is installed here, and has no such name" in said
    assert all(each in said for each in words)
    assert NOT_AS_EXPECTED not in ended(caught.value, calls=1), "the model has no part in it"


@pytest.mark.parametrize("wrong", ["'x'.data", "None.data", "f(unknown=1)", "__import__('json').Loads"])
def test_names_that_no_package_has_are_no_matter_of_versions(wrong: str) -> None:
    with pytest.raises((AttributeError, TypeError)) as caught:
        exec(wrong, {"f": lambda known: known})
    assert other_version(caught.value) is None


@pytest.mark.parametrize("part", ["final_output", "output", "raw", "content"])
def test_a_frameworks_result_in_place_of_a_reward(part: str) -> None:
    result = SimpleNamespace(**{part: "The answer is 4."})
    with pytest.raises(RewardError, match=rf"^The reward must be .*float\(task\['answer'\] in result\.{part}\)"):
        checked_reward(result)
    with pytest.raises(RewardError, match=r"in result\['messages'\]\[-1\]\.content\)"):
        reward_attributes({"messages": [SimpleNamespace(content="4")]})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("path", ["/conversations", "/v1/files", "/images/generations", "/vector_stores/x/search"])
def test_what_a_provider_keeps_is_not_asked_of_the_model(path: str) -> None:
    finding = never_called([], {f"{NO_SUCH_PATH}{path} here. Served are /v1/chat/completions.": 4})
    assert "Keep a conversation in the agent" in finding.fix
    azure = never_called([], {f"{NO_SUCH_PATH}/openai/deployments/policy/chat/completions here.": 4})
    assert "ChatOpenAI of AzureChatOpenAI" in azure.fix
    wrong = never_called([], {f"{NO_SUCH_PATH}/chat/completions/chat/completions here.": 4})
    assert "give it to a client as it is" in wrong.fix


def test_a_long_error_is_cut_between_words() -> None:
    attempt = Attempt(
        rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0, error=f"{'a word ' * 60}\nmore"
    )
    line = first_line(Episode(Rollout(rollout_id="ro-1", input={}), attempt, None, []))
    assert line.endswith((" a …", " word …"))
    assert len(line) <= 302


def test_a_client_of_a_loop_that_is_closed_ends_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Client:
        async def aclose(self) -> None:
            raise RuntimeError("Event loop is closed")

        async def work(self) -> None:
            raise RuntimeError("Event loop is closed")

    async def collected(coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        await asyncio.wait([task])

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(collected(Client().aclose()))
        gc.collect()
        assert not caplog.records
        runner.run(collected(Client().work()))
        gc.collect()
        assert [record.name for record in caplog.records] == ["asyncio"]


def module(**parts: Any) -> Any:
    return SimpleNamespace(**parts)


CACHES: list[tuple[str, Any, Any, str]] = [
    (
        "langchain_core.globals",
        module(get_llm_cache=lambda: {}),
        module(get_llm_cache=lambda: None),
        "set_llm_cache(None)",
    ),
    (
        "litellm",
        module(cache=module(mode=module(value="default_on"))),
        module(cache=module(mode=module(value="default_off"))),
        "litellm.cache = None",
    ),
    (
        "dspy",
        module(cache=module(enable_memory_cache=True, memory_cache={"key": "answer"})),
        module(cache=module(enable_memory_cache=True, memory_cache={})),
        "cache=False",
    ),
]


@pytest.mark.parametrize(("package", "on", "off", "way"), CACHES, ids=[name for name, *_ in CACHES])
def test_a_frameworks_cache_that_answers_in_the_models_place_is_named(
    package: str, on: Any, off: Any, way: str
) -> None:
    assert caches_on({package: off}) == caches_on({package: module()}) == caches_on({}) == []
    caches = caches_on({package: on})
    for finding in (calls_no_longer(caches), never_called([], {}, caches)):
        assert way in finding.fix
        assert "functools" not in finding.fix
    assert "functools.cache" in asks_itself([]), "where no cache of a framework is seen"


def test_a_thread_that_keeps_the_process_is_named() -> None:
    end = threading.Event()
    kept = threading.Thread(target=end.wait, name="connection")
    daemon = threading.Thread(target=end.wait, name="harmless", daemon=True)
    ours = threading.Thread(target=end.wait, name="agl-agents-end")
    for thread in (kept, daemon, ours):
        thread.start()
    said, nobody = left_running([threading.main_thread(), kept, daemon, ours]), left_running([daemon, ours])
    end.set()
    for thread in (kept, daemon, ours):
        thread.join()
    assert "left running (connection)" in said
    assert "Ctrl-C" in said
    assert nobody == ""


def test_a_script_is_told_of_threads_that_its_training_left() -> None:
    script = (
        "import threading, time; from agentlightning.trainer.left_running import of_a_script\n"
        "threading.Thread(target=time.sleep, args=(2,), name='poller').start(); of_a_script(0.1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("The work is done, and its process waits for what the agent or its packages left")
    assert "(poller of time)" in done.stderr


def test_a_command_whose_agent_leaves_a_thread_says_why_it_does_not_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    end = threading.Event()
    kept = threading.Thread(target=end.wait, name="connection")
    kept.start()
    say_who_is_left(seconds=0.0).join()
    end.set()
    kept.join()
    assert "connection" in capsys.readouterr().err


def test_a_script_that_leaves_a_thread_says_why_it_does_not_end(capsys: pytest.CaptureFixture[str]) -> None:
    end, script = threading.Event(), threading.Thread(target=lambda: None)
    kept = threading.Thread(target=end.wait, name="checkpointer")
    kept.start()
    script.start()
    first = say_who_is_left(seconds=0.0, after=script)
    first.join()
    end.set()
    kept.join()
    assert "The work is done" in capsys.readouterr().err
