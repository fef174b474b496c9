"""What became of an attempt, read off its Job and its pod as the API server shows them. Pure.

What the program did is an AgentError, what the cluster did an ExecutorError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentlightning.errors import AgentError, DeadlineError, ExecutorError
from agentlightning.litagent.kubernetes.manifests import CONTAINER
from agentlightning.types.rollout import TIMEOUT_SETTING

Json = Mapping[str, Any]

_NO_IMAGE = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_NOT_STARTED = ("StartError", "ContainerCannotRun", "RunContainerError")
_OWN_LIMIT = re.compile(r"exceed\w* the (total )?limit|exceed\w* its local ephemeral storage limit", re.IGNORECASE)


def exit_of(job: Json, pod: Json | None) -> Json | None:
    """How the container ended (`exitCode`, `message`); None while it has not.

    Raises DeadlineError, AgentError or ExecutorError for other ends than an exit.
    """
    conditions = [c for c in job.get("status", {}).get("conditions", ()) if c["status"] == "True"]
    if any(c.get("reason") == "DeadlineExceeded" for c in conditions):
        raise DeadlineError(f"The cluster stopped the attempt at its Job's deadline. {TIMEOUT_SETTING}")
    if is_going(pod):  # why is known when the Job has ended, and perhaps it was the deadline
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


def _refuse_disrupted(pod: Json) -> None:
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


def is_going(pod: Json | None) -> bool:
    """Whether the pod is deleted, or gone, or was not made yet, and has not ended well."""
    if pod is None:
        return True
    return "deletionTimestamp" in pod["metadata"] and pod.get("status", {}).get("phase") != "Succeeded"


def why_not_started(pod: Json | None) -> str | None:
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


def _state(pod: Json) -> Json:
    """Of the program's own container; a cluster may have put others beside it."""
    containers = pod.get("status", {}).get("containerStatuses") or ()
    return next((c.get("state", {}) for c in containers if c["name"] == CONTAINER), {})
