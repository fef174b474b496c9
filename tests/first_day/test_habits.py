"""Habits of other libraries and programs, and half-copied lines: each is answered with what is written here instead."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import agentlightning as agl
from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.metrics import SilentConsole
from agentlightning.models import resolve_model
from agentlightning.runner.endings import (
    HUNG_UP,
    NOT_AS_EXPECTED,
    OWN_ADDRESS,
    TOO_MANY_FILES,
    Ending,
    describe,
    hint_for,
    hint_with_calls,
    hint_without_calls,
    with_gateway,
)
from agentlightning.trainer.checks import as_agent, as_tasks
from agentlightning.trainer.words import numbers_as_text
from agentlightning.types import Outcome
from agentlightning.types.reward import checked_reward

from .day import said, script

NAMES: dict[str, Any] = {"agl": sys.modules["agentlightning"], "OpenAI": OpenAI}
LLM = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")


def agent(task: Any, llm: agl.LLM) -> float:
    return 1.0


# ---- other libraries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((f"{a}Trainer", f"Trainer(algorithm={a}(model=…)).fit(agent, tasks)") for a in ("GRPO", "PPO", "DPO", "SFT")),
        *((f"{a}Config", f"{a}(model=…, learning_rate=…)") for a in ("GRPO", "RLOO", "DPO", "SFT")),
        ("LightningModule", "PyTorch Lightning"),
        ("train", "Trainer(algorithm=GRPO(model=…)).fit"),
        ("init", "nothing to set up"),
        ("evaluate", "agl eval RUN"),
        ("load_model", "GRPO(model='runs/NAME')"),
        ("seed", "GRPO(model=…, seed=1)"),
        ("Model", "A model is named"),
        ("serve", "agl serve RUN"),
        ("Tool", "the agent's own"),
        ("Store", "SqliteLightningStore('store.db')"),
        ("Environment", "@agl.rollout"),
        ("LoraConfig", "lora_rank=16"),
        ("algorithms", "from agentlightning import GRPO, Trainer"),
    ],
)
def test_names_that_are_other_libraries(name: str, words: str) -> None:
    assert not hasattr(agl, name)
    for wrong in (lambda: getattr(agl, name), lambda: exec(f"from agentlightning import {name}")):
        with pytest.raises(agl.ConfigError) as caught:
            wrong()
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.GRPO(model='calc', args={})", "Each setting is an argument of its own"),
        ("agl.GRPO(model='calc', num_iterations=2)", "Did you mean update_epochs?"),
        ("agl.GRPO(model='calc', max_prompt_len=2)", "max_context bounds prompt and response"),
        ("agl.Trainer(store='http://h:4747')", "agl.LightningStoreClient('http://h:4747')"),
        ("agl.GRPO(model='calc', config={})", "Each setting is an argument of its own"),
        ("agl.GRPO(model='calc', **{'actor_rollout_ref.rollout.n': 8})", "Did you mean group_size?"),
        ("agl.GRPO(model='calc', **{'data.train_batch_size': 8})", "Did you mean tasks_per_step?"),
        ("agl.GRPO(model='calc', **{'actor_rollout_ref.actor.optim.lr': 8})", "Did you mean learning_rate?"),
        ("agl.Trainer.fit(agent, [1])", "Trainer(…).fit(…)"),
        ("agl.Trainer.dev(agent, [1])", "Trainer(…).dev(…)"),
        ("agl.rollout(dict)", "dict is a class, and @agl.rollout is for a def"),
        ("agl.Provider(base_url='http://h/v1/chat/completions')", "clients add /chat/completions themselves"),
        ("agl.Provider(base_url='http://h/v1', api_key='Bearer sk-1')", "Give the key alone"),
        ("agl.Provider(base_url='http://h/v1', api_key='sk-1\\n')", "take .strip()"),
    ],
)
def test_lines_that_are_other_libraries(wrong: str, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        eval(wrong, {**NAMES, "agent": agent})
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["Trainer", "GRPO", "rollout", "emit_reward"])
def test_names_that_are_in_the_other_package(name: str) -> None:
    import agent_lightning

    with pytest.raises(AttributeError, match=rf"agentlightning\.{name}"):
        getattr(agent_lightning, name)
    assert not hasattr(agent_lightning, "frobnicate")


@pytest.mark.parametrize(
    "signature",
    [
        "prompts, completions, **kwargs",
        "completions, answer",
        "data_source, solution_str, ground_truth, extra_info=None",
        "task, completion",
        "prompt, completion, info",
    ],
)
def test_reward_functions_of_other_trainers(signature: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def reward({signature}): return 1.0", names)
    with pytest.raises(agl.ConfigError) as caught:
        agl.Trainer(algorithm=agl.GRPO(model="calc"), console=SilentConsole()).fit(names["reward"], [1])
    parameter = signature.split(",")[1].strip()
    assert ("the agent itself calls the model" in str(caught.value)) or parameter == "answer"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama3.2:1b", "a name of Ollama's"),
        ("me/model:latest", "a name of Ollama's"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "its Hugging Face id is 'Qwen/Qwen3-0.6B'"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "its Hugging Face id is 'Qwen/Qwen3-0.6B'"),
    ],
)
def test_names_of_models_that_others_have(name: str, words: str) -> None:
    with pytest.raises(agl.ModelError) as caught:
        resolve_model(name)
    assert words in str(caught.value)


# ---- agents ---------------------------------------------------------------------------------------------------------


class Nothing(agl.LitAgent[Any]):
    def run(self, task: Any) -> float:
        return 1.0


class TaskOnly(agl.LitAgent[Any]):
    def rollout(self, task: Any) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 1.0


class TaskAndModel(agl.LitAgent[Any]):
    async def rollout_async(self, task: Any, llm: Any) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 1.0


class Whole(agl.LitAgent[Any]):
    def training_rollout(self, *given: Any) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 1.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Nothing, "Nothing has no method that runs a task"),
        (TaskOnly, "def rollout(self, task, resources, rollout)"),
        (TaskAndModel, "def rollout_async(self, task, resources, rollout)"),
    ],
)
def test_classes_whose_method_cannot_be_called(kind: type[agl.LitAgent[Any]], words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        agl.Trainer(algorithm=agl.GRPO(model="no/such/model"), console=SilentConsole()).fit(kind(), [1])
    assert words in str(caught.value)
    as_agent(Whole())


def test_a_parameter_that_is_none_is_filled_where_it_can_be() -> None:
    seen: list[Any] = []

    def mine(task: Any, llm: Any = None, rollout: Any = None, other: Any = None, own: str = "mine") -> float:
        seen.append((llm, rollout is not None, other, own))
        return 1.0

    trainer = agl.Trainer(algorithm=agl.Baseline(), initial_resources={"llm": LLM}, console=SilentConsole())
    with pytest.MonkeyPatch.context() as places:
        places.chdir(Path(__file__).parent)
        agl.litagent.FunctionAgent(mine).rollout(1, {"llm": LLM, "own": LLM}, rollout=object())  # pyright: ignore
    assert seen == [(LLM, True, None, "mine")]
    assert trainer.initial_resources["llm"] is LLM


class ChatCompletion:
    """Named as the answer of a client."""


class Stream:
    """Named as a streamed one."""


RAISES: list[tuple[str, str]] = [
    ("llm['endpoint']", "model=llm.model"),
    ("llm.generate('hi')", "model=llm.model"),
    ("llm.chat.completions", "model=llm.model"),
    ("ChatCompletion()['choices']", "answer.choices[0].message.content"),
    ("Stream().choices", "for chunk in answer"),
    ("{'question': 1}.question", 'task["question"]'),
    ("OpenAI(endpoint='x', api_key='y')", "goes by another name there: OpenAI(base_url="),
    ("OpenAI(api_base='x', api_key='y')", "goes by another name there: OpenAI(base_url="),
    ("__import__('json').dumps({'tools': [len]})", "no Python function"),
    ("__import__('json').dumps({'tools': [print_it]})", "no Python function"),
    ("__import__('os').environ['OPENAI_API_KEY']", "api_key=llm.api_key"),
    ("__import__('os').environ['ANTHROPIC_API_KEY']", "api_key=llm.api_key"),
]


@pytest.mark.parametrize(("wrong", "words"), RAISES, ids=[wrong for wrong, _ in RAISES])
def test_what_first_agents_raise(monkeypatch: pytest.MonkeyPatch, wrong: str, words: str) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    here = {**NAMES, "llm": LLM, "ChatCompletion": ChatCompletion, "Stream": Stream, "print_it": agent}
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever Python makes of it
        eval(wrong, here)
    assert words in (hint_for(caught.value) or "")


@pytest.mark.parametrize(
    "wrong",
    [
        "float('forty-two')",
        "__import__('json').loads('forty-two')",
        "'42'.split('####')[1]",
        "__import__('json').loads('42')['answer']",
        "{}['answer']",
        "1 / len('')",
        "__import__('ast').literal_eval('f(')",
    ],
)
def test_code_that_fails_at_what_a_model_wrote(wrong: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever Python makes of it
        eval(wrong)
    assert hint_with_calls(caught.value) == NOT_AS_EXPECTED
    assert hint_without_calls(caught.value) is None, "the model wrote nothing yet"
    ending = Ending(Outcome.AGENT_ERROR, describe(caught.value), exception=caught.value)
    assert NOT_AS_EXPECTED in (with_gateway(ending, AttemptSummary(calls=1)).error or "")


def test_a_process_that_may_open_no_more_files() -> None:
    class APIConnectionError(Exception):
        """As clients call it."""

    raised = APIConnectionError("Connection error.")
    raised.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert hint_without_calls(raised) == TOO_MANY_FILES
    raised.__cause__ = ConnectionResetError("Connection reset by peer")
    assert hint_without_calls(raised) == HUNG_UP
    raised.__cause__ = ConnectionRefusedError("Connection refused")
    assert hint_without_calls(raised) == OWN_ADDRESS


def test_a_provider_that_has_nothing_at_this_address() -> None:
    where = "The provider of 'llm' answered 404. Its base URL is http://h:1; that of most servers ends in /v1."
    ending = Ending(Outcome.AGENT_ERROR, "NotFoundError: 404\n  File …")
    told = with_gateway(ending, AttemptSummary(refused_by_provider=where)).error or ""
    assert told.splitlines() == ["NotFoundError: 404", where, "  File …"]
    assert with_gateway(ending, AttemptSummary(refused_by_provider=where, forwarded=1)).error == ending.error


@pytest.mark.parametrize("value", [ChatCompletion(), object(), agent], ids=["answer", "object", "function"])
def test_a_reward_that_is_an_object(value: Any) -> None:
    with pytest.raises(agl.AgentLightningError, match="Return what the answer is worth"):
        checked_reward(value)


@pytest.mark.parametrize("template", ["{question}", "Solve {question} as {how}"])
def test_a_template_that_is_given_a_task_without_its_name(template: str) -> None:
    with pytest.raises(agl.AgentLightningError, match=r"format\(\*\*task\)"):
        agl.PromptTemplate(template=template).format({"question": 1})


def test_a_template_with_a_placeholder_that_has_no_name() -> None:
    with pytest.raises(agl.AgentLightningError, match=r"write \{question\}, not \{\}"):
        agl.PromptTemplate(template="Solve {}").format(question="1 + 1")


@pytest.mark.parametrize("template", ["Solve {{question}}", "Solve {{ question }} {how}"])
def test_a_template_of_jinja_that_is_not_said_to_be_one(template: str) -> None:
    with pytest.raises(agl.AgentLightningError, match=r"Write \{question\}, or make it .* engine='jinja'"):
        agl.PromptTemplate(template=template).format(question="1 + 1", how="slowly")


@pytest.mark.parametrize(
    "template", ["{question} as {{question}}", "{question!s} {{ question }}", '{question} {{"a": 1}}']
)
def test_braces_that_are_text(template: str) -> None:
    assert "1 + 1" in agl.PromptTemplate(template=template).format(question="1 + 1")


# ---- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"train": [1], "test": [2]}, "fit(agent, sets['train'], val_dataset=sets['test'])"),
        ({"train": [1]}, "fit(agent, sets['train'])"),
        (([{"q": 1}], [{"q": 2}]), "fit(agent, tasks, val_dataset=others)"),
        ("What is 1 + 1?", "in a list, fit(agent, ['…'])"),
        ('["1 + 1"]', "in a list, fit(agent, ['…'])"),
        ("data\\tasks.jsonl", "Folders stand behind / here: data/tasks.jsonl"),
        (Path("https://example.com/t.jsonl"), "'https://example.com/t.jsonl' is an address: download the file first"),
        ("comment.jsonl", "JSON has no comments"),
        ("slashes.jsonl", "JSON has no comments"),
    ],
    ids=str,
)
def test_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: Any, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/tasks.jsonl").write_text("1\n")
    Path("comment.jsonl").write_text("# mine\n1\n")
    Path("slashes.jsonl").write_text("1\n// mine\n")
    with pytest.raises(agl.ConfigError) as caught:
        as_tasks("training", tasks)
    assert words in str(caught.value)


@pytest.mark.parametrize("tasks", [[("a", 1), ("b", 2)], ([1, 2], [3, 4]), (1, 2), [[{"role": "user"}]] * 2])
def test_lists_and_pairs_that_are_tasks(tasks: Any) -> None:
    assert len(as_tasks("training", tasks)) == 2


def test_numbers_in_quotes_are_named_where_nothing_was_learned() -> None:
    (words,) = numbers_as_text([{"question": "1 + 1", "answer": "2"}, {"question": "2 + 2", "answer": "4.5"}])
    assert "field 'answer' is text, such as '2'" in words
    for tasks in (None, [], ["2", "3"], [{"id": 2}], [{"answer": "two"}], [{"answer": "2"}, {"answer": "no"}]):
        assert numbers_as_text(tasks) == []


@pytest.mark.parametrize("field", ["answer", "expected", "label"])
@pytest.mark.parametrize("value", [5, -1.5])
def test_a_number_that_no_text_equals(field: str, value: float) -> None:
    (words,) = numbers_as_text([{"id": 1, field: value}, {"id": 2, field: 7}])
    assert f"field '{field}' is a number, such as {value}" in words
    assert f"take str(task['{field}'])" in words
    for other in (True, None, "five", [5]):
        assert numbers_as_text([{"id": 1, field: other}]) == []


# ---- scripts and commands -------------------------------------------------------------------------------------------


def test_a_column_of_the_metrics_is_asked_for_row_by_row() -> None:
    result = agl.RunResult(Path("run"), None, False, [{"reward": 0.25}, {"reward": 0.5}])
    with pytest.raises(TypeError, match=r"result\.metrics\[-1\]\['reward'\]"):
        result.metrics["reward"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert result.metrics[-1]["reward"] == 0.5
    assert [row.get("reward") for row in result.metrics[:2]] == [0.25, 0.5]


@pytest.mark.parametrize("name", ["reward", "history", "zzz"])
def test_what_a_result_has(name: str) -> None:
    result = agl.RunResult(Path("run"), None, False)
    with pytest.raises(AttributeError, match=r"result\.metrics\[-1\]\['reward'\]"):
        getattr(result, name)
    with pytest.raises(TypeError, match=r"result\.metrics\[-1\]\['reward'\]"):
        _ = result[name]  # pyright: ignore[reportIndexIssue]
    assert not hasattr(result, name)


def test_a_file_that_hides_a_package(tmp_path: Path) -> None:
    (tmp_path / "openai.py").write_text("print('mine')\n")
    (tmp_path / "train.py").write_text("import agentlightning\nfrom openai import OpenAI\n")
    # an interpreter of its own: what hides a package must be imported first
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "hides the package 'openai': give the file another name" in done.stderr


@pytest.mark.parametrize("name", ["types", "enum", "functools", "threading", "dataclasses", "re", "json", "logging"])
def test_a_file_that_hides_what_everything_needs(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text("import agentlightning as agl\nagl.Trainer(algorithm=agl.GRPO(model='calc'))\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"{name}.py is a file of yours, and hides the package '{name}': give the file another name" in done.stderr


@pytest.mark.parametrize("name", ["random", "queue", "secrets"])
@pytest.mark.quick_with("queue")
def test_a_script_that_has_the_name_of_a_package(tmp_path: Path, name: str) -> None:
    text = f"import {name}\nimport agentlightning as agl\nagl.Trainer\nimport {name}\n{name}.none_has_this\n"
    (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"hides the package '{name}': give the file another name" in done.stderr


@pytest.mark.quick_with("openai")
@pytest.mark.parametrize("name", ["openai", "renderers"])
def test_a_script_that_training_would_import(tmp_path: Path, name: str) -> None:
    """It waited for ever, for itself."""
    trains = "agl.Trainer(algorithm=agl.Baseline(model='calc')).fit(lambda task: 1.0, [1])"
    text = f"import agentlightning as agl\n{trains}\n"
    (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"hides the package '{name}': give the file another name" in done.stderr
    assert not (tmp_path / "runs").exists()


def run_killable(command: list[str], folder: Path) -> str:
    """What the command writes to its standard error; one that does not end within a minute is killed."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            return process.communicate(timeout=60)[1]
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["openai", "renderers", "tokenizers", "jinja2"])
@pytest.mark.quick_with("openai")
def test_a_file_with_a_packages_name_that_trains(tmp_path: Path, name: str) -> None:
    """The script that trained waited for it, and it for the script."""
    text = (
        "import agentlightning as agl\nagl.Trainer(algorithm=agl.Baseline(model='calc')).fit(lambda task: 1.0, [1])\n"
    )
    (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "train.py").write_text(text)
    done = run_killable([sys.executable, "train.py"], tmp_path)
    assert f"{name}.py is a file of yours, and hides the package '{name}': give the file another name" in done


