"""What the trainer is given, looked at before anything is started. Each refusal says what to give instead."""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agentlightning.algorithm.base import Algorithm, FunctionalAlgorithm
from agentlightning.algorithm.prompts.settings import PromptSettings, held_out
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import as_count, check_address
from agentlightning.errors import ConfigError, StoreError
from agentlightning.files import no_path
from agentlightning.importing import MAIN_GUARD, file_being_loaded
from agentlightning.litagent import FunctionAgent, LitAgent
from agentlightning.metrics import Sink
from agentlightning.metrics.console import Console
from agentlightning.runner.runner import current_runner
from agentlightning.runner.versions import installed_as
from agentlightning.store.base import LightningStore
from agentlightning.store.operations.codec import encode_task
from agentlightning.tracer import Tracer
from agentlightning.trainer.overrides import OF_STEPS, check_methods
from agentlightning.trainer.provenance import MOST_KEPT
from agentlightning.trainer.tasks import check_texts, load_tasks
from agentlightning.types import LLM, Dataset, Hook, NamedResources, ProxyLLM, Resource
from agentlightning.types.reward import largest_reward

_PARTS: dict[str, tuple[type, str]] = {
    "algorithm": (Algorithm, "GRPO(model='calc')"),
    "store": (LightningStore, "SqliteLightningStore('store.db')"),
    "tracer": (Tracer, "OtelTracer()"),
    "resource": (Resource, "PromptTemplate(template='…', engine='f-string')"),
    "sink": (
        Sink,
        "metrics.Sink(), of a class with your methods: class Mine(agl.metrics.Sink), def step(self, metrics)",
    ),
    "hook": (
        Hook,
        "Hook(), of a class with your methods: class Mine(agl.Hook), such as async def on_rollout_end(self, "
        f"**given). {OF_STEPS.removesuffix('.')}",
    ),
    "console": (Console, "metrics.SilentConsole()"),
}
_HIGHEST_PORT = 65535
_AN_AGENT = (
    "a function of a task, or a LitAgent: let the class be one, class MyAgent(agl.LitAgent), with a method "
    "rollout(self, task, resources, rollout)."
)


def check_parts(**parts: object) -> None:
    """Raises ConfigError for a part that is given by name, as a class, or is something else."""
    for name, value in parts.items():
        kind, example = _PARTS[name]
        if name == "store" and isinstance(value, str) and value.startswith("http"):
            raise ConfigError(f"store is {value!r}; a store that is served is agl.LightningStoreClient({value!r}).")
        if value is not None and not isinstance(value, kind):
            a_class = isinstance(value, type)
            shown = f"the class {value.__name__}" if a_class else f"{value!r}, which is no {kind.__name__}"
            own = (
                a_class
                and issubclass(value, kind)
                and (kind is Sink or value.__module__.partition(".")[0] != "agentlightning")
            )
            make = f"{value.__name__}(…)" if own else f"agl.{example}"  # pyright: ignore[reportAttributeAccessIssue]
            raise ConfigError(f"{name} is {shown}. Give an object: {make}.")


def check_each(**parts: Iterable[object]) -> None:
    """`check_parts` for several parts of a kind."""
    for name, values in parts.items():
        for value in values:
            check_parts(**{name: value})
            check_methods(value, _PARTS[name][0])


def listed(given: Any) -> list[Any]:
    """Several parts of a kind as a list, where one alone or None may be given for them."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]


def check_adapter(adapter: object, algorithm: Algorithm) -> None:
    """Raises ConfigError for an adapter that would have no effect: what trains a model reads the gateway's calls."""
    if adapter is None or not isinstance(algorithm, TrainingSettings):
        return
    name, kind = type(algorithm).__name__, type(adapter)
    if not isinstance(adapter, TracerTraceToTriplet) or type(adapter).adapt not in _ADAPTS:
        raise ConfigError(
            f"{name} learns from the gateway's calls and reads no spans, so adapter={kind.__name__}(…) would have no "
            "effect. Leave it out. Let the agent return its triplets, or give rewards to calls with credit=."
        )
    if adapter.reward_match == "first_sibling":
        raise ConfigError(
            f"{name} shares rewards out itself, so reward_match='first_sibling' would have no effect. Leave it out; "
            f"{name}(credit=…) says which calls a reward goes to."
        )


def check_proxy(llm_proxy: object, algorithm: Algorithm) -> None:
    """Raises ConfigError for a gateway beside the one of an algorithm that serves its own model."""
    if llm_proxy is not None and algorithm.policy is not None:
        raise ConfigError(
            f"{type(algorithm).__name__} serves its own model: leave llm_proxy out, and give port= to the trainer."
        )


