"""Words of the trainer that are read in another way today, or that describe a part instead of giving it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentlightning.compat.components import REGISTRY, build_component, part
from agentlightning.errors import ConfigError
from agentlightning.runner import LitAgentRunner

Arguments = dict[str, Any]


def dev(arguments: Arguments, value: bool) -> None:
    """`Trainer(dev=True)`: run the agent, learn nothing."""
    if value:
        from agentlightning.algorithm import Algorithm, dry_run_of

        given = arguments.get("algorithm")
        arguments["algorithm"] = dry_run_of(given if isinstance(given, Algorithm) else part("algorithm", given))


def runner(arguments: Arguments, value: Any) -> None:
    """The runner is the trainer's own; of one that is described, the words that have a meaning are taken."""
    given = dict(value) if isinstance(value, Mapping) else {}
    named = given.pop("type", LitAgentRunner) if isinstance(value, Mapping) else value
    name = named.rpartition(".")[2] if isinstance(named, str) else getattr(named, "__name__", type(named).__name__)
    if name != "LitAgentRunner":
        raise ConfigError(f"runner= is {name}; a trainer's runners are LitAgentRunners. Hooks see every stage of them.")
    if "max_rollouts" in given:
        arguments.setdefault("max_rollouts", given["max_rollouts"])


def adapter(arguments: Arguments, value: Any) -> None:
    arguments["adapter"] = part("adapter", value)


def algorithm(arguments: Arguments, value: Any) -> None:
    arguments["algorithm"] = part("algorithm", value)


def llm_proxy(arguments: Arguments, value: Any) -> None:
    if isinstance(value, Mapping) and "type" not in value:
        value = {"type": "agentlightning.compat.llm_proxy.LLMProxy", **value}
    arguments["llm_proxy"] = part("llm_proxy", value)


def store(arguments: Arguments, value: Any) -> None:
    arguments["store"] = part("store", value)


def strategy(arguments: Arguments, value: Any) -> None:
    number = next((arguments[w] for w in ("n_runners", "n_workers") if arguments.get(w) is not None), None)
    defaults = {} if number is None else {"n_runners": number}
    port = arguments.get("port")
    if port is not None:
        defaults["server_port"] = port
    if isinstance(value, str) and value not in REGISTRY:
        arguments["strategy"] = value  # the trainer says which there are
        return
    arguments["strategy"] = build_component(value, spec_name="strategy", optional_defaults=defaults)


def tracer(arguments: Arguments, value: Any) -> None:
    arguments["tracer"] = part("tracer", value)


def fit_v0(self: Any, agent: Any, train_data: Any, *, val_data: Any = None, dev_data: Any = None, **others: Any) -> Any:
    """`fit` of 0.1 with tasks of its own; with a server's address it is refused, as by `fit`."""
    if dev_data is not None or others:
        raise ConfigError(
            f"fit_v0: {', '.join(['dev_data', *others] if dev_data is not None else others)}= is not kept."
        )
    return self.fit(agent, train_data, val_dataset=val_data)
