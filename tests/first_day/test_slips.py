"""Slips of a first script: parts in the wrong place or of the wrong kind, and words of other libraries."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.errors import RewardError
from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.metrics import SilentConsole
from agentlightning.models import resolve_model
from agentlightning.runner.endings import Ending, describe, hint_for, hint_without_calls, with_gateway
from agentlightning.types import Outcome
from agentlightning.types.reward import checked_reward

NAMES: dict[str, Any] = {"agl": sys.modules["agentlightning"], "Path": Path}


def agent(task: Any) -> float:
    return 1.0


class NotOurs:
    def rollout(self, task: Any, llm: agl.LLM) -> float:
        return 1.0


def swapped(llm: agl.LLM, task: Any) -> float:
    return 1.0


def said_of(wrong: str, **names: Any) -> str:
    with pytest.raises(agl.ConfigError) as caught:
        eval(wrong, {**NAMES, **names})
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("fit('a.py')", "give the function itself: import it"),
        ("fit('a.py', [1])", "agl train --agent a.py:name --tasks FILE"),
        ("fit('a:agent', [1])", "agl train --agent my_agent.py:name --tasks FILE"),
        ("fit(Path('a.py'), [1])", "agl train --agent a.py:name --tasks FILE"),
        ("fit([1, 2], agent)", "It comes first, and the tasks behind it: fit(agent, tasks)"),
        ("fit(NotOurs(), [1])", "class MyAgent(agl.LitAgent)"),
        ("fit(swapped, [1])", "Write def swapped(task, llm)."),
        ("dev('a.py', [1])", "give the function itself"),
    ],
)
def test_the_agent(wrong: str, words: str) -> None:
    assert words in said_of(f"agl.Trainer().{wrong}", agent=agent, NotOurs=NotOurs, swapped=swapped)


def test_a_run_that_nobody_awaits() -> None:
    with pytest.warns(RuntimeWarning, match=r"nothing was trained. In async code: await trainer.fit_async\(…\)"):
        agl.Trainer().fit_async(agent, [1])  # pyright: ignore[reportUnusedCoroutine]
    begun = agl.Trainer().fit_async(agent, [1])
    with pytest.raises(AttributeError, match=r"without await.* Elsewhere: trainer.fit\(…\)"):
        _ = begun.metrics  # pyright: ignore[reportAttributeAccessIssue]
    begun.close()


def test_chats_that_are_given_as_tasks_are_told(caplog: pytest.LogCaptureFixture) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    for tasks in ([chat], [{"messages": chat["messages"][:1]}], [{"question": "hi"}], ["hi"]):
        agl.SFT(model="calc").check_data(tasks)
    assert caplog.text.count("To learn the conversations themselves: SFT(source='chats')") == 1


def test_an_assistant_that_says_nothing() -> None:
    asked, call = {"role": "user", "content": "hi"}, {"function": {"name": "f", "arguments": "{}"}}
    silent = {"role": "assistant", "content": ""}
    with pytest.raises(agl.ConfigError, match="The assistant says nothing in this chat"):
        agl.SFT(model="calc", source="chats").check_data([{"messages": [asked, silent]}])
    agl.SFT(model="calc", source="chats").check_data([{"messages": [asked, {**silent, "tool_calls": [call]}]}])


def test_a_method_that_belongs_to_no_object() -> None:
    with pytest.raises(agl.ConfigError, match=r"fit\(MyClass\(\)\.run, tasks\)"):

        class Mine:
            @agl.rollout
            def run(self, task: Any) -> float:
                return 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("n_runners='2'", "n_runners is '2'; it must be a whole number, and at least 1"),
        ("n_workers=-1", "n_workers is -1; it must be a whole number"),
        ("concurrency=2.5", "concurrency is 2.5; it must be a whole number"),
        ("max_rollouts=0", "max_rollouts is 0; it must be a whole number"),
        ("port='8000'", "port is '8000'; give a number up to 65535"),
        ("port=99999", "port is 99999; give a number up to 65535"),
        ("run_dir=5", "run_dir is 5; give a path"),
        ("resume=True", "resume is True; give a path"),
        ("console='quiet'", "agl.metrics.SilentConsole()"),
        ("models=['judge']", "give providers by alias"),
        ("models={'judge': 'gpt-4o'}", "'judge': 'gpt-4o', which is no Provider"),
        ("initial_resources=[1]", "give resources by name"),
        ("reward_fn=max", "The reward comes from the agent"),
        ("algorithm='GRPO'", "algorithm is 'GRPO', which is no Algorithm. Give an object: agl.GRPO("),
        ("algorithm=agl.GRPO", "algorithm is the class GRPO. Give an object: agl.GRPO("),
    ],
)
def test_the_trainer(settings: str, words: str) -> None:
    assert words in said_of(f"agl.Trainer({settings})")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("reward_funcs=[max]", "The reward comes from the agent: let it return a number"),
        ("train_dataset=[1]", "fit(agent, tasks, val_dataset=others)"),
        ("agent=max", "fit(agent, tasks, val_dataset=others)"),
        ("run_dir='x'", "a setting of the trainer: Trainer(algorithm=…, run_dir=…)"),
        ("report_to='wandb'", "sinks=[WandbSink(…)]"),
        ("tokenizer=1", "The tokenizer is the model's own"),
        ("use_vllm=True", "Say backend='vllm'"),
        ("bf16=True", "Say dtype='bfloat16'"),
        ("use_lora=True", "Say lora_rank=16"),
        ("lora_alpha=64", "alpha 32"),
        ("target_modules=['q_proj']", "all linear layers"),
        ("load_in_4bit=True", "lora_rank=16 with dtype='bfloat16'"),
        ("gradient_accumulation_steps=4", "tokens_per_batch bounds the memory"),
        ("num_gpus=4", "A GPU is taken where there is one"),
        ("max_completion_length=9", "the agent says max_tokens in its calls"),
        ("optimizer='adam'", "It is AdamW"),
        ("logging_steps=1", "Every step is written to metrics.jsonl"),
        ("steps=True", "steps is True; it must be a whole number"),
        ("device='gpu'", "'cuda', one of several: 'cuda:1', or Apple's: 'mps'"),
        ("device=0", "device is 0; it can be 'auto'"),
        ("reward_weights=[1]", "it takes values by name"),
        ("rollout_config={'timeout_seconds': 3}", "give an object: agl.RolloutConfig(timeout_seconds=60)"),
    ],
)
def test_the_algorithm(settings: str, words: str) -> None:
    assert words in said_of(f"agl.GRPO(model='calc', {settings})")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.Provider(base_url='api.openai.com/v1')", "it begins with http:// or https://"),
        ("agl.Provider(base_url='https://api.openai.com/v1', api_key='')", "is a variable not set?"),
        ("agl.Baseline(model='calc', repeats=0)", "each task is run at least once"),
        ("agl.LightningStoreClient('localhost:4747')", "it begins with http://"),
    ],
)
def test_the_parts(wrong: str, words: str) -> None:
    assert words in said_of(wrong)


FILES = {
    "data/tasks.jsonl": "1\n",
    "semicolons.csv": "question;answer\n1 + 1;2\n",
    "book.xlsx": "PK",
    "tasks.jsonl.gz": "",
    "tasks.yaml": "- 1\n",
    "python.jsonl": "{'a': 1}\n",
    "tabs.tsv": "question\tanswer\n1 + 1\t2\n",
    "lines.txt": "What is 1 + 1?\n",
    "broken.parquet": "no table",
}


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ("data", "is a folder, and tasks are read from a file, for example data/tasks.jsonl"),
        ("semicolons.csv", "its fields stand between ';'. Save it with commas"),
        ("book.xlsx", "Save the sheet as CSV"),
        ("tasks.jsonl.gz", "Unpack it first"),
        ("tasks.yaml", "Write them as JSON lines"),
        ("tabs.tsv", "Save it with commas, as CSV"),
        ("lines.txt", 'Write a JSON value per line, a task {"question": "…"} or a chat {"messages": […]}'),
        ("python.jsonl", "JSON has double quotes: write each task with json.dumps(task)"),
        ("broken.parquet", "cannot be read as Parquet"),
        ("openai/gsm8k", "hf:openai/gsm8k@train"),
        ("wide.jsonl", "Save it as UTF-8"),
    ],
)
def test_the_file_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("wide.jsonl").write_text('{"a": 1}\n', encoding="utf-16")
    assert words in said_of("agl.Trainer().fit(agent, tasks)", agent=agent, tasks=tasks)


@pytest.mark.parametrize("tasks", [[None, None], (None,)])
def test_tasks_that_are_all_none(tasks: Any) -> None:
    algorithm = agl.GRPO(model="calc")
    assert "are all None" in said_of(
        "agl.Trainer(algorithm=algorithm).fit(agent, tasks)", agent=agent, tasks=tasks, algorithm=algorithm
    )


@pytest.mark.parametrize("address", ["https://x.example/tasks.jsonl", Path("https://x.example/tasks.jsonl")])
def test_tasks_that_are_elsewhere(address: Any) -> None:
    assert "download the file first" in said_of("agl.Trainer().fit(agent, tasks)", agent=agent, tasks=address)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-4o-mini", "is a provider's model"),
        ("o3", "is a provider's model"),
        ("claude-sonnet-4-5", "is a provider's model"),
        ("openai/gpt-4o", "is a provider's model"),
        ("gpt-oss-20b", "There is no model at 'gpt-oss-20b'"),
        ("http://localhost:8000/v1", "That is an endpoint"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "its Hugging Face id is 'Qwen/Qwen3-0.6B'"),
        ("clac", "Did you mean 'calc'?"),
    ],
)
def test_a_model_that_cannot_be_trained(name: str, words: str) -> None:
    with pytest.raises(agl.ModelError) as caught:
        resolve_model(name)
    assert words in str(caught.value)


def test_a_folder_called_like_a_providers_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "claude-mine").mkdir()
    with pytest.raises(agl.ModelError, match="holds no model"):
        resolve_model("claude-mine")


@pytest.mark.parametrize("share", [0.2, 20])
def test_a_share_of_the_tasks(share: float) -> None:
    words = said_of("agl.Trainer(algorithm=agl.GRPO(model='calc')).fit(agent, [1, 2], share)", agent=agent, share=share)
    assert "split the list yourself: fit(agent, tasks[20:], val_dataset=tasks[:20])" in words


def test_a_task_with_a_hole(tmp_path: Path) -> None:
    trainer = agl.Trainer(run_dir=tmp_path, console=SilentConsole())
    with pytest.raises(agl.ConfigError, match=r"JSON has no NaN .* put None in their place"):
        trainer.dev(agent, [{"answer": float("nan")}])


@pytest.mark.parametrize("run_dir", ["file.txt", "file.txt/inside"])
def test_a_folder_that_cannot_be(tmp_path: Path, run_dir: str) -> None:
    (tmp_path / "file.txt").write_text("mine")
    trainer = agl.Trainer(run_dir=tmp_path / run_dir, console=SilentConsole())
    with pytest.raises(agl.ConfigError, match="Give a run_dir where it can"):
        trainer.fit(agent, [1])
    assert (tmp_path / "file.txt").read_text() == "mine"


@pytest.mark.parametrize("reward", [np.array([1.0, 2.0]), np.array([1.0]), np.array(["a"])])
def test_an_array_as_a_reward(reward: Any) -> None:
    with pytest.raises(RewardError, match=r"must be a number, not ndarray: .* take \.item\(\) or \.mean\(\)"):
        checked_reward(reward)


@pytest.mark.parametrize("reward", ["the answer is 4", None, {"reward": "high"}, ["a", "b"], b"1"])
def test_what_is_no_reward(reward: Any) -> None:
    with pytest.raises(RewardError, match=r"must be a number, not .*Return what the answer is worth"):
        checked_reward(reward)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"prompt": 1, "answer": 2}, "it has prompt, answer."),
        ({}, "it has none."),
        ({"question": 1}, None),  # it is another dict that lacks it
        ("text", None),
    ],
)
def test_a_field_that_the_task_has_not(task: Any, words: str | None) -> None:
    said = describe(KeyError("question"), task)
    assert (words or "The task has") in said if words else "The task has" not in said


@pytest.mark.slow
def test_an_image_for_a_model_that_reads_text(tmp_path: Path) -> None:
    """It is said at the first call that has one, before anything is learned."""

    async def shows(task: Any, llm: agl.LLM) -> float:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            asked: Any = [{"role": "user", "content": [{"type": "text", "text": task}, part]}]
            await client.chat.completions.create(model=llm.model, max_tokens=4, messages=asked)
        return 1.0

    warned: list[str] = []

    class Console(SilentConsole):
        def warn(self, text: str) -> None:
            warned.append(text)

    trainer = agl.Trainer(algorithm=agl.GRPO(model="calc"), run_dir=tmp_path / "run", console=Console())
    trainer.dev(shows, ["What is 1 + 2?", "What is 2 + 2?"])
    (said,) = [text for text in warned if "image_url" in text]
    assert "this model reads text only" in said


def test_an_agent_that_exits(tmp_path: Path) -> None:
    async def exits(task: Any) -> float:
        sys.exit(1)

    algorithm = agl.Baseline()
    agl.Trainer(algorithm=algorithm, run_dir=tmp_path, console=SilentConsole()).fit(exits, [1])
    (episode,) = algorithm.episodes
    assert "Return a reward, or raise an error, in place of exiting" in (
        (episode.attempt and episode.attempt.error) or ""
    )


def like(name: str, *above: str, module: str = "client") -> BaseException:
    """An error of a class that a client calls so, or that is one of classes called so."""
    kind: Any = Exception
    for each in (*reversed(above), name):
        kind = type(each, (kind,), {"__module__": module})
    return kind("It did not answer.")


ARRIVED_NOWHERE = [
    like("APIConnectionError", module="openai"),
    like("APITimeoutError", "APIConnectionError", module="anthropic"),
    like("ConnectError", module="httpx"),
    like("ProxyError", "ConnectionError", module="requests.exceptions"),
    like("ClientProxyConnectionError", module="aiohttp"),
    like("NewConnectionError", module="urllib3.exceptions"),
    like("URLError", module="urllib.error"),
    ConnectionRefusedError("refused"),
]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "base_url=llm.endpoint"),
        ({"HTTP_PROXY": "http://proxy:8080"}, "NO_PROXY=127.0.0.1,localhost"),
        ({"ALL_PROXY": "http://proxy:8080"}, "NO_PROXY=127.0.0.1,localhost"),
        ({"HTTP_PROXY": "http://proxy:8080", "NO_PROXY": "127.0.0.1"}, "base_url=llm.endpoint"),
    ],
)
@pytest.mark.parametrize("error", ARRIVED_NOWHERE, ids=lambda error: type(error).__name__)
def test_a_call_that_goes_to_a_proxy(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str, error: BaseException
) -> None:
    set_proxies(monkeypatch, environment)
    assert words in (hint_without_calls(error) or "")


@pytest.mark.parametrize("module", ["requests.exceptions", "openai", "httpx", "urllib.error"])
def test_what_a_proxy_answers_itself(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    refused = like("HTTPError", module=module)
    set_proxies(monkeypatch, {"HTTP_PROXY": "http://proxy:8080"})
    assert "NO_PROXY" in (hint_without_calls(refused) or "")
    set_proxies(monkeypatch, {})
    assert hint_without_calls(refused) is None


def set_proxies(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


NO_KEY = "Missing credentials. Please pass an `api_key`"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        *((error, "look at its base_url") for error in ARRIVED_NOWHERE),
        (type("OpenAIError", (Exception,), {"__module__": "openai"})(NO_KEY), "models={'judge': agl.Provider("),
        (like("AuthenticationError", module="openai"), "models={'judge': agl.Provider("),
    ],
    ids=lambda value: type(value).__name__,
)
def test_another_client_of_an_agent_whose_model_had_answered(error: BaseException, words: str) -> None:
    """A judge's, for example: the endpoint of the policy is none of its business."""
    ending = Ending(Outcome.AGENT_ERROR, describe(error), exception=error)
    said = with_gateway(ending, AttemptSummary(calls=1)).error or ""
    assert words in said
    assert "api_key=llm.api_key" not in said


