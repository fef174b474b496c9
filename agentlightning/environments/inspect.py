"""`inspect:FILE@task`: a task of inspect_ai with its solver and its scorers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentlightning.environments.foreign import ForeignEnvironment


class InspectEnvironment(ForeignEnvironment):
    """A sample is a task, the solver works on it, and its scores are the rewards."""

    scheme = "inspect"
    summary = "a task of inspect_ai: its samples, its solver, its scores"
    tested = "inspect_ai 0.3.285"
    worker = Path(__file__).parent / "workers" / "inspect_tasks.py"
    install = "pip install inspect-ai openai"

    def __init__(
        self,
        name: str,
        *,
        python: str | None = None,
        reward_key: str | None = None,
        val_tasks: int = 0,
        message_limit: int | None = None,
        time_limit: int | None = None,
        sandbox: str | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            name: `FILE@task`: a file, and a function in it with inspect's `@task`.
            python: The interpreter in which inspect_ai is installed; this one if not given.
            reward_key: Which score trains; the first scorer's if not given.
            val_tasks: So many samples, the last ones, are to validate on.
            message_limit: Of a sample, in place of the task's own.
            time_limit: The same in seconds.
            sandbox: Where tools act for the model, in place of the task's own: "docker", or "local" for this machine,
                which a task alone cannot choose.
            arguments: Of the task's function.
        """
        file, at, task = name.rpartition("@")
        limits = {"message_limit": message_limit, "time_limit": time_limit, "sandbox": sandbox}
        settings = {**limits, "arguments": arguments or {}}
        whole = f"{Path(file).expanduser().absolute()}@{task}" if at else str(Path(name).expanduser().absolute())
        super().__init__(whole, python=python, reward_key=reward_key, settings=settings, val_tasks=val_tasks)
