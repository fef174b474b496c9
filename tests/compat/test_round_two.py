"""Names and behaviours of 0.1 to 0.3 that scripts rely on without naming them: what they ask objects for."""

# Older members are there while the program runs, not for the checker.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from agentlightning.semconv import AGL_ANNOTATION, AGL_MESSAGE, AGL_OPERATION  # pyright: ignore[reportMissingImports]
from opentelemetry import trace as otel_trace

import agentlightning as agl
from agentlightning.compat.lookup import NotKept
from agentlightning.compat.table import NAMES
from agentlightning.metrics import SilentConsole
from agentlightning.trainer.strategy import Strategy

NOT_KEPT = [old for old in NAMES if old.to is None and old.name.count(".") <= 1]


@pytest.mark.parametrize("old", NOT_KEPT, ids=lambda old: old.name)
def test_a_name_that_is_not_kept_is_not_there_and_its_import_says_why(old: Any) -> None:
    module, _, name = old.name.partition(":")
    scope: dict[str, Any] = {}
    try:
        exec(f"import {module} as found", scope)
    except NotKept:
        return  # the whole module is not kept
    if hasattr(scope["found"], "__path__"):
        assert not hasattr(scope["found"], name)
        with pytest.raises(AttributeError, match=name):
            getattr(scope["found"], name)
    with pytest.raises(NotKept) as error:
        exec(f"from {module} import {name}")
    assert old.note in str(error.value)


@pytest.mark.parametrize("kind", [agl.SharedMemoryExecutionStrategy, agl.ClientServerExecutionStrategy])
def test_strategies_are_classes(kind: Any) -> None:
    class Own(kind):
        def __init__(self) -> None:
            super().__init__(n_runners=3)

    for made in (kind(n_runners=3), Own()):
        assert isinstance(made, kind)
        assert isinstance(made, agl.ExecutionStrategy)
        assert isinstance(made, Strategy)
        trainer = agl.Trainer(strategy=made)
        assert trainer.n_runners == 3
        assert trainer.strategy.runners == made.runners
        assert (trainer.strategy.key is not None) == (made.runners == "processes")
    with pytest.raises(agl.ConfigError, match="execute would never be called"):

        class Wrong(kind):
            def execute(self, algorithm: Any, runner: Any, store: Any) -> None: ...


async def test_what_a_trace_context_gives_starts_spans() -> None:
    tracer = agl.OtelTracer()
    with tracer.lifespan():
        async with tracer.trace_context() as given:
            with given.start_as_current_span("outer") as outer:
                outer.set_attribute("a", 1)
                given.start_span("inner").end()
    by_name = {span.name: span for span in tracer.last_trace()}
    assert by_name["outer"].attributes == {"a": 1}
    assert by_name["inner"].parent_id == by_name["outer"].span_id


async def test_a_trace_is_drawn_by_its_older_words(tmp_path: Path) -> None:
    tracer = agl.OtelTracer()
    async with tracer.trace_context():
        with otel_trace.get_tracer("x").start_as_current_span("outer"):
            otel_trace.get_tracer("x").start_span("wanted").end()
            otel_trace.get_tracer("x").start_span("other").end()
    spans = tracer.get_last_trace()
    tracer.last_trace().visualize(str(tmp_path / "all"))
    agl.TracerTraceToTriplet().visualize(list(spans), str(tmp_path / "some"), interested_span_match="wanted")
    drawn = (tmp_path / "some.svg").read_text()
    assert "other" in (tmp_path / "all.svg").read_text()
    assert "wanted" in drawn
    assert "outer" in drawn
    assert "other" not in drawn


FILTERS: dict[str, Callable[[str], object]] = {
    "==": lambda name: name == AGL_ANNOTATION,
    "== the text": lambda name: name == "agentlightning.annotation",
    "in a set": lambda name: name in {AGL_ANNOTATION, AGL_OPERATION},
    "in a tuple": lambda name: name in (AGL_ANNOTATION, AGL_OPERATION),
    "a key": lambda name: {AGL_ANNOTATION: True}.get(name),
    "startswith": lambda name: name.startswith(AGL_ANNOTATION),
    "endswith": lambda name: name.endswith(".annotation"),
    "re": lambda name: re.fullmatch(re.escape(AGL_ANNOTATION), name),
    "fnmatch": lambda name: fnmatch(name, "*.annotation"),
    "as JSON": lambda name: json.loads(json.dumps(name)) == AGL_ANNOTATION,
}
"""How scripts choose spans by a name."""


