"""As scripts for 0.3 are written: an assistant of AutoGen with a tool, tried by a runner on two tasks."""

import asyncio
import os
import re
from typing import Any, TypedDict

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient

import agentlightning as agl


class Problem(TypedDict):
    question: str
    result: str


async def calculate(expression: str) -> str:
    """The value of a product."""
    left, right = re.findall(r"\d+", expression)
    return str(int(left) * int(right))


def assistant(llm: agl.LLM) -> AssistantAgent:
    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": ModelFamily.UNKNOWN,
        "structured_output": False,
    }
    client = OpenAIChatCompletionClient(
        model=llm.model,
        base_url=llm.endpoint,
        api_key=os.environ.get("OPENAI_API_KEY", "dummy"),
        model_info=info,
        temperature=llm.sampling_parameters.get("temperature", 0.7),
    )
    return AssistantAgent(name="calc", model_client=client, tools=[calculate], reflect_on_tool_use=True)


@agl.rollout
async def agent(task: Problem, llm: agl.LLM) -> None:
    said = await assistant(llm).run(task=task["question"])
    found = re.findall(r"\d+", str(said.messages[-1].content))  # pyright: ignore
    agl.emit_reward(float(task["result"] in found))


async def main() -> None:
    runner = agl.LitAgentRunner[Problem](agl.OtelTracer())
    store = agl.InMemoryLightningStore()
    endpoint = agl.LLM(endpoint=os.environ["OPENAI_BASE_URL"], model="small", sampling_parameters={"temperature": 1.0})
    with runner.run_context(agent=agent, store=store):
        for result, reward in (("180", 1.0), ("16", 0.0)):
            done = await runner.step({"question": "What is 12 * 15?", "result": result}, resources={"main": endpoint})
            spans = await store.query_spans(done.rollout_id)
            assert agl.find_final_reward(spans) == reward


if __name__ == "__main__":
    agl.setup_logging()
    asyncio.run(main())
