"""`agl optimize`: prompt optimisers on any agent, with prompts from files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from http import HTTPStatus
from pathlib import Path
from shlex import quote
from typing import Any

import aiohttp

from agentlightning.algorithm import APO, GEPA, Prices
from agentlightning.algorithm.checkpoint import served_model
from agentlightning.cli.agents import find_work
from agentlightning.cli.commands.train import OptimizeOptions
from agentlightning.cli.configuration import parsed_settings
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.console import Console
from agentlightning.errors import ConfigError
from agentlightning.files import meant_by, text_of
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.keys import not_empty
from agentlightning.net.outgoing import http_session, reason_of
from agentlightning.trainer import Trainer
from agentlightning.trainer.sync import run_sync
from agentlightning.types import Demonstrations, PromptTemplate, RolloutConfig, SystemPrompt, ToolDescription

console = Console(highlight=False, soft_wrap=True)

KINDS: Mapping[str, type[APO] | type[GEPA]] = {"apo": APO, "gepa": GEPA}
MODEL_SETTINGS = {"apo": ("gradient_model", "apply_edit_model"), "gepa": ("reflection_model",)}
"""Where the critic's model is named."""
_BUDGETS = ("budget_rollouts", "budget_critic_tokens", "budget_cost")
_OF_THE_COMMAND = ("async_openai_client", "rollout_config", "prices")
_MODELS_SECONDS = 10.0
_LISTED = 10
_JINJA = re.compile(r"\{\{-?\s*[A-Za-z_][^{}\"':]*\}\}|\{%")
"""Text in which braces are Jinja's. Doubled braces around anything but a name, as around JSON, are braces as text."""
_PRICES = ("critic_input", "critic_output", "agent_input", "agent_output")


def read_prompts(options: OptimizeOptions) -> dict[str, PromptTemplate]:
    """The templates that are tuned, by name. Raises ConfigError where there is none, or a file is not there."""
    demonstrations, answer = options.demonstrations, options.answer
    found: dict[str, PromptTemplate] = {}
    for given in options.prompt:
        name, text = _named(given, "prompt_template")
        if name in found:
            raise ConfigError(f"--prompt {given}: a prompt {name} is given already. Name each: --prompt NAME=FILE.")
        if not text.strip():
            raise ConfigError(f"--prompt {given}: the file is empty. Write the prompt that the agent has now into it.")
        found[name] = PromptTemplate(template=text, engine="jinja" if _JINJA.search(text) else "f-string")
    for given in options.system_prompt:
        agent, text = _named(given, "")
        found[f"system_{agent}" if agent else "system_prompt"] = SystemPrompt(
            template=text, agent=agent or None, how=options.prompt_place
        )
    for given in options.tool_description:
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
        a_text = " Write the text into a file, and give the file." if re.search(r"[\s{]", str(path)) else ""
        raise ConfigError(f"There is no file '{path}' with a prompt.{a_text or meant_by(path)}")
    return (name if equals else otherwise), text_of(path, f"'{path}'").rstrip("\n")


def optimize_agent(options: OptimizeOptions) -> None:
    """Tune; the run says itself what came of it and where it is."""
    agent, tasks, val_tasks = find_work(
        options.agent, options.tasks, options.environment, options.program, options.val_tasks
    )
    prompts = read_prompts(options)
    texts = [name for name, prompt in prompts.items() if not isinstance(prompt, Demonstrations)]
    _check_models(options, texts, [name for name, prompt in prompts.items() if prompt.literal])
    key, endpoint = not_empty(options.api_key, "--api-key"), options.endpoint
    served = options.endpoint_model or (run_sync(only_model(endpoint, key)) if endpoint is not None else None)
    given = _settings(options, texts, key, served)
    with served_model(options.model) if options.model else nullcontext() as path:
        trainer = Trainer(
            algorithm=KINDS[options.algorithm](model=path, **given),
            models={"llm": Provider(base_url=endpoint, api_key=key, model=served)} if endpoint else {},
            initial_resources={**prompts},
            concurrency=options.concurrency,
            run_dir=options.run_dir,
            resume=options.resume,
        )
        result = trainer.fit(agent, tasks, val_tasks)
    if result.stopped:
        console.print(f"Stopped. Go on with the same command and  --resume {quote(str(result.run_dir))}")
        exit_interrupted()


def _settings(options: OptimizeOptions, texts: Sequence[str], key: str | None, served: str | None) -> dict[str, Any]:
    """The algorithm's settings: budgets, those of `--set`, and the critic, where there are texts to tune."""
    given: dict[str, Any] = {name: getattr(options, name) for name in _BUDGETS}
    known = [f.name for f in fields(KINDS[options.algorithm]) if f.init and f.name not in _OF_THE_COMMAND]
    given |= parsed_settings(options.settings, known)
    if texts:
        at_endpoint = options.critic_url in (None, options.endpoint)
        for name in MODEL_SETTINGS[options.algorithm]:
            given.setdefault(name, options.critic_model or (served if at_endpoint else None))
        if None in [given[name] for name in MODEL_SETTINGS[options.algorithm]]:
            raise ConfigError(f"Say which model the critic at {options.critic_url} is: --critic-model NAME.")
        critic_key = options.critic_key or (key if at_endpoint else None)
        given |= {"critic_url": options.critic_url or options.endpoint, "critic_key": critic_key}
    prices = None if options.prices is None else _prices(options.prices)
    return {**given, "prices": prices, "rollout_config": RolloutConfig(timeout_seconds=options.timeout)}


def _check_models(options: OptimizeOptions, texts: Sequence[str], put_in: Sequence[str]) -> None:
    """Raises ConfigError where a model that is needed is missing, or the agent has two."""
    if options.model is not None and options.endpoint is not None:
        raise ConfigError("The agent's model is either served here (--model) or at --endpoint: give one.")
    if options.budget_cost is not None and options.prices is None:
        raise ConfigError("--budget-cost needs --prices, such as --prices 1.2,9,0.3,2.")
    if texts and options.critic_url is None and options.endpoint is None:
        raise ConfigError("There is no critic: give --critic-url, the base URL of an OpenAI-compatible server.")
    if put_in and options.endpoint is None and options.model is None:
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
            f"{endpoint} does not say which models it serves ({reason_of(error)}). Check --endpoint and "
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
