# pyright: basic, reportMissingImports=false
"""The worker of `verifiers:`; see `foreign`. It runs where verifiers is installed, and imports nothing of ours."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

TOTAL = "reward"
"""The sum of the rewards, each times its weight: what verifiers itself trains on."""


def load(name: str, given: dict[str, Any]) -> Any:
    """The environment of a taskset's package, its one agent on this machine and without retries.

    A retry would be a second conversation in the same attempt, recorded as if it were one with the first.
    """
    try:
        import verifiers.v1 as vf
    except ImportError:
        import verifiers

        version = getattr(verifiers, "__version__", "older")
        raise SystemExit(f"This is verifiers {version}, and environments of its first API are not taken.") from None
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class

    kind = environment_class(name)
    config = concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    roles = [n for n, field in config.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(roles) != 1:
        raise SystemExit(f"{name} has the agents {', '.join(roles)}: those of one agent are taken.")
    agent = {
        "runtime": {"type": "subprocess"},
        **{n: given[n] for n in ("harness", "max_turns") if given[n] is not None},
    }
    if isinstance(given["harness"], str):
        agent["harness"] = {"id": given["harness"]}
    made = config.model_validate({"taskset": {**given["arguments"], "id": name}, roles[0]: agent})
    [spec] = agent_config_fields(made).values()
    spec.retries = made.retries = type(spec.retries)()
    return kind(made)


def tasks(environment: Any, given: dict[str, Any]) -> Any:
    """Those to train and validate on. An endless taskset needs a number of them."""
    if given["tasks"] is not None:
        return environment.taskset.take(given["tasks"])
    if not environment.taskset.bounded:
        raise SystemExit("This taskset never ends: say how many of its tasks are taken (tasks=100).")
    return environment.taskset


def listed(environment: Any, given: dict[str, Any]) -> None:
    for task in tasks(environment, given):
        prompt = task.data.prompt
        said = prompt if isinstance(prompt, str) else task.data.name or ""
        print(json.dumps({"id": task.data.idx, "name": task.data.name, "input": said[:2000]}))  # noqa: T201


async def run(environment: Any, given: dict[str, Any]) -> dict[str, Any]:
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext

    wanted = json.load(sys.stdin)["id"]
    task = next((one for one in tasks(environment, given) if one.data.idx == wanted), None)
    if task is None:
        return {"error": f"the taskset has no task {wanted} any more"}
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    model = ModelContext(model=os.environ["OPENAI_MODEL"], client=client, sampling=vf.SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(task, model)
    if not episode.ok:
        failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {"error": "; ".join(f"{one.type}: {one.message}" for one in failed) or "verifiers gives no reason"}
    if len(episode.traces) != 1:
        return {"error": f"its agent ran {len(episode.traces)} times in one episode, each with a reward of its own"}
    [trace] = episode.traces
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    if not parts:
        return {"error": "it has no @vf.reward"}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"rewards": {TOTAL: trace.reward, **{n: v for n, v in {**metrics, **parts}.items() if n != TOTAL}}}


if __name__ == "__main__":
    what, name, given = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if what == "list":
        listed(load(name, given), given)
    else:
        print("\n" + json.dumps(asyncio.run(run(load(name, given), given))))  # noqa: T201
