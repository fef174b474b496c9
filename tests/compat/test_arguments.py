"""Each older argument has its effect, asks for nothing that would be missed, or is refused: every row of the table."""

# Older words are there while the program runs, not for the checker.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.compat.lookup import follow
from agentlightning.compat.older_arguments import ARGUMENTS
from agentlightning.compat.row import Old

DROPPED = [old for old in ARGUMENTS if old.to == ""]
NEWER = [old for old in ARGUMENTS if old.to and not old.to.startswith("agentlightning.")]
READ = [old for old in ARGUMENTS if old.to and old.to.startswith("agentlightning.")]
GIVEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "APO": lambda: (AsyncOpenAI(api_key="none"),),
    "LightningStoreClient": lambda: ("http://127.0.0.1:1",),
    "LightningStoreServer": lambda: (STORE,),
    "LitAgentRunner": lambda: (agl.DummyTracer(),),
    "emit_exception": lambda: (ValueError("bad"),),
    "emit_message": lambda: ("hello",),
    "emit_object": lambda: ({"a": 1},),
    "emit_annotation": lambda: ({"a": 1},),
    "emit_reward": lambda: (0.5,),
    "operation": lambda: ("search",),
}
"""What a callable needs besides."""
STORE = agl.InMemoryLightningStore()
VALUES: dict[str, Any] = {
    "Baseline(n_epochs": 3,
    "LightningStoreClient(server_address": "http://127.0.0.1:7",
    "LightningStoreClient(request_timeout": 3.0,
    "Trainer(max_tasks": 4,
    "Trainer(triplet_exporter": agl.LlmProxyTraceToTriplet(),
    "emit_annotation(annotation": {"a": 1},
    "emit_reward(reward": 0.5,
}
"""For words that lead to newer ones."""


class OwnTracer(agl.OtelTracer): ...


class OwnAlgorithm(agl.Baseline): ...


TRAINERS: dict[str, tuple[Any, Callable[[Any], Any], Any]] = {
    "dev": (True, lambda t: type(t.algorithm), agl.Baseline),
    "runner": ({"max_rollouts": 2}, lambda t: t.max_rollouts, 2),
    "adapter": ({"agent_match": "writer"}, lambda t: t.adapter.agent_match, "writer"),
    "algorithm": (OwnAlgorithm, lambda t: type(t.algorithm), OwnAlgorithm),
    "llm_proxy": ({"port": 4567}, lambda t: t.llm_proxy.port, 4567),
    "store": ("agentlightning.InMemoryLightningStore", lambda t: type(t.store), agl.InMemoryLightningStore),
    "strategy": ({"type": "shm", "n_runners": 5}, lambda t: t.n_runners, 5),
    "tracer": (OwnTracer, lambda t: type(t.tracer), OwnTracer),
}
"""By an older word of the trainer: a value that describes a part, what shows it, and what that is then."""
EMITTERS = [old for old in READ if "(propagate=)" in old.name]
ELSEWHERE = {
    "TracerTraceToTriplet(_skip_empty_token_spans": "test_calls_without_tokens_are_not_left_out_in_silence",
    "LightningStoreClient(retry_delays": "test_retry_delays_are_how_long_it_tries",
    "LitAgentRunner.iter(event": "test_an_event_ends_what_a_runner_does",
}
"""Words whose effect has a test of its own, below."""


def test_each_row_has_a_test_of_its_effect() -> None:
    tested = {name_of(old) for old in (*DROPPED, *NEWER, *EMITTERS)}
    tested |= {f"Trainer({word}" for word in TRAINERS} | set(ELSEWHERE)
    assert tested == {name_of(old) for old in ARGUMENTS}
    assert set(ELSEWHERE.values()) <= set(globals())
    assert {f"{parts(old)[0]}({parts(old)[1]}" for old in NEWER} == set(VALUES)


def needs(old: Old) -> None:
    """Skip where a class needs a package that is not installed; `tests/clients/test_tracers.py` has it."""
    if "WeaveTracer" in old.name:
        pytest.importorskip("weave")


