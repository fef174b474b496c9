"""Arguments of another kind than is taken: refused where they are given, and not by each rollout."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.records import names_of
from agentlightning.arguments import of_its_kinds
from agentlightning.emitter.record import plain
from agentlightning.metrics import Sink
from agentlightning.models.shape import known_shape
from agentlightning.runner.endings import CALL_IT, NO_AWAIT, hint_for, hint_with_calls
from agentlightning.trainer.folder import prepare_folder
from agentlightning.trainer.strategy import Strategy

NAMES: dict[str, Any] = {"agl": sys.modules["agentlightning"], "Path": Path}
LATE = "agl.Program(['python', '-V'], {})"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("agl.Limits(memory_bytes='2GB')", "memory_bytes of Limits is '2GB'; it must be a whole number (or None)."),
        ("agl.Limits(memory_bytes=2e9)", "it must be a whole number"),
        ("agl.Limits(cpu_seconds=True)", "it must be a whole number"),
        ("agl.Bubblewrap(read='/data')", "read of Bubblewrap is '/data'; it must be a list of texts or paths."),
        ("agl.Container('python:3.11')", "it must be a list of texts"),
        ("agl.Kubernetes(image=3)", "it must be a text"),
        ("agl.SpendingLimits(cost='5,5')", "it must be a number (or None). A number has a point here: 5.5."),
        ("agl.TokenPrice(input='5%')", "Write 5% as 0.05"),
        ("agl.Provider(base_url='http://a/v1', limits={'cost': 1})", "it must be agl.SpendingLimits(…)"),
        (
            "agl.Provider(base_url='http://a/v1', headers={'a': 1})",
            "headers of Provider is {'a': 1}; it must be a dict",
        ),
        ("agl.Prices(1, 2)", "for example Prices(critic_input=…)"),
        ("agl.LossSpec(lambda entries, config: 0)", "path of LossSpec is <function"),
        ("agl.Constraint()", "Constraint needs part"),
        ("agl.load_example('calc')", "load_example needs module"),
        ("agl.Trainer(sinks='tensorbord')", "There is no tracker 'tensorbord'"),
        ("agl.Trainer(sinks=[3])", "which is no Sink"),
        ("agl.Trainer(sinks=[agl.metrics.JsonlSink])", "Give an object: JsonlSink(…)"),
        ("agl.Trainer(verbose=False)", "Trainer(console=agl.metrics.SilentConsole())"),
        ("agl.Trainer(sinks=[print])", "class Mine(agl.metrics.Sink), def step(self, metrics)"),
        ("agl.Trainer(sinks={'wandb': {'project': 'x'}})", "A sink is no dict"),
        ("agl.Trainer(sinks=['wandb:my-project'])", "sinks=[WandbSink('my-project')]"),
        (LATE.format("limits={'cpu_seconds': 1}"), "limits of Program is {'cpu_seconds': 1}; it must be agl.Limits(…)"),
        (LATE.format("env={'A': 1}"), "env of Program is {'A': 1}; it must be a dict of texts"),
        (LATE.format("grader=1.0"), "it must be a list of texts or a text or a function (or None)"),
        (LATE.format("files='none'"), "there is no such folder here"),
        (LATE.format("files=__file__"), "and that is a file. Give the folder that is copied"),
        (LATE.format("workspaces=__file__"), "and that is a file. Give a folder (--workspaces)"),
    ],
)
def test_what_is_given(wrong: str, words: str) -> None:
    with pytest.raises(agl.ConfigError) as caught:
        eval(wrong, {**NAMES, "__file__": __file__})
    assert words in str(caught.value)


@pytest.mark.parametrize("wrong", [3, [["a"]], {1: 2}, None])
def test_no_setting_of_training_meets_a_value_of_another_kind_with_a_traceback(wrong: object) -> None:
    """Of each setting by its flat name; a value that happens to be right is taken."""
    for name in names_of(agl.GRPO):
        with suppress(agl.AgentLightningError):
            agl.GRPO(**{"model": "calc", name: wrong})
    with pytest.raises(agl.ConfigError, match="policies takes a list of different names"):
        agl.GRPO(model="calc", policies=["solver"], frozen=[wrong])  # pyright: ignore[reportArgumentType]


def test_numbers_and_texts_of_other_libraries_are_taken() -> None:
    assert agl.Limits(memory_bytes=np.int64(5)).memory_bytes == 5  # pyright: ignore[reportArgumentType]
    assert agl.TokenPrice(input=np.float64(0.5)).input == 0.5
    assert agl.Bubblewrap(read=(Path("/data"), "/pages")).read


def test_hints_that_say_more_are_left_alone() -> None:
    @of_its_kinds
    def given(one: Any, other: type | None = None, third: list[int] | None = None) -> Any:
        return one

    assert given("a", other="text") == "a"  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"third of given is \['b'\]; it must be a list of whole numbers"):
        given("a", third=["b"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="missing 1 required"):
        given()  # pyright: ignore[reportCallIssue]


def emitted(wrong: str) -> BaseException:
    with pytest.raises((TypeError, agl.AgentLightningError)) as caught:
        eval(wrong, {**NAMES, "plain": plain})
    return caught.value


@pytest.mark.parametrize("wrong", ["agl.emit_message({'a': 1})", "agl.emit_exception('oops')", "plain('tag')"])
def test_an_emitter_is_not_what_the_model_wrote(wrong: str) -> None:
    assert hint_with_calls(emitted(wrong)) is None


def test_an_emitter_that_is_awaited_and_an_operation_that_is_not_called() -> None:
    assert hint_for(TypeError("object Span can't be used in 'await' expression")) == NO_AWAIT
    with pytest.raises(TypeError) as caught, agl.operation:  # pyright: ignore[reportGeneralTypeIssues]
        pass
    assert hint_for(caught.value) == CALL_IT


class Late(agl.LitAgent[Any]):
    async def rollout(self, task: Any, resources: Any, rollout: Any) -> float:  # pyright: ignore
        return 1.0


def test_an_async_method_with_the_name_of_the_other() -> None:
    with pytest.raises(agl.ConfigError, match=r"Late\.rollout is async: call it rollout_async"):
        agl.Trainer().fit(Late(), [1])


def test_one_sink_is_as_good_as_several() -> None:
    silent = Sink()
    assert agl.Trainer(sinks=silent).sinks == agl.Trainer(sinks=[silent]).sinks == [silent]


def test_an_empty_variable_is_none() -> None:
    empty = Strategy.read(None, {"AGL_CURRENT_ROLE": "", "AGL_SERVER_PORT": "", "AGL_SERVER_HOST": ""})
    assert empty == Strategy.read(None, {})


def test_a_run_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").touch()
    with pytest.raises(agl.ConfigError, match=r"The run cannot write to .*tasks.jsonl: [A-Z][a-z ]+\. Give a run_dir"):
        prepare_folder(tmp_path / "tasks.jsonl", resuming=False)


def test_a_size_that_is_not_in_the_table() -> None:
    with pytest.raises(agl.ModelError, match=r"no size '7B' here. Give the next larger one: 135m, .*8b"):
        known_shape("7B")
