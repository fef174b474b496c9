"""The methods of a hook or a sink of the user's, before anything calls them: a slip in a name is silent else. And those
that other trainers have."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

from agentlightning.errors import ConfigError

OF_STEPS = (
    "After each step a sink's step(self, metrics) is called: class Mine(agl.metrics.Sink), Trainer(sinks=[Mine()]). "
    "What follows the training stands below fit(…)."
)
OTHER_VERBS = {
    **dict.fromkeys(("train", "run", "learn", "start"), "It trains with fit(agent, tasks)."),
    **dict.fromkeys(
        ("evaluate", "eval", "test", "validate", "predict"),
        "agl eval RUN compares models; Trainer(algorithm=Baseline(model=…)).fit(agent, tasks) measures one.",
    ),
    **dict.fromkeys(("add_callback", "add_hook", "register_hook", "callbacks"), f"Trainer(hooks=[Mine()]). {OF_STEPS}"),
    **dict.fromkeys(
        (
            "load",
            "restore",
            "resume",
            "from_run",
            "from_checkpoint",
            "load_checkpoint",
            "load_from_checkpoint",
            "from_pretrained",
        ),
        "Trainer(resume='runs/NAME', algorithm=…).fit(…) goes on with a run; GRPO(model='runs/NAME') takes its model.",
    ),
    **dict.fromkeys(
        (
            *("state", "result", "results", "history", "logs", "log_history", "metrics", "callback_metrics", "model"),
            *("checkpoint", "policy", "tokenizer"),
        ),
        "fit returns it: result = trainer.fit(agent, tasks). result.metrics has a row per step, and the model is in "
        "result.checkpoint / 'model'.",
    ),
    **dict.fromkeys(("log", "log_metrics", "logger"), f"Metrics are recorded by themselves. {OF_STEPS}"),
    **dict.fromkeys(
        ("save", "save_model", "save_checkpoint", "save_pretrained", "push_to_hub", "export"),
        "Checkpoints are in the run's folder. agl export RUN --to FOLDER writes the model, --push NAME/REPOSITORY too.",
    ),
}
"""What other trainers have as methods, and where it is here."""
_OF_A_STEP = re.compile(
    r"((on|before|after)_)*(train|step_|epoch|eval|valid|batch|fit|optim|update|log|save|checkpoint|iter|write|report)"
)
"""Moments of a training, as other libraries name their callbacks' methods."""
_A_SLIP = 0.8
"""How much of two names must be the same, for one to be a slip of the other."""


def check_methods(given: object, base: type) -> None:
    """Raises ConfigError for a method of the user's that nothing calls, or that cannot be called as the base's is."""
    kind = type(given)
    theirs = {name: each for name, each in inspect.getmembers(base, inspect.isfunction) if name[0] != "_"}
    below = [each for each in kind.__mro__ if each not in base.__mro__]
    own = {n: m for each in reversed(below) for n, m in vars(each).items() if inspect.isfunction(m) and n[0] != "_"}
    for name, method in own.items():
        where = f"The method {name} of {kind.__name__}"
        if name not in theirs:
            meant = difflib.get_close_matches(name, theirs.keys() - own.keys(), n=1, cutoff=_A_SLIP)
            if meant or name.startswith("on_") or own.keys().isdisjoint(theirs):
                is_it = f"Did you mean {meant[0]}?" if meant else f"A {base.__name__} has {', '.join(theirs)}."
                is_it = OF_STEPS if _OF_A_STEP.match(name) else is_it
                raise ConfigError(f"{where} is called by nothing. {is_it}")
        elif inspect.iscoroutinefunction(theirs[name]) and not inspect.iscoroutinefunction(inspect.unwrap(method)):
            raise ConfigError(f"{where} is awaited: write async def {name}.")
        elif inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(theirs[name]):
            raise ConfigError(f"{where} is not awaited: write def {name}, without async.")
        elif missing := _not_taken(method, theirs[name]):
            raise ConfigError(f"{where} is called with {missing}, too, which it does not take: add **others to it.")
        elif not _can_be_called(method, theirs[name]):
            raise ConfigError(
                f"{where} is called with other arguments: write def {name}{inspect.signature(theirs[name])}."
            )


def _can_be_called(method: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether it takes as many arguments by place as the base's is called with."""
    given = [one.name for one in inspect.signature(theirs).parameters.values() if one.kind is not one.KEYWORD_ONLY]
    named = [one.name for one in inspect.signature(theirs).parameters.values() if one.kind is one.KEYWORD_ONLY]
    try:
        inspect.signature(method).bind(*given, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def _not_taken(method: Callable[..., Any], theirs: Callable[..., Any]) -> str:
    """The arguments by name with which the base's method is called and that this one has no place for."""
    takes = inspect.signature(method).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in takes):
        return ""
    called = [one.name for one in inspect.signature(theirs).parameters.values() if one.kind is one.KEYWORD_ONLY]
    return ", ".join(name for name in called if name not in {one.name for one in takes})
