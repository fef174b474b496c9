# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Environments of the first API of verifiers (`load_environment`, versions 0.1 and 0.2), for `verifiers_tasks`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
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
    if getattr(made, "requires_group_rollouts", False) and not rewards_groups(made):
        raise SystemExit(f"{name} rewards the rollouts of a group in a way of its own; functions of groups are taken.")
    return made


def rewards_groups(environment: Any) -> bool:
    """Whether its rubrics have functions that see the rollouts of a group together."""
    return any(rubric._is_group_func(one) for rubric in rubrics(environment) for one in rubric.funcs)


def leave(environment: Any, *, of_groups: bool) -> None:
    """Leave only the functions of groups in its rubrics, or only the others."""
    for rubric in rubrics(environment):
        pairs = zip(rubric.funcs, rubric.weights, strict=True)
        left = [(one, weight) for one, weight in pairs if rubric._is_group_func(one) == of_groups]
        rubric.funcs[:] = [one for one, _ in left]
        rubric.weights[:] = [weight for _, weight in left]


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
    print(json.dumps({"rewards_groups": rewards_groups(environment)}))  # noqa: T201
    for name, row in rows(environment, given).items():
        prompt = row["prompt"]
        question = prompt if isinstance(prompt, str) else prompt[-1].get("content") or ""
        known = {"id": name, "key": key_of(row), "split": name.partition("-")[0], "input": str(question)[:2000]}
        print(json.dumps(known))  # noqa: T201


def found_row(environment: Any, given: dict[str, Any], wanted: dict[str, Any]) -> Any:
    """The row of a task; a text that says why there is none."""
    row = rows(environment, given).get(wanted["id"])
    if row is None:
        return f"the environment has no task {wanted['id']} any more"
    if wanted.get("key", key_of(row)) != key_of(row):
        return f"task {wanted['id']} is another one now than when tasks were listed: its order must stay"
    return row


async def run(environment: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Work on a task. One whose group is rewarded later has the rewards that are of itself, and what the group's
    functions will be shown of it lies in a file."""
    from verifiers.types import ClientConfig

    wanted = json.load(sys.stdin)
    row = found_row(environment, given, wanted)
    if isinstance(row, str):
        return {"error": row}
    client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0)
    grouped = rewards_groups(environment)
    later = grouped and wanted.get("rewarded_later", False)
    if later:
        leave(environment, of_groups=False)
    failed, states = watched(environment), scored(environment)
    # A retry of the rollout would be a second conversation in the same attempt.
    how = (client, os.environ["OPENAI_MODEL"], environment.sampling_args)
    if grouped:
        [done] = await environment.run_group([row], *how, max_retries=0)
    else:
        done = await environment.run_rollout(row, *how, max_retries=0)
    if done.get("error"):
        return {"error": str(done["error"].get("error_chain_repr") or done["error"])}
    if failed:
        return {"error": "; ".join(failed)}
    if later:
        keep_for_group(states[-1])
    elif done.get("reward") is None:
        return {"error": "its rubric gives no reward"}
    metrics = {name: value for name, value in (done.get("metrics") or {}).items() if name != TOTAL}
    return {"rewards": {TOTAL: done.get("reward") or 0.0, **metrics}}


STATE_FILE = "group_state.json"
"""In the working directory of an attempt: what functions of groups are shown of it."""
_LIVE = frozenset({"client", "input", "model", "sampling_args", "tool_defs", "timing", "usage_tracker"})
"""Of a state: what is gone with the process of its rollout, or would not fit in a record of it."""


def scored(environment: Any) -> list[Any]:
    """The states that its rubric scores from now on."""
    states, score = list[Any](), environment.rubric.score_group

    async def kept(some: Any) -> None:
        states.extend(some)
        await score(some)

    environment.rubric.score_group = kept
    return states


def keep_for_group(state: Any) -> None:
    """Write down what of a state is data: its messages, and what the environment put there and JSON can hold."""
    found: dict[str, Any] = {}
    turns = [
        {k: v for k, v in turn.items() if k not in ("response", "tokens")} for turn in state.get("trajectory") or ()
    ]
    for key, value in {**state, "trajectory": turns}.items():
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            found |= {} if key in _LIVE else {key: json.loads(json.dumps(value, default=plain))}
    with open(STATE_FILE, "w") as file:
        json.dump(found, file)


def plain(value: Any) -> Any:
    """A message, or another record, as JSON has it."""
    return dict(value) if isinstance(value, Mapping) else value.model_dump()


async def reward(environment: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What the functions of groups give to the rollouts of a task."""
    from verifiers.types import State

    wanted = json.load(sys.stdin)
    row = found_row(environment, given, wanted["task"])
    if isinstance(row, str):
        return {"error": row}
    leave(environment, of_groups=True)
    failed = watched(environment)
    states = [State({**one, "input": dict(row), "reward": 0.0, "metrics": {}}) for one in wanted["states"]]
    await environment.rubric.score_group(states)
    if failed:
        return {"error": "; ".join(failed)}
    return {"group": [{TOTAL: one["reward"], **one["metrics"]} for one in states]}
