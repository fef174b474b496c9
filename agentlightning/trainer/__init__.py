"""The trainer wires everything together and owns the lifecycles."""

from agentlightning.trainer.trainer import RunResult, Trainer

__all__ = ["RunResult", "Trainer"]
