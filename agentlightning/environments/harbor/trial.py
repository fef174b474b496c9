"""One attempt at a task: the box is set up, somebody works in it, and the verifier's numbers are read.

The order of things is Harbor's: tests come into the box only after the agent, a time-out or a bad exit of the agent is
recorded and what it did is verified, and the verifier's own exit code means nothing: the file that it writes decides.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from agentlightning.environments.harbor.artifacts import Record, check_services, collect, place_in, run_commands
from agentlightning.environments.harbor.boxes import Box, BoxRequest
from agentlightning.environments.harbor.compose import MAIN, Composition, read_composition
from agentlightning.environments.harbor.egress import restricted
from agentlightning.environments.harbor.engines import open_box
from agentlightning.environments.harbor.format import HarborTask, Healthcheck, Stage, resolved
from agentlightning.environments.harbor.pods import check_for_pods
from agentlightning.errors import ConfigError, ExecutorError
from agentlightning.litagent.process import Captured
from agentlightning.types.reward import checked_reward

Worker = Callable[[Box, Stage, Captured], Awaitable[int]]
"""Works on a stage in its box; its exit code."""
Preparation = Callable[[Box, Stage], Awaitable[None]]
"""Makes a box ready for the worker, in time of its own: the limit of the worker's counts from when it starts."""
_SHOWN = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """What all attempts of an environment have in common."""

    engine: str
    arguments: Sequence[str] = ()
    namespace: str | None = None
    """Where pods are made; kubectl's own where none is given."""
    variables: Collection[str] = ()
    """Names of this machine's variables that tasks may read."""
    time_factor: float = 1.0
    """Time limits are multiplied by it."""


@dataclass(slots=True)
class Verified:
    """What an attempt came to."""

    rewards: dict[str, float] = field(default_factory=dict)
    """By name; of several stages their mean, or the last one's."""
    stages: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """The rewards of each stage that was reached."""


async def run_trial(
    task: HarborTask,
    work: Worker,
    settings: TrialSettings,
    *,
    prepare: Preparation | None = None,
    endpoint: str | None = None,
    uses: Sequence[str] = (),
    record: Record = lambda _: None,
) -> Verified:
    """Run an attempt to its end. Raises ExecutorError where it could not be done or has no reward."""
    section = task.file.environment
    variables = resolved(section.env, f"{task.folder}: environment.env", settings.variables)
    request = BoxRequest(
        section=section,
        build=task.folder / "environment",
        environment=variables,
        endpoint=endpoint,
        uses=uses,
        composition=composition_of(task, settings),
        network_policies=task.network_policies,
    )
    found = Verified()
    async with open_box(settings.engine, request, settings.arguments, settings.namespace) as box:
        await _healthy(box, section.healthcheck)
        for stage in task.stages:
            await _prepare(box, stage)
            if prepare is not None:
                await prepare(box, stage)
            await _let_work(box, stage, work, settings, record)
            rewards = await _verified(task, stage, box, settings, record)
            found.stages[stage.name] = rewards
            if not _reaches(rewards, stage.min_reward):
                break
    each = list(found.stages.values())
    names = {name: None for rewards in each for name in rewards}
    last = task.file.multi_step_reward_strategy == "final"
    missing = [0.0] * (len(task.stages) - len(each))  # a stage that was not reached earned nothing
    found.rewards = {
        name: each[-1].get(name, 0.0) * (not missing) if last else fmean([*(e.get(name, 0.0) for e in each), *missing])
        for name in names
    }
    return found


def composition_of(task: HarborTask, settings: TrialSettings) -> Composition | None:
    """The services of a task, None where it has one container. Raises ConfigError for what its engine refuses of it."""
    if settings.engine == "kubernetes":
        check_for_pods(task)
    else:
        _check_network(task, settings.engine)
    if task.compose is None:
        check_services(task, None)
        return None
    if settings.engine == "bubblewrap":
        raise ConfigError(f"{task.compose}: several containers need engine=podman or engine=docker, not bubblewrap.")
    if settings.arguments:
        raise ConfigError(
            f"container_options are for {settings.engine} run, which {task.compose} is not started by: say there what "
            "its services need."
        )
    section = task.file.environment
    variables = resolved(section.env, f"{task.folder}: environment.env", settings.variables)
    composition = read_composition(task.compose.parent, section, variables, settings.variables)
    check_services(task, composition)
    return composition


