"""The trainer wires everything together and owns the lifecycles."""

from agentlightning.trainer.result import RunResult
from agentlightning.trainer.trainer import Trainer

__all__ = ["RunResult", "Trainer"]
