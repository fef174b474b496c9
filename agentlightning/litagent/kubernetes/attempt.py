"""One attempt as a Job, from its manifest to its deletion, and how it ended, as its Job and its pod show. What the
program did wrong is an AgentError, what the cluster did an ExecutorError.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentlightning.errors import AgentError, DeadlineError, ExecutorError
from agentlightning.litagent.kubernetes.api import ClusterApi
from agentlightning.litagent.kubernetes.manifests import (
    ATTEMPT,
    CONTAINER,
    JOB,
    PROCESS,
    RUNNER,
    AttemptWork,
    Kubernetes,
    job_of,
    process,
    runner,
    secret_of,
)
from agentlightning.litagent.process import Captured, Finished, Limits
from agentlightning.types.rollout import TIMEOUT_SETTING

logger = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""How long news of a pod is waited for before the pod is looked at all the same."""
GOING_SECONDS = 1.0
"""The same while a pod is deleted or gone and its Job has not ended: that is news of the Job, not of the pod."""
LEAVE_SECONDS = 4.0
"""How long the log of an attempt that was stopped may take, and then its Job's deletion."""


async def run_job(
    cluster: Kubernetes, work: AttemptWork, *, folder: Path, limits: Limits, captured: Captured | None = None
) -> Finished:
    """Run the command in a Job to its end. Raises AgentError, ExecutorError or DeadlineError.

    The reward that it left in its file is written to `.agl/reward` in the folder. A pod has one log for both streams:
    it is the output, and the error output too.
    """
    captured = captured or Captured.empty()
    began, read = time.monotonic(), False
    async with ClusterApi.opened(cluster) as api:
        await _forget_the_dead(api)
        ours = True
        try:
            if (made := await api.make("jobs", job_of(cluster, work, api.owner))) is None:
                ours = False
                made, ours = await _adopted(api, work), True
            await api.make("secrets", secret_of(work, made))
            pod, ended = await _until_ended(api, work.name, cluster.start_seconds)
            captured.stdout, read = await api.log(pod, limits.output_bytes), True
        finally:
            if ours:
                await asyncio.shield(_leave(api, work.name, limits, None if read else captured))
    if (reward := ended.get("message")) and (folder / ".agl").is_dir():
        (folder / ".agl" / "reward").write_text(reward)
    text = captured.stdout.text()
    return Finished(ended["exitCode"], text, text, time.monotonic() - began)


async def _adopted(api: ClusterApi, work: AttemptWork) -> dict[str, Any]:
    """The Job of this name, which an earlier try has made whose answer was lost."""
    found = await api.ask("GET", "jobs", work.name)
    has, going = found["metadata"].get("annotations", {}), "deletionTimestamp" in found["metadata"]
    if has.get(ATTEMPT) != work.attempt_id or going:
        raise ExecutorError(f"The Job {work.name} {'is being deleted' if going else 'belongs to something else'}.")
    return found


async def _until_ended(api: ClusterApi, name: str, start_seconds: float) -> tuple[str, Mapping[str, Any]]:
    """The pod's name, and how its container ended.

    A watch says only when to look. What is decided on is always a fresh answer, so it does not matter how one breaks.
    """
    selector, latest, begun = f"{JOB}={name}", time.monotonic() + start_seconds, False
    ids: set[str] = set()
    while True:
        job = await api.ask("GET", "jobs", name)
        pods = await api.ask("GET", "pods", labelSelector=selector)
        pod = next(iter(pods["items"]), None)
        ids |= {found["metadata"]["uid"] for found in pods["items"]}
        if len(ids) > 1:  # older clusters put another one in the place of a pod that was deleted
            raise ExecutorError("The pod was deleted before its end, and the cluster began another one.")
        if (ended := _exit_of(job, pod)) is not None:
            assert pod is not None
            return pod["metadata"]["name"], ended
        wait = GOING_SECONDS if _is_going(pod) else LOOK_SECONDS
        why = _why_not_started(pod)
        begun = begun or why is None
        if not begun:
            wait = min(wait, latest - time.monotonic())
            if wait <= 0:
                raise ExecutorError(f"The program did not run after {start_seconds:g} s. {why}")
        await api.news(selector, pods["metadata"]["resourceVersion"], wait)