def _check_network(task: HarborTask, engine: str) -> None:
    """Raises ConfigError for a phase whose network cannot be restricted as it says."""
    apart = [own.network_policy for s in task.stages if s.apart for own in (s.verifier, s.apart.section)]
    modes = {policy.mode for policy in (*task.network_policies, *apart) if policy}
    where = f"{task.folder / 'task.toml'}: network_mode"
    if engine == "bubblewrap" and "allowlist" in modes:
        raise ConfigError(f"{where} is allowlist, which needs engine=podman or engine=docker, and not bubblewrap.")
    if task.compose is not None and restricted(task.network_policies):
        mode = next(policy.mode for policy in task.network_policies if policy.mode != "public")
        raise ConfigError(f"{where} is {mode}, and the services of {task.compose.name} have a network; say public.")


async def _prepare(box: Box, stage: Stage) -> None:
    if stage.workdir is not None:
        await box.put(stage.workdir, box.workdir)
        if (stage.workdir / "setup.sh").is_file():
            done = await box.shell("sh ./setup.sh")
            if done.exit_code != 0:
                raise ExecutorError(f"setup.sh of step {stage.name} ended with exit code {done.exit_code}.")
    await _healthy(box, stage.healthcheck)


async def _healthy(box: Box, check: Healthcheck | None) -> None:
    """Wait until the environment is ready. Raises ExecutorError where it does not become so."""
    if check is None:
        return
    began, failed = time.monotonic(), 0
    while True:
        try:
            async with asyncio.timeout(check.timeout_sec):
                if (await box.shell(check.command)).exit_code == 0:
                    return
        except TimeoutError:
            pass
        starting = time.monotonic() - began < check.start_period_sec
        failed += not starting
        if failed >= check.retries:
            raise ExecutorError(f"The environment did not become healthy: {check.command}")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


async def _let_work(box: Box, stage: Stage, work: Worker, settings: TrialSettings, record: Record) -> None:
    """Let the worker do what it can in its time; however it ends, what it did is verified."""
    captured, began = Captured.empty(), time.monotonic()
    limit = stage.agent.timeout_sec and stage.agent.timeout_sec * settings.time_factor
    ended: dict[str, Any] = {"exit_code": None}
    try:
        with box.reaching(stage.agent.network_policy):
            async with asyncio.timeout(limit):
                ended["exit_code"] = await work(box, stage, captured)
    except TimeoutError:
        ended["timed_out"] = True
    finally:
        ended |= {"seconds": time.monotonic() - began, **({"step": stage.name} if stage.name else {})}
        output = {"stdout": captured.stdout.text(), "stderr": captured.stderr.text()}
        record(
            {"program": {**ended, **output, "stdout_bytes": captured.stdout.size, "stderr_bytes": captured.stderr.size}}
        )


async def _verified(
    task: HarborTask, stage: Stage, box: Box, settings: TrialSettings, record: Record
) -> dict[str, float]:
    """The rewards of a stage. Raises ExecutorError where the verifier gives none."""
    if (own := stage.apart) is None:
        await run_commands(box, sorted(stage.verifier.collect, key=lambda one: one.service != MAIN), record)
        return await _verify(task, stage, box, settings, record)
    variables = resolved(own.section.env, f"{task.folder}: verifier.environment.env", settings.variables)
    begun = own.section.network_policy
    network_policies = (begun, stage.verifier.network_policy or begun)
    request = BoxRequest(section=own.section, build=own.build, environment=variables, network_policies=network_policies)
    with tempfile.TemporaryDirectory(prefix="agl-artifacts-") as name:
        fetched = await collect(box, stage, Path(name), record, stops=stage is task.stages[-1])
        async with open_box(settings.engine, request, settings.arguments, settings.namespace) as apart:
            await place_in(apart, fetched, Path(name))
            return await _verify(task, stage, apart, settings, record)