@pytest.mark.parametrize("chosen", FILTERS.values(), ids=FILTERS)
async def test_reward_spans_are_annotations_however_one_looks_for_them(chosen: Callable[[str], object]) -> None:
    tracer = agl.OtelTracer()
    async with tracer.trace_context():
        agl.emit_reward(0.5)
        agl.emit_annotation({"a": 1})
        agl.emit_message("x")
    spans = tracer.get_last_trace()
    assert [agl.get_reward_value(span) for span in spans if chosen(span.name)] == [0.5, None]
    assert [span.name for span in spans if not chosen(span.name)] == [AGL_MESSAGE]


async def test_a_store_finds_reward_spans_by_the_name_of_annotations() -> None:
    store, tracer = agl.InMemoryLightningStore(), agl.OtelTracer()
    rollout = await store.start_rollout("task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    async with tracer.trace_context(store=store, **ids):
        agl.emit_reward(0.5)
        agl.emit_message("x")
    for asked in ({"name": AGL_ANNOTATION}, {"name_contains": "annotation"}):
        (span,) = await store.query_spans(rollout.rollout_id, **asked)
        assert agl.get_reward_value(span) == 0.5
    await store.close()


async def test_what_stores_and_their_pages_were_asked_for() -> None:
    store = agl.InMemoryLightningStore()
    assert isinstance(store, agl.CollectionBasedLightningStore)
    assert (await store.statistics()).get("uptime", -1) >= 0
    ids = [(await store.enqueue_rollout(n)).rollout_id for n in range(4)]
    page = await store.query_rollouts(sort_by="start_time")
    assert isinstance(page, Sequence)
    assert [r.rollout_id for r in page[1:3]] == ids[1:3]
    assert (page.index(page[2]), page.count(page[2])) == (2, 1)
    assert page[3] in page
    assert next(reversed(page)).rollout_id == ids[3]
    await store.close()
    client = agl.LightningStoreClient("http://127.0.0.1:1")
    assert client.server_address == "http://127.0.0.1:1"


def test_a_runner_of_ones_own_needs_no_tracer() -> None:
    class Own(agl.Runner):
        def __init__(self) -> None:
            super().__init__(max_rollouts=1)

    assert isinstance(Own().tracer, agl.OtelTracer)


def test_agentops_that_is_missing_is_said_at_once() -> None:
    class Derived(agl.AgentOpsTracer):
        """As frameworks have their tracers."""

    assert Derived()
    if find_spec("agentops") is None:
        with pytest.raises(agl.ConfigError, match="agentops"):
            agl.AgentOpsTracer()
    else:
        assert agl.AgentOpsTracer()


@pytest.mark.parametrize("fit", ["fit", "fit_v0"])
def test_a_servers_address_is_no_data_set(fit: str) -> None:
    trainer = agl.Trainer(console=SilentConsole())
    with pytest.raises(agl.ConfigError, match=r"as in 0\.1.*agl runner"):
        getattr(trainer, fit)(lambda task: 1.0, "http://localhost:8000")


def test_fit_of_then_with_tasks_is_fit(tmp_path: Path) -> None:
    result = agl.Trainer(console=SilentConsole(), run_dir=tmp_path / "run").fit_v0(lambda task: 1.0, ["a"])
    assert result.run_dir == tmp_path / "run"
    with pytest.raises(agl.ConfigError, match="dev_data"):
        agl.Trainer(console=SilentConsole()).fit_v0(lambda task: 1.0, ["a"], dev_data=["b"])


def test_records_of_the_first_protocol_are_there() -> None:
    task = agl.Task(rollout_id="r", input={"question": "?"})
    assert agl.TaskIfAny(is_available=True, task=task).task == task
    told = agl.RolloutLegacy(
        rollout_id="r", task=task, final_reward=1.0, triplets=[agl.Triplet(prompt="a", response="b")]
    )
    assert agl.RolloutLegacy.model_validate_json(told.model_dump_json()) == told
    assert agl.GenericResponse().status == "success"
