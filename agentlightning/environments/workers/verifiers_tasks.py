# pyright: basic, reportMissingImports=false
"""The worker of `verifiers:`; see `foreign`. It runs where verifiers is installed, and imports nothing of ours.

What is here is for tasksets (`verifiers.v1` of 0.4); `verifiers_first_api` is for what came before them.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from typing import Any

TOTAL = "reward"
"""The sum of the rewards, each times its weight: what verifiers itself trains on."""


def load(name: str, given: dict[str, Any]) -> Any:
    """The environment of a taskset's package, its one agent where `placed` says and without retries.

    A retry would be a second conversation in the same attempt, recorded as if it were one with the first.
    """
    try:
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import default_harness_id, environment_class
    except ImportError as error:
        version = importlib.metadata.version("verifiers")
        raise SystemExit(f"This is verifiers {version}: 0.4 is needed, or 0.1 with its first API ({error}).") from None

    kind = environment_class(name)
    config = concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    roles = {n: f.default for n, f in config.model_fields.items() if isinstance(f.default, vf.AgentConfig)}
    if len(roles) != 1:
        raise SystemExit(f"{name} has the agents {', '.join(roles)}: those of one agent are taken.")
    [(role, authors)] = roles.items()
    agent = {n: given[n] for n in ("harness", "max_turns", "runtime") if given[n] is not None}
    for setting, key in (("harness", "id"), ("runtime", "type")):
        if isinstance(agent.get(setting), str):
            agent[setting] = {key: agent[setting]}
    if "harness" not in agent and authors.harness is None and default_harness_id(name) != name:
        agent["harness"] = {"id": "null"}  # verifiers would give it a shell
    made = config.model_validate({"taskset": {**given["arguments"], "id": name}, role: agent})
    [spec] = agent_config_fields(made).values()
    spec.retries = made.retries = type(spec.retries)()
    placed(made, spec, chosen=given["runtime"] is not None, authors="runtime" in authors.model_fields_set)
    return kind(made)


def placed(made: Any, spec: Any, *, chosen: bool, authors: bool) -> None:
    """Let its program run where the user or the environment's author says, else on this machine (verifiers' own default
    is a sandbox that somebody sells), where only a program runs unasked that executes nothing the model writes."""
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import harness_class

    if not chosen and not authors:
        spec.runtime = SubprocessConfig()
    [program] = made.agent_harnesses().values()
    if not chosen and isinstance(spec.runtime, SubprocessConfig) and harness_class(program.id).EXECUTES_CODE:
        raise SystemExit(
            f"The agent's program (harness {program.id}) executes what the model writes. Say where: in a container "
            "(runtime=docker or runtime=podman), or on this machine, with all that you may do on it "
            "(runtime=subprocess). harness=null is a conversation with the taskset's tools and executes nothing."
        )


def tasks(environment: Any, given: dict[str, Any]) -> Any:
    """Those to train and validate on. An endless taskset needs a number of them."""
    if given["tasks"] is not None:
        return environment.taskset.take(given["tasks"])
    if not environment.taskset.bounded:
        raise SystemExit("This taskset never ends: say how many of its tasks are taken (tasks=100).")
    return environment.taskset


def listed(environment: Any, given: dict[str, Any]) -> None:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.compile import resolve_runtime_config

    [spec] = agent_config_fields(environment.config).values()
    for task in tasks(environment, given):
        try:
            resolve_runtime_config(spec.runtime, task)
        except ValueError as error:
            raise SystemExit(f"runtime={spec.runtime.type}: {error}") from None
        prompt = task.data.prompt
        question = prompt if isinstance(prompt, str) else task.data.name or ""
        whole = {"id": task.data.idx, "key": task.key, "name": task.data.name, "input": question[:2000]}
        print(json.dumps(whole))  # noqa: T201


async def run(environment: Any, given: dict[str, Any]) -> dict[str, Any]:
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext

    wanted = json.load(sys.stdin)
    task = next((one for one in tasks(environment, given) if one.data.idx == wanted["id"]), None)
    if task is None:
        return {"error": f"the taskset has no task {wanted['id']} any more"}
    if wanted.get("key", task.key) != task.key:
        return {"error": f"task {wanted['id']} is another one now than when tasks were listed: its order must stay"}
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
    import verifiers

    if hasattr(verifiers, "load_environment"):
        import verifiers_first_api as api
    else:
        api = sys.modules[__name__]
    if what == "list":
        api.listed(api.load(name, given), given)
    else:
        work = getattr(api, what)
        print("\n" + json.dumps(asyncio.run(work(api.load(name, given), given))))  # noqa: T201