async def _verify(
    task: HarborTask, stage: Stage, box: Box, settings: TrialSettings, record: Record
) -> dict[str, float]:
    verifier = stage.verifier
    bundled = stage.apart is not None and stage.apart.has_tests
    if not bundled or (await box.shell("test -e /tests/test.sh", user=0)).exit_code != 0:
        await box.shell("find /tests -mindepth 1 -delete; true", user=0)
        for folder in stage.tests:
            await box.put(folder, "/tests")
    await box.shell("find /logs/verifier -mindepth 1 -delete; true", user=0)
    await box.shell("chmod +x /tests/test.sh; chmod 777 /logs/verifier; true", user=0)
    env = resolved(verifier.env, f"{task.folder}: verifier.env", settings.variables)
    limit, captured = verifier.timeout_sec * settings.time_factor, Captured.empty()
    try:
        with box.reaching(verifier.network_policy):
            async with asyncio.timeout(limit):
                await box.run(["/tests/test.sh"], environment=env, user=verifier.user, captured=captured)
    except TimeoutError:
        raise ExecutorError(f"The verifier of {task.name} took more than {limit:g} s (verifier.timeout_sec).") from None
    finally:
        output = captured.stdout.text() + captured.stderr.text()
        record({"verifier": {"output": output, **({"step": stage.name} if stage.name else {})}})
    return read_rewards(await _files_of(box), task.name, output)


async def _files_of(box: Box) -> tuple[bytes | None, bytes | None]:
    return await box.read("/logs/verifier/reward.json"), await box.read("/logs/verifier/reward.txt")


def read_rewards(files: tuple[bytes | None, bytes | None], name: str, output: str = "") -> dict[str, float]:
    """What a verifier wrote: reward.json, an object of finite numbers, or else reward.txt, a number. Raises
    ExecutorError for anything else: no reward is not a reward of 0."""
    as_json, as_text = files
    if as_json is None and as_text is None:
        raise ExecutorError(
            f"The verifier of {name} wrote neither /logs/verifier/reward.json nor reward.txt, so that there is no "
            f"reward. It said: {output.strip()[-_SHOWN:] or 'nothing'}"
        )
    which = "reward.txt" if as_json is None else "reward.json"
    try:
        found = json.loads(as_json) if as_json is not None else {"reward": float((as_text or b"").decode().strip())}
        if not isinstance(found, dict) or not found:
            raise ValueError("it is no object with numbers")
        rewards = {str(key): checked_reward(value, is_json=as_json is not None) for key, value in found.items()}
        if not all(map(math.isfinite, rewards.values())):
            raise ValueError("a number is not finite")
    except (ValueError, TypeError, RecursionError) as error:
        shown = (as_json if as_json is not None else as_text or b"").decode(errors="replace")[:200]
        raise ExecutorError(
            f"The verifier of {name} wrote {which}, which holds no reward: {shown!r} ({error})."
        ) from None
    return rewards


def _reaches(rewards: Mapping[str, float], least: float | Mapping[str, float] | None) -> bool:
    """Whether the next stage is begun."""
    if least is None:
        return True
    wanted = least if isinstance(least, Mapping) else {"reward": least}
    return all(rewards.get(name, -math.inf) >= value for name, value in wanted.items())


async def solve(task: HarborTask, box: Box, stage: Stage, captured: Captured, variables: Collection[str]) -> int:
    """Work as the solution that comes with a task."""
    await box.put(stage.solution, "/solution")
    env = resolved(task.file.solution.env, f"{task.folder}: solution.env", variables)
    script = "chmod +x /solution/solve.sh; exec /solution/solve.sh"
    command = ["sh", "-c", script]
    return (await box.run(command, environment=env, user=stage.agent.user, captured=captured)).exit_code


async def do_nothing(_box: Box, _stage: Stage, _captured: Captured) -> int:
    """Work as somebody who does nothing."""
    return 0


def shown_command(command: Sequence[str]) -> str:
    """A command as it is recorded."""
    return shlex.join(command)[:_SHOWN]
