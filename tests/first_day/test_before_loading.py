"""Everything that can be known is said before a model is loaded: of tasks of every kind, of models, of settings.

The model that is named here does not exist, so what is answered with other words was found before it was looked for.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import agentlightning as agl
from agentlightning.algorithm.features import PARTS
from agentlightning.algorithm.part import Part
from agentlightning.metrics import Sink
from agentlightning.trainer.checks import check_agents_resources, shared_tasks
from agentlightning.trainer.words import FAR_TOO_HIGH


@agl.rollout
def agent(task: Any, llm: agl.LLM) -> float:
    return 1.0


def fit(tasks: Any, val: Any = None, *, model: str = "no/such/model/here", **settings: Any) -> None:
    algorithm = agl.GRPO(model=model, steps=1, **settings)
    agl.Trainer(algorithm=algorithm, run_dir="run", console=agl.metrics.SilentConsole()).fit(agent, tasks, val)


def refused(tasks: Any, val: Any = None, **settings: Any) -> str:
    with pytest.raises(agl.ConfigError) as caught:
        fit(tasks, val, **settings)
    assert not Path("run").exists(), "nothing was begun"
    return str(caught.value)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 1, 1),
        datetime.date(2026, 1, 1),
        Decimal("1.5"),
        float("nan"),
        float("inf"),
        {1, 2},
        b"bytes",
        Path("x"),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("place", ["a field", "deep", "a list"])
def test_a_task_that_is_no_json_is_named_with_its_number_and_field(value: Any, place: str) -> None:
    task, field = {
        "a field": ({"q": 1, "when": value}, "when"),
        "deep": ({"order": {"when": value}}, "order.when"),
        "a list": ({"items": [1, value]}, "items[1]"),
    }[place]
    good = [{"q": n} for n in range(5)]
    for tasks, val, what in (([*good, task], None, "training"), (good, [*good, task], "validation")):
        said = refused(tasks, val)
        assert f"Of the {what} tasks, number 6" in said
        assert repr(field) in said


class Pair(NamedTuple):
    q: int
    a: int


@pytest.mark.parametrize(
    ("task", "field", "words"),
    [
        ({1: "x"}, "", ["the key 1, a int", 'Write "1"']),
        ({"options": {2: "x"}}, "options", ["the key 2, a int"]),
        ({"options": [{True: "x"}]}, "options[0]", ["the key True, a bool", 'Write "True"']),
        ({None: 1}, "", ["the key None, a NoneType"]),
        ({0.5: 1}, "", ["the key 0.5, a float"]),
        (Pair(1, 2), "", ["a plain list of a Pair", "task._asdict()"]),
        ({"pair": Pair(1, 2)}, "pair", ["a plain list of a Pair"]),
    ],
    ids=str,
)
def test_a_task_that_json_would_change_is_named(task: Any, field: str, words: list[str]) -> None:
    said = refused([{"q": 1}, task])
    for each in (*words, "Of the training tasks, number 2", *([repr(field)] if field else [])):
        assert each in said


@pytest.mark.parametrize("algorithm", [agl.GRPO(model="no/such/model"), agl.Baseline(model="no/such/model"), None])
@pytest.mark.parametrize("name", ["prompt_template", "client", "tools", "main_llm2"])
def test_a_parameter_that_no_resource_fits(algorithm: Any, name: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def mine(task, {name}): return 1.0", names)
    trainer = agl.Trainer(algorithm=algorithm, run_dir="run", console=agl.metrics.SilentConsole())
    with pytest.raises(agl.ConfigError, match=f"has a parameter '{name}'"):
        trainer.fit(names["mine"], [1])
    assert not Path("run").exists()


def test_an_agent_that_wants_a_model_where_there_is_none() -> None:
    with pytest.raises(agl.ConfigError, match=r"asks for an LLM and there is none.*models=\{'llm': agl\.Provider\("):
        agl.Trainer(run_dir="run", console=agl.metrics.SilentConsole()).fit(agent, [1])
    assert not Path("run").exists()


@pytest.mark.parametrize("name", ["llm", "main_llm", "policy", "judge", "resources", "rollout", "mine"])
def test_parameters_that_will_be_filled(name: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def given(task, {name}): return 1.0", names)
    check_agents_resources(
        agl.rollout(names["given"]), agl.GRPO(model="x"), {"mine": agl.PromptTemplate(template="")}, ["judge"]
    )


def test_an_algorithm_of_ones_own_may_make_resources() -> None:
    @agl.algo
    def mine(train_dataset: Any) -> None: ...

    check_agents_resources(agl.rollout(lambda task, anything: 1.0), mine, {}, [])


def of_library(library: str, name: str, base: type = object, **members: Any) -> Any:
    """An object of a class of this name of a library, as its users hold it."""
    kind = type(name, (base,), {"__module__": f"{library}.somewhere", **members})
    return kind()


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (lambda: of_library("datasets", "DatasetDict", dict), "Give one of them"),
        (lambda: of_library("polars", "DataFrame"), "frame.to_dicts()"),
        (lambda: of_library("pandas", "DataFrame"), "frame.to_dict('records')"),
        (lambda: of_library("torch", "DataLoader", __len__=lambda self: 3), "loader.dataset"),
        (lambda: of_library("datasets", "IterableDataset"), "list(dataset.take("),
    ],
    ids=["DatasetDict", "polars", "pandas", "DataLoader", "stream"],
)
def test_what_libraries_hold_tasks_in(tasks: Callable[[], Any], words: str) -> None:
    assert words in refused(tasks())


def test_the_splits_of_a_data_set_are_named() -> None:
    splits = of_library("datasets", "DatasetDict", dict)
    splits.update(train=[1], test=[2])
    said = refused(splits)
    assert "'train', 'test'" in said
    assert "dataset['train']" in said


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1},\n{"a": 2},\n', "comma at the end of the line"),
        ("b.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "git lfs pull"),
        ("c.csv", "What is 2+2?,4\nWhat is 3+3?,6\n", "Put a line with the names in front"),
        ("d.csv", "1,2\n3,4\n", "Put a line with the names in front"),
        ("e.csv", "yes,yes\nno,yes\n", "Put a line with the names in front"),
    ],
)
def test_files_that_are_nearly_right(name: str, text: str, words: str) -> None:
    Path(name).write_text(text)
    assert words in refused(name)


@pytest.mark.parametrize("text", ["question,answer\n2+2,4\n", "id\n1\n2\n", "q1,q2\na,b\n"])
def test_a_csv_with_a_heading_is_read(text: str) -> None:
    from agentlightning.trainer.tasks import load_tasks

    Path("a.csv").write_text(text)
    assert len(load_tasks("a.csv")) == len(text.splitlines()) - 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("openai/gpt-4o", "agl optimize"),
        ("anthropic/claude-sonnet-4", "agl optimize"),
        ("google/gemini-2.5-pro", "agl optimize"),
        ("./weights.gguf", "cannot be trained"),
        ("ggufs", "cannot be trained"),
    ],
)
def test_models_that_can_never_be_trained(model: str, words: str) -> None:
    Path("ggufs").mkdir()
    Path("ggufs", "model-q4.gguf").touch()
    with pytest.raises(agl.ModelError) as caught:
        fit([1], model=model)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["keep_checkpoints", "save_every", "group_size", "tasks_per_step", "seed", "gamma"])
def test_none_is_no_number_where_a_setting_has_no_none(name: str) -> None:
    with pytest.raises(agl.ConfigError, match=name):
        agl.GRPO(model="calc", **{name: None})  # pyright: ignore[reportArgumentType]


def test_a_home_is_a_home_for_all_files_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert agl.Trainer(run_dir="~/mine").run_dir == folder / "home" / "mine"


class Heard(Sink):
    """What a run warns of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_validation_tasks_that_are_trained_and_a_rate_far_off_are_said() -> None:
    from agentlightning.metrics import Reporter
    from agentlightning.trainer.words import introduce

    heard = Heard()
    algorithm = agl.GRPO(model="calc", learning_rate=0.5)
    tasks = [{"q": n} for n in range(4)]
    introduce(Reporter(heard), algorithm, Path("run"), tasks, tasks[2:])
    said = " ".join(heard.warnings)
    assert "2 validation tasks are training tasks, too, of 2" in said
    assert "learning rate 0.5 is" in said
    heard.warnings.clear()
    usual = agl.GRPO(model="calc").peak_rate
    introduce(Reporter(heard), agl.GRPO(model="calc", learning_rate=usual * FAR_TOO_HIGH / 2), Path("r"), tasks, [9])
    assert heard.warnings == []


def test_equal_tasks_are_equal_in_whatever_order_their_fields_stand() -> None:
    assert shared_tasks([{"a": 1, "b": 2}], [json.loads('{"b": 2, "a": 1}'), {"a": 2}]) == 1
    assert shared_tasks(None, [1]) == shared_tasks([1], None) == 0


def test_every_part_that_a_message_tells_people_to_give_exists() -> None:
    from agentlightning.trainer.checks import _PARTS

    for _, example in _PARTS.values():
        name = example.partition("(")[0]
        found: Any = agl
        for part in name.split("."):
            found = getattr(found, part)
        assert isinstance(found, type), example


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_an_agent_is_checked_by_each_feature_before_the_model_is_looked_for(kind: type[Part]) -> None:
    """A feature that reads the model's files for its settings would be answered with words about the model."""
    for settings in (agl.GRPO(model="no/such/model"), agl.GRPO(model="no/such/model", credit="branches", branches=2)):
        if (part := kind.of(settings)) is not None:
            part.check_agent(settings, agent)