_ADAPTS = (TracerTraceToTriplet.adapt, LlmProxyTraceToTriplet.adapt)


def check_whole_numbers(**given: object) -> None:
    """Raises ConfigError for a setting that is no whole number of at least 1; None leaves it to its default."""
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(
                f"{name} is {value!r}; it must be a whole number, and at least 1.{as_count('', value, zero=False)}"
            )
    both = given.get("n_runners"), given.get("n_workers")
    if None not in both and both[0] != both[1]:
        raise ConfigError("n_workers is the older word for n_runners; give only one of them.")


def check_places(*, run_dir: object, resume: object, port: object) -> None:
    """Raises ConfigError for a folder that is no path, and for a port that there is not."""
    for name, value in (("run_dir", run_dir), ("resume", resume)):
        if value == "":
            raise ConfigError(f"{name} is '', which would be the working directory: is a variable not set?")
        if value is not None and not isinstance(value, str | os.PathLike):
            raise ConfigError(f"{name} is {value!r}; give a path, for example {name}='runs/mine'.")
        if (words := no_path(str(value))) and (name == "run_dir" or "://" not in str(value)):
            raise ConfigError(f"{name} is {str(value)!r}. {words}")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= _HIGHEST_PORT):
        raise ConfigError(f"port is {port!r}; give a number up to {_HIGHEST_PORT}, or leave it out for a free one.")


def check_models(models: object) -> None:
    """Raises ConfigError for other providers that are not named, or are something else than providers."""
    if not models:
        return
    from agentlightning.gateway.routing.upstream import Provider

    example = "models={'judge': agl.Provider(base_url='https://api.example.com/v1', api_key=…, model=…)}"
    if not isinstance(models, Mapping):
        raise ConfigError(f"models is {models!r}; give providers by alias: {example}.")
    for alias, provider in models.items():
        if not isinstance(provider, Provider):
            raise ConfigError(f"models has {alias!r}: {provider!r}, which is no Provider: {example}.")


def check_resources(resources: object) -> None:
    """Raises ConfigError for resources that are not named, or are something else than resources."""
    if resources is not None and not isinstance(resources, Mapping):
        raise ConfigError(f"initial_resources is {resources!r}; give resources by name: {{'llm': agl.LLM(…)}}.")
    for name, resource in (resources or {}).items():
        try:
            check_parts(resource=resource)
        except ConfigError as error:
            raise ConfigError(f"Of initial_resources, {name!r}: {error}") from None
        if isinstance(resource, LLM) and not isinstance(resource, ProxyLLM):
            check_address(f"The endpoint of the resource for the model {resource.model!r}", resource.endpoint)


def check_agents_resources(
    agent: LitAgent[Any], algorithm: Algorithm, given: NamedResources, models: Iterable[str]
) -> None:
    """Raises ConfigError where the agent needs a resource that it will not get.

    An algorithm of the user's own may make resources that nobody knows of here, so it is left alone.
    """
    if not type(algorithm).__module__.startswith("agentlightning.") or isinstance(algorithm, FunctionalAlgorithm):
        return
    policy = algorithm.policy
    own = () if policy is None else ("llm", *policy.model.trained, *policy.model.members, policy.model.frozen)
    served: NamedResources = {name: LLM(endpoint="", model=name) for name in (*own, *models) if name}
    agent.check_resources({**served, **given})
    unused = agent.unused_prompts(given) if isinstance(algorithm, PromptSettings) else ()
    for name in unused:
        raise ConfigError(
            f"The prompt {name!r} is to be tuned, and the agent {agent.origin[0]} takes none: give the function a "
            f"parameter, def {agent.origin[0]}(task, llm, {name}), and let it ask with {name}.format(…). A prompt that "
            "the gateway puts in, with no change to the agent, is an agl.SystemPrompt (--system-prompt FILE)."
        )


def has_endpoints(resources: NamedResources) -> bool:
    """Whether there is an endpoint among them that the gateway is to stand in front of."""
    return any(is_endpoint(resource) for resource in resources.values())


def is_endpoint(resource: Resource) -> TypeGuard[LLM]:
    """Whether it is an endpoint of the user's own, and not one of a gateway already."""
    return isinstance(resource, LLM) and not isinstance(resource, ProxyLLM)


