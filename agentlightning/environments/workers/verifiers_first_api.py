# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Environments of the first API of verifiers (`load_environment`, versions 0.1 and 0.2), for `verifiers_tasks`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
from typing import Any

TOTAL = "reward"
"""The sum of the rubric's functions, each times its weight."""


def load(name: str, given: dict[str, Any]) -> Any:
    """The environment that the package's `load_environment` makes, with its settings of the agent."""
    import verifiers as vf

    for option in ("harness", "runtime"):
        if given[option] is not None:
            raise SystemExit(f"{option} is for tasksets of verifiers 0.4; {name} is run by verifiers {vf.__version__}.")
    if not hasattr(vf.Environment, "build_eval_dataset"):
        raise SystemExit(f"This is verifiers {vf.__version__}: 0.1.14 is needed, or 0.4.")
    made = vf.load_environment(name, **given["arguments"])
    if given["max_turns"] is not None:
        if not hasattr(made, "max_turns"):
            raise SystemExit(f"max_turns: {type(made).__name__} has none.")
        made.max_turns = given["max_turns"]
    if getattr(made, "requires_group_rollouts", False):
        raise SystemExit(f"{name} rewards the rollouts of a group together; rewards of one rollout are taken.")
    return made


def rubrics(environment: Any) -> list[Any]:
    """All, of an environment's parts and of a rubric's parts, too."""
    found, waiting = [], [environment]
    while waiting:
        one = waiting.pop()
        waiting += [*getattr(one, "envs", ()), *getattr(one, "rubrics", ())]
        waiting += [one.rubric] if hasattr(one, "rubric") else []
        found += [one] if isinstance(getattr(one, "funcs", None), list) else []
    return found


def watched(environment: Any) -> list[str]:
    """What goes wrong in its reward functions from now on, which verifiers takes for a reward of 0."""
    failed: list[str] = []

    def guarded(function: Any) -> Any:
        @functools.wraps(function)
        async def rewarded(*args: Any, **kwargs: Any) -> Any:
            try:
                value = function(*args, **kwargs)
                return await value if inspect.isawaitable(value) else value
            except Exception as error:
                failed.append(f"{getattr(function, '__name__', function)}: {type(error).__name__}: {error}")
                raise

        return rewarded

    for rubric in rubrics(environment):
        rubric.funcs[:] = [guarded(one) for one in rubric.funcs]
    return failed


def rows(environment: Any, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows to train on, then those that the environment itself evaluates on, by an id of each."""
    environment.build_dataset()
    environment.build_eval_dataset()
    trained, kept = environment.dataset, environment.eval_dataset
    if trained is None:
        trained, kept = kept, None
    parts = {"train": list(trained)[: given["tasks"]], "validation": list(kept if kept is not None else ())}
    return {f"{part}-{number}": row for part, some in parts.items() for number, row in enumerate(some)}


def key_of(row: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()


def listed(environment: Any, given: dict[str, Any]) -> None:
    for name, row in rows(environment, given).items():
        prompt = row["prompt"]
        said = prompt if isinstance(prompt, str) else prompt[-1].get("content") or ""
        known = {"id": name, "key": key_of(row), "split": name.partition("-")[0], "input": str(said)[:2000]}
        print(json.dumps(known))  # noqa: T201


async def run(environment: Any, given: dict[str, Any]) -> dict[str, Any]:
    from verifiers.types import ClientConfig

    wanted = json.load(sys.stdin)
    row = rows(environment, given).get(wanted["id"])
    if row is None:
        return {"error": f"the environment has no task {wanted['id']} any more"}
    if wanted.get("key", key_of(row)) != key_of(row):
        return {"error": f"task {wanted['id']} is another one now than when tasks were listed: its order must stay"}
    client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0)
    failed = watched(environment)
    # A retry of the rollout would be a second conversation in the same attempt.
    done = await environment.run_rollout(
        row, client, os.environ["OPENAI_MODEL"], environment.sampling_args, max_retries=0
    )
    if done.get("error"):
        return {"error": str(done["error"].get("error_chain_repr") or done["error"])}
    if failed:
        return {"error": "; ".join(failed)}
    metrics = {name: value for name, value in (done.get("metrics") or {}).items() if name != TOTAL}
    if done.get("reward") is None:
        return {"error": "its rubric gives no reward"}
    return {"rewards": {TOTAL: done["reward"], **metrics}}
