"""The agent of the reinforcement method: a line of the training file is a task, one completion the answer, a grader
gives the reward."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentlightning.arguments import explained
from agentlightning.emitter import emit_annotation, emit_reward
from agentlightning.errors import AgentError, ConfigError, JudgeError
from agentlightning.finetuning.graders.base import Grader
from agentlightning.finetuning.graders.model import HttpModels
from agentlightning.finetuning.graders.parse import grade, parse_grader
from agentlightning.finetuning.graders.result import Grade, Models, Sample
from agentlightning.finetuning.graders.settings import GraderSettings
from agentlightning.litagent import LitAgent
from agentlightning.types import LLM, AttemptedRollout, NamedResources

GRADE = "agentlightning.grade"
"""The attribute of an attempt's annotation with its grade: the JSON of `Grade.as_response`, and `graders`, for each its
name, type, reward, flags and seconds."""
TOTAL = "reward"
"""The name of the reward that trains, where a `multi` gives the rewards of its graders as well."""
_SECONDS = 3600.0
"""To wait for the policy; the rollout's own deadline is shorter."""


class GradedCompletion(LitAgent[Any]):
    """Asks the policy once for each task and rewards the answer by a grader.

    A task is `{"messages": […], "tools": […], …}`; the grader sees all of it as `item`. A grader that fails ends the
    attempt as `judge_error`, which trains nothing.

    Args:
        grader: JSON of the fine-tuning API, or a parsed one.
        response_format: Of the requests, as chat completions have it; a JSON schema is held by a grammar.
        parallel_tool_calls: Of the requests with tools.
        models: What model graders ask. None: the run's gateway, whose `Trainer(models={…})` have prices and limits.
        settings: What Python graders run in, and what graders may use. None: the file that `AGL_GRADERS` names.
    """

    @explained
    def __init__(
        self,
        grader: Mapping[str, Any] | Grader,
        *,
        response_format: Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        models: Models | None = None,
        settings: GraderSettings | None = None,
        trained_agents: str | None = None,
    ) -> None:
        super().__init__(trained_agents=trained_agents)
        self.grader = grader if isinstance(grader, Grader) else parse_grader(grader, settings=settings)
        self._fields = {"response_format": response_format}
        self._of_tools = {"parallel_tool_calls": parallel_tool_calls}
        self._models = models

    def check_task(self, task: Any) -> None:
        """Raises ConfigError for a task without messages, or with invalid tools."""
        messages, tools = (task.get("messages"), task.get("tools")) if isinstance(task, Mapping) else (None, None)
        if not isinstance(messages, list) or not messages or not all(isinstance(one, Mapping) for one in messages):
            raise ConfigError('A task needs {"messages": [{"role": "user", "content": …}]}, with at least one message.')
        if tools is not None and not (isinstance(tools, list) and all(isinstance(one, Mapping) for one in tools)):
            raise ConfigError("The tools of a task are a list of objects, as chat completions have it.")

    def check_resources(self, resources: NamedResources) -> None:
        """Raises ConfigError where the policy would grade itself, and be trained on its grades."""
        model = next((resource.model for resource in resources.values() if isinstance(resource, LLM)), None)
        if self._models is None and model in self.grader.models:
            raise ConfigError(
                f"The grader asks the model {model!r}, which is the one that is trained. Give another model in "
                "Trainer(models={…}), and its name in the grader."
            )

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> None:
        self.check_task(task)
        llm = next((resource for resource in resources.values() if isinstance(resource, LLM)), None)
        if llm is None:
            raise AgentError("GradedCompletion needs a model, and the rollout's resources have none.")
        endpoint = HttpModels(llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id), llm.api_key, _SECONDS)
        try:
            completion = await self._completion(endpoint, llm, task)
            found = await grade(self.grader, task, Sample.of_completion(completion), self._models or endpoint)
        finally:
            await endpoint.close()
        emit_annotation({GRADE: json.dumps({**found.as_response(), "graders": _noted(found)})})
        if found.reward is None:
            raise JudgeError(f"The grader {found.name!r} failed. {found.why}")
        emit_reward(*_named(found))

    async def _completion(self, endpoint: HttpModels, llm: LLM, task: Mapping[str, Any]) -> Mapping[str, Any]:
        fields = {**llm.sampling_parameters, **self._fields}
        if task.get("tools"):
            fields |= {"tools": task["tools"], **self._of_tools}
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return await endpoint.chat_exactly(llm.model, task["messages"], given)
        except JudgeError as error:  # here it is the policy, and no judge
            raise AgentError(str(error)) from error


def _noted(found: Grade) -> list[dict[str, Any]]:
    graders = found.parts or {found.name: found}
    return [
        {"name": name, "type": g.type, "reward": g.reward, "flags": g.errors.flags, "seconds": g.seconds}
        for name, g in graders.items()
    ]


def _named(found: Grade) -> tuple[dict[str, float], str]:
    """The rewards by name, and the name of the one that trains."""
    parts = {name: reward for name, reward in found.sub_rewards.items() if reward is not None}
    total = found.name if not found.parts else TOTAL if TOTAL not in parts else f"{TOTAL}_total"
    return {total: found.reward or 0.0, **parts}, total
