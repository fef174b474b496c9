"""A support agent on tau2: the assistant is trained, its user is simulated, tau2 says whether the case was solved.

It is an ordinary tau2 program. `@agl.rollout`, the endpoint and the reward are all that knows about training.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from tau2.agent.base import AgentError
from tau2.agent.llm_agent import LLMAgent
from tau2.data_model.message import AssistantMessage, ToolMessage, UserMessage
from tau2.data_model.simulation import SimulationRun
from tau2.data_model.tasks import Task
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.registry import registry

import agentlightning as agl

from .prompts import MAX_STEPS, MAX_TOKENS
from .user import make_user


class Assistant(LLMAgent):
    """tau2's own agent. A message that tau2 cannot take is its own error, and no failure of the program."""

    def generate_next_message(self, message: Any, state: Any) -> tuple[AssistantMessage, Any]:
        try:
            said, state = super().generate_next_message(message, state)
        except ValidationError as error:
            raise AgentError(f"a call whose arguments are none: {error}") from error
        if not (said.is_tool_call() or said.has_text_content()):
            raise AgentError("an empty message")
        return said, state


@agl.rollout
def support_agent(task: dict[str, Any], llm: agl.LLM) -> None:
    """Solve `task["task"]`, a task of tau2's domain `task["domain"]`; tau2's evaluator gives the reward."""
    domain, case = task["domain"], Task.model_validate(task["task"])
    environment = registry.get_env_constructor(domain)()
    agent = Assistant(
        environment.get_tools(),
        environment.get_policy(),
        llm=f"openai/{llm.model}",
        llm_args={
            "api_base": agl.GATEWAY_URL,  # one for all rollouts, for which litellm keeps one client
            "api_key": "none",
            "num_retries": 0,
            "max_tokens": MAX_TOKENS.get(domain, 1024),
        },
    )
    user = make_user(case, environment)
    conversation = Orchestrator(domain, agent, user, environment, case, max_steps=MAX_STEPS.get(domain, 100))
    try:
        simulation = conversation.run()
    except AgentError:  # the model's own doing, which earns nothing
        agl.emit_reward({"score": 0.0, "calls": 0.0, "errors": 0.0, "questions": 0.0}, primary_key="score")
        return
    info = evaluate_simulation(simulation, case, EvaluationType.ALL, solo_mode=False, domain=domain)
    agl.emit_reward({"score": info.reward, **told(simulation)}, primary_key="score")


def told(simulation: SimulationRun) -> dict[str, float]:
    """What tells how a conversation went: how many tools were called, how many of these calls failed, and how many of
    the agent's questions the user answered.
    """
    results = [message for message in simulation.messages if isinstance(message, ToolMessage)]
    spoken = [m for m in simulation.messages if isinstance(m, UserMessage) and m.has_text_content()]
    return {
        "calls": float(len(results)),
        "errors": float(sum(result.error for result in results)),
        "questions": float(max(0, len(spoken) - 2)),  # beside why they call, and that they leave
    }