def test_fit_is_no_coroutine(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        "import asyncio\n"
        "trainer = agl.Trainer(run_dir='run', console=agl.metrics.SilentConsole())\n"
        "asyncio.run(trainer.fit(lambda task: 1.0, [1]))\n",
    )
    assert done.returncode == 1
    assert (tmp_path / "run" / "store.db").exists()
    with pytest.raises(ValueError, match="a coroutine was expected"):
        asyncio.run(agl.RunResult(tmp_path, None, False))  # pyright: ignore[reportArgumentType]
    said(done, "Leave asyncio.run out")


def test_an_error_that_ends_a_thread_is_in_words(tmp_path: Path) -> None:
    text = "import threading\nthread = threading.Thread(target=agl.Trainer().fit, args=(1, [1]))\n"
    done = script(tmp_path, text + "thread.start()\nthread.join()\nprint('the script goes on')\n")
    assert "Traceback" not in done.stderr, done.stderr
    said(done, "Error: ", "the script goes on")


@pytest.mark.parametrize("script", ["agent.sh", "grade.sh"])
def test_a_script_with_the_line_ends_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("agent.sh", "grade.sh"):
        Path(name).write_bytes(b"#!/usr/bin/env python3\r\n1\r\n" if name == script else b"#!/bin/sh\necho 1\n")
        Path(name).chmod(0o755)
    with pytest.raises(agl.ConfigError, match=f"{script} has the line ends of Windows"):
        agl.Program(["./agent.sh"], grader=["./grade.sh"]).check_machine()