def test_a_client_without_a_key_of_an_agent_that_was_not_heard() -> None:
    error = type("OpenAIError", (Exception,), {"__module__": "openai"})(NO_KEY)
    ending = Ending(Outcome.AGENT_ERROR, describe(error), exception=error)
    assert "api_key=llm.api_key" in (with_gateway(ending, AttemptSummary()).error or "")


class ChatCompletion:
    """Named as the answer of a client that is not async."""


async def waits_for_no_coroutine() -> None:
    await ChatCompletion()  # pyright: ignore[reportGeneralTypeIssues]


async def asks() -> None:
    """A call that nobody awaits."""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.LLM(endpoint='x', model='m').base_url", "OpenAI(base_url=llm.endpoint, api_key=llm.api_key)"),
        ("agl.LLM(endpoint='x', model='m').model_name", "model=llm.model"),
        ("agl.LLM(endpoint='x', model='m')('hello')", "OpenAI(base_url=llm.endpoint"),
        ("__import__('langchain_that_is_not_here')", "Install the package into the environment that runs the agent"),
    ],
)
def test_what_agents_raise(wrong: str, words: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever Python makes of it
        eval(wrong, NAMES)
    assert words in (hint_for(caught.value) or "")


async def test_what_async_agents_raise() -> None:
    forgotten = asks()
    with pytest.raises(AttributeError) as caught:
        _ = forgotten.choices  # pyright: ignore[reportAttributeAccessIssue]
    forgotten.close()
    assert "`await` is missing" in (hint_for(caught.value) or "")
    with pytest.raises(TypeError) as caught:
        await waits_for_no_coroutine()
    assert "take AsyncOpenAI" in (hint_for(caught.value) or "")
    inner = asks()
    with pytest.raises(RuntimeError) as caught:
        asyncio.get_running_loop().run_until_complete(inner)
    assert "await the coroutine" in (hint_for(caught.value) or "")
    with pytest.raises(RuntimeError) as caught:
        __import__("asyncio").run(inner)
    inner.close()
    assert "await the coroutine" in (hint_for(caught.value) or "")


@pytest.mark.parametrize(
    ("template", "given", "words"),
    [
        (
            "Solve {question}: {hint}",
            {"question": "1 + 1"},
            ["'Solve {question}: {hint}'", "'hint'", "given: question"],
        ),
        ("Solve {question}", {}, ["'question'", "given: nothing"]),
        ("Solve {}", {"question": 1}, ["placeholder without a name (write {question}, not {})", "given: question"]),
        ('Answer as {"a": 1}: {q}', {"q": 1}, ["written twice: {{ and }}"]),
        ("A lone { brace", {"q": 1}, ["written twice"]),
        ("{task.question}", {"task": {"question": 1}}, ["no attribute 'question'", "given: task"]),
        ("{task[other]}", {"task": {"question": 1}}, ["needs 'other'"]),
        ("x" * 500 + "{q}", {}, ["x…'", "'q'"]),
    ],
)
def test_a_template_that_cannot_be_filled(template: str, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(agl.AgentLightningError) as caught:
        agl.PromptTemplate(template=template).format(**given)
    for each in words:
        assert each in str(caught.value)
    assert isinstance(caught.value, KeyError), "as scripts of 0.3 may catch it"
    assert len(str(caught.value)) < 400


async def test_a_timeout_says_which_limit_it_was(tmp_path: Path) -> None:
    async def sleeps(task: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    algorithm = agl.Baseline(rollout_config=agl.RolloutConfig(timeout_seconds=0.2))
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", console=SilentConsole())
    await trainer.fit_async(sleeps, [1])
    (episode,) = algorithm.episodes
    assert episode.outcome is Outcome.TIMEOUT
    for words in ("after 0.2 s", "timeout_seconds", "--timeout"):
        assert words in ((episode.attempt and episode.attempt.error) or "")
