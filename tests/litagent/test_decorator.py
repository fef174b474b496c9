"""A decorated function stays callable and is filled by name; a class overrides what it needs."""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.types import Attempt, AttemptedRollout, RolloutMode

ROLLOUT = AttemptedRollout(
    rollout_id="r",
    input=1,
    start_time=0.0,
    attempt=Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=0),
)
LLM = agl.LLM(endpoint="http://127.0.0.1/v1", model="m")
PROMPT = agl.PromptTemplate(template="Answer {question}")


def test_a_decorated_function_stays_callable() -> None:
    @agl.rollout
    def agent(task: int, llm: agl.LLM) -> float:
        """What it does."""
        return float(task)

    assert agent(3, LLM) == 3.0
    assert agent.__doc__ == "What it does."
    assert not agent.is_async()


async def test_parameters_are_filled_by_name() -> None:
    @agl.rollout(trained_agents="writer")
    async def agent(task: int, llm: agl.LLM, prompt_template: agl.PromptTemplate, rollout: Any, extra: int = 5) -> Any:
        return task, llm.model, prompt_template.format(question="q"), rollout.rollout_id, extra

    assert agent.trained_agents == "writer"
    result: Any = await agent.rollout_async(7, {"first": LLM, "second": PROMPT}, ROLLOUT)
    assert result == (7, "m", "Answer q", "r", 5)


def test_a_resource_by_its_own_name_wins() -> None:
    @agl.rollout
    def agent(task: int, judge: agl.LLM) -> Any:
        return judge.model

    other = agl.LLM(endpoint="http://127.0.0.1/v1", model="judge-model")
    assert agent.rollout(1, {"main": LLM, "judge": other}, ROLLOUT) == "judge-model"


def test_what_cannot_be_an_agent_says_why() -> None:
    with pytest.raises(ConfigError, match="must be the task"):
        agl.rollout(lambda: 1.0)
    with pytest.raises(ConfigError, match="no parameter 'llm'"):
        agl.llm_rollout(lambda task: 1.0)
    with pytest.raises(ConfigError, match="no parameter 'prompt_template'"):
        agl.prompt_rollout(lambda task, llm: 1.0)


def test_a_class_is_run_by_the_methods_it_overrides() -> None:
    class Sync(agl.LitAgent[int]):
        def rollout(self, task: int, resources: Any, rollout: Any) -> float:
            return 1.0

        def validation_rollout(self, task: int, resources: Any, rollout: Any) -> float:
            return 2.0

    class Async(agl.LitAgent[int]):
        async def rollout_async(self, task: int, resources: Any, rollout: Any) -> float:
            return 1.0

    agent = Sync()
    assert not agent.is_async()
    assert agent.method_for(RolloutMode.TRAIN)(1, {}, ROLLOUT) == 1.0
    assert agent.method_for(RolloutMode.VAL)(1, {}, ROLLOUT) == 2.0
    assert Async().is_async()
    with pytest.raises(NotImplementedError, match="neither"):
        agl.LitAgent().rollout(1, {}, ROLLOUT)


@pytest.mark.parametrize("strips", [True, False])
def test_an_endpoint_names_its_attempt_unless_it_is_asked_to_stay_as_it_is(strips: bool) -> None:
    proxy = agl.ProxyLLM(endpoint="http://127.0.0.1/v1", model="m")

    @agl.llm_rollout(strip_proxy=strips)
    def agent(task: int, llm: agl.LLM) -> Any:
        return llm

    given: Any = agent.rollout(1, {"main_llm": proxy}, ROLLOUT)
    of_attempt = "http://127.0.0.1/rollout/r/attempt/a/v1"
    assert given.get_base_url("r", "a") == of_attempt
    assert (type(given), given.endpoint) == ((agl.LLM, of_attempt) if strips else (agl.ProxyLLM, proxy.endpoint))
    assert agl.llm_rollout(lambda task, llm: llm).rollout(1, {"main_llm": proxy}, ROLLOUT) != proxy
