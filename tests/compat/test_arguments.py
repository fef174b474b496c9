"""Each older argument has its effect, asks for nothing that would be missed, or is refused: every row of the table."""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from functools import reduce
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.compat.lookup import follow
from agentlightning.compat.older_arguments import ARGUMENTS
from agentlightning.compat.row import Old

DROPPED = [old for old in ARGUMENTS if old.to == ""]
GIVEN: dict[str, tuple[Any, ...]] = {
    "LightningStoreClient": ("http://127.0.0.1:1",),
    "LitAgentRunner": (agl.DummyTracer(),),
}
"""What a callable needs besides."""
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
        callable_(*GIVEN.get(path, ()), **{word: Asked()})


@pytest.mark.parametrize("old", [old for old in DROPPED if "Tracer" not in old.name], ids=name_of)
def test_a_word_that_is_dropped_changes_nothing(old: Old) -> None:
    """What is made with it is what is made without it."""
    path, word, callable_ = parts(old)
    if not inspect.isclass(callable_) or path in ("APO", "LightningStoreServer"):
        pytest.skip("not made here; a value that asks for something is refused, which is tested above")
    value = old.accepts[0] if old.accepts else object()
    with_it, without = (callable_(*GIVEN.get(path, ()), **given) for given in ({word: value}, {}))
    assert seen(with_it) == seen(without)


def seen(made: Any) -> dict[str, str]:
    """The plain attributes of an object; others are of this one object."""
    plain = (str, int, float, bool, tuple, type(None))
    return {
        k: repr(v)
        for k, v in vars(made).items()
        if isinstance(v, plain) and "id" not in k and k not in ("_path", "_opened")
    }


@pytest.mark.parametrize(
    "old", [old for old in ARGUMENTS if old.to and not old.to.startswith("agentlightning.")], ids=name_of
)
def test_an_older_word_does_what_the_newer_one_does(old: Old) -> None:
    path, word, callable_ = parts(old)
    value = VALUES[f"{path}({word}"]
    given = () if old.to == "url" else GIVEN.get(path, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, newer = callable_(*given, **{word: value}), callable_(*given, **{str(old.to): value})
    if made is None or newer is None:
        assert made is newer
        return
    assert seen(made) == seen(newer)
    assert seen(made) != seen(callable_(*GIVEN.get(path, ()))) or value in vars(made).values()


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