def refuse_while_loading() -> None:
    """Raises ConfigError where a file trains while it is imported for the agent in it, or an agent trains."""
    if current_runner.get() is not None:
        raise ConfigError(
            "fit was called inside an agent, so every rollout would train. An agent does one task and returns its "
            "reward: call fit outside of it."
        )
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "script")
    if script.stem in _IMPORTED_LATER:
        raise _hides_a_package(script)
    if (file := file_being_loaded()) is not None:
        raise ConfigError(
            f"{file} trains when it is imported, and here only its agent is wanted. Put the lines that train under  "
            f"{MAIN_GUARD}"
        )


def refuse_in_an_import_of_training() -> None:
    """Raises ConfigError where a file trains that training itself imports, for it has the name of a package: each would
    wait for the other."""
    module, frame = "", sys._getframe(1)
    while frame is not None:
        if not module and frame.f_code.co_name == "<module>":
            module = frame.f_code.co_filename
        elif module and frame.f_globals.get("__name__") == "agentlightning.trainer.launch":
            raise _hides_a_package(Path(module))
        frame = frame.f_back


def _hides_a_package(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} is a file of yours, and hides the package {file.stem!r}: give the file another name. Training imports "
        "that package, and would run your file instead."
    )


_IMPORTED_LATER = frozenset(("openai", "renderers", "tokenizers", "jinja2"))
"""Packages that the process of a script imports once it trains."""
_SOURCES = {"SFT": ("conversations", "chats"), "DPO": ("preferences", "pairs")}
"""What the data may be that an algorithm learns without an agent, and how its `source` says so."""


def as_agent(agent: LitAgent[Any] | Callable[..., Any] | None, algorithm: object = None) -> LitAgent[Any]:
    """A plain function is taken as if it were decorated with `@rollout`. Raises ConfigError for what is no agent, in
    words that suit the algorithm."""
    if isinstance(agent, LitAgent):
        _check_methods(agent)
        return agent
    if isinstance(agent, type):
        runs = issubclass(agent, LitAgent) or "__call__" in vars(agent)
        mend = f"give an instance of it: {agent.__name__}(…)." if runs else f"an agent is {_AN_AGENT}"
        raise ConfigError(f"The agent is the class {agent.__name__}; {mend}")
    if agent is None:
        remote = "Leave it out only if runners on other machines have it: Trainer(strategy='remote')."
        raise ConfigError(f"There is no agent. {_without_agent(algorithm) or remote}")
    if callable(agent):
        return FunctionAgent(agent)
    raise ConfigError(" ".join(filter(None, (_no_agent(agent), _without_agent(algorithm)))))


def _without_agent(algorithm: object) -> str:
    """How an algorithm learns examples without an agent; nothing where it cannot, or does already."""
    name = type(algorithm).__name__
    if name not in _SOURCES or getattr(algorithm, "source", None) != "rollouts":
        return ""
    what, source = _SOURCES[name]
    return f"For {what} in place of rollouts none is needed: {name}(source={source!r}, …), then fit(None, {what})."


def _check_methods(agent: LitAgent[Any]) -> None:
    """Raises ConfigError for an agent that runs nothing, or whose method cannot be given what it is called with."""
    name, methods = type(agent).__name__, agent.own_methods()
    if not methods:
        raise ConfigError(
            f"{name} has no method that runs a task. Write  def rollout(self, task, resources, rollout)  (or async def "
            "rollout_async) that returns the reward; the model is resources['llm']."
        )
    for method in methods:
        if inspect.iscoroutinefunction(method) and not method.__name__.endswith("_async"):
            raise ConfigError(f"{name}.{method.__name__} is async: call it {method.__name__}_async.")
        try:
            inspect.signature(method).bind("task", "resources", "rollout")
        except TypeError:
            raise ConfigError(
                f"{name}.{method.__name__} cannot be called with a task, the resources and the rollout. Write  "
                f"def {method.__name__}(self, task, resources, rollout); the model is resources['llm']."
            ) from None


def _no_agent(given: object) -> str:
    """What somebody gave who meant an agent, and what to give."""
    if isinstance(given, str | Path):
        file = str(given).partition(":")[0]
        named = f"{file if file.endswith('.py') else 'my_agent.py'}:name"
        return (
            f"The agent is the text {str(given)!r}; give the function itself: import it, then fit(function, tasks). "
            f"By its name it is trained from the command line:  agl train --agent {named} --tasks FILE"
        )
    if isinstance(given, Mapping | Sequence):
        return f"The agent is a {type(given).__name__}. It comes first, and the tasks behind it: fit(agent, tasks)."
    if inspect.iscoroutine(given):
        given.close()
        name = given.__name__
        return f"The agent is a coroutine, which calling {name}(…) made. Give the function itself: fit({name}, tasks)."
    return f"The agent is {of_a_framework(given) or f'a {type(given).__name__}; an agent must be {_AN_AGENT}'}"


