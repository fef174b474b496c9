"""`VERL(config)`: an algorithm of ours with the settings that a nested VERL configuration says.

python -m agentlightning.verl agent=agent.py:name data.train_files=tasks.jsonl actor_rollout_ref.model.path=calc …
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning import algorithm as family
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.compat.verl_keys import flatten, in_verls_words, understand
from agentlightning.compat.verl_trainer import trainer_defaults
from agentlightning.errors import AgentLightningError, ConfigError

logger = logging.getLogger(__name__)

USAGE = """\
python -m agentlightning.verl key=value …

  data.train_files=FILE              tasks, one JSON value per line (or Parquet); needed
  data.val_files=FILE                tasks to validate on
  agent=FILE.py:NAME                 the agent; without it, runners elsewhere run it (agl runner)
  actor_rollout_ref.model.path=…     and all other keys of VERL(config)
"""


def VERL(config: Mapping[str, Any], trainer_cls: Any = None, daemon_cls: Any = None) -> TrainingSettings:
    """The algorithm that the configuration describes: GRPO, PPO, RLOO, …; what it is not said has VERL's defaults.

    Every key is mapped to a setting, listed once as having no meaning here, or refused with a ConfigError that says
    what to do.
    """
    for name, given in (("trainer_cls", trainer_cls), ("daemon_cls", daemon_cls)):
        if given is not None:
            raise ConfigError(f"{name}= is not kept: there is no VERL trainer inside. Subclass GRPO instead.")
    flat = flatten(_plain(config))
    meaning = understand(flat, _gpus, _has_vllm)
    try:
        made = getattr(family, meaning.algorithm)(**meaning.settings)
    except ConfigError as error:
        raise ConfigError(f"VERL's configuration cannot be used as it is: {in_verls_words(str(error))}") from error
    vars(made)["trainer_defaults"] = trainer_defaults(flat)  # beside the settings, which are frozen
    if meaning.ignored:
        lines = "\n".join(f"  {key}: {why}" for key, why in meaning.ignored.items())
        logger.warning("These keys of VERL's configuration have no meaning here and change nothing:\n%s", lines)
    return made


def _plain(config: Any) -> Mapping[str, Any]:
    """OmegaConf's configuration as plain dictionaries."""
    if type(config).__module__.partition(".")[0] != "omegaconf":
        return config
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]


def _gpus() -> int:
    try:
        import torch
    except ModuleNotFoundError:
        return 0
    return torch.cuda.device_count()


def _has_vllm() -> bool:
    from agentlightning.backend.vllm.options import find_vllm

    try:
        return bool(find_vllm(None))
    except ConfigError:
        return False


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Train from the command line. Exits with a message for what is wrong."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or {"-h", "--help"} & set(given):
        print(USAGE)  # noqa: T201
        return
    try:
        _train(dict(map(_override, given)))
    except AgentLightningError as error:
        sys.exit(f"Error: {error}")


def _train(flat: dict[str, Any]) -> None:
    from agentlightning.cli.agents import find_agent
    from agentlightning.trainer import Trainer

    train, val = flat.pop("data.train_files", None), flat.pop("data.val_files", None)
    named = flat.pop("agent", None)
    if train is None:
        raise ConfigError("data.train_files is missing: a file with one task per line.")
    agent = None if named is None else find_agent(named)
    trainer = Trainer(algorithm=VERL(flat), strategy=None if agent else "remote")
    trainer.fit(agent, _tasks(train), None if val is None else _tasks(val))


def _override(text: str) -> tuple[str, Any]:
    """One `key=value` as Hydra writes it: `+` in front is accepted, values are JSON, words, lists, or text."""
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not key:
        raise ConfigError(f"'{text}' is no key=value.")
    return key, _value(value)


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text.startswith("[") and text.endswith("]"):  # the shell took the quotes away
        return [_value(part.strip().strip("'\"")) for part in text[1:-1].split(",") if part.strip()]
    return text


def _tasks(file: str | Sequence[str]) -> list[Any]:
    """The tasks of one file, or of several."""
    if not isinstance(file, str):
        return [task for one in file for task in _tasks(one)]
    from agentlightning.trainer.tasks import load_tasks

    return load_tasks(file)


if __name__ == "__main__":
    main()
