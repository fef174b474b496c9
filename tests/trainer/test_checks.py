"""What the trainer is given is looked at before anything starts, and a refusal says what to give instead."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.trainer.checks import as_agent, as_tasks


class Frame:
    """Reads like a pandas frame: by the name of a column."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: Any) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize(
    ("tasks", "hint"),
    [
        ((task for task in "ab"), "list(tasks)"),
        ({"question": "?"}, "Give a list"),
        ("questions.jsonl", "There is no file 'questions.jsonl'"),
        (Frame(), "to_dict('records')"),
        (3, "Give a list of them"),
    ],
)
def test_tasks_that_cannot_be_read_by_number(tasks: Any, hint: str) -> None:
    with pytest.raises(agl.ConfigError) as error:
        as_tasks("training", tasks)
    assert hint in str(error.value)


@pytest.mark.parametrize("text", ["\ud800", "a\0b", "\udc00\ud800"])
@pytest.mark.parametrize("shape", [list, tuple, lambda text: {"q": text}, lambda text: {text: [1]}])
@pytest.mark.parametrize("kind", [list, tuple])
def test_texts_that_no_store_holds(kind: Any, shape: Any, text: str) -> None:
    task = shape([text]) if shape in (list, tuple) else shape(text)
    with pytest.raises(agl.ConfigError, match=r"tasks\[1\] of the training tasks"):
        as_tasks("training", kind(["good", task]))


@pytest.mark.parametrize("tasks", [["a"], ("a", "b"), [], range(3)])
def test_tasks_that_can(tasks: Any) -> None:
    assert as_tasks("training", tasks) is tasks


def test_a_class_is_no_agent() -> None:
    class Mine(agl.LitAgent[Any]): ...

    with pytest.raises(agl.ConfigError, match=r"give an instance of it: Mine\(…\)"):
        as_agent(Mine)  # pyright: ignore[reportArgumentType]
    with pytest.raises(agl.ConfigError, match="The agent is the text"):
        as_agent("agent")  # pyright: ignore[reportArgumentType]


async def answer(task: str, punctuation: str = "") -> float:
    return float(len(task + punctuation))


class Callable_:
    async def __call__(self, task: str) -> float:
        return float(len(task))


@pytest.mark.parametrize("agent", [answer, functools.partial(answer, punctuation="!"), Callable_()])
def test_whatever_can_be_called_is_an_agent(agent: Callable[..., Any], tmp_path: Path) -> None:
    algorithm = agl.Baseline()
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path, console=SilentConsole())
    trainer.fit(agent, ["one", "three"])
    assert all(e.good for e in algorithm.episodes)
    assert (tmp_path / "run.json").is_file()


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "grpo"},
        {"algorithm": agl.GRPO},
        {"store": "store.db"},
        {"tracer": "otel"},
        {"hooks": [print]},
        {"initial_resources": {"llm": "gpt"}},
    ],
)
def test_parts_given_by_name(given: Any) -> None:
    with pytest.raises(agl.ConfigError, match=r"Give an object: agl\."):
        agl.Trainer(**given)


def test_no_runners_are_not_one() -> None:
    with pytest.raises(agl.ConfigError, match="at least 1"):
        agl.Trainer(n_runners=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(agl.ConfigError, match="cannot write to"):
        agl.Trainer(run_dir=tmp_path).fit(answer, ["one"])


def test_a_file_is_no_run_dir(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(agl.ConfigError, match="cannot write to"):
        agl.Trainer(run_dir=tmp_path / "file").fit(answer, ["one"])


def test_an_error_shows_the_way_to_fit_and_no_further(tmp_path: Path) -> None:
    with pytest.raises(agl.ConfigError) as error:
        agl.Trainer(run_dir=tmp_path).fit(answer, [])
    functions = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert functions == ["test_an_error_shows_the_way_to_fit_and_no_further", "call", "fit"]  # `explained`'s, and fit
    assert error.value.__suppress_context__


class Own(agl.TracerTraceToTriplet):
    def adapt(self, spans: Any, calls: Any = ()) -> list[agl.Triplet]:
        return []


@pytest.mark.parametrize(
    "adapter", [Own(), agl.TraceToMessages(), agl.TracerTraceToTriplet(reward_match="first_sibling"), object()]
)
def test_an_adapter_that_nothing_would_read_is_refused(adapter: Any) -> None:
    with pytest.raises(agl.ConfigError, match="no effect"):
        agl.Trainer(algorithm=agl.GRPO(model="calc"), adapter=adapter)
    assert agl.Trainer(algorithm=agl.Baseline(), adapter=adapter).adapter is adapter, "there it is read"