def given(path: str) -> tuple[Any, ...]:
    return GIVEN[path]() if path in GIVEN else ()


def name_of(old: Old) -> str:
    return old.name.rpartition(":")[2].removesuffix("=)")


def parts(old: Old) -> tuple[str, str, Any]:
    path, _, word = name_of(old).partition("(")
    module = importlib.import_module(old.name.partition(":")[0])
    return path, word, reduce(getattr, path.split("."), module)


@pytest.mark.parametrize("old", ARGUMENTS, ids=name_of)
def test_a_row_says_one_of_three_things(old: Old) -> None:
    """`same`, `other` or `refused`; what leads nowhere says why, and what is refused what to do."""
    assert old.state.split(",")[0] in ("same", "other", "refused")
    if old.to == "":
        assert old.note
    elif old.to and not old.to.startswith("agentlightning."):
        _, _, callable_ = parts(old)
        assert old.to in inspect.signature(callable_).parameters, "the newer word is there"
    elif old.to:
        assert callable(follow(old))


class Asked(Exception):
    """A value of no kind that anything accepts."""


@pytest.mark.parametrize("old", [old for old in DROPPED if old.accepts is not None], ids=name_of)
def test_a_word_that_asks_for_something_is_refused_by_its_name(old: Old) -> None:
    path, word, callable_ = parts(old)
    with pytest.raises(agl.ConfigError, match=rf"{word}=.*no effect"):
        callable_(*given(path), **{word: Asked()})


CLASSES = [old for old in DROPPED if inspect.isclass(parts(old)[2])]


@pytest.mark.parametrize("old", CLASSES, ids=name_of)
def test_a_word_that_is_dropped_changes_nothing(old: Old) -> None:
    """What is made with it is what is made without it."""
    needs(old)
    path, word, callable_ = parts(old)
    if "Tracer" in path:  # a class that derives from it needs no package of others
        callable_ = type(path, (callable_,), {})
    value = old.accepts[0] if old.accepts else object()
    with_it, without = (callable_(*given(path), **words) for words in ({word: value}, {}))
    assert seen(with_it) == seen(without)


async def test_an_operation_that_propagates_is_recorded_as_any() -> None:
    taking: Any = agl.operation
    async with agl.DummyTracer().trace_context() as trace:
        for words in ({"propagate": True}, {}):
            with taking("search", **words):
                pass
    first, second = trace.spans
    assert (first.name, first.attributes) == (second.name, second.attributes)


async def test_a_step_without_an_event_is_any_step() -> None:
    runner: Any = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=agl.rollout(lambda task: 1.0), store=agl.InMemoryLightningStore()):
        done = await runner.step("task", event=None)
    assert done.status == "succeeded"


@pytest.mark.parametrize("made", [agl.ThreadingEvent, agl.MultiprocessingEvent])
async def test_an_event_ends_what_a_runner_does(made: Any) -> None:
    event, runner = made(), cast(Any, agl.LitAgentRunner(agl.DummyTracer()))
    event.set()
    with runner.run_context(agent=agl.rollout(lambda task: 1.0), store=agl.InMemoryLightningStore()):
        async with asyncio.timeout(60):
            await runner.iter(event=event)


@pytest.mark.parametrize("old", EMITTERS, ids=name_of)
async def test_what_does_not_propagate_is_given_and_not_recorded(old: Old) -> None:
    path, word, emit = parts(old)
    async with agl.DummyTracer().trace_context() as trace:
        apart = emit(*given(path), **{word: False})
        kept, plain = emit(*given(path), **{word: True}), emit(*given(path))
    assert trace.spans == [kept, plain]
    assert (apart.name, apart.attributes.keys()) == (plain.name, plain.attributes.keys())