def of_a_framework(given: object) -> str | None:
    """What an object is that an installed package makes, and how an agent is made of it; None of other objects."""
    if not (package := installed_as(type(given).__module__)):
        return None
    return (
        f"an object of the class {type(given).__name__} of {package}. Write a function around it that gives it the "
        "task and the model, and returns the reward:  async def agent(task, llm): …  docs/bring-your-own.md has one, "
        "and docs/clients.md the line by which each framework is given the model."
    )


def check_given(
    algorithm: Algorithm, agent: LitAgent[Any], train: Dataset[Any] | None, val: Dataset[Any] | None
) -> None:
    """Raises ConfigError for tasks that the algorithm cannot learn, or the agent cannot be given."""
    largest_reward()  # what the environment says of it is asked for before a rollout is
    if train is not None and isinstance(algorithm, TrainingSettings):
        algorithm.check_data(train)
    algorithm.check_agent(agent)
    if isinstance(algorithm, PromptSettings) and train is not None and len(train) > 1:
        apart = 0 if val is not None and len(val) > 0 else held_out(len(train))
        algorithm.require_rollouts(len(train) - apart, apart or len(val or ()))
    for what, tasks in (("training", train), ("validation", val)):
        check_json(what, tasks)
        check_tasks(agent, what, tasks)


def check_json(what: str, tasks: Dataset[Any] | None) -> None:
    """Raises ConfigError for the first task that a store cannot hold, with its number and the field."""
    for number in range(min(len(tasks), MOST_KEPT) if tasks is not None else 0):
        task = tasks[number]  # pyright: ignore[reportOptionalSubscript]
        try:
            encode_task(task, "A task")
        except StoreError as error:
            raise ConfigError(f"{_which(what, number, _not_json(task))}: {error}") from error
        if (changed := _changed_by_json(task)) is not None:
            where, words = changed
            raise ConfigError(f"{_which(what, number, where)}: {words}")


def _which(what: str, number: int, field: str) -> str:
    return f"Of the {what} tasks, number {number + 1} (counted from 1)" + (f" in its field {field!r}" if field else "")


