"""`agl optimize`: prompt optimisers on any agent, with prompts from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import aiohttp

from agentlightning.algorithm import APO, GEPA, Prices
from agentlightning.algorithm.checkpoint import served_model
from agentlightning.cli.configuration import parsed_settings
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.console import Console
from agentlightning.errors import ConfigError
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.keys import not_empty
from agentlightning.litagent import LitAgent
from agentlightning.outgoing import http_session
from agentlightning.trainer import Trainer
from agentlightning.trainer.sync import run_sync
from agentlightning.types import Demonstrations, PromptTemplate, RolloutConfig, SystemPrompt, ToolDescription

console = Console(highlight=False, soft_wrap=True)

KINDS: Mapping[str, type[APO] | type[GEPA]] = {"apo": APO, "gepa": GEPA}
MODEL_SETTINGS = {"apo": ("gradient_model", "apply_edit_model"), "gepa": ("reflection_model",)}
"""Where the critic's model is named."""
_OF_THE_COMMAND = ("async_openai_client", "rollout_config", "prices")
_MODELS_SECONDS = 10.0
_LISTED = 10
_PRICES = ("critic_input", "critic_output", "agent_input", "agent_output")


def read_prompts(
    prompts: Sequence[str],
    system_prompts: Sequence[str],
    tools: Sequence[str],
    place: Literal["replace", "before", "after"],
    demonstrations: int | None = None,
    answer: str | None = None,
) -> dict[str, PromptTemplate]:
    """The templates that are tuned, by name. Raises ConfigError where there is none, or a file is not there."""
    found: dict[str, PromptTemplate] = {}
    for given in prompts:
        name, text = _named(given, "prompt_template")
        engine = "jinja" if "{{" in text else "f-string"
        found[name] = PromptTemplate(template=text, engine=engine)
    for given in system_prompts:
        agent, text = _named(given, "")
        found[f"system_{agent}" if agent else "system_prompt"] = SystemPrompt(
            template=text, agent=agent or None, how=place
        )
    for given in tools:
        tool, text = _named(given, "")
        if not tool:
            raise ConfigError(f"--tool-description {given}: give TOOL=FILE.")
        found[f"tool_{tool}"] = ToolDescription(template=text, tool=tool)
    if demonstrations is not None:
        found["demonstrations"] = Demonstrations(most=demonstrations, answer=answer)
    elif answer is not None:
        raise ConfigError("--answer is for --demonstrations N: give both, or neither.")
    if not found:
        raise ConfigError(
            "There is no prompt to tune: give --prompt FILE, --system-prompt FILE for a program, or --demonstrations N."
        )
    return found


def _named(given: str, otherwise: str) -> tuple[str, str]:
    """The name and the text of NAME=FILE or FILE."""
    name, equals, file = given.partition("=")
    path = Path(file if equals else given).expanduser()
    if not path.is_file():
        raise ConfigError(f"There is no file '{path}' with a prompt.")
    return (name if equals else otherwise), path.read_text(encoding="utf-8").rstrip("\n")


def optimize_agent(
    agent: LitAgent[Any],
    tasks: list[Any],
    val_tasks: list[Any] | None,
    *,
    algorithm: str,
    prompts: dict[str, PromptTemplate],
    model: str | None,
    endpoint: str | None,
    endpoint_model: str | None,
    api_key: str | None,
    critic_url: str | None,
    critic_model: str | None,
    critic_key: str | None,
    budget: Mapping[str, float | None],
    prices: str | None,
    settings: Sequence[str],
    timeout: float | None,
    concurrency: int,
    run_dir: Path | None,
    resume: Path | None,
) -> None:
    """Tune; the run says itself what came of it and where it is."""
    texts = [name for name, prompt in prompts.items() if not isinstance(prompt, Demonstrations)]
    _check_models(texts, [name for name, prompt in prompts.items() if prompt.literal], model, endpoint, critic_url)
    key = not_empty(api_key, "--api-key")
    kind = KINDS[algorithm]
    given: dict[str, Any] = {f"budget_{name}": limit for name, limit in budget.items()}
    given |= parsed_settings(settings, [f.name for f in fields(kind) if f.init and f.name not in _OF_THE_COMMAND])
    if endpoint is not None:
        endpoint_model = endpoint_model or run_sync(only_model(endpoint, key))
    if texts:
        at_endpoint = critic_url in (None, endpoint)
        for name in MODEL_SETTINGS[algorithm]:
            given.setdefault(name, critic_model or (endpoint_model if at_endpoint else None))
        if None in [given[name] for name in MODEL_SETTINGS[algorithm]]:
            raise ConfigError(f"Say which model the critic at {critic_url} is: --critic-model NAME.")
        given |= {"critic_url": critic_url or endpoint, "critic_key": critic_key or (key if at_endpoint else None)}
    with served_model(model) if model else nullcontext() as path:
        tuner = kind(
            model=path,
            prices=None if prices is None else _prices(prices),
            rollout_config=RolloutConfig(timeout_seconds=timeout),
            **given,
        )
        trainer = Trainer(
            algorithm=tuner,
            models={"llm": Provider(base_url=endpoint, api_key=key, model=endpoint_model)} if endpoint else {},
            initial_resources={**prompts},
            concurrency=concurrency,
            run_dir=run_dir,
            resume=resume,
        )
        result = trainer.fit(agent, tasks, val_tasks)
    if result.stopped:
        console.print(f"Stopped. Go on with the same command and  --resume {result.run_dir}")
        exit_interrupted()


def _check_models(
    texts: Sequence[str], put_in: Sequence[str], model: str | None, endpoint: str | None, critic_url: str | None
) -> None:
    """Raises ConfigError where a model that is needed is missing, or the agent has two."""
    if model is not None and endpoint is not None:
        raise ConfigError("The agent's model is either served here (--model) or at --endpoint: give one.")
    if texts and critic_url is None and endpoint is None:
        raise ConfigError("There is no critic: give --critic-url, the base URL of an OpenAI-compatible server.")
    if put_in and endpoint is None and model is None:
        raise ConfigError(
            f"The gateway puts in {', '.join(put_in)}: give --endpoint or --model, so that calls go through it."
        )


async def only_model(endpoint: str, key: str | None) -> str:
    """The one model that a server lists. Raises ConfigError where it lists several or cannot be asked."""
    headers = {"authorization": f"Bearer {key or 'none'}"}
    timeout = aiohttp.ClientTimeout(total=_MODELS_SECONDS)
    try:
        async with (
            http_session(trust_env=True, timeout=timeout) as session,
            session.get(f"{endpoint.rstrip('/')}/models", headers=headers) as answer,
        ):
            if answer.status != HTTPStatus.OK:
                raise ValueError(f"HTTP {answer.status}")
            names = [str(entry["id"]) for entry in (await answer.json(content_type=None))["data"]]
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{endpoint} does not say which models it serves ({error or type(error).__name__}). Check --endpoint and "
            "--api-key, or name the model with --endpoint-model."
        ) from error
    if len(names) != 1:
        listed = ", ".join(names[:_LISTED]) + ", …" * (len(names) > _LISTED)
        raise ConfigError(f"{endpoint} serves {len(names)} models: choose one with --endpoint-model. {listed}".rstrip())
    return names[0]


def _prices(text: str) -> Prices:
    parts = text.split(",")
    try:
        if len(parts) > len(_PRICES):
            raise ValueError(text)
        return Prices(**dict(zip(_PRICES, map(float, parts), strict=False)))
    except ValueError:
        raise ConfigError(f"--prices {text}: give up to four numbers, such as 1.2,9,0.3,2.") from None