@pytest.mark.parametrize("word", TRAINERS)
def test_a_part_of_the_trainer_that_is_described_is_made(word: str) -> None:
    value, shown, wanted = TRAINERS[word]
    trainer: Any = agl.Trainer
    assert shown(trainer(**{word: value})) == wanted
    if word not in ("dev", "runner"):
        assert shown(trainer(**{word: getattr(trainer(**{word: value}), word)})) == wanted, "as the part itself"


def seen(made: Any) -> dict[str, str]:
    """The plain attributes of an object; others are of this one object."""
    plain = (str, int, float, bool, tuple, type(None))
    return {
        k: repr(v)
        for k, v in vars(made).items()
        if isinstance(v, plain) and "id" not in k and k not in ("_path", "_opened") and "secret" not in k
    }


@pytest.mark.parametrize("old", NEWER, ids=name_of)
async def test_an_older_word_does_what_the_newer_one_does(old: Old) -> None:
    path, word, callable_ = parts(old)
    value = VALUES[f"{path}({word}"]
    needed = () if old.to in ("url", "value", "attributes") else given(path)
    async with agl.DummyTracer().trace_context() as trace:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made, newer = callable_(*needed, **{word: value}), callable_(*needed, **{str(old.to): value})
    if path.startswith("emit_"):
        assert trace.spans == [made, newer]
        assert made.attributes == newer.attributes
        assert value in (made.attributes, agl.get_reward_value(made))
        return
    assert seen(made) == seen(newer)
    assert seen(made) != seen(callable_(*given(path))) or value in vars(made).values()


class _Takes:
    """An __init__ that hands on what it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


OF_CLASSES = [old for old in ARGUMENTS if inspect.isclass(parts(old)[2])]


@pytest.mark.parametrize("bases", [(), (_Takes,)], ids=["without __init__", "with __init__"])
@pytest.mark.parametrize("old", OF_CLASSES, ids=name_of)
def test_classes_that_are_derived_take_the_older_words(old: Old, bases: tuple[type, ...]) -> None:
    needs(old)
    path, word, cls = parts(old)
    own: Any = type(cls)(f"Own{path}", (*bases, cls), {})
    value = VALUES.get(f"{path}({word}", TRAINERS[word][0] if path == "Trainer" and word in TRAINERS else None)
    if old.to == "":
        value = old.accepts[0] if old.accepts else object()
    value = {"_skip_empty_token_spans": False, "retry_delays": (1.0,)}.get(word, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = own(*(() if old.to == "url" else given(path)), **{word: value})
        assert isinstance(made, own)
        if path == "Trainer" and word in TRAINERS:
            assert TRAINERS[word][1](made) == TRAINERS[word][2]
        if old.accepts is not None:
            with pytest.raises(agl.ConfigError, match=word):
                own(*given(path), **{word: Asked()})


def test_retry_delays_are_how_long_it_tries() -> None:
    client: Any = agl.LightningStoreClient
    made, newer = (
        client("http://127.0.0.1:1", **given) for given in ({"retry_delays": (1, 2, 5)}, {"retry_seconds": 8.0})
    )
    assert seen(made) == seen(newer)


def test_calls_without_tokens_are_not_left_out_in_silence() -> None:
    adapter: Any = agl.TracerTraceToTriplet
    with pytest.raises(agl.ConfigError, match="_skip_empty_token_spans"):
        adapter(_skip_empty_token_spans=True)
    assert adapter(_skip_empty_token_spans=False)


def test_logging_takes_all_words_and_no_others() -> None:
    other = logging.getLogger("somebody.else")
    agl.setup_logging(console=False, disable_existing_loggers=True, capture_warnings=True)  # pyright: ignore
    try:
        assert other.disabled
        assert not logging.getLogger("agentlightning.compat").disabled
    finally:
        logging.captureWarnings(False)
        for name in logging.root.manager.loggerDict:
            logging.getLogger(name).disabled = name == "agentlightning.compat.notice"
        agl.setup_logging(console=False, propagate=True)  # pyright: ignore
        logging.getLogger("agentlightning").setLevel(logging.NOTSET)
    with pytest.raises(TypeError):
        agl.setup_logging(colour=True)  # pyright: ignore