async def _leave(api: ClusterApi, name: str, limits: Limits, unread: Captured | None) -> None:
    """Read the log if nobody has, and delete the Job; as far as the cluster answers in time."""
    if unread is not None:
        with suppress(ExecutorError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                for pod in (await api.ask("GET", "pods", labelSelector=f"{JOB}={name}"))["items"]:
                    unread.stdout = await api.log(pod["metadata"]["name"], limits.output_bytes)
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await api.remove(name)
    except (ExecutorError, TimeoutError) as error:
        why = str(error) or "it did not answer in time."
        logger.warning("The Job %s is left to the cluster, which ends it at its deadline: %s", name, why)


_looked: set[tuple[int, str, str]] = set()
"""Where this process has looked for Jobs that others left."""


async def _forget_the_dead(api: ClusterApi) -> None:
    """Delete, once, the Jobs of processes that ran in this pod or on this machine and are gone.

    Their attempts are done again, under other ids, when their leases run out.
    """
    if (place := (os.getpid(), api.url, api.namespace)) in _looked:
        return
    _looked.add(place)
    try:
        left = await api.ask("GET", "jobs", labelSelector=f"{RUNNER}={runner()}")
    except ExecutorError:
        _looked.discard(place)  # the next attempt looks again
        raise
    for job in left["items"]:
        name, whose = job["metadata"]["name"], job["metadata"]["labels"].get(PROCESS, "")
        pid = whose.partition("-")[0]
        if pid.isdigit() and process(int(pid)) != whose:
            logger.warning("The runner that made the Job %s is gone: it is deleted.", name)
            await api.remove(name)


_Json = Mapping[str, Any]

_NO_IMAGE = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_NOT_STARTED = ("StartError", "ContainerCannotRun", "RunContainerError")
_OWN_LIMIT = re.compile(r"exceed\w* the (total )?limit|exceed\w* its local ephemeral storage limit", re.IGNORECASE)


def _exit_of(job: _Json, pod: _Json | None) -> _Json | None:
    """How the container ended (`exitCode`, `message`); None while it has not.

    Raises DeadlineError, AgentError or ExecutorError for other ends than an exit.
    """
    conditions = [c for c in job.get("status", {}).get("conditions", ()) if c["status"] == "True"]
    if any(c.get("reason") == "DeadlineExceeded" for c in conditions):
        raise DeadlineError(f"The cluster stopped the attempt at its Job's deadline. {TIMEOUT_SETTING}")
    if _is_going(pod):  # the reason, perhaps the deadline, is known when the Job has ended
        if any(c["type"] in ("Failed", "Complete") for c in conditions):
            raise ExecutorError("The pod was deleted before its end: its node was drained, or somebody did it.")
        return None
    if pod is None:
        return None
    _refuse_disrupted(pod)
    state = _state(pod)
    waiting, ended = state.get("waiting", {}), state.get("terminated")
    if waiting.get("reason") in _NO_IMAGE:
        raise ExecutorError(f"The image cannot be had ({waiting['reason']}). {waiting.get('message', '')}")
    if ended is None:
        if pod["status"].get("phase") == "Failed":
            raise ExecutorError("The pod failed, and the cluster does not say why.")
        return None
    if (
        ended.get("reason") == "OOMKilled" and ended["exitCode"] != 0
    ):  # else a child was killed, and the program lived on
        raise AgentError("The program used more memory than its pod has, and was killed (Kubernetes(memory=…)).")
    if ended.get("reason") in _NOT_STARTED or ended["exitCode"] == 127:
        raise AgentError(f"The program could not be started in its image. {ended.get('message', '')}".rstrip())
    return ended


def _refuse_disrupted(pod: _Json) -> None:
    """Raises for a pod that was ended from outside: for what it wrote to disk, or for the cluster's own reasons."""
    status = pod.get("status", {})
    reason, message = status.get("reason"), status.get("message") or ""
    if reason == "Evicted" and _OWN_LIMIT.search(message):
        raise AgentError(f"The program wrote more than its pod may hold (Kubernetes(storage=…)). {message}")
    if reason is not None:
        raise ExecutorError(f"The cluster ended the pod ({reason}). {message}")
    for condition in status.get("conditions", ()):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            message = condition.get("message", "")
            raise ExecutorError(f"The cluster ended the pod ({condition.get('reason')}). {message}")


def _is_going(pod: _Json | None) -> bool:
    """Whether the pod is deleted, or gone, or was not made yet, and has not ended well."""
    if pod is None:
        return True
    return "deletionTimestamp" in pod["metadata"] and pod.get("status", {}).get("phase") != "Succeeded"


def _why_not_started(pod: _Json | None) -> str | None:
    """Why the program does not run yet; None if it does."""
    if pod is None:
        return "The cluster has made no pod for its Job: `kubectl describe job` says why."
    if "running" in _state(pod):
        return None
    unscheduled = [
        c for c in pod["status"].get("conditions", ()) if c["type"] == "PodScheduled" and c["status"] != "True"
    ]
    state = [*unscheduled, _state(pod).get("waiting", {})][0]
    return f"{state.get('reason', 'Pending')}: {state.get('message', 'the cluster does not say why')}"


def _state(pod: _Json) -> _Json:
    """The state of the program's own container; a cluster may have put others beside it."""
    containers = pod.get("status", {}).get("containerStatuses") or ()
    return next((c.get("state", {}) for c in containers if c["name"] == CONTAINER), {})