def _changed_by_json(value: Any, where: str = "") -> tuple[str, str] | None:
    """Where JSON would give something else back than was put in, and what to do; None if it would not."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return where, f"JSON makes a plain list of a {type(value).__name__}, without names. Give task._asdict()."
    if isinstance(value, Mapping) and (odd := [key for key in value if not isinstance(key, str)]):
        example = json.dumps(str(odd[0]))
        return where, (
            f"it has the key {odd[0]!r}, a {type(odd[0]).__name__}, and JSON's keys are text: the agent would find "
            f"another key. Write {example}: {{str(key): value for key, value in task.items()}}."
        )
    return next(filter(None, (_changed_by_json(part, path) for path, part in _parts(value, where))), None)


def _not_json(value: Any, where: str = "") -> str:
    """Where the innermost part is that JSON cannot hold."""
    for path, part in _parts(value, where):
        try:
            encode_task(part, "A task")
        except StoreError:
            return _not_json(part, path)
    return where


def _parts(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """What a JSON value holds, and where it is."""
    if isinstance(value, Mapping):
        yield from ((f"{where}.{name}" if where else str(name), part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{where}[{number}]", part) for number, part in enumerate(value))


def shared_tasks(train: Dataset[Any] | None, val: Dataset[Any] | None) -> int:
    """How many validation tasks are training tasks as well."""
    if train is None or val is None or max(len(train), len(val)) > _MOST_CHECKED:
        return 0
    known = {json.dumps(train[n], sort_keys=True, default=repr) for n in range(len(train))}
    return sum(json.dumps(val[n], sort_keys=True, default=repr) in known for n in range(len(val)))


_MOST_CHECKED = 100_000
"""Tasks that an agent is asked about before a run begins."""


def check_tasks(agent: LitAgent[Any], what: str, tasks: Dataset[Any] | None) -> None:
    """Raises ConfigError for the first task that the agent cannot be given, with its number."""
    if tasks is None or type(agent).check_task is LitAgent.check_task:
        return
    for number in range(min(len(tasks), _MOST_CHECKED)):
        try:
            agent.check_task(tasks[number])
        except ConfigError as error:
            raise ConfigError(f"Of the {what} tasks, number {number + 1} (counted from 1): {error}") from None


def _of_a_library(what: str, tasks: object) -> str | None:
    """What to give in place of an object of a library that holds tasks and is no list of them; None for others."""
    library, name = type(tasks).__module__.partition(".")[0], type(tasks).__name__
    if library == "datasets" and isinstance(tasks, Mapping):
        splits = ", ".join(map(repr, tasks)) or "none"
        first = next(iter(tasks), "train")
        return f"The {what} tasks are a {name} with the splits {splits}. Give one of them: dataset[{first!r}]."
    if library == "datasets" and not hasattr(type(tasks), "__len__"):
        return f"The {what} tasks are a {name}, which is read as a stream. Give a list: list(dataset.take(1000))."
    if library in ("polars", "pandas") and name == "DataFrame":
        rows = "frame.to_dicts()" if library == "polars" else "frame.to_dict('records')"
        return f"The {what} tasks are a {library} frame. Give its rows: {rows}."
    if library == "torch" and name == "DataLoader":
        return f"The {what} tasks are a DataLoader, which makes batches. Give what it reads: loader.dataset."
    return None


def _is_a_set(tasks: object) -> bool:
    """Whether it is a list of dicts, as tasks are and one task seldom is."""
    return isinstance(tasks, list) and bool(tasks) and all(isinstance(task, Mapping) for task in tasks)


_SPLITS = {"train", "training", "test", "val", "valid", "validation", "dev", "eval"}


def _rows_of(tasks: Mapping[Any, Any]) -> str:
    """What to do with a dict of several sets of tasks, or of columns; nothing for another one."""
    names = [name for name in tasks if isinstance(name, str) and name.lower() in _SPLITS]
    if names and len(names) == len(tasks):
        others = "".join(f", val_dataset=sets[{name!r}]" for name in names[1:2])
        return f" It holds sets of tasks by name: fit(agent, sets[{names[0]!r}]{others})."
    if tasks and all(isinstance(column, list) for column in tasks.values()):
        return " Of columns it is made so: [dict(zip(tasks, row)) for row in zip(*tasks.values())]."
    if tasks and all(isinstance(column, Mapping) for column in tasks.values()):  # as pandas makes it
        return " Of a DataFrame it is made so: df.to_dict('records'); of other dicts: list(tasks.values())."
    return ""


def _list_of(tasks: object) -> str:
    """How to make a list of what is none."""
    if isinstance(tasks, io.IOBase):
        return f"Give the name of the file: fit(agent, {str(getattr(tasks, 'name', 'tasks.jsonl'))!r})."
    if inspect.isroutine(tasks):
        return f"Call it, and give a list of what it makes: list({tasks.__name__}())."
    return "Give a list of them: list(tasks)."


def as_tasks(what: str, tasks: object) -> Dataset[Any]:
    """The tasks, read from a file if it is the name of one.

    Raises ConfigError for tasks that cannot be counted and taken by number, and for texts that no store can hold.
    """
    if isinstance(tasks, str | Path):
        return load_tasks(tasks)
    if (words := _of_a_library(what, tasks)) is not None:
        raise ConfigError(words)
    if isinstance(tasks, bytes | Mapping):
        rows = _rows_of(tasks) if isinstance(tasks, Mapping) else ""
        raise ConfigError(
            f"The {what} tasks are a {type(tasks).__name__}. Give a list with one JSON value per task.{rows}"
        )
    if isinstance(tasks, tuple) and len(tasks) == 2 and all(_is_a_set(each) for each in tasks):
        raise ConfigError(
            f"The {what} tasks are a pair of two sets. Give each as an argument of its own: "
            "fit(agent, tasks, val_dataset=others)."
        )
    if isinstance(tasks, int | float):
        raise ConfigError(
            f"The {what} tasks are the number {tasks!r}. Give a list of them. To keep some for validation, "
            "split the list yourself: fit(agent, tasks[20:], val_dataset=tasks[:20])."
        )
    if not isinstance(tasks, Dataset):
        raise ConfigError(
            f"The {what} tasks are a {type(tasks).__name__}, which has no length or cannot be read by number. "
            f"{_list_of(tasks)}"
        )
    if len(tasks) == 0:
        return tasks
    try:
        tasks[0]
    except Exception as error:  # what other people's data sets raise
        raise ConfigError(
            f"The {what} tasks are a {type(tasks).__name__}, and reading the first as tasks[0] failed: "
            f"{type(error).__name__}: {error}. Give a list of tasks; for a pandas frame: frame.to_dict('records')."
        ) from error
    if isinstance(tasks, list | tuple) and all(task is None for task in tasks):
        raise ConfigError(f"The {what} tasks are all None, so nothing is known of any: look at what made the list.")
    if isinstance(tasks, list | tuple):  # others may read each task from afar
        for number, task in enumerate(tasks):
            check_texts(task, f"tasks[{number}] of the {what} tasks")
    return tasks
