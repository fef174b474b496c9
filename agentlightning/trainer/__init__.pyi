"""The names of `agentlightning.trainer`, and where each is loaded from when it is used."""

from agentlightning.trainer.result import RunResult as RunResult
from agentlightning.trainer.trainer import Trainer as Trainer

__all__: list[str]
