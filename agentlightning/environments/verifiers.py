"""`verifiers:NAME`: a taskset of verifiers with its agent and its rewards, or an environment of its first API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentlightning.environments.foreign import ForeignEnvironment
from agentlightning.errors import ConfigError


class VerifiersEnvironment(ForeignEnvironment):
    """A taskset's tasks; verifiers runs its agent on them, and its rewards are the rewards."""

    scheme = "verifiers"
    summary = "a taskset of verifiers: its tasks, its agent, its rewards"
    tested = "verifiers 0.4.0, 0.2.1, 0.1.14"
    worker = Path(__file__).parent / "workers" / "verifiers_tasks.py"
    install = "pip install verifiers uv, and the environment's own package"

    def __init__(
        self,
        name: str,
        *,
        python: str | None = None,
        reward_key: str | None = None,
        tasks: int | None = None,
        val_tasks: int = 0,
        harness: str | dict[str, Any] | None = None,
        runtime: str | dict[str, Any] | None = None,
        max_turns: int | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            name: The id, as `vf-eval` takes it: the name of a package that is installed, or lies here.
            python: The interpreter in which verifiers is installed; this one if not given.
            reward_key: Which reward trains; "reward" if not given, the sum of all by their weights.
            tasks: So many tasks are taken, the first ones; all if not given.
            val_tasks: So many are to validate on: the last ones, or the first of the environment's own evaluation rows.
            harness: The agent's program: its id, or its id with its settings; the taskset's own if not given, else
                "null", a conversation with the taskset's tools (in verifiers itself "bash", which has a shell).
            runtime: Where that program runs: "docker", "podman" or "subprocess" (on this machine), or one with its
                settings, such as {"type": "docker", "image": "python:3.12"}. If not given, where the taskset's author
                says, else on this machine; a program that executes what the model writes is refused there.
            max_turns: Of an attempt: how many calls of the model.
            arguments: Settings of the taskset.
        """
        for option, value in (("tasks", tasks), ("max_turns", max_turns)):
            if value is not None and value < 1:
                raise ConfigError(f"{option} is {value}, and at least 1 is needed.")
        whole = {"harness": harness, "runtime": runtime, "max_turns": max_turns, "arguments": arguments or {}}
        settings = {"tasks": tasks, **whole}
        super().__init__(name, python=python, reward_key=reward_key, settings=settings, val_tasks=val_tasks)
