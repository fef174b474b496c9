"""The airline's support on agent-framework-lab's runner for tau2: the assistant is Microsoft's agent-framework, and the
lab's workflow leads the conversation. Tasks, tools, policy and evaluator are tau2's; the lab has this domain only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import litellm
from agent_framework import BaseChatClient, ChatResponse, FunctionTool, Message
from agent_framework.lab.tau2 import ASSISTANT_AGENT_ID, TaskRunner, patch_env_set_state
from agent_framework.observability import enable_instrumentation
from agent_framework.openai import OpenAIChatCompletionClient
from tau2.data_model.tasks import Task

import agentlightning as agl

from .script import Script
from .user import API_KEY, BASE_URL, MODEL

# The lab counts tokens by a table that tiktoken would download, and litellm, which tau2 brings along, has.
os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(litellm.__file__).parent / "litellm_core_utils" / "tokenizers"))
enable_instrumentation()  # its spans say which agent calls
# The lab's runner asks its tools for their schema under tau2's name for it, which agent-framework's tools do not have.
FunctionTool.openai_schema = property(FunctionTool.to_json_schema_spec)
patch_env_set_state()  # the lab's way to compare what its tools return with what tau2's environment returns


class ScriptedUser(BaseChatClient[Any]):
    """A model for the lab's user simulator that says what the script says."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    async def _inner_get_response(self, *, messages: Any, stream: bool, options: Any, **_: Any) -> ChatResponse:
        opened = any(message.role == "assistant" for message in messages)
        said = self._script.reply(messages[-1].text) if opened else self._script.opening()
        return ChatResponse(messages=[Message("assistant", [said])])


def make_user(task: Task) -> BaseChatClient[Any]:
    """The user of a task: a script, unless the environment names a model."""
    if model := os.environ.get(MODEL):
        return OpenAIChatCompletionClient(
            model=model.removeprefix("openai/"), base_url=os.environ.get(BASE_URL), api_key=os.environ.get(API_KEY)
        )
    told: Any = task.user_scenario.instructions
    return ScriptedUser(Script(told.reason_for_call, told.known_info or ""))


@agl.rollout(trained_agents=f"^{ASSISTANT_AGENT_ID}$")
async def lab_agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Solve `task["task"]`, one of tau2's airline tasks; tau2's evaluator gives the reward."""
    case = Task.model_validate(task["task"])
    runner = TaskRunner(max_steps=100, assistant_sampling_temperature=llm.sampling_parameters.get("temperature", 0.0))
    assistant = OpenAIChatCompletionClient(model=llm.model, base_url=llm.endpoint, api_key="dummy")
    conversation = await runner.run(case, assistant, make_user(case))
    return runner.evaluate(case, conversation, runner.termination_reason)
